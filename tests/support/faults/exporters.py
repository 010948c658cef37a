"""Scenarios with a fault of the exporter itself, or between it and Prometheus."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tests.support.faults.faulty import hoarder, orphaned
from tests.support.faults.scene import FOUND, HOUR, MINUTE, Build, Scene, card, hiccups, plain, process, share
from tests.support.host import programs
from tests.support.host.model import Fault
from tests.support.host.programs import Torch
from tests.support.host.scrapes import Weather


def absent(random: Random) -> Scene:
    """A scrape configuration without the job: Prometheus knows no exporter any more."""
    gpu = card(random)
    onset = random.uniform(10, 50) * MINUTE
    job = process(random, Torch(programs.steady(share(gpu, 0.5))))
    return Scene([gpu], [job], hours=onset / HOUR + 0.5, onset=onset, weather=Weather(unknown=onset))


def never_a_driver(random: Random) -> Scene:
    """A host on which the driver has not answered since monitoring began."""
    gpu = card(random)
    return Scene([gpu], [], hours=1, onset=0.0, weather=hiccups(random), faults=[Fault("driver lost")])


def clock_wrong(random: Random) -> Scene:
    """A node whose clock is minutes off, before or behind."""
    gpu = card(random)
    job = process(random, Torch(programs.steady(share(gpu, 0.5))))
    skew = random.choice([-1, 1]) * random.uniform(75, 900)
    return Scene(
        [gpu], [job], hours=1, onset=0.0, weather=hiccups(random), faults=[Fault("clock", number=skew)]
    )


def collector_failing(random: Random) -> Scene:
    """A collector that gives no data from some moment on, while the others do."""
    gpu = card(random)
    onset = random.uniform(10, 50) * MINUTE
    job = process(random, Torch(programs.steady(share(gpu, 0.5))))
    return Scene(
        [gpu], [job], hours=onset / HOUR + 0.6, onset=onset, weather=hiccups(random),
        faults=[Fault("collector", onset, name="hidden")],
    )  # fmt: skip


def crowd(random: Random) -> Scene:
    """More holders on a card than the exporter shows one by one."""
    gpu = card(random)
    onset = random.uniform(10, 50) * MINUTE
    size = share(gpu, 0.1)
    jobs = [
        process(random, Torch(programs.steady(size)), begin=0.0 if few else onset)
        for few in (True, True, True, False, False)
    ]
    weather = hiccups(random)
    weather.most = 4
    return Scene([gpu], jobs, hours=onset / HOUR + 0.7, onset=onset, weather=weather)


_SKEWED = ("VramLedgerClockSkew", "GpuMemoryNearlyFull")


def skewed(build: Build) -> Build:
    """Give the host of a scenario a clock that is minutes off."""

    def off(random: Random) -> Scene:
        scene = build(random)
        skew = random.choice([-1, 1]) * random.uniform(75, 900)
        scene.faults = [*scene.faults, Fault("clock", number=skew)]
        return scene

    off.__name__ = f"{build.__name__}_skewed"
    return off


EXPORTERS = [
    replace(plain(absent, "VramLedgerAbsent", within=FOUND), alone=True),
    plain(never_a_driver, "VramLedgerSamplingFailed", within=FOUND),
    plain(clock_wrong, "VramLedgerClockSkew", within=FOUND),
    # It looks back over two minutes.
    plain(collector_failing, "VramLedgerCollectorFailing", within=FOUND * 2),
    plain(crowd, "VramLedgerSeriesDropped", within=FOUND),
    plain(
        skewed(orphaned),
        "GpuMemoryOrphaned",
        allows=("GpuMemoryHoarded",),
        always=_SKEWED,
        within=FOUND,
    ),
    plain(skewed(hoarder), "GpuMemoryHoarded", always=_SKEWED, within=HOUR + FOUND),
]
