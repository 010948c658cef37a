"""Scenarios with a fault of the exporter itself, or between it and Prometheus."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

from tests.support.faults.faulty import hoarder, orphaned
from tests.support.faults.scene import (
    FOUND,
    HOUR,
    MINUTE,
    Build,
    Scene,
    after,
    beside_a_job,
    card,
    hiccups,
    named,
    plain,
    process,
    share,
    soon,
)
from tests.support.host import programs
from tests.support.host.model import Fault
from tests.support.host.programs import Torch
from tests.support.host.scrapes import Weather
from vramledger.model.reading import Grant, Scheduler


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


def crowd(random: Random) -> Scene:
    """More holders on a card than the exporter shows one by one."""
    gpu = card(random)
    onset = soon(random)
    size = share(gpu, 0.1)
    jobs = [
        process(random, Torch(programs.steady(size)), begin=0.0 if few else onset)
        for few in (True, True, True, False, False)
    ]
    scene = after(onset, random, [gpu], jobs, 0.7)
    scene.weather.most = 4
    return scene


def shows(random: Random, series: str, before: float | None, then: float | Callable[[float], float]) -> Scene:
    """Let a series change at some moment, once or by the time since; ``GPU`` stands for the card's labels."""
    gpu = card(random)
    onset = random.uniform(20, 50) * MINUTE
    job = process(random, Torch(programs.steady(share(gpu, 0.5))))
    scene = after(onset, random, [gpu], [job], 0.6)

    def value(now: float) -> float | None:
        if now < onset:
            return before
        return then(now - onset) if callable(then) else then

    scene.weather.says = {series.replace("GPU", f'gpu="{gpu.index}",uuid="{gpu.uuid(0)}"'): value}
    return scene


def stuck(random: Random) -> Scene:
    """A program whose thread sleeps in the driver for ever."""
    gpu = card(random)
    onset = random.uniform(20, 50) * MINUTE
    job = process(random, Torch(programs.steady(share(gpu, 0.5))), fates={"stuck": onset})
    return after(onset, random, [gpu], [job], 0.6)


def reserved_unused(random: Random) -> Scene:
    """A card that Slurm gave to a job which never uses it."""
    gpu = card(random)
    grants = (Grant("slurm", "4711", (f"nvidia{gpu.index}",)),)
    slurm = Scheduler("slurm", ("*",), grants)
    return Scene([gpu], [], 2.4, onset=0.0, weather=hiccups(random), schedulers=(slurm,))


_FAILING = 'prometheus_rule_evaluation_failures_total{rule_group="/etc/x.yml;vramledger-growth"}'

_SHOWN: dict[str, tuple[str, str, float | None, float | Callable[[float], float]]] = {
    "rules-failing": ("VramLedgerRulesFailing", _FAILING, 0, lambda age: age // 30),
    "storage-failing": ("VramLedgerStorageFailing", "vramledger_storage_up", 1, 0),
    "agent-socket-down": ("VramLedgerAgentSocketDown", "vramledger_agent_socket_up", 1, 0),
    "web-configuration-wrong":
        ("VramLedgerWebConfigNotReloaded", "vramledger_web_config_last_reload_successful", 1, 0),
    "xid": ("GpuXidError", 'vramledger_device_xid_errors_total{GPU,xid="94"}', None, 1),
    "ecc": ("GpuEccUncorrectable", 'vramledger_device_ecc_errors_total{GPU,type="uncorrected"}', 3, 4),
    "rows-used-up": ("GpuRowRemapFailed", "vramledger_device_row_remap_failed{GPU}", 0, 1),
    "reset-required": ("GpuResetRequired", "vramledger_device_reset_required{GPU}", 0, 1),
    "ghost": ("GpuGhost", "vramledger_device_ghost{GPU}", 0, 1),
}  # fmt: skip
"""Faults that show in one series: the alert, the series, its value before, and by the time since then."""

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
    *(
        plain(named(name, shows, series=series, before=before, then=then), alert, within=FOUND)
        for name, (alert, series, before, then) in _SHOWN.items()
    ),
    plain(stuck, "GpuMemoryStuck", within=FOUND * 2),
    plain(reserved_unused, "GpuReservedUnused", within=FOUND),
    # A scrape configuration without the job: Prometheus knows no exporter any more.
    replace(
        plain(beside_a_job("absent", 0.5, lambda at: Weather(unknown=at)), "VramLedgerAbsent", within=FOUND),
        alone=True,
    ),
    plain(never_a_driver, "VramLedgerSamplingFailed", within=FOUND),
    plain(clock_wrong, "VramLedgerClockSkew", within=FOUND),
    # One gives no data, while the others do; the alert looks back over two minutes.
    plain(
        beside_a_job("collector_failing", 0.6, lambda at: Fault("collector", at, name="hidden")),
        "VramLedgerCollectorFailing",
        within=FOUND * 2,
    ),
    plain(crowd, "VramLedgerSeriesDropped", within=FOUND),
    plain(skewed(orphaned), "GpuMemoryOrphaned", allows=("GpuMemoryHoarded",), always=_SKEWED, within=FOUND),
    plain(skewed(hoarder), "GpuMemoryHoarded", always=_SKEWED, within=HOUR + FOUND),
]
