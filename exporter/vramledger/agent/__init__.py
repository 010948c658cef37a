"""What runs in the user's process, and disturbs nothing there: it tells the exporter what a framework holds.

``vramledger run -- CMD`` brings it along; ``vramledger.agent.start()`` does the same from a program's own
code. It makes no GPU call, initialises no framework, and has neither thread nor socket until the program
itself has an allocator. Nothing but the standard library is imported, and of that little before then.
"""

from __future__ import annotations

import os

__all__ = ["start", "stop"]


def start() -> None:
    """Watch this process from now on: report what its frameworks hold once they hold anything.

    Doing it twice is doing it once. It never raises: a program runs the same without the agent.
    """
    from vramledger.agent import imports

    os.environ.setdefault("VRAMLEDGER_AGENT", "1")
    imports.watch()


def begin() -> None:
    """Do what :func:`start` does if the environment asks for it: what an installed start-up hook calls."""
    if os.environ.get("VRAMLEDGER_AGENT") == "1":
        start()


def stop() -> None:
    """Report no more from this process, and let go of the thread and the socket."""
    from vramledger.agent import imports
    from vramledger.agent.worker import worker

    imports.unwatch()
    worker.stop()
