"""Scenarios with too much memory, with another owner's memory, or with a reused pid."""

from random import Random

from tests.support.faults.scene import (
    FOUND,
    HOUR,
    MINUTE,
    Scenario,
    Scene,
    after,
    card,
    plain,
    process,
    share,
    soon,
    uuid,
)
from tests.support.host import programs
from tests.support.host.model import GIB, Gpu, Process
from tests.support.host.programs import Held, Torch
from tests.support.host.scrapes import Weather
from vramledger.model.reading import CgroupLimit, Grant, Owner, Scheduler

BUDGET = 8 * GIB
SPENDER = Owner("pod", "team-b/greedy", namespace="team-b", pod="greedy")
"""The only owner with a budget in the suite; the shipped rules have none."""

FIRST = Owner("slurm", "100", slurm_job="100")
SECOND = Owner("slurm", "101", slurm_job="101")


def nearly_full(random: Random) -> Scene:
    """Two programs that together take nearly all of a card, and keep it."""
    gpu = card(random)
    onset = soon(random)
    first = share(gpu, random.uniform(0.3, 0.6))
    second = gpu.total * 0.975 - gpu.reserved - first
    jobs = [
        process(random, Held(programs.steady(first)), agent=False),
        process(random, Held(programs.steady(second)), agent=False, begin=onset),
    ]
    return after(onset, random, [gpu], jobs, 0.8)


def filling_up(random: Random) -> Scene:
    """A program that has grown for long, and will fill the card within half an hour; without an agent."""
    gpu = card(random)
    beside, begun = share(gpu, 0.15), random.uniform(0.05, 0.15) * gpu.total
    # From 85 % on that leaves 12 to 25 minutes.
    left = random.uniform(12, 25) * MINUTE
    rate = gpu.total * 0.15 / left
    onset = (gpu.total * 0.85 - gpu.reserved - gpu.unowned(0) - beside - begun) / rate
    jobs = [
        process(random, Held(programs.steady(beside)), agent=False),
        process(random, Held(lambda age: begun + rate * age), agent=False, end=onset + 0.95 * left),
    ]
    return after(onset, random, [gpu], jobs, 0.4)


def outside_reservation(random: Random) -> Scene:
    """A card that Slurm assigned to one job, and another user's program on it."""
    gpu = card(random)
    onset = soon(random)
    jobs = [
        process(random, Torch(programs.steady(share(gpu, 0.4))), owner=FIRST),
        process(random, Torch(programs.steady(share(gpu, 0.2))), owner=SECOND, begin=onset),
    ]
    grants = (Grant("slurm", FIRST.name, (f"nvidia{gpu.index}",)),)
    return after(onset, random, [gpu], jobs, 0.6, schedulers=(Scheduler("slurm", ("*",), grants),))


def over_budget(random: Random) -> Scene:
    """An owner whose second program exceeds its budget, over two cards."""
    cards = [card(random, index, size=40_960) for index in range(2)]
    onset = soon(random)
    jobs = [
        process(random, Held(programs.steady(BUDGET * 0.8)), owner=SPENDER, agent=False),
        process(
            random, Held(programs.steady(BUDGET * random.uniform(0.25, 1))), 1, owner=SPENDER, begin=onset,
            agent=False,
        ),
    ]  # fmt: skip
    return after(onset, random, cards, jobs, 0.7)


def _next_of_its_pid(random: Random, gpu: Gpu, second: Torch, ends: float) -> list[Process]:
    """Give a pid to two jobs of two owners, the second within seconds of the first one's end."""
    first = Torch(programs.steady(share(gpu, 0.5)), programs.until(ends / 3, lambda _: 0.8, programs.idle))
    before = process(random, first, end=ends, owner=FIRST, user="ada")
    signs = ("multiprocessing",)
    after = process(
        random, second, begin=ends + random.uniform(1, 10), owner=SECOND, user="grace", signs=signs
    )
    after.pid = before.pid
    return [before, after]


def reused_pid_orphaned(random: Random) -> Scene:
    """A pid that another owner's job got, which is then orphaned."""
    gpu = card(random)
    ends = random.uniform(20, 40) * MINUTE
    onset = ends + random.uniform(30, 300)
    jobs = _next_of_its_pid(random, gpu, Torch(programs.steady(share(gpu, 0.6))), ends)
    jobs[1].fates["orphaned"] = onset
    return after(onset, random, [gpu], jobs, 0.5)


