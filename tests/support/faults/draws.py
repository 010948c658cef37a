"""Scenarios that nothing was tuned on: their rates, sizes, phases and lost scrapes are drawn at random.

With ``--draws``, ``make faults`` runs them.
"""

import math
from dataclasses import replace
from random import Random

from tests.support.faults.exporters import reserved_unused, shows, stuck
from tests.support.faults.faulty import hoarder
from tests.support.faults.jobs import (
    checkpoints,
    kernels_that_spin,
    rank_asleep,
    rank_stopped,
    ranks_end_one_by_one,
    server_at_night,
    weather,
)
from tests.support.faults.scene import HOUR, MINUTE, Build, Scenario, Scene, card, named, process, share
from tests.support.host import programs
from tests.support.host.model import MIB, Fault, Program
from tests.support.host.programs import Held, Torch
from tests.support.host.scrapes import Weather
from vramledger.model.reading import Grant, Owner, Scheduler

GROWTH = ("GpuMemoryLeakSuspected", "GpuMemoryGrowing", "GpuMemoryAboutToFill")
"""Any of them finds a leak."""

_TRUE = ("GpuMemoryNearlyFull", "GpuMemoryFilling")


def _log(random: Random, low: float, high: float) -> float:
    return math.exp(random.uniform(math.log(low), math.log(high)))


def _wave(random: Random, room: float) -> programs.Demand:
    base = room * random.uniform(0.05, 0.35)
    return programs.sawtooth(random, base, base * random.uniform(0.1, 1.2), _log(random, 0.2, 60))


# --- growth that does not end ------------------------------------------------------------------------------


def _grows(random: Random, kept: programs.Demand, lasting: float, onset: float, *, agent: bool) -> Scene:
    """Let ``kept`` go from 0 to 1 in ``lasting`` seconds after the onset, over the wave of a training."""
    gpu = card(random)
    room = share(gpu, 1)
    wave = _wave(random, room)
    left = room * random.uniform(0.5, 0.6)

    def demand(age: float) -> float:
        return wave(age) + left * kept(max(0.0, age - onset) / lasting)

    begun = random.uniform(0, 300)
    hours = (onset + lasting * 1.05) / HOUR
    jobs = [process(random, Torch(demand, limit=room), agent=agent, begin=begun)]
    return Scene([gpu], jobs, hours, onset + begun, weather(random, hours))


def drawn_leak(random: Random) -> Scene:
    """A leak at any pace that fills the card in 1 to 12 hours, with an agent."""
    onset = random.uniform(40, 150) * MINUTE
    return _grows(random, lambda part: part, _log(random, 1, 12) * HOUR, onset, agent=True)


def drawn_leak_from_outside(random: Random) -> Scene:
    """The same without an agent: only the driver's figure."""
    onset = random.uniform(40, 150) * MINUTE
    return _grows(random, lambda part: part, _log(random, 1, 12) * HOUR, onset, agent=False)


def leak_in_phases(random: Random) -> Scene:
    """A leak in some of a program's phases alone: in between it keeps nothing for a few minutes."""
    onset, lasting = random.uniform(40, 90) * MINUTE, _log(random, 2, 10) * HOUR
    period, duty = random.uniform(2, 12) * MINUTE / lasting, random.uniform(0.3, 0.8)

    def kept(part: float) -> float:
        whole, rest = divmod(part / period, 1)
        return period * (whole + min(1.0, rest / duty))

    return _grows(random, kept, lasting, onset, agent=True)


def leak_that_speeds_up(random: Random) -> Scene:
    """A list that is copied as it grows: each hour keeps more than the one before."""
    onset, power = random.uniform(40, 90) * MINUTE, random.uniform(1.3, 2)
    return _grows(random, lambda part: part**power, _log(random, 2, 10) * HOUR, onset, agent=True)


def leak_under_evaluations(random: Random) -> Scene:
    """A leak below evaluations that need more for minutes, at any interval."""
    gpu = card(random)
    room = share(gpu, 1)
    onset, lasting = random.uniform(40, 120) * MINUTE, _log(random, 2, 12) * HOUR
    demand = programs.with_leak(_wave(random, room * 0.6), room * 0.5 / lasting, onset)
    demand = programs.with_evaluations(
        demand, room * random.uniform(0.05, 0.2), random.uniform(10, 90) * MINUTE, random.uniform(60, 500)
    )
    hours = (onset + lasting) / HOUR
    job = process(random, Torch(demand, limit=room), agent=True)
    return Scene([gpu], [job], hours, onset, weather(random, hours))


