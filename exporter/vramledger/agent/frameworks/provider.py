"""What the agent asks of a framework's part: is it there, has it memory, what does it hold.

A provider is a module of this package that ``imports.FRAMEWORKS`` names, with a function ``provider()`` that
makes one. The module is imported when the program starts to import the framework, never before, so it may
import what the framework imports anyway. It imports the framework itself never: ``sys.modules`` has it.

The rules for every method: make no GPU call, initialise nothing, change no setting, reset no peak. What
raises is caught, counted as an error of this provider, and not the program's concern; what takes more than
:data:`SLOW` three times running is not asked again for a while.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:  # a program that uses no framework need not load it
    from collections.abc import Callable


SLOW = 0.005
"""Seconds that a reading may take: it may hold the interpreter's lock for as long."""


class Provider:
    """One framework in this process; the methods here say what a silent one says.

    Attributes:
        name: of the framework, as the report has it: ``torch``, ``tensorflow``, ``jax``, ``cupy``, ``rmm``.
    """

    name = ""

    def hook(self, ready: Callable[[], None]) -> bool:
        """Arrange that ``ready()`` is called once the allocator is initialised, if the framework allows that.

        Called once, on the thread that imports the framework, after the module that
        ``imports.FRAMEWORKS`` names was imported. ``ready`` never raises, may be called on any thread and
        more than once.

        Returns:
            True when it will be called. False when the framework has no such moment: then
            :meth:`initialised` is asked every two seconds, from a thread of ours.
        """
        del ready
        return False

    def initialised(self) -> bool:
        """Say whether the framework has an allocator now: microseconds, also amid the framework's import."""
        return False

    def begin(self) -> None:
        """Prepare for :meth:`read`: called once, when the allocator is initialised, on any thread.

        The place for what must be in place before the first report: hooks, observers, imports, the
        environment as it was at this moment. After a fork the child has new providers: those of its parent
        whose framework was initialised there are gone, for the child cannot use it.
        """

    def observe(self) -> None:
        """Watch what must be watched all the time: called at every turn, also while no exporter is there."""

    def read(self) -> dict[str, object] | None:
        """Return the framework's entry of the report, None while there is nothing to say.

        Called at every report, on the agent's thread, after :meth:`begin`. The keys are those of the wire
        format: ``framework``, ``version``, ``supported``, ``allocator``, ``policy``, ``devices``. A key whose
        value is None is left out of the report: not known is never zero.
        """
        return None

    def end(self) -> None:
        """Undo what :meth:`begin` hooked into the program, as far as the framework allows."""
