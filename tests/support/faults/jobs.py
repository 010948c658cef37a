"""Scenarios of distributed jobs: ranks that wait for another one."""

from __future__ import annotations

from math import inf
from random import Random

from tests.support.faults.scene import HOUR, MINUTE, Scene, card, plain, process, share
from tests.support.host import programs
from tests.support.host.model import Gpu, Process, Program, Use
from tests.support.host.programs import Torch
from tests.support.host.scrapes import Weather
from vramledger.model.reading import Owner, ParentFacts, Rank


class Waiting:
    """A program that works, and waits in a kernel from some moment on."""

    def __init__(self, program: Program, since: float) -> None:
        """Take the program, and the age from which it waits."""
        self._program = program
        self._since = since

    def use(self, age: float) -> Use:
        """Do what the program does, or spin."""
        use = self._program.use(age)
        return use._replace(work=0.0, spins=1.0) if age >= self._since else use


def _ranks(random: Random, onset: float, *, asleep: bool = False) -> tuple[list[Gpu], list[Process]]:
    """Make a job of two to four ranks, which all wait for the last one, and that may be asleep."""
    count = random.randint(2, 4)
    cards = [card(random, index, size=81_559) for index in range(count)]
    port = random.randint(1024, 65535)
    jobs = []
    for number, gpu in enumerate(cards):
        last = number == count - 1
        work = programs.until(onset if last and asleep else inf, programs.steady(0.8), programs.idle)
        steady = Torch(programs.steady(share(gpu, random.uniform(0.2, 0.8))), work)
        rank = process(
            random, steady if last else Waiting(steady, onset), number,
            rank=Rank(number, count, f"gpu-1:{port}"), owner=Owner("slurm", "4711", slurm_job="4711"),
            user="barbara", agent=False, starter=ParentFacts(77, 70, "torchrun", "torchrun", init=False),
        )  # fmt: skip
        jobs.append(rank)
    return cards, jobs


def _lossy(random: Random) -> Weather:
    return Weather(random.choice([0.0, random.uniform(0, 0.03)]))


def rank_stopped(random: Random) -> Scene:
    """A rank that is stopped, or ends, while the others wait for it for ever."""
    onset = random.uniform(20, 90) * MINUTE
    cards, jobs = _ranks(random, onset)
    if random.random() < 0.5:
        jobs[-1].fates["stopped"] = onset
    else:
        jobs[-1].end = onset
    return Scene(cards, jobs, onset / HOUR + 1, onset, _lossy(random))


def rank_asleep(random: Random) -> Scene:
    """A rank that waits at a lock and does nothing, while the others wait for it for ever."""
    onset = random.uniform(20, 90) * MINUTE
    cards, jobs = _ranks(random, onset, asleep=True)
    return Scene(cards, jobs, onset / HOUR + 1.3, onset, _lossy(random))


def all_ranks_wait(random: Random) -> Scene:
    """Ranks that all wait for ever, for one that nobody sees."""
    onset = random.uniform(20, 90) * MINUTE
    cards, jobs = _ranks(random, onset)
    return Scene(cards[:-1], jobs[:-1], onset / HOUR + 1, onset, _lossy(random))


_IDLE = ("GpuMemoryHoarded", "GpuMemoryStopped", "GpuBusyWithoutWork")

JOBS = [
    # The exporter says it after 2 minutes, and the rules after 20 or 35.
    plain(rank_stopped, "GpuJobHung", allows=_IDLE, within=22 * MINUTE),
    plain(rank_asleep, "GpuJobHung", allows=_IDLE, within=37 * MINUTE),
    plain(all_ranks_wait, "GpuBusyWithoutWork", within=22 * MINUTE),
]
