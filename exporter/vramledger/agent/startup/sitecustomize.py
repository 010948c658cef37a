"""Bring the agent into every Python process of a program; ``vramledger run`` puts this on PYTHONPATH.

Python imports the first ``sitecustomize`` that it finds, so this one imports the one that it hides. Every
Python that the program starts inherits PYTHONPATH and reads this file, so its syntax is that of old versions.
"""

import os
import sys

# exporter/framework_files.py writes what follows, from vramledger/agent_protocol/frameworks.py.
IMPORTED_MODULES = (
    "torch.cuda",
    "jax._src.xla_bridge",
    "tensorflow.python.eager.context",
    "rmm",
    "cupy",
)
# End of what is written.
"""Until one of these is imported, Python has loaded nothing else of the agent."""


class _FrameworkFinder:
    """See imports, find nothing, and load the agent, which takes over, when a framework is imported."""

    def find_spec(self, name, path=None, target=None):  # type: (str, object, object) -> None # noqa: ANN001, ANN202, ARG002
        """Load the agent before a framework is found."""
        if name in IMPORTED_MODULES and self in sys.meta_path:
            try:
                _load_agent(_directory)
                sys.meta_path[0].find_spec(name, None)
            except Exception:
                pass
            if self in sys.meta_path:
                sys.meta_path.remove(self)


def _load_agent(directory):  # type: (str) -> None # noqa: ANN001, ANN202
    """Import the agent from its own directory, and leave the program's import path as it was."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(directory)))
    sys.path.insert(0, root)
    try:
        from vramledger.agent import import_hook

        import_hook.install()
    finally:
        sys.path.remove(root)


def _install_finder():  # type: () -> None # noqa: ANN202
    """Watch imports, if the environment enables the agent and this Python can run it."""
    if sys.version_info[:2] >= (3, 10) and os.environ.get("VRAMLEDGER_AGENT") == "1":
        sys.meta_path.insert(0, _FrameworkFinder())


def _import_hidden_sitecustomize(directory):  # type: (str) -> None # noqa: ANN001, ANN202
    """Import the sitecustomize that the program would have without this one."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != directory]
    this = sys.modules.pop("sitecustomize")
    try:
        __import__("sitecustomize")
    except ImportError as error:
        if getattr(error, "name", "sitecustomize") != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = this


_directory = os.path.dirname(os.path.abspath(__file__))
try:
    _install_finder()
except Exception:
    pass
_import_hidden_sitecustomize(_directory)
