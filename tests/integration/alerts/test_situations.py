"""What is told of what happens to GPUs, programs, exporters and Prometheus: once, in time, and no more."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest

from tests.integration.alerts.test_false_pages import torch
from tests.support.alerts.cases import DEAD, DEVICE, ORPHAN, TRAINER
from tests.support.alerts.exporter_cases import ECC, RESERVED, XID
from tests.support.alerts.holder_cases import IDLE, NOTEBOOK, QUIET, grows, pieces, sawtooth, with_agent
from tests.support.alerts.nodes import STEP, Holder, Node, Values, changing_at, uuid, value_at
from tests.support.alerts.promtool import alerts_over_time
from tests.support.faults.evaluation import Manager
from tests.support.host.model import GIB
from tests.support.requirements import VERSIONS

pytestmark = pytest.mark.timeout(900)  # promtool takes its time where others work too

LAST = 120
"""Minutes that each situation lasts."""

ROUND = 60

Relabel = Callable[[float, Mapping[str, str]], Mapping[str, str]]


@dataclass(frozen=True)
class Told:
    """An alert: between which minutes it begins, and ends; by default it lasts to the end."""

    begins: tuple[float, float]
    ends: tuple[float, float] = (LAST, LAST)
    sets: int = 1


@dataclass(frozen=True)
class Situation:
    """What there is, in words what is wanted, and all that is told."""

    wanted: str
    node: Node
    told: Mapping[str, Told] = field(default_factory=dict)
    beside: Node | None = None


def with_labels(**labels: str) -> Relabel:
    """Return labels with some more, or others."""
    return lambda _, given: {**given, **labels}


def from_minute(begin: float, change: Relabel) -> Relabel:
    """Return the change of labels, from a minute on."""
    return lambda minute, given: change(minute, given) if minute >= begin else given


def on_devices(**uuids: str) -> Relabel:
    """Return labels in which devices have other uuids, by the index."""
    return lambda _, given: {**given, "uuid": uuids[f"gpu{given['gpu']}"]} if "uuid" in given else given


def mig(_: float, given: Mapping[str, str]) -> Mapping[str, str]:
    """Return labels in which each GPU is a MIG instance of the first one."""
    return {**given, "gpu": "0", "uuid": f"MIG-{given['gpu']}"} if "gpu" in given else given


def swapped(minute: float, given: Mapping[str, str]) -> Mapping[str, str]:
    """Return labels in which two GPUs have each other's index after a reboot."""
    return {**given, "gpu": str(1 - int(given["gpu"]))} if "gpu" in given and minute >= 60 else given


def until(minute: float, values: Values) -> Values:
    """Return values that end at a minute."""
    return lambda now: value_at(values, now) if now < minute else None


def away(begin: float, end: float) -> Callable[[float], bool]:
    """Return when nothing answers."""
    return lambda minute: begin <= minute < end


def filled(pace: float, full: float, *, agent: str = "") -> Holder:
    """Return a program that has rested, and fills its GPU of 80 GiB by a minute."""

    def held(minute: float) -> float:
        return min(79.4, max(20.0, 80 - pace * (full - minute)))

    if not agent:
        return Holder(7, held)
    small = {"torch_allocated_bytes": 9.0, "torch_reserved_bytes": 9.0}
    own = small if agent == "native" else dict.fromkeys(small, lambda m: held(m) - 0.4)
    return Holder(7, held, agent={**own, "torch_alloc_retries_total": 0, "torch_ooms_total": 0})


def fills(pace: float, agent: str, every: int = STEP) -> Situation:
    """Return a GPU that is full at minute 60."""
    by = {"": "nobody but the driver", "framework": "its framework", "native": "its agent, outside the pool"}
    leak = {"GpuMemoryLeakSuspected-w": Told((40, 62), (100, LAST))} if agent else {}
    return Situation(
        f"{pace} GiB a minute told by {by[agent]}, a scrape each {every} s: the page comes before it is full",
        Node([filled(pace, 60, agent=agent)], total=80, every=every),
        {"GpuMemoryAboutToFill-p": Told((50, 59), (60, 75)), **leak},
    )