def reused_pid_hoarding(random: Random) -> Scene:
    """A pid that went from an idle job to another owner's, which then stops working: its own hour counts."""
    gpu = card(random, size=random.choice([40_960, 81_559, 143_771]))
    ends = random.uniform(50, 70) * MINUTE
    onset = ends + 10 * MINUTE
    program = Torch(programs.steady(share(gpu, 0.6)), programs.until(600, lambda _: 0.8, programs.idle))
    jobs = _next_of_its_pid(random, gpu, program, ends)
    return after(onset, random, [gpu], jobs, 1.4)


def reused_pid_leaking(random: Random) -> Scene:
    """A pid that went from a full job to another owner's, which leaks from a smaller size."""
    gpu = card(random)
    room, ends = share(gpu, 1), random.uniform(20, 40) * MINUTE
    wave = programs.sawtooth(random, room * 0.15, room * 0.05, random.uniform(0.5, 10))
    lasting = random.uniform(1.5, 3) * HOUR
    program = Torch(programs.with_leak(wave, room * 0.7 / lasting, 300), limit=room)
    jobs = _next_of_its_pid(random, gpu, program, ends)
    jobs[1].agent = True
    return after(ends + 310, random, [gpu], jobs, (lasting - 310) / HOUR)


def replaced_then_orphaned(random: Random) -> Scene:
    """A host that gets another card in the same place, on which a worker is then orphaned."""
    gpu = card(random)
    off, back = 30 * MINUTE, 30 * MINUTE + random.uniform(60, 600)
    onset = back + random.uniform(10, 30) * MINUTE
    gpu.uuids = (*gpu.uuids, (back, uuid(random)))
    jobs = [
        process(random, Torch(programs.steady(share(gpu, 0.5))), end=off),
        process(
            random, Torch(programs.steady(share(gpu, 0.6))), begin=back + 60, fates={"orphaned": onset},
            signs=("multiprocessing",),
        ),
    ]  # fmt: skip
    weather = Weather(down=((off, back + 10),), restarts=(back + 5,))
    return Scene([gpu], jobs, hours=onset / HOUR + 0.5, onset=onset, weather=weather)


def near_its_limit(random: Random) -> Scene:
    """A job that takes nearly all that its cgroup may, on a card with much free memory."""
    gpu = card(random)
    onset = soon(random)
    held = int(share(gpu, random.uniform(0.2, 0.5)))
    cgroup = "/system.slice/slurmstepd.scope/job_100"
    gpu.says["limits"] = (CgroupLimit(cgroup, 0, int(held / random.uniform(0.955, 1)), held),)
    program = Held(programs.steady(held))
    job = process(random, program, agent=False, begin=onset, owner=FIRST, cgroup=cgroup)
    return after(onset, random, [gpu], [job], 0.8)


_FULL = ("GpuMemoryNearlyFull", "GpuMemoryFilling", "GpuMemoryAboutToFill", "GpuMemoryGrowing")
_IDLE = ("GpuMemoryHoarded", "GpuMemoryNearlyFull")
_LEAK = ("GpuMemoryGrowing", "GpuMemoryFragmented", "GpuFrameworkCacheHigh", "GpuAllocatorRetries")

LIMITS = [
    plain(nearly_full, "GpuMemoryNearlyFull", within=FOUND),
    plain(
        filling_up, "GpuMemoryFilling", "GpuMemoryAboutToFill", allows=_FULL,
        # The page waits until 10 minutes are left of the 25, and 5 more; that about fast growth does not.
        always=("GpuMemoryGrowing",), within=20 * MINUTE + FOUND,
    ),
    plain(outside_reservation, "GpuMemoryOutsideReservation", within=FOUND),
    plain(over_budget, "GpuOwnerOverBudget", within=FOUND),
    plain(near_its_limit, "GpuMemoryLimitNear", within=FOUND),
    plain(reused_pid_orphaned, "GpuMemoryOrphaned", allows=_IDLE, within=FOUND),
    plain(reused_pid_hoarding, "GpuMemoryHoarded", allows=_IDLE, within=HOUR + FOUND),
    Scenario(
        "reused-pid-leaking", reused_pid_leaking, ("GpuMemoryLeakSuspected",),
        frozenset({*_FULL, *_LEAK, "GpuOutOfMemory"}), leak=True,
    ),
    # For as long as the host is off nothing answers, which is said after 5 minutes.
    plain(replaced_then_orphaned, "GpuMemoryOrphaned", always=("VramLedgerExporterDown",), within=FOUND),
]  # fmt: skip