def leak_of_days(random: Random) -> Scene:
    """A leak of 0.7 to 8 % of the card a day, under a need that varies by up to 100 MiB."""
    gpu = card(random)
    a_day = gpu.total * _log(random, 0.007, 0.08)
    base, noise = share(gpu, random.uniform(0.1, 0.6)), random.uniform(0, 100) * MIB
    onset, agent = random.uniform(0.2, 6) * HOUR, random.random() < 0.5

    def demand(age: float) -> float:
        return base + noise * random.random() + a_day * max(0.0, age - onset) / (24 * HOUR)

    program = Torch(demand) if agent else Held(demand)
    return Scene([gpu], [process(random, program, agent=agent, begin=0.0)], 48, onset, weather(random, 48))


# --- growth that ends by itself ----------------------------------------------------------------------------


def cache_that_fills(random: Random) -> Scene:
    """A KV cache that fills over one to four hours, stops at 75 to 95 % of the card, and stays."""
    gpu = card(random)
    size, lasting = share(gpu, random.uniform(0.75, 0.95)), random.uniform(1, 4) * HOUR
    first, begun = random.uniform(0.1, 0.5), random.uniform(0, 3) * HOUR
    shape = random.uniform(0.6, 1.4)

    def demand(age: float) -> float:
        part = math.pow(min(1.0, max(0.0, age - begun) / lasting), shape)
        return size * (first + (1 - first) * part)

    agent = random.random() < 0.5
    program = Torch(demand, spread=lambda _: 0.0, limit=share(gpu, 1)) if agent else Held(demand)
    return Scene([gpu], [process(random, program, agent=agent)], weather=weather(random, 24))