def beside(**labels: str) -> Relabel:
    """Return labels of a second source of the same node."""
    return lambda _, given: {**given, **labels, "instance": given["instance"].removesuffix("b")}


def at_times(*spans: tuple[float, float], inside: float | None = None, outside: float | None = 1) -> Values:
    """Return one value within spans of minutes, and another one outside of them."""
    return lambda now: inside if any(a <= now < b for a, b in spans) else outside


OFTEN = [(m, m + 0.25) for m in range(3, LAST, 7)]
"""A scrape of each seven minutes."""

HOARDED = {"GpuMemoryHoarded-w": Told((4, 10))}
LEAK = with_agent(grows(0.25))
LEAKS = {"GpuMemoryLeakSuspected-w": Told((20, 60))}
GROWS = {"GpuMemoryGrowing-w": Told((40, 75))}
AGENTLESS = Holder(7, grows(0.25))
INSTANCE = 'NODE,gpu="0",uuid="MIG-a"'
BYTES = "vramledger_process_memory_bytes"
SINCE = "vramledger_process_state_since_timestamp_seconds"


def told_when(holder: Holder, told: Callable[[float], bool], up: Values) -> Holder:
    """Return a program whose agent tells its figures at some minutes only."""

    def at(values: Values) -> Values:
        return lambda minute: value_at(values, minute) if told(minute) else None

    return replace(holder, agent={name: at(values) for name, values in holder.agent.items()}, agent_up=up)


TWO = Node([replace(IDLE, gpu=1), replace(TRAINER, gpu=0)], gpus=2)
GONE = f'vramledger_device_up{{NODE,gpu="1",uuid="{uuid(1)}"}}'

