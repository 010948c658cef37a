"""What a process tree is: who is in it, whether it is healthy, and what must be said of it.

A tree is a function of a :class:`Stage` below one of the decorators :func:`healthy`, :func:`leftover` and
:func:`other`; a short one is a row of ``SHORT``. :meth:`Cast.lose_launcher` leads from *before* to *after*.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import psutil

from tests.support.players.stage import Player, Program, Stage, parent_of, status
from tests.support.waiting import wait_until


@dataclass
class Cast:
    """Who plays in a tree."""

    holders: Sequence[Player]
    launcher: Player | Program | psutil.Process | None = None  # None when the test does not end it
    end: Callable[[], object] | None = None  # ends the launcher; None for a kill

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(player.pid for player in self.holders)

    def lose_launcher(self) -> None:
        """Take the launcher away and wait until its children have been adopted.

        Without a launcher in the play there is nothing to do: the moment after is now.
        """
        if self.launcher is None:
            return
        launcher = self.launcher.pid
        left_behind = [child.pid for child in psutil.Process(launcher).children()]
        assert left_behind, "this launcher has no child"
        end = self.end
        if end is None:
            assert not isinstance(self.launcher, psutil.Process)
            end = self.launcher.end
        end()
        wait_until(lambda: status(launcher) == "gone", "the launcher does not go")
        wait_until(lambda: all(parent_of(pid) != launcher for pid in left_behind), "nobody adopts")


class Verdict(NamedTuple):
    """What must be said of every holder: ``alive`` or another state, words of the evidence, and its grade."""

    state: str
    words: str = ""
    grade: str = "inferred"


ALIVE = Verdict("alive")

PARENT_ENDED = "was seen alive and has ended"
LEADER_ENDED = "the leader of its process group"
LAUNCHER_ENDED = "and its launcher has ended"
"""Words of the evidence against a leftover: for who saw its parent, and for who did not."""

SEVERED = "what connected it to its launcher is dead"
"""Words of the evidence that is proven, for both."""

Builder = Callable[[Stage], Cast]


@dataclass(frozen=True)
class Tree:
    build: Builder  # sets it up
    kind: Literal["healthy", "leftover", "other"]
    watched: Verdict  # in the moment after, for who saw the moment before
    late: Verdict  # for who sees the moment after only

    @property
    def name(self) -> str:
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


def seems_left(late: str | None, watched: str | None = PARENT_ENDED) -> Callable[[Builder], Tree]:
    """Declare a healthy tree that looks like a leftover; nothing may act on what is only ``inferred``."""
    return lambda build: Tree(build, "healthy", *_inferred(watched, late))


def leftover(late: str | None, watched: str | None = PARENT_ENDED) -> Callable[[Builder], Tree]:
    """Declare a tree whose holders seem to be orphans once the launcher is gone, as far as can be inferred.

    The words are the evidence, for who did not see the launcher and for who did; None where none is known.
    """
    return lambda build: Tree(build, "leftover", *_inferred(watched, late))


def _inferred(*told: str | None) -> list[Verdict]:
    return [ALIVE if words is None else Verdict("orphaned", words) for words in told]


def abandoned(build: Builder) -> Tree:
    """Declare a tree whose holders nobody can reach any more, as is proven, watched and late."""
    verdict = Verdict("orphaned", SEVERED, "proven")
    return Tree(build, "leftover", verdict, verdict)


def declared(**rows: tuple[Callable[[Builder], Tree], str, Builder]) -> tuple[Tree, ...]:
    """Declare short trees: for each name the decorator, what is played, and the function."""
    for name, (_, what, build) in rows.items():
        build.__name__, build.__doc__ = name, f"Play {what}."
    return tuple(declare(build) for declare, _, build in rows.values())


def launched(launch: Callable[[Stage], Player], work: Callable[[Player], Sequence[Player]]) -> Builder:
    """Return what sets up a launcher, which the test ends, and whom it starts."""

    def build(stage: Stage) -> Cast:
        launcher = launch(stage)
        return Cast(work(launcher), launcher)

    return build


def other(state: str, words: str) -> Callable[[Builder], Tree]:
    """Declare a tree whose holders are in another state from the beginning."""
    verdict = Verdict(state, words, "inferred" if state == ALIVE.state else "proven")
    return lambda build: Tree(build, "other", verdict, verdict)