def longer_sequences(random: Random) -> Scene:
    """A curriculum: the need rises step by step for hours, and stays at its last step."""
    gpu = card(random)
    room, steps = share(gpu, 1), random.randint(2, 6)
    every, low = random.uniform(0.5, 3) * HOUR, random.uniform(0.15, 0.4)
    top = random.uniform(low + 0.1, 0.75)
    wave = programs.sawtooth(random, room * low * 0.5, room * low * 0.5, _log(random, 0.3, 40))
    program = Torch(lambda age: wave(age) + room * (top - low) * min(steps, age // every) / steps, limit=room)
    return Scene([gpu], [process(random, program)], weather=weather(random, 24))


def model_loads(random: Random) -> Scene:
    """Models of any size that load for 2 to 28 minutes, with an agent or without, hour after hour."""
    gpu = card(random)
    jobs, at = [], random.uniform(60, 600)
    while at < 24 * HOUR:
        size, lasting = share(gpu, random.uniform(0.5, 0.96)), random.uniform(2, 28) * MINUTE
        end = at + lasting + random.uniform(0.5, 6) * HOUR
        load = _loading(size, lasting)
        agent = random.random() < 0.5
        program: Program = Torch(load, spread=lambda _: 0.0) if agent else Held(load)
        jobs.append(process(random, program, begin=at, end=end, agent=agent))
        at = end + random.uniform(30, 1800)
    return Scene([gpu], jobs, weather=weather(random, 24))


def _loading(size: float, lasting: float) -> programs.Demand:
    return lambda age: size * min(1.0, max(0.03, age / lasting))


def days_and_nights(random: Random) -> Scene:
    """A server with a day and a night: its need follows the hour."""
    gpu = card(random)
    low, high, phase = random.uniform(0.1, 0.3), random.uniform(0.4, 0.85), random.uniform(0, 24)
    noise = random.uniform(0, 0.03)

    def demand(age: float) -> float:
        day = 0.5 - 0.5 * math.cos((age / HOUR + phase) * math.pi / 12)
        return share(gpu, low + (high - low) * day + noise * random.random())

    work = programs.in_bursts(random, 20, random.uniform(5, 60))
    agent = random.random() < 0.5
    program = Torch(demand, work) if agent else Held(demand, work)
    return Scene([gpu], [process(random, program, agent=agent)], weather=weather(random, 24))


# --- counters, reservations, drivers and clocks ------------------------------------------------------------


def old_counters(random: Random) -> Scene:
    """A program with errors and retries of yesterday, an exporter that is away at times, and lost scrapes."""
    gpu = card(random)
    program = Torch(_wave(random, share(gpu, 0.6)), ooms=random.randint(1, 9), retries=random.randint(0, 50))
    away = [(at, at + random.uniform(20, 900)) for at in (random.uniform(0, 24) * HOUR for _ in range(3))]
    sky = Weather(
        random.uniform(0, 0.08), tuple(away), tuple(end for _, end in away if random.random() < 0.5)
    )
    return Scene([gpu], [process(random, program, agent=True)], weather=sky)


def retries_elsewhere(random: Random) -> Scene:
    """An idle server, and on another card jobs that search their batch size: retries, and errors."""
    cards = [card(random, index) for index in range(2)]
    quiet = Torch(
        programs.steady(share(cards[0], random.uniform(0.3, 0.6))), programs.in_bursts(random, 3, 1500)
    )
    jobs, at = [process(random, quiet, agent=True, user="ada")], 600.0
    while at < 24 * HOUR:
        end = at + random.uniform(0.3, 2) * HOUR
        room = share(cards[1], 0.9)
        program = Torch(_trying(_wave(random, room * 0.5), room, random.uniform(60, 900)), limit=room)
        jobs.append(process(random, program, 1, begin=at, end=end, agent=True, user="grace"))
        at = end + random.uniform(60, 1800)
    return Scene(cards, jobs, weather=weather(random, 24))


def _trying(demand: programs.Demand, room: float, moment: float) -> programs.Demand:
    return lambda age: room * 1.02 if moment <= age < moment + 40 else demand(age)


def nomad_tasks(random: Random) -> Scene:
    """A card that Nomad gave to a task, whose processes the kernel shows as those of a container."""
    gpu = card(random)
    owner = Owner("container", f"{random.getrandbits(48):012x}", container="x")
    grants = (Grant("nomad", "train/main/1f", (gpu.uuid(0),)),)
    program = Torch(_wave(random, share(gpu, 0.9)))
    job, nomad = process(random, program, owner=owner), Scheduler("nomad", ("*",), grants)
    return Scene([gpu], [job], weather=weather(random, 24), schedulers=(nomad,))


def rolling_reboots(random: Random) -> Scene:
    """Reboots, each followed by a build of the driver of up to four and a half minutes."""
    gpu = card(random)
    jobs, faults, away, at = [], [], [], 0.0
    for _ in range(random.randint(2, 5)):
        end = at + random.uniform(1, 5) * HOUR
        jobs.append(process(random, Torch(_wave(random, share(gpu, 1))), begin=at + 120, end=end))
        back = end + random.uniform(20, 280)
        built = back + random.uniform(0, 270)
        away.append((end, back))
        faults.append(Fault("driver lost", end, built))
        at = built
    sky = Weather(0.005, tuple(away), tuple(back for _, back in away))
    return Scene([gpu], jobs, weather=sky, faults=faults)


def crash_loop(random: Random) -> Scene:
    """An exporter that starts, answers once or twice, and crashes, for an hour."""
    gpu = card(random)
    begun, period = random.uniform(1, 20) * HOUR, random.uniform(50, 150)
    answers = random.uniform(0.1, 0.4) * period
    ends = [begun + number * period for number in range(int(HOUR / period))]
    sky = Weather(0.0, tuple((end, end + period - answers) for end in ends), tuple(ends))
    job = process(random, Torch(_wave(random, share(gpu, 1))))
    return Scene([gpu], [job], weather=sky)


def behind_an_hour(random: Random) -> Scene:
    """A node whose clock is up to 90 minutes off, and programs that grow in their first hour alone."""
    gpu = card(random)
    jobs, at = [], 300.0
    while at < 24 * HOUR:
        end = at + random.uniform(1.5, 5) * HOUR
        climb = programs.climbing(share(gpu, random.uniform(0.3, 0.7)), random.uniform(2, 12) * MINUTE)
        jobs.append(process(random, Torch(climb, spread=lambda _: 0.0), begin=at, end=end))
        at = end + random.uniform(60, 900)
    faults = [Fault("clock", number=random.choice([-1, 1]) * random.uniform(600, 5400))]
    return Scene([gpu], jobs, weather=weather(random, 24), faults=faults)


def beside_a_desktop(random: Random) -> Scene:
    """A framework that takes its own card, beside a display server, or a small helper of its owner."""
    gpu = card(random)
    taken = share(gpu, random.uniform(0.6, 0.85))
    need = programs.lengths(random, taken * 0.2, taken * 0.6)
    greedy = Held(programs.steady(taken), report=programs.tensorflow(need))
    display = Held(programs.steady(random.uniform(5, 800) * MIB), programs.in_bursts(random, 2, 60))
    command, user = random.choice([("Xorg", "root"), ("gnome-shell", "donald"), ("helper.py", "ada")])
    jobs = [
        process(random, greedy, framework="tensorflow", user="ada"),
        process(random, display, framework="cuda", command=command, user=user, agent=False),
    ]
    return Scene([gpu], jobs, weather=weather(random, 24))


def working_orphans(random: Random) -> Scene:
    """A training that goes on when its launcher is killed: a leftover, and no page."""
    gpu = card(random)
    job = process(random, Torch(_wave(random, share(gpu, 1))), signs=("multiprocessing",))
    job.fates["orphaned"] = random.uniform(0.5, 10) * HOUR
    return Scene([gpu], [job], weather=weather(random, 24))


# --- faults that show at once ------------------------------------------------------------------------------


def missing_after_reboot(random: Random) -> Scene:
    """A GPU that is not listed any more after a reboot of any length."""
    cards = [card(random, index) for index in range(random.randint(2, 4))]
    lost, onset = len(cards) - 1, random.uniform(0.5, 3) * HOUR
    back = onset + random.uniform(30, 1800)
    jobs = [process(random, Torch(_wave(random, share(each, 1))), each.index, end=onset) for each in cards]
    sky, faults = Weather(0.0, ((onset, back),), (back,)), [Fault("device gone", onset, gpu=lost)]
    return Scene(cards, jobs, back / HOUR + 1, onset, sky, faults)


def died_between_scrapes(random: Random) -> Scene:
    """A program that dies of its uncaught error between two scrapes: only its owner's counters know it."""
    gpu = card(random)
    onset = random.uniform(0.4, 2) * HOUR
    owner = Owner("pod", f"team/train-{random.randint(0, 9)}", namespace="team", pod="train")
    job = process(random, Torch(_wave(random, share(gpu, 0.8))), owner=owner, end=onset)
    labels = f'owner_type="pod",owner="{owner.name}",framework="torch"'
    sky = Weather(random.choice([0.0, random.uniform(0, 0.03)]))
    sky.says = {
        f"vramledger_owner_last_oom_timestamp_seconds{{{labels}}}": lambda now: (
            7200 + onset if now >= onset else None
        ),
        f"vramledger_owner_ooms_total{{{labels}}}": lambda now: 1.0 if now >= onset else None,
    }
    return Scene([gpu], [job], onset / HOUR + 0.5, onset, sky)


def orphans_of_a_job(random: Random) -> Scene:
    """Workers on several cards whose launcher is killed, and which do nothing any more."""
    cards = [card(random, index) for index in range(random.randint(2, 4))]
    onset = random.uniform(10, 90) * MINUTE
    working = programs.until(onset, programs.steady(0.8), programs.idle)
    jobs = [
        process(
            random, Torch(programs.steady(share(each, random.uniform(0.05, 0.8))), working),
            each.index, signs=("multiprocessing",), fates={"orphaned": onset}, user="ada", agent=False,
        )
        for each in cards
    ]  # fmt: skip
    return Scene(cards, jobs, onset / HOUR + 1, onset, weather(random, 0.1))


def hoarder_and_restarts(random: Random) -> Scene:
    """A job that has stopped working, and an exporter that restarts meanwhile."""
    scene = hoarder(random)
    moments = sorted((scene.onset or 0) + random.uniform(0, 50) * MINUTE for _ in range(random.randint(1, 3)))
    scene.weather = Weather(
        random.uniform(0, 0.03), tuple((at - random.uniform(5, 40), at) for at in moments), tuple(moments)
    )
    return scene


_GROWS = (
    *GROWTH, *_TRUE, "GpuOutOfMemory", "GpuAllocatorRetries", "GpuMemoryFragmented", "GpuFrameworkCacheHigh",
)  # fmt: skip
_IDLE = ("GpuMemoryHoarded", "GpuMemoryGrowing", *_TRUE)
_DOWN = ("VramLedgerExporterDown", "VramLedgerManyExportersDown")


def _scenario(build: Build, *expects: str, allows: tuple[str, ...] = (), leak: bool = False) -> Scenario:
    return Scenario(
        build.__name__.replace("_", "-"), build, expects, frozenset((*allows, *_TRUE)), leak=leak,
        always=frozenset(_TRUE if expects else ()),
    )  # fmt: skip


def _leak(build: Build) -> Scenario:
    return _scenario(build, "GpuMemoryLeakSuspected", allows=_GROWS, leak=True)


DRAWS = [
    *map(_leak, (drawn_leak, drawn_leak_from_outside, leak_in_phases, leak_that_speeds_up)),
    *map(_leak, (leak_under_evaluations, leak_of_days)),
    replace(_scenario(rank_stopped, "GpuJobHung"), name="drawn-rank-stopped"),
    replace(_scenario(rank_asleep, "GpuJobHung"), name="drawn-rank-asleep"),
    _scenario(missing_after_reboot, "GpuDeviceLost", allows=_DOWN),
    _scenario(died_between_scrapes, "GpuOutOfMemory"),
    _scenario(orphans_of_a_job, "GpuMemoryOrphaned", allows=_IDLE),
    _scenario(hoarder_and_restarts, "GpuMemoryHoarded", allows=_IDLE),
    replace(_scenario(stuck, "GpuMemoryStuck"), name="drawn-stuck"),
    replace(_scenario(reserved_unused, "GpuReservedUnused"), name="drawn-reserved-unused"),
    *(
        _scenario(named(name, shows, series=f"vramledger_{series}", before=before, then=then), alert)
        for name, series, before, then, alert in (
            ("drawn_xid", 'device_xid_errors_total{GPU,xid="79"}', None, 1, "GpuXidError"),
            ("drawn_ecc", 'device_ecc_errors_total{GPU,type="uncorrected"}', 7, 8, "GpuEccUncorrectable"),
            ("rows_gone", "device_row_remap_failed{GPU}", 0, 1, "GpuRowRemapFailed"),
            ("reset_wanted", 'device_recovery_action{GPU,action="gpu_reset"}', None, 1, "GpuResetRequired"),
            ("ghost_device", "device_ghost{GPU}", 0, 1, "GpuGhost"),
            ("socket_down", "agent_socket_up", 1, 0, "VramLedgerAgentSocketDown"),
        )
    ),
    # --- healthy
    _scenario(cache_that_fills, allows=("GpuMemoryGrowing", "GpuMemoryLeakSuspected")),
    _scenario(longer_sequences, allows=("GpuMemoryGrowing", "GpuMemoryLeakSuspected")),
    _scenario(model_loads),
    _scenario(days_and_nights, allows=("GpuMemoryGrowing", "GpuMemoryLeakSuspected")),
    _scenario(old_counters, allows=_DOWN),
    _scenario(retries_elsewhere, allows=("GpuOutOfMemory", "GpuAllocatorRetries", "GpuMemoryHoarded")),
    _scenario(nomad_tasks),
    _scenario(rolling_reboots, allows=_DOWN),
    _scenario(crash_loop, allows=_DOWN),
    _scenario(behind_an_hour, allows=("VramLedgerClockSkew",)),
    _scenario(beside_a_desktop),
    _scenario(working_orphans, allows=("GpuMemoryOrphaned",)),
    _scenario(checkpoints, allows=("GpuBusyWithoutWork",)),
    _scenario(ranks_end_one_by_one, allows=("GpuBusyWithoutWork",)),
    _scenario(kernels_that_spin, allows=("GpuBusyWithoutWork",)),
    # The first rank does nothing all night, and nobody has given its owner a threshold.
    _scenario(server_at_night, allows=("GpuBusyWithoutWork", "GpuMemoryHoarded")),
]
