"""Situations of memory that grows and fills a device, and of frameworks' pools and counters."""

import math
from dataclasses import replace
from random import Random

from tests.support.alerts.nodes import STEP, Holder, Node, Values, changing_at, value_at
from tests.support.alerts.parts import (
    BOBS_LAST_OOM,
    FREE,
    LAST_OOM,
    LEAK,
    MIB,
    TRAINER,
    away,
    gone,
    grows,
    jax,
    loses,
    on_gpu,
    sawtooth,
    series,
    told_when,
    torch,
    until,
)
from tests.support.alerts.situation import Situation
from tests.support.host.model import GIB

LEAKS, FILLS = "GpuMemoryLeakSuspected-w", "GpuMemoryAboutToFill-p"
FILLING, NEARLY = ", GpuMemoryFilling-w", ", GpuMemoryNearlyFull-i"
FULL = FILLING + NEARLY
POD = {"owner_type": "pod", "owner": "team/train", "framework": "torch"}


def filled(pace: float, full: float, *, agent: str = "", **more: int) -> Holder:
    """Return a program that has rested, and fills its GPU of 80 GiB by a minute."""

    def held(minute: float) -> float:
        return min(79.4, max(20.0, 80 - pace * (full - minute)))

    own: dict[str, Values] = {"torch_alloc_retries_total": 0, "torch_ooms_total": 0}
    for name in ("torch_allocated_bytes", "torch_reserved_bytes"):
        own[name] = 9.0 if agent == "native" else lambda m: held(m) - 0.4
    return replace(Holder(7, held), agent=own if agent else {}, agent_up=1 if agent else None, **more)  # type: ignore[arg-type]


def fills(pace: float, agent: str, every: int = STEP) -> Situation:
    """Return a GPU that is full at minute 60."""
    by = {"": "nobody but the driver", "framework": "its framework", "native": "its agent, outside the pool"}
    leak = f"{LEAKS} 40..62 to 90..100, " if agent else ""
    return Situation(
        f"{pace} GiB a minute told by {by[agent]}, a scrape each {every} s: the page comes before it is full",
        Node([filled(pace, 60, agent=agent)], total=80, every=every),
        f"{leak}{FILLS} 50..59 to 60..75{FULL if pace <= 3 else NEARLY}", 100,
    )  # fmt: skip


def coherent(cache: Values, *, shared: Values = 0, free: Values = 0.1) -> dict[str, Values]:
    """Return the figures of coherent memory, GiB; shared memory cannot be dropped, as page cache can."""

    def bytes_of(*sizes: Values) -> Values:
        return lambda minute: GIB * sum(value_at(each, minute) or 0.0 for each in sizes)

    kinds = {"file": bytes_of(cache, shared), "shared": bytes_of(shared)}
    nodes = {on_gpu("device_node_memory_bytes", type=kind): each for kind, each in kinds.items()}
    return {FREE: bytes_of(free)} | nodes


def flickering(minute: float) -> float:
    """Return what the kernel keeps free beside a page cache that fills the rest, GiB: 85 to 115 MiB."""
    return (100 + 15 * math.sin(minute * 60 * 2 * math.pi / 47)) * MIB


def bursts(minute: float) -> float:
    """Return GiB of a leak that grows by 4 GiB in half an hour, and then rests for fifty minutes."""
    whole, rest = divmod(minute, 80)
    return 10 + 4 * (whole + min(rest, 30) / 30)


_DRAWN = [4 * drawn.random() for drawn in [Random(159)] for _ in range(400)]  # noqa: S311 always the same


def used_again(minute: float) -> float | None:
    """Return GiB of a leak that ends, and of another process a minute later, which does not grow."""
    return 10.5 + 0.25 * minute if minute < 60 else 40 if minute >= 61 else None


def of_another(values: Values) -> Values:
    """Return figures of a program that ends, and of another one, which stay."""
    return lambda now: value_at(values, min(now, 61)) if not 60 <= now < 61 else None


