"""What the agent reads of a framework: whether it is there, whether it has memory, and what it holds.

A provider is a module of this package that the framework's declaration names, with a function
``make_provider()``. The module is imported when the program starts to import the framework, never before, so
it may import what the framework imports anyway. The framework itself it never imports but finds in
``sys.modules``.

The rules for every method: make no GPU call, initialise nothing, change no setting, reset no peak. What
raises is caught, counted as an error of this provider, and not the program's concern; what takes more than
:data:`SLOW_READ_SECONDS` three times running is left alone for a while.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # a program that uses no framework need not load it
    from collections.abc import Callable, Iterable


SLOW_READ_SECONDS = 0.005
"""A reading may take so long: it may hold the interpreter's lock for as long."""


class Provider:
    """One framework in this process; the methods here are those of one that holds nothing.

    Attributes:
        name: of the framework, as it is declared.
    """

    name = ""

    def hook_initialisation(self, announce: Callable[[], None]) -> bool:
        """Have ``announce()`` called once the allocator is initialised, if the framework can do that.

        Called once, on the thread that imports the framework, after the module that
        its declaration names was imported. ``announce`` never raises, may be called on any thread
        and more than once.

        Returns:
            True when it will be called. False when the framework has no such moment: then
            :meth:`is_initialised` is called every two seconds, from a thread of ours.
        """
        del announce
        return False

    def is_initialised(self) -> bool:
        """Return whether the framework has an allocator now: microseconds, also during its import."""
        return False

    def start(self) -> None:
        """Prepare for :meth:`read`: called once, when the allocator is initialised, on any thread.

        The place for what must be in place before the first report: hooks, observers, imports, the
        environment as it was at this moment. After a fork the child has new providers: those of its parent
        whose framework was initialised there are gone, for the child cannot use it.
        """

    def update(self) -> None:
        """Update what must be watched all the time: called at every turn, also while no exporter is there."""

    def read(self) -> dict[str, object] | None:
        """Return the framework's entry of the report, None while there is nothing to report.

        Called at every report, on the agent's thread, after :meth:`start`. The keys are those of the wire
        format: ``framework``, ``version``, ``supported``, ``allocator``, ``policy``, ``devices``. A key whose
        value is None is left out of the report: not known is never zero.
        """
        return None

    def stop(self) -> None:
        """Undo what :meth:`start` hooked into the program, as far as the framework allows."""


def module_version(module: str) -> str | None:
    """Return the version that a module of the program names, None without one."""
    version = getattr(sys.modules.get(module), "__version__", None)
    return str(version) if version else None


def read_environment(names: Iterable[str]) -> dict[str, str]:
    """Return the variables that are set, of those that are named."""
    return {name: os.environ[name] for name in names if name in os.environ}
