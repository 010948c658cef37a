"""Bring the agent into every Python process of a program; ``vramledger run`` puts this on PYTHONPATH.

Python imports the first ``sitecustomize`` that it finds, so this one imports the one that it hides. Whatever
Python comes across it (PYTHONPATH is inherited by all of them) must be able to read it, so its syntax is old.
"""

import os
import sys


def _begin(here):  # type: (str) -> None # noqa: ANN001, ANN202 a comment for the oldest
    """Start the agent from where it is, leaving the program's import path as it was."""
    if sys.version_info[:2] < (3, 10) or os.environ.get("VRAMLEDGER_AGENT") != "1":
        return
    root = os.path.dirname(os.path.dirname(os.path.dirname(here)))
    sys.path.insert(0, root)
    try:
        from vramledger.agent import imports

        imports.watch()
    finally:
        sys.path.remove(root)


def _hand_on(here):  # type: (str) -> None # noqa: ANN001, ANN202
    """Import the sitecustomize that the program would have had, as if this one were not there."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    this = sys.modules.pop("sitecustomize")
    try:
        __import__("sitecustomize")
    except ImportError as error:
        if getattr(error, "name", "sitecustomize") != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = this


_here = os.path.dirname(os.path.abspath(__file__))
try:
    _begin(_here)
except Exception:
    pass
_hand_on(_here)