GROWTH = [
    Situation("a training's sawtooth: nothing", Node([torch(sawtooth)]), minutes=200),
    Situation("a training's sawtooth, by the driver: nothing", Node([Holder(7, sawtooth)]), minutes=200),
    # --- within minutes, at several paces, whoever tells the figures
    *[fills(pace, agent) for pace in (2.5, 3, 4, 5, 6) for agent in ("", "framework", "native")],
    fills(3, "framework", 30),
    fills(3, "framework", 60),
    Situation("4 GiB a minute with an agent, by a rank on each of two GPUs: one page for each GPU",
        Node([filled(4, 60, agent="framework", gpu=gpu, pid=7 + gpu) for gpu in (0, 1)], total=80, gpus=2),
        f"{FILLS} 50..59 to 60..75 x2, {LEAKS} 40..62 to 90..100 x2{NEARLY} x2", 100),
    Situation("a pool grows by 4 GiB a minute to the brim, and what is in use does not: nobody is woken",
        Node([replace(filled(4, 60, agent="framework"), agent={**filled(4, 60, agent="framework").agent,
        "torch_allocated_bytes": 9})], total=80), "GpuFrameworkCacheHigh-i 70..95" + NEARLY),
    Situation("an idle program beside one that fills the GPU by 4 GiB a minute: the page names that one",
        Node([filled(4, 60, agent="framework"), Holder(8, 0.5, "idle", since=-60, sm=None)], total=80),
        f"{FILLS}@7 50..59 to 60..75, {LEAKS}@7 40..62 to 90..100{FULL}", 100),
    Situation("a program with an agent fills 60 of 80 GiB in 10 minutes and stops: nobody is woken",
        Node([torch(grows(5, 10, 30, 60))], total=80), LEAKS + " 20..60 to 60..120"),
    Situation("without an agent 1 GiB a minute for more than an hour: told, and paged before it is full",
        Node([Holder(7, grows(1))]), f"GpuMemoryGrowing-w, {FILLS}{FILLING}", 86),
    Situation("a leak whose program goes up and down at each step: told as soon as another",
        Node([replace(torch(lambda m: 40 + 2 * m + _DRAWN[round(m * 4)]), start=0)], total=140),
        LEAKS + " 30..40", 48),
    # --- page cache, shared and managed memory
    Situation("growth into page cache, which the kernel drops before an allocation fails: nothing",
        Node([Holder(7, grows(40 * MIB, 86))], total=96, extra=coherent(lambda m: 9.5 - m * 40 * MIB,
        free=flickering)), minutes=90),
    Situation("page cache that grows: nothing", Node([replace(TRAINER, gib=86)], extra=coherent(grows(0.4, 0),
        free=grows(-0.4, 13.5))), minutes=33),
    Situation("full of shared memory, which the kernel cannot drop: listed", Node([replace(TRAINER, gib=50)],
        extra=coherent(1, shared=48.9, free=0.1)), "GpuMemoryNearlyFull-i", 30),
    Situation("shared memory that grows: told", Node([replace(TRAINER, gib=80)],
        extra=coherent(1, shared=lambda m: m / 5, free=lambda m: 19 - m / 5)), "GpuMemoryFilling-w", 80),
    Situation("a leak that has used up the page cache: paged",
        Node([torch(grows(1))], extra=coherent(lambda m: max(0, 50 - m),
        free=lambda m: max(0, 90 - max(m, 50)))), f"{LEAKS}, {FILLS}{FILLING}", 86),
    Situation("managed memory that grows: told", Node([Holder(7, 0.5, managed=grows(0.25))]),
        "GpuMemoryGrowing-w 40..45", 45),
    Situation("managed memory that fills the GPU, and runs nobody out of memory: told, and nobody is woken",
        Node([Holder(7, 0.5, managed=grows(1))]), "GpuMemoryGrowing-w" + FILLING, 86),
    Situation("growth beside managed memory, which gives way before an allocation fails: told",
        Node([Holder(7, grows(1, 5)), Holder(8, 0.5, managed=20)]), "GpuMemoryGrowing-w" + FILLING, 71.5),
    Situation("managed memory that comes and goes, a little more each time, and nothing in between: nothing",
        Node([Holder(7, 0.5, managed=lambda m: 10 + m / 4 if m % 2 < 1 else None)]), minutes=45),
    Situation("managed memory that becomes certain: nothing",
        Node([Holder(7, 0.5, managed=changing_at(20, None, 40))]), minutes=45),
    Situation("growth beside memory of one of two: nothing",
        Node([Holder(7, 0.5, most=50), Holder(8, grows(0.01), most=50)]), minutes=45),
    # --- growth that ends by itself
    Situation("a program that warms up: nothing", Node([Holder(7, lambda m: 40 - 30 * math.exp(-m / 10))]),
        minutes=100),
    Situation("a cache below which the need goes up and down: nothing", Node([torch(sawtooth, 40)]),
        minutes=70),
    Situation("a cache that fills over two hours: told", Node([Holder(7, grows(0.6, 18, 0, 90))]),
        "GpuMemoryGrowing-w" + FILLING, 180),
    Situation("a cache that fills over two hours, with an agent: told", Node([torch(grows(0.6, 18, 0, 92))]),
        LEAKS + FILLING, 180),
    Situation("a cache that stays at 95: told", Node([Holder(7, grows(0.62, 20, 0, 95))]),
        "GpuMemoryGrowing-w" + FILLING, 180),
    Situation("a model loads for 20 minutes: nothing", Node([replace(torch(grows(4.5, 1, 0, 91)), start=0)]),
        minutes=60),
    Situation("a later load of 20 minutes: told, and nobody is woken", Node([torch(grows(4, 1, 30, 80))]),
        LEAKS, 90),
    Situation("a later load to 91, which nothing tells from a leak: paged",
        Node([torch(grows(4.5, 1, 30, 91))]), f"{LEAKS}, {FILLS}", 90),
    Situation("a later load of 7 minutes without an agent: nothing", Node([Holder(7, grows(12, 10, 30, 94))]),
        minutes=90),
    Situation("a first load of 26 minutes without an agent: nothing",
        Node([Holder(7, grows(3, 18, 3, 96), start=0)]), "GpuMemoryNearlyFull-i" + FILLING, 60),
    Situation("a program grows in its first hour: nothing", Node([Holder(7, grows(0.5, 5, 0, 30), start=0)]),
        minutes=55),
    Situation("jobs fill a GPU one by one: nothing of growth",
        Node([Holder(100 + n, changing_at(20 + n, None, 4)) for n in range(24)]),
        "GpuMemoryNearlyFull-i", 60),
    # --- a leak that rests, ends, or is not always seen
    Situation("a leak with rests: told without a pause", Node([torch(bursts)]), LEAKS + " 30..120", 200),
    Situation("a leak whose program ends: it is over soon",
        Node([replace(LEAK, gib=until(80, grows(0.25, 10.5)))]), LEAKS + " 30..50 to 80..96"),
    Situation("a leak whose pid is used again: it is over soon",
        Node([replace(LEAK, gib=used_again, start=changing_at(60, -600, 61),
        agent={name: of_another(values) for name, values in LEAK.agent.items()})]),
        LEAKS + " 30..50 to 60..76"),
    Situation("a growth without an agent whose pid is used again: over soon",
        Node([Holder(7, used_again, start=changing_at(60, -600, 61))]),
        "GpuMemoryGrowing-w 30..50 to 60..76"),
    Situation("the pid of another that holds more: nothing",
        Node([Holder(7, lambda m: 10 if m < 20 else 12 + m, start=changing_at(20, -600, 20))]), minutes=45),
    Situation("an exporter restarts in the middle of the wait of a growth: told some minutes later at most",
        Node([Holder(7, grows(0.25))], missing=away(45, 46)), "GpuMemoryGrowing-w 40..80"),
    Situation("nobody says when the programs began: a leak is told all the same",
        Node([LEAK], extra={series("process_start_time_seconds", pid=7): None}), LEAKS + " 20..60"),
    Situation("a scrape of each seven minutes lacks the bytes of a leak: told without a pause",
        Node([LEAK],
        extra={on_gpu("process_memory_bytes", pid=7): lambda m: (
        None if m >= 3 and (m - 3) % 7 < 0.25 else 30 * GIB)}), LEAKS + " 20..60"),
    # --- agents that come and go
    Situation("an agent is attached to a program that leaks: growth stays told until the leak is",
        Node([told_when(LEAK, lambda m: m >= 80, changing_at(80, None, 1))]),
        f"GpuMemoryGrowing-w 40..75 to 100..120, {LEAKS} 100..118"),
    Situation("the agent of a program that leaks ends: it stays told as growth",
        Node([told_when(LEAK, lambda m: m < 80, until(80, 1))]),
        f"{LEAKS} 30..50 to 140..200, GpuMemoryGrowing-w 80..139", 200),
    Situation("an agent answers six of nine minutes while its program leaks: told, without a pause",
        Node([told_when(LEAK, lambda m: m % 9 >= 3, lambda m: float(m % 9 >= 3))]), LEAKS + " 20..110"),
    Situation("the agent of a program whose need goes up and down ends: nothing is told of growth",
        Node([told_when(torch(sawtooth), lambda m: m < 60, until(60, 1))])),
    # --- caches, pools and pieces of frameworks
    Situation("much in CuPy's cache: listed",
        Node([replace(jax(30.5, 2), framework="cupy", policy="caching")]), "GpuFrameworkCacheHigh-i", 45),
    Situation("a pool taken in advance: nothing", Node([replace(jax(70.5, 2), policy="fraction")]),
        minutes=90),
    Situation("a pool that cannot be emptied: nothing", Node([replace(jax(70.5, 2), policy="growth")]),
        minutes=90),
    Situation("a pool taken in advance beside torch: nothing", Node([replace(torch(5), gib=75)],
        extra={on_gpu(f"framework_{name}_bytes", pid=7, framework="jax"): gib * GIB for name,
        gib in {"in_use": 2, "pool": 70}.items()}), minutes=90),
    Situation("split blocks within a step: nothing",
        Node([torch(10, 20, split=lambda m: 6 if int(m) % 2 else 1)]), minutes=60),
    # --- allocations that failed
    Situation("an old error, and scrapes that are lost: nothing", Node([torch(ooms=1)], missing=loses),
        minutes=60),
    Situation("an old error, and an exporter that is away for 3 hours: nothing of it",
        Node([torch(ooms=1)], missing=away(20, 200)), "VramLedgerExporterDown-w", 220),
    Situation("an old error, and an agent that is silent for 4 minutes: nothing",
        Node([torch(ooms=gone(20, 24))]), minutes=45),
    Situation("a program set its counter back while the exporter restarted: nothing",
        Node([torch(ooms=changing_at(20, 5, 1))], missing=away(19.7, 20.1)), minutes=45),
    Situation("retries before the exporter was away: nothing of them",
        Node([torch(retries=40)], missing=away(20, 40)), "VramLedgerExporterDown-w", 70),
    Situation("a counter begins at 0 again: nothing", Node([torch(ooms=changing_at(20, 3, 0))]), minutes=45),
    Situation("out of memory again: told", Node([torch(ooms=changing_at(20, 4, 5))]), "GpuOutOfMemory-w", 45),
    Situation("out of memory while the exporter is away: told", Node([torch(ooms=changing_at(22, 4, 5))],
        missing=away(20, 24)), "GpuOutOfMemory-w", 45),
    Situation("out of memory at first sight: told", Node([torch(ooms=changing_at(20, None, 1))]),
        "GpuOutOfMemory-w", 45),
    Situation("out of memory in a program's first minute: told",
        Node([replace(torch(ooms=changing_at(20, None, 1)), start=19)]), "GpuOutOfMemory-w", 45),
    Situation("a program died of it between two scrapes: its owner's counters tell",
        Node(extra={series("owner_ooms_total", **POD): changing_at(20, None, 1),
        series("owner_last_oom_timestamp_seconds", **POD): changing_at(20, None, 1195)}), "GpuOutOfMemory-w",
        60),
    Situation("out of memory, and its owner counts it too: told once",
        Node([torch(ooms=changing_at(20, 0, 1), owner="bob")],
        extra={BOBS_LAST_OOM: changing_at(20, None, 1199)}), "GpuOutOfMemory-w", 45),
    Situation("out of memory of torch, and the driver's side reports it too: told once",
        Node([torch(ooms=changing_at(20, 0, 1), pid=9)],
        extra={LAST_OOM.replace("jax", "torch"): changing_at(20, None, 1190)}), "GpuOutOfMemory-w", 45),
]  # fmt: skip
