"""What a process tree is: who is in it, whether it is healthy, and what must be said of it.

A tree is a function of a :class:`Stage` below one of the decorators :func:`healthy`, :func:`leftover` and
:func:`other`. It sets the tree up to the moment *before*, and returns the :class:`Cast`.
:meth:`Cast.lose_launcher` takes the launcher away and returns in the moment *after*. The first line of the
docstring, "Play SOMETHING.", says what the tree is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tests.support.players.stage import Player, Program, Stage, parent_of, status
from tests.support.waiting import wait_until


@dataclass
class Cast:
    """Who plays in a tree.

    Attributes:
        holders: the processes that act as GPU holders.
        launcher: the process that started them; None when the test does not end it (it has ended, or stays).
        end: ends the launcher; None for a kill.
    """

    holders: Sequence[Player]
    launcher: Player | Program | None = None
    end: Callable[[], object] | None = None

    @property
    def pids(self) -> tuple[int, ...]:
        """The holders' pids."""
        return tuple(player.pid for player in self.holders)

    def lose_launcher(self) -> None:
        """Take the launcher away and wait until its children have been adopted.

        Without a launcher in the play there is nothing to do: the moment after is now.
        """
        if self.launcher is None:
            return
        launcher = self.launcher.pid
        left_behind = [pid for pid in self.pids if parent_of(pid) == launcher]
        assert left_behind, "no holder has this launcher"
        (self.end or self.launcher.end)()
        wait_until(lambda: status(launcher) == "gone", "the launcher does not go")
        wait_until(lambda: all(parent_of(pid) != launcher for pid in left_behind), "nobody adopts")


class Verdict(NamedTuple):
    """What must be said of every holder: ``alive`` or another state, and words of the evidence."""

    state: str
    words: str = ""


ALIVE = Verdict("alive")

PARENT_ENDED = "was seen alive and has ended"
LEADER_ENDED = "the leader of its process group"
LAUNCHER_ENDED = "and its launcher has ended"
"""Words of the evidence against a leftover: for who saw its parent, and for who did not."""

Builder = Callable[[Stage], Cast]


@dataclass(frozen=True)
class Tree:
    """A process tree.

    Attributes:
        build: sets it up.
        kind: whether the holders are as they should be, were left behind, or neither.
        watched: the verdict in the moment after, for who saw the moment before.
        late: the verdict for who sees the moment after only.
    """

    build: Builder
    kind: Literal["healthy", "leftover", "other"]
    watched: Verdict
    late: Verdict

    @property
    def name(self) -> str:
        """The function's name."""
        return self.build.__name__

    @property
    def what(self) -> str:
        """What it is, in one line."""
        line = (self.build.__doc__ or "").partition("\n")[0]
        text = line.removeprefix("Play ").rstrip(".")
        return text[:1].upper() + text[1:]

    @contextmanager
    def play(self) -> Iterator[Cast]:
        """Set the tree up, and clean up behind it."""
        with Stage() as stage:
            yield self.build(stage)


def healthy(build: Builder) -> Tree:
    """Declare a tree whose holders nobody may call left behind, whoever has ended."""
    return Tree(build, "healthy", ALIVE, ALIVE)


def leftover(late: str | None, watched: str = PARENT_ENDED) -> Callable[[Builder], Tree]:
    """Declare a tree whose holders are orphans once the launcher is gone.

    Args:
        late: words of the evidence for who did not see the launcher; None where that cannot be known, and the
            holders have to pass for alive.
        watched: the same for who saw it.
    """
    seen_late = ALIVE if late is None else Verdict("orphaned", late)
    return lambda build: Tree(build, "leftover", Verdict("orphaned", watched), seen_late)


def other(state: str, words: str) -> Callable[[Builder], Tree]:
    """Declare a tree whose holders are in another state from the beginning."""
    return lambda build: Tree(build, "other", Verdict(state, words), Verdict(state, words))
