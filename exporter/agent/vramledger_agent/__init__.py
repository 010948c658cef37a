"""Report from the user's process what its frameworks hold, without disturbing it.

``vramledger-agent run -- CMD`` starts the agent; ``vramledger_agent.start()`` does it from a program's own
code. The agent makes no GPU call and initialises no framework. It has neither thread nor socket until the
program itself has an allocator. It imports only the standard library, and only a small part of it before the
program has an allocator.
"""

from __future__ import annotations

import os

__version__ = "0.1.0"
"""The one place of the version of both packages."""

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing itself takes longer to import than this package may
    from vramledger_agent.isolation import IsolatedPool, isolated, isolated_async
    from vramledger_agent.prometheus import PrometheusCollector

__all__ = ["IsolatedPool", "PrometheusCollector", "isolated", "isolated_async", "safe_point", "start", "stop"]


def start() -> None:
    """Report what this process' frameworks hold from now on; never raises. A second call changes nothing."""
    from vramledger_agent import import_hook

    os.environ.setdefault("VRAMLEDGER_AGENT", "1")
    import_hook.install()


def start_if_enabled() -> None:
    """Call :func:`start` if the environment asks for it: an installed start-up hook calls this."""
    if os.environ.get("VRAMLEDGER_AGENT") == "1":
        start()


def stop() -> None:
    """Stop reporting from this process; end the thread and close the socket."""
    from vramledger_agent import import_hook
    from vramledger_agent.worker import worker

    import_hook.uninstall()
    worker.stop()


def safe_point() -> None:
    """Run the work that waits for a pause now: this thread is between two pieces of work, as after a request.

    A program that trains need not call it, because every step of an optimizer is such a point. A program that
    only evaluates or serves calls it where a pause of a second does no harm, and where it holds no lock or
    the like. Without it, ``vramledger reclaim`` finds no moment to do its work. A call costs nothing if
    nothing waits.
    """
    from vramledger_agent import step_boundary

    step_boundary.run_pending()


def __getattr__(name: str) -> object:
    """Import on first use what few programs need."""
    if name == "PrometheusCollector":
        from vramledger_agent.prometheus import PrometheusCollector

        return PrometheusCollector
    if name in ("IsolatedPool", "isolated", "isolated_async"):
        from vramledger_agent import isolation

        return getattr(isolation, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
