"""Scenarios of distributed jobs: ranks that wait for another one, and what only looks like it."""

from random import Random

from tests.support.faults.scene import HOUR, MINUTE, Scene, card, plain, process, share
from tests.support.host import programs
from tests.support.host.model import Gpu, Process, Program, Use
from tests.support.host.programs import Held, Torch
from tests.support.host.scrapes import Weather
from vramledger.model.reading import Owner, ParentFacts, Rank


def weather(random: Random, hours: float) -> Weather:
    """Lose up to 3 % of the scrapes, and restart the exporter twice at most."""
    restarts = sorted(random.uniform(0, hours * HOUR) for _ in range(random.choice([0, 0, 1, 2])))
    return Weather(
        missing=random.choice([0.0, random.uniform(0, 0.03)]),
        down=tuple((at - random.uniform(5, 60), at) for at in restarts),
        restarts=tuple(restarts),
    )


class Waiting:
    """A program that waits in a kernel at times, and works otherwise."""

    def __init__(self, program: Program, waits: programs.Demand) -> None:
        """Take the program, and a function of its age: whether it waits, 1 or 0."""
        self._program = program
        self._waits = waits

    def use(self, age: float) -> Use:
        """Do what the program does, or spin."""
        use = self._program.use(age)
        return use._replace(work=0.0, spins=1.0) if self._waits(age) else use


def _ranks(
    random: Random, waits: programs.Demand, rests: programs.Demand, **more: object
) -> tuple[list[Gpu], list[Process]]:
    """Make a job of two to four ranks, of which the last one ``rests`` while the others wait."""
    count = random.randint(2, 4)
    cards = [card(random, index, size=81_559) for index in range(count)]
    known: dict[str, object] = {
        "owner": Owner("slurm", "4711", slurm_job="4711"), "user": "barbara", "agent": False,
        "starter": ParentFacts(77, 70, "torchrun", "torchrun", init=False),
    }  # fmt: skip
    port = random.randint(1024, 65535)
    jobs = []
    for number, gpu in enumerate(cards):
        work = programs.steady(0.8)
        if number == count - 1:
            work = _unless(rests)
        steady = Torch(programs.steady(share(gpu, random.uniform(0.2, 0.8))), work)
        program = Waiting(steady, waits) if number < count - 1 else steady
        rank = Rank(number, count, f"gpu-1:{port}")
        jobs.append(process(random, program, number, rank=rank, **{**known, **more}))
    return cards, jobs


def _unless(rests: programs.Demand) -> programs.Demand:
    return lambda age: 0.0 if rests(age) else 0.8


def _never(_: float) -> float:
    return 0.0


def _from(moment: float) -> programs.Demand:
    return lambda age: float(age >= moment)


def rank_stopped(random: Random) -> Scene:
    """A rank that is stopped, or ends, while the others wait for it for ever."""
    onset = random.uniform(20, 90) * MINUTE
    cards, jobs = _ranks(random, _from(onset), _never)
    if random.random() < 0.5:
        jobs[-1].fates["stopped"] = onset
    else:
        jobs[-1].end = onset
    hours = onset / HOUR + 1
    return Scene(cards, jobs, hours, onset, Weather(random.choice([0.0, random.uniform(0, 0.03)])))


def rank_asleep(random: Random) -> Scene:
    """A rank that waits at a lock and does nothing, while the others wait for it for ever."""
    onset = random.uniform(20, 90) * MINUTE
    cards, jobs = _ranks(random, _from(onset), _from(onset))
    hours = onset / HOUR + 1.3
    return Scene(cards, jobs, hours, onset, Weather(random.choice([0.0, random.uniform(0, 0.03)])))


def checkpoints(random: Random) -> Scene:
    """Ranks that wait in a kernel for up to 15 minutes, while one writes a checkpoint, again and again."""
    every, lasting = random.uniform(0.5, 3) * HOUR, random.uniform(1, 15) * MINUTE

    def writes(age: float) -> float:
        return float(age % every < lasting and age > every)

    cards, jobs = _ranks(random, writes, writes)
    return Scene(cards, jobs, weather=weather(random, 24))


def ranks_end_one_by_one(random: Random) -> Scene:
    """A job whose ranks end minutes apart: the last ones wait in a kernel."""
    end = random.uniform(2, 20) * HOUR
    last = end + random.uniform(1, 14) * MINUTE
    cards, jobs = _ranks(random, _from(end), _never)
    jobs[-1].end = end
    for job in jobs[:-1]:
        job.end = last
    return Scene(cards, jobs, weather=weather(random, 24))


def kernels_that_spin(random: Random) -> Scene:
    """A kernel that serves, or a runtime that polls in one: at 100 % for a day without moving a byte."""
    gpu = card(random, size=81_559)
    held = Held(programs.steady(share(gpu, random.uniform(0.1, 0.9))), _never)
    quiet = random.uniform(0, 1)
    program = Waiting(held, lambda age: float(age % 7200 > 7200 * quiet * 0.2))
    job = process(random, program, command="serve.py", agent=False)
    return Scene([gpu], [job], weather=weather(random, 24))


def server_at_night(random: Random) -> Scene:
    """Ranks of an inference server that wait in a broadcast all night, and the first one has no request."""
    begun, lasting = random.uniform(2, 8) * HOUR, random.uniform(2, 12) * HOUR

    def night(age: float) -> float:
        return float(begun <= age < begun + lasting)

    owner = Owner("pod", "serving/llama-0", namespace="serving", pod="llama-0")
    cards, jobs = _ranks(random, night, night, framework="vllm", command="vllm", owner=owner)
    return Scene(cards, jobs, weather=weather(random, 24))


def all_ranks_wait(random: Random) -> Scene:
    """Ranks that all wait for ever, for one that nobody sees."""
    onset = random.uniform(20, 90) * MINUTE
    cards, jobs = _ranks(random, _from(onset), _never)
    hours = onset / HOUR + 1
    return Scene(cards[:-1], jobs[:-1], hours, onset, Weather(random.choice([0.0, random.uniform(0, 0.03)])))


_IDLE = ("GpuMemoryHoarded", "GpuMemoryStopped", "GpuBusyWithoutWork")

JOBS = [
    # The exporter says it after 2 minutes, and the rules after 20 or 35.
    plain(rank_stopped, "GpuJobHung", allows=_IDLE, within=22 * MINUTE),
    plain(rank_asleep, "GpuJobHung", allows=_IDLE, within=37 * MINUTE),
    plain(all_ranks_wait, "GpuBusyWithoutWork", within=22 * MINUTE),
]