SITUATIONS = [
    # --- memory that fills within minutes, at several paces, whoever tells the figures
    *[fills(pace, agent) for pace in (2.5, 3, 4, 5, 6) for agent in ("", "framework", "native")],
    fills(3, "framework", 30),
    fills(3, "framework", 60),
    Situation(
        "4 GiB a minute with an agent, by a rank on each of two GPUs: one page for each GPU",
        Node([replace(filled(4, 60, agent="framework"), gpu=gpu, pid=7 + gpu) for gpu in (0, 1)], total=80,
             gpus=2),
        {"GpuMemoryAboutToFill-p": Told((50, 59), (60, 75), 2),
         "GpuMemoryLeakSuspected-w": Told((40, 62), (100, LAST), 2)},
    ),
    Situation(
        "a pool with an agent grows by 4 GiB a minute to the brim, and what is in use does "
        "not: nobody is woken",
        Node([replace(filled(4, 60, agent="framework"), agent={
            **filled(4, 60, agent="framework").agent, "torch_allocated_bytes": 9})], total=80),
            {"GpuFrameworkCacheHigh-i": Told((70, 95))},
    ),
    Situation(
        "an idle program beside one that fills the GPU by 4 GiB a minute: the page names the one that grows",
        Node([filled(4, 60, agent="framework"), Holder(8, 0.5, "idle", since=-60, sm=None)], total=80),
        {"GpuMemoryAboutToFill-p": Told((50, 59), (60, 75)),
         "GpuMemoryLeakSuspected-w": Told((40, 62), (100, LAST))},
    ),
    Situation(
        "a program with an agent fills 60 of 80 GiB in 10 minutes and stops: nobody is woken",
        Node([torch(7, lambda m: min(60, 10 + 5 * max(0, m - 30)))], total=80), LEAKS,
    ),
    # --- MIG, MPS, shared GPUs
    Situation(
        "of two MIG instances of a GPU one is idle, the other works: the idle one is told",
        replace(TWO, relabel=mig), HOARDED,
    ),
    Situation(
        "MIG instances are made anew, with other uuids, while nothing runs: no GPU is lost",
        Node(gpus=2, relabel=lambda m, given: {
            **given, "gpu": "0", "uuid": f"MIG-{m >= 60}-{given['gpu']}",
        } if "gpu" in given else given),
    ),
    Situation(
        "a GPU is divided by MIG at minute 60: the GPU without a ledger is not lost, and its "
        "instances raise nothing",
        Node(extra={
            f'vramledger_device_memory_bytes{DEVICE[:-1]},state="free"}}': until(60, 70 * GIB),
            f"vramledger_device_memory_total_bytes{DEVICE}": until(60, 100 * GIB),
            'vramledger_device_up{NODE,gpu="0",uuid="MIG-a"}': changing_at(60, None, 1),
            f"vramledger_device_memory_total_bytes{{{INSTANCE}}}": changing_at(60, None, 40 * GIB),
            f'vramledger_device_memory_bytes{{{INSTANCE},state="free"}}': changing_at(60, None, 40 * GIB),
        }),
    ),
    Situation(
        "the whole GPU of MIG instances is lost: it is paged once, not once an instance",
        Node(extra={
            f"vramledger_device_up{DEVICE}": changing_at(30, 1, 0),
            'vramledger_device_up{NODE,gpu="0",uuid="MIG-a"}': changing_at(30, 1, None),
            'vramledger_device_up{NODE,gpu="0",uuid="MIG-b"}': changing_at(30, 1, None),
        }),
        {"GpuDeviceLost-p": Told((31, 34))},
    ),
    Situation(
        "an MPS server holds a context, its clients work: nothing",
        Node([Holder(5, 0.4, "idle", since=-600, sm=None, user="root", owner_type="unit", owner="mps"),
              *[Holder(10 + n, 12, owner=f"u{n}", user=f"u{n}") for n in range(5)]]),
    ),
    Situation(
        "six users with an idle program of 5 GiB each share a GPU, and nobody lacks memory: nothing",
        Node([replace(IDLE, pid=10 + n, gib=5, owner=f"u{n}", user=f"u{n}") for n in range(6)]),
    ),
    Situation(
        "one user's six idle programs of 5 GiB share a GPU with a training: told once, for all six",
        Node([*pieces(6, 5), TRAINER]), {"GpuMemoryHoardedInPieces-w": Told((4, 10))},
    ),
    Situation(
        "one program idles on all of eight GPUs: each holding is told, to one owner",
        Node([replace(IDLE, gpu=gpu) for gpu in range(8)],
             gpus=8), {"GpuMemoryHoarded-w": Told((4, 10), sets=8)},
    ),
    # --- clocks
    Situation(
        "a node's clock drifts by a second a minute: it is said that it is wrong, and an idle "
        "program is told in time",
        Node([IDLE], extra={"vramledger_sample_timestamp_seconds{NODE}": lambda m: 61 * m}),
        HOARDED | {"VramLedgerClockSkew-i": Told((70, 85))},
    ),
    Situation(
        "a sample is 40 seconds older than its scrape, as where sampling is slow: nothing",
        Node([TRAINER], extra={"vramledger_sample_timestamp_seconds{NODE}": lambda m: 60 * m - 40}),
    ),
    Situation(
        "the clock goes back by an hour and, 20 minutes later, forward: what is told stays "
        "told, and the clock is not said",
        Node([IDLE],
             extra={"vramledger_sample_timestamp_seconds{NODE}": lambda m: 60 * m - 3600 * (40 <= m < 52)}),
        HOARDED,
    ),
    # --- restarts in the middle of a wait
    Situation(
        "an exporter restarts, a minute away, in the middle of the wait of a growth: told at "
        "most some minutes later",
        Node([AGENTLESS], missing=away(45, 46)), {"GpuMemoryGrowing-w": Told((40, 80))},
    ),
    Situation(
        "scrapes are lost each seven minutes while memory belongs to nobody: told in time",
        Node(unattributed=10, missing=lambda m: any(a <= m < b for a, b in OFTEN)),
        {"GpuMemoryUnattributed-w": Told((14, 22))},
    ),
    Situation(
        "an exporter restarts three times within the wait for a stuck program, and says the "
        "same time each time: told in time",
        Node([replace(ORPHAN, state="stuck")],
             missing=lambda m: m in {3, 6, 8}), {"GpuMemoryStuck-p": Told((10, 14))},
    ),
    Situation(
        "an exporter restarts and begins to count anew, in the middle of the wait for a "
        "stopped program: told in time",
        Node([replace(TRAINER, state="stopped", since=changing_at(20, 0, 20.5))], missing=away(20, 20.5)),
        {"GpuMemoryStopped-w": Told((30, 34))},
    ),
    # --- labels that change
    Situation(
        "two GPUs have each other's index after a reboot, an idle program on one: told "
        "throughout, for its uuid",
        replace(TWO, relabel=swapped), {"GpuMemoryHoarded-w": Told((4, 70), (70, LAST), 2)},
    ),
    Situation(
        "a target gets a label `rack` while a program idles: told without a pause, once",
        Node([IDLE], relabel=from_minute(60, with_labels(rack="r1"))), HOARDED,
    ),
    Situation(
        "a target gets and loses a label every ten minutes while a program leaks: told once",
        Node([LEAK], relabel=lambda m, given: {**given, "rack": "r1"} if m // 10 % 2 else given), LEAKS,
    ),
    # --- two replicas, federation
    Situation(
        "two Prometheus servers scrape a node and a third one has the series of both: an idle "
        "program is told once",
        Node([IDLE], relabel=beside(replica="a")), HOARDED, Node([IDLE], relabel=beside(replica="b")),
    ),
    Situation(
        "the same with a leak, and one of the two is away for ten minutes: told once, without a pause",
        Node([LEAK],
             relabel=beside(replica="a"), missing=away(50, 60)), LEAKS,
        Node([LEAK], relabel=beside(replica="b")),
    ),
    Situation(
        "the same with a lost GPU: paged once",
        Node([TRAINER],
             relabel=beside(replica="a"), extra={f"vramledger_device_up{DEVICE}": changing_at(30, 1, 0)}),
        {"GpuDeviceLost-p": Told((31, 34))},
        Node([TRAINER],
             relabel=beside(replica="b"), extra={f"vramledger_device_up{DEVICE}": changing_at(30, 1, 0)}),
    ),
    Situation(
        "one of two replicas cannot reach the exporter: the exporter is not down",
        Node([IDLE], relabel=beside(replica="a")), HOARDED,
        Node([IDLE], relabel=beside(replica="b"), missing=lambda m: m >= 20),
    ),
    Situation(
        "federated series have prometheus, env and region: dead memory is paged once, as everywhere",
        Node([DEAD],
             relabel=with_labels(prometheus="p1", env="prod", region="eu")),
        {"GpuMemoryDead-p": Told((5, 8))},
    ),
    Situation(
        "federated without `up`: an idle program and a leak are told all the same",
        Node([replace(IDLE, pid=8), LEAK], extra={"up{NODE}": None}), HOARDED | LEAKS,
    ),
    # --- what is missing, NaN
    Situation(
        "nobody says when the programs began: a leak is told all the same",
        Node([LEAK], extra={'vramledger_process_start_time_seconds{NODE,pid="7"}': None}), LEAKS,
    ),
    Situation(
        "a vGPU whose memory and holders cannot be asked: nothing",
        Node(extra={
            f"vramledger_device_memory_total_bytes{DEVICE}": None,
            f'vramledger_device_memory_bytes{DEVICE[:-1]},state="free"}}': None,
        }),
    ),
    Situation(
        "free memory is not a number for 20 minutes: nothing",
        Node([TRAINER], extra={
            f'vramledger_device_memory_bytes{DEVICE[:-1]},state="free"}}': at_times(
                (40, 60), inside=math.nan, outside=70 * GIB
            )
        }),
    ),
    Situation(
        "the time since when is not a number for one scrape: an idle program is told without a pause",
        Node([IDLE], extra={
            f'{SINCE}{DEVICE[:-1]},pid="7",state="idle",grade="proven"}}': at_times(
                (40, 40.25), inside=math.nan, outside=-3660
            )
        }), HOARDED,
    ),
    Situation(
        "the bytes of a leaking program are missing in each seventh minute: told without a pause",
        Node([LEAK], extra={f'{BYTES}{DEVICE[:-1]},pid="7"}}': at_times(*OFTEN, outside=30 * GIB)}), LEAKS,
    ),
    # --- counters that begin again
    Situation(
        "an XID comes 6 minutes after the exporter began to count anew: it is told",
        Node([TRAINER], extra={XID.format(79): lambda m: 3 if m < 60 else None if m < 66 else 1}),
        {"GpuXidError-w": Told((66, 68), (80, 112))},
    ),
    Situation(
        "an XID comes again an hour after the exporter, which remembers nothing, restarted: it is told",
        Node([TRAINER],
             missing=away(40, 41), extra={XID.format(94): lambda m: 1 if m < 40 or m >= 100 else None}),
        {"GpuXidError-w": Told((100, 102))},
    ),
    Situation(
        "a count of XIDs is back unchanged after an update of 12 minutes: nothing but the update",
        Node([TRAINER], missing=away(40, 52), extra={XID.format(94): 2}),
        {"VramLedgerExporterDown-w": Told((44, 47), (52, 60))},
    ),
    Situation(
        "a count of XIDs is 3, 0 after a restart, and stays 0: nothing",
        Node([TRAINER], extra={XID.format(79): changing_at(60, 3, 0)}),
    ),
    Situation(
        "another GPU with 5 old ECC errors takes the place of one with none: nothing but what it says itself",
        Node(extra={ECC.format("uncorrected"): 0},
             missing=away(55, 59), relabel=from_minute(59, on_devices(gpu0="GPU-new"))),
    ),
    # --- GPUs replaced
    Situation(
        "a GPU is replaced, same index and another uuid, over an hour without power: no GPU is lost",
        Node([TRAINER], gpus=2, missing=away(30, 90), relabel=from_minute(
            90, on_devices(gpu0=uuid(0), gpu1="GPU-new"))),
        {"VramLedgerExporterDown-w": Told((34, 37), (90, 97))},
    ),
    Situation(
        "a GPU is replaced while it was lost: the page ends",
        Node(gpus=2, missing=away(60, 63), extra={
            GONE: lambda m: 1 if m < 20 else 0 if m < 60 else None,
            'vramledger_device_up{NODE,gpu="1",uuid="GPU-new"}': changing_at(63, None, 1),
        }), {"GpuDeviceLost-p": Told((21, 24), (60, 80))},
    ),
    Situation(
        "two of eight GPUs do not come back from a reboot: each is paged once",
        Node(gpus=8, missing=away(30, 34), extra={
            f'vramledger_device_up{{NODE,gpu="{n}",uuid="{uuid(n)}"}}': changing_at(30, 1, None)
            for n in (3, 4)
        }), {"GpuDeviceLost-p": Told((35, 39), sets=2)},
    ),
    # --- owners
    Situation(
        "a job is known a minute after its program began, which never worked: told once, for the job",
        Node([replace(IDLE, since=0, start=0)],
             relabel=lambda m, given: {**given, "owner_type": "slurm", "owner": "17"}
             if given.get("owner") and m >= 1 else given), {"GpuMemoryHoarded-w": Told((64, 68))},
    ),
    Situation(
        "a program is of nobody known for 10 minutes, then of its user: told once, with the user",
        Node([IDLE], relabel=lambda m, given: {**given, "owner": "", "owner_type": "", "user": ""}
             if given.get("owner") and 30 <= m < 40 else given), HOARDED,
    ),
    Situation(
        "a pid idles, ends, and is another user's who idles too: each is told, the second an hour later",
        Node([replace(IDLE, gib=lambda m: 30 if m < 40 or m >= 42 else None, since=changing_at(41, -61, 50),
                      start=changing_at(41, -600, 41))],
             relabel=lambda m, given: {
                 **given, "owner": "bob", "user": "bob"} if given.get("owner") and m >= 41 else given),
        {"GpuMemoryHoarded-w": Told((4, 118), (40, LAST), 2)},
    ),
    # --- agents that come and go
    Situation(
        "an agent is attached to a program that leaks: the growth that was told stays told until the leak is",
        Node([told_when(LEAK, lambda m: m >= 80, changing_at(80, None, 1))]),
        GROWS | {"GpuMemoryLeakSuspected-w": Told((100, 118))},
    ),
    Situation(
        "an agent answers six of nine minutes while its program leaks: told, without a pause",
        Node([told_when(LEAK, lambda m: m % 9 >= 3, lambda m: float(m % 9 >= 3))]),
        {"GpuMemoryLeakSuspected-w": Told((20, 110))},
    ),
    Situation(
        "the agent of a program whose need goes up and down ends: nothing is told of growth",
        Node([told_when(with_agent(sawtooth), lambda m: m < 60, until(60, 1))]),
    ),
    # --- scrape intervals
    *[Situation(
        f"a scrape each {every} s: an idle program, a leak and dead memory are told in time",
        Node([replace(IDLE, pid=8), LEAK, replace(DEAD, pid=9)], every=every),
        {"GpuMemoryHoarded-w": Told((4, 12)), **LEAKS, "GpuMemoryDead-p": Told((5, 9))},
    ) for every in (30, 60)],
    Situation(
        "a scrape each 60 s, and one of ten is lost: the same",
        Node([replace(IDLE, pid=8), LEAK], every=60, missing=lambda m: m % 10 == 3), HOARDED | LEAKS,
    ),
    Situation(
        "a scrape each 120 s of a healthy node: no page",
        Node([TRAINER, with_agent(sawtooth)], every=120),
    ),
    Situation(
        "a scrape each 120 s, and a GPU that is lost: paged within 10 minutes",
        Node([TRAINER], every=120, extra={f"vramledger_device_up{DEVICE}": changing_at(30, 1, 0)}),
        {"GpuDeviceLost-p": Told((31, 40))},
    ),
    # --- updates
    Situation(
        "the exporter is updated, two minutes away and of another version: what is told stays, once",
        Node([IDLE, replace(LEAK, pid=8)], missing=away(60, 62), extra={
            'vramledger_build_info{NODE,version="0.1.0"}': until(60, 1),
            'vramledger_build_info{NODE,version="0.2.0"}': changing_at(62, None, 1),
        }), HOARDED | LEAKS,
    ),
    Situation(
        "an update is rolled back after ten minutes, and again: what is told stays, once",
        Node([IDLE, replace(LEAK, pid=8)],
             missing=lambda m: any(a <= m < a + 2 for a in (50, 60, 70, 80))), HOARDED | LEAKS,
    ),
    # --- series that end for one scrape
    Situation(
        "all series of a node with a lost GPU end for one scrape: the page stays",
        Node([TRAINER],
             missing=lambda m: m == 60, extra={f"vramledger_device_up{DEVICE}": changing_at(30, 1, 0)}),
        {"GpuDeviceLost-p": Told((31, 34))},
    ),
    Situation(
        "the process series of a leaking and an idle program end for one scrape of each 11 "
        "minutes: told without a pause",
        Node([LEAK, replace(IDLE, pid=8)], extra={
            f'{BYTES}{DEVICE[:-1]},pid="{pid}"}}': (lambda m: None if m % 11 == 0 else 30 * GIB)
            for pid in (7, 8)
        }), HOARDED | LEAKS,
    ),
    Situation(
        "the owners end for one scrape of each five minutes: one alert, with the owner",
        Node([IDLE], relabel=lambda m, given: {**given, "owner": "", "owner_type": ""}
             if given.get("owner") and m % 5 == 0 else given), HOARDED,
    ),
    # --- the same name elsewhere, one thing that becomes another
    Situation(
        "nodes of one name in two clusters have the same pid: the idle one is told, the "
        "leaking one too, each in its cluster",
        Node([IDLE],
             relabel=beside(cluster="east")), HOARDED | LEAKS, Node([LEAK], relabel=beside(cluster="west")),
    ),
    Situation(
        "a program idles on one GPU and moves to another: told for the first until it left, "
        "for the second an hour later",
        Node([replace(IDLE, gib=until(30, 30)),
              replace(IDLE, gpu=1, gib=changing_at(30, None, 30), since=40)], gpus=2),
        {"GpuMemoryHoarded-w": Told((4, 118), (30, LAST), 2)},
    ),
    Situation(
        "a zombie becomes dead memory: the one ends and the other begins",
        Node([replace(ORPHAN, state=lambda m: "zombie" if m < 40 else "dead", since=changing_at(40, 0, 40))]),
        {"GpuMemoryZombie-w": Told((5, 8), (40, 53)), "GpuMemoryDead-p": Told((45, 49))},
    ),
    Situation(
        "an idle program works for a minute each half hour: nothing",
        Node([Holder(7, 30, lambda m: "active" if m % 30 < 1 else "idle",
                     since=lambda m: m // 30 * 30 + (m % 30 >= 1),
                     last_active=lambda m: m // 30 * 30 + min(1, m % 30))]),
    ),
    Situation(
        "an idle notebook of 5 GiB beside the same user's idle training of 30: each is told once",
        Node([IDLE, replace(NOTEBOOK, pid=8)]), HOARDED | {"GpuNotebookIdle-w": Told((4, 10))},
    ),
    Situation(
        "a GPU stands still for two hours with a small holder, far from 6 hours: nothing",
        Node([Holder(7, 10)], extra=QUIET),
    ),
    Situation(
        "a reservation is unused for 100 minutes, then used: nothing",
        Node(extra=RESERVED | {
            f'vramledger_device_reservations{DEVICE[:-1]},use="{use}"}}': changing_at(100, begins, 1 - begins)
            for use, begins in {"held": 0, "unheld": 1}.items()
        }),
    ),
]  # fmt: skip


NAMES = {f"n{number}": each for number, each in enumerate(SITUATIONS)}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Mapping[str, Mapping[str, list[float]]]]:
    """Return when each alert fires in each situation, by its labels; in one evaluation."""
    nodes = {name: (each.node, float(LAST)) for name, each in NAMES.items()}
    nodes |= {f"{name}b": (each.beside, float(LAST)) for name, each in NAMES.items() if each.beside}
    found: dict[str, dict[str, dict[str, list[float]]]] = {name: {} for name in NAMES}
    folder = tmp_path_factory.mktemp("situations")
    manager = Manager(ROUND, everything=True)
    for key, seen in alerts_over_time(nodes, range(LAST + 1), folder, VERSIONS[0], manager).items():
        labels = dict(key)
        name = labels.get("instance", "").removesuffix("b")
        if labels["alertstate"] == "firing" and name in found:
            alert = f"{labels['alertname']}-{labels['severity'][0]}"
            own = ",".join(f"{label}={text}" for label, text in sorted(labels.items()))
            found[name].setdefault(alert, {})[own] = [at / 60 for at in seen]
    return found


@pytest.mark.parametrize("name", NAMES, ids=[each.wanted for each in SITUATIONS])
def test_what_is_wanted_is_told(
    name: str, told: Mapping[str, Mapping[str, Mapping[str, list[float]]]]
) -> None:
    """Every alert that is wanted comes in its time, once and without a pause, and no other comes."""
    quiet = {"GpuMemoryNearlyFull-i", "GpuMemoryFilling-w"}  # they are about the device, and true here
    mine = {alert: of for alert, of in told[name].items() if alert not in quiet}
    wanted = NAMES[name].told
    spans = {alert: {own: (seen[0], seen[-1]) for own, seen in of.items()} for alert, of in mine.items()}

    assert set(mine) == set(wanted), spans
    for alert, want in wanted.items():
        assert len(mine[alert]) == want.sets, spans[alert]
        for own, seen in mine[alert].items():
            assert want.begins[0] <= seen[0] <= want.begins[1], (own, spans[alert][own])
            assert want.ends[0] <= seen[-1] <= want.ends[1], (own, spans[alert][own])
            assert all(b - a <= ROUND / 60 for a, b in pairwise(seen)), (own, seen)
