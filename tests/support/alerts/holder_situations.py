"""Situations of what programs hold: idle, orphaned, dead, and in jobs of several ranks."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from tests.support.alerts.nodes import Holder, Node, Values, changing_at
from tests.support.alerts.parts import (
    DEAD,
    IDLE,
    LEAK,
    NOTEBOOK,
    ORPHAN,
    PREALLOCATED,
    SHORT,
    STAMP,
    TRAINER,
    away,
    forgotten,
    from_minute,
    grows,
    on_gpu,
    owned_by,
    pieces,
    series,
    source,
    torch,
    until,
    with_labels,
)
from tests.support.alerts.situation import Situation
from tests.support.host.model import GIB
from vramledger.model.reading import Rank
from vramledger.model.snapshot import Grade

UNCHARGED = replace(IDLE, gib=0.5)
SERVICE = replace(IDLE, owner_type="unit", owner="vllm.service", framework="vllm")
STRAY = [Holder(7, 0.5, "idle", gpu=0, sm=None), Holder(7, 40, gpu=1)]
HOARDER = replace(IDLE, since=-12)
WHILE_SHORT = replace(IDLE, since=-31)
WHILE_SHORT_PAGE = "GpuMemoryHoardedWhileShort-p"
ON_ONE_OF_TWO = Node([replace(IDLE, gpu=1), replace(TRAINER, gpu=0)], gpus=2)
QUIET: dict[str, Values] = {on_gpu("device_utilization_ratio"): 0.004}
WELL_USED: dict[str, Values] = {
    on_gpu("device_utilization_ratio"): lambda m: 0.5 if 100 <= m % 120 < 101 else 0.001
}
HOARDED, IN_PIECES = "GpuMemoryHoarded-w 4..10", "GpuMemoryHoardedInPieces-w 4..10"


def bytes_of(pid: int) -> str:
    """Return the series of what a pid holds on the first device."""
    return on_gpu("process_memory_bytes", pid=pid)


def mig(_: float, given: Mapping[str, str]) -> Mapping[str, str]:
    """Return labels in which each GPU is a MIG instance of the first one."""
    return {**given, "gpu": "0", "uuid": f"MIG-{given['gpu']}"} if "gpu" in given else given


def swapped(_: float, given: Mapping[str, str]) -> Mapping[str, str]:
    """Return labels in which two GPUs have each other's index."""
    return {**given, "gpu": str(1 - int(given["gpu"]))} if "gpu" in given else given


HOLDERS = [
    Situation("a training: nothing", Node([TRAINER]), minutes=70),
    # --- held on purpose, or only perhaps
    Situation("orphaned only by inference: nothing", Node([replace(ORPHAN, grade=Grade.INFERRED, gib=70)]),
        minutes=60),
    Situation("much of an orphan that works: told, and nobody is woken", Node([replace(ORPHAN, gib=50)],
        extra={on_gpu("process_orphan_working", pid=7): 1}), "GpuMemoryOrphaned-w", 40),
    Situation("managed memory is hoarded", Node([replace(UNCHARGED, managed=30)]), HOARDED, 15),
    Situation("little managed memory: nothing", Node([replace(UNCHARGED, managed=9)]), minutes=60),
    Situation("memory that an ended process left is hoarded", Node([replace(UNCHARGED, left=30)]), HOARDED,
        15),
    Situation("memory of one of two, nobody knows of which: nothing",
        Node([replace(UNCHARGED, most=30), replace(UNCHARGED, pid=8, most=30)]), minutes=60),
    Situation("hoarded, by what is seen", Node([replace(IDLE, grade=Grade.SEEN)]), HOARDED, 15),
    Situation("idle only by inference: nothing", Node([replace(IDLE, grade=Grade.INFERRED, gib=70)]),
        minutes=60),
    Situation("a server that holds on purpose: nothing", Node([replace(SERVICE, gib=90)]), minutes=60),
    Situation("a server that nobody asked for a day: told", Node([replace(SERVICE, since=-1441)]), HOARDED,
        15),
    *[
        Situation(f"hoarded, and it says that its {label} is {name}, which excuses nothing",
                  Node([replace(IDLE, **{label: name})]), HOARDED + more, 15)  # type: ignore[arg-type]
        for label, name, more in (
            ("framework", "vllm", ""), ("command", "vllm", ""), ("policy", "preallocate", ""),
            ("notebook", "a.ipynb", ", GpuNotebookIdle-w"),
        )
    ],
    # --- idle while others are short
    Situation("a notebook idles while another is short: paged",
        Node([replace(WHILE_SHORT, notebook="a.ipynb"), SHORT], total=60), WHILE_SHORT_PAGE, 9),
    *[
        Situation(f"an idle program that becomes {state} while another is short: paged",
                  Node([replace(WHILE_SHORT, state=state), SHORT], total=60),
                  f"{WHILE_SHORT_PAGE}, {own}", 9)
        for state, own in (("stopped", "GpuMemoryStopped-w"), ("zombie", "GpuMemoryZombie-w"))
    ],
    Situation("idle beside a program that says that it lacks memory, with more free than is held: nothing",
        Node([WHILE_SHORT, SHORT]), minutes=9),
    Situation("what an ended process left idles while another is short: paged",
        Node([replace(WHILE_SHORT, gib=0.5, left=30), SHORT], total=60), WHILE_SHORT_PAGE, 9),
    Situation("managed memory, which gives way, while another is short: nothing",
        Node([replace(WHILE_SHORT, gib=0.5, managed=30), SHORT], total=60), minutes=9),
    Situation("managed and charged memory while another is short: paged",
        Node([replace(WHILE_SHORT, gib=12, managed=30), SHORT], total=60), WHILE_SHORT_PAGE, 9),
    Situation("a hoarder, and one retry on another GPU: nothing",
        Node([HOARDER, torch(retries=changing_at(20, 0, 1), pid=8, gpu=1)], gpus=2), minutes=45),
    Situation("a hoarder, and one retry on its GPU: nothing",
        Node([HOARDER, torch(retries=changing_at(20, 0, 1), pid=8)], total=60), minutes=45),
    Situation("a hoarder, and an error on another GPU: only the error is told",
        Node([HOARDER, torch(ooms=changing_at(20, 0, 1), pid=8, gpu=1)], gpus=2), "GpuOutOfMemory-w", 45),
    Situation("short beside a hoarder whose GPU is reserved for it: nobody is woken",
        Node([HOARDER, torch(retries=grows(4, 0), pid=8, owner="bob")], total=60,
        extra={on_gpu("device_reservation_info", owner_type="user", owner="ann"): 1}),
        "GpuAllocatorRetries-w", 30),
    Situation("short beside a hoarder of the same GPU: paged",
        Node([HOARDER, torch(retries=grows(4, 0), pid=8, owner="bob")], total=60),
        "GpuAllocatorRetries-w, " + WHILE_SHORT_PAGE, 45),
    # --- in pieces
    Situation("contexts beside a training: told", Node([*pieces(24, 0.5), TRAINER]), IN_PIECES, 15),
    Situation("many that work: nothing", Node(pieces(24, 3.5, state="active")), minutes=90),
    Situation("many that idle only by inference: nothing", Node(pieces(24, 3.5, grade=Grade.INFERRED)),
        minutes=90),
    Situation("pieces in many jobs of a user: told",
        Node([replace(each, owner_type="slurm", owner=str(each.pid)) for each in pieces(12, 6)]), IN_PIECES,
        15),
    Situation("pieces of a service for a day: told",
        Node(pieces(12, 6, owner_type="unit", owner="ray.service", user="ray", since=-1441)), IN_PIECES, 15),
    Situation("containers of root: nothing",
        Node([replace(each, owner_type="container", owner=f"c{each.pid}", user="root") for each in pieces(12,
        6)]), minutes=30),
    Situation("pieces of many users, and nobody lacks memory: nothing", Node(pieces(24, 3, users=True)),
        minutes=30),
    *[
        Situation(f"{name} of many users while another is short: told",
                  Node([*pieces(24, 3, users=True, since=-31, notebook=notebook), SHORT]),
                  "GpuMemoryHoardedInPieces-w", 9)
        for name, notebook in (("pieces", ""), ("notebooks", "a.ipynb"))
    ],
    Situation("managed pieces of many users while another is short: nothing",
        Node([*pieces(24, 0.1, users=True, since=-31, managed=3), SHORT]), minutes=9),
    Situation("idle contexts of notebooks: told", Node(pieces(24, 0.5, notebook="a.ipynb")), IN_PIECES, 15),
    Situation("a hoarder and a piece: only the hoarder is told", Node([IDLE, *pieces(1, 6)]), HOARDED, 15),
    Situation("one user's six idle programs of 5 GiB beside a training: told once, for all six",
        Node([*pieces(6, 5), TRAINER]), IN_PIECES, 30),
    # --- notebooks, memory taken in advance, stray contexts
    Situation("a notebook idle only by inference: nothing", Node([replace(NOTEBOOK, grade=Grade.INFERRED)]),
        minutes=60),
    Situation("a notebook in use: nothing", Node([replace(NOTEBOOK, state="active")]), minutes=90),
    Situation("an idle notebook of 5 GiB beside the same user's idle training of 30: each is told once",
        Node([IDLE, replace(NOTEBOOK, pid=8)]), HOARDED + ", GpuNotebookIdle-w 4..10", 30),
    Situation("taken in advance, and its owner's own helper beside it: nothing",
        Node([PREALLOCATED, Holder(9, 5, command="helper")]), minutes=40),
    Situation("managed memory taken in advance beside another: told",
        Node([replace(PREALLOCATED, gib=0.5, managed=50), replace(TRAINER, gib=2)]),
        "GpuMemoryPreallocatedShared-w", 20),
    Situation("a stray context beside managed memory: listed",
        Node([STRAY[0], Holder(7, 0.5, gpu=1, managed=40)], gpus=2), "GpuStrayContext-i", 20),
    Situation("stray only by inference: nothing",
        Node([replace(each, grade=Grade.INFERRED) for each in STRAY], gpus=2), minutes=60),
    Situation("a program on two GPUs that uses both: nothing",
        Node([replace(STRAY[0], state="active"), STRAY[1]], gpus=2), minutes=60),
    # --- held, and hardly used
    Situation("little is held and hardly used: nothing", Node([replace(TRAINER, gib=24)], extra=QUIET),
        minutes=375),
    Situation("held in pieces and hardly used: told",
        Node([replace(TRAINER, gib=4, pid=pid) for pid in range(10, 18)], extra=QUIET),
        "GpuHeldHardlyUsed-w 366..375", 375),
    Situation("held, and used now and then: nothing", Node([TRAINER], extra=WELL_USED), minutes=380),
    Situation("held on purpose and hardly used: nothing", Node([replace(SERVICE, state="active", gib=90)],
        extra=QUIET), minutes=375),
    Situation("held and hardly used by what calls itself vllm: told",
        Node([replace(TRAINER, framework="vllm", gib=90)], extra=QUIET), "GpuHeldHardlyUsed-w 366..375", 375),
    Situation("held and hardly used over nightly updates: told", Node([TRAINER], missing=away(0, 6, 120),
        extra=QUIET), "GpuHeldHardlyUsed-w, VramLedgerExporterDown-w", 390),
    # --- shared GPUs, MIG, MPS
    Situation("of two MIG instances of a GPU one is idle, the other works: the idle one is told",
        replace(ON_ONE_OF_TWO, relabel=mig), HOARDED, 30),
    Situation("an MPS server holds a context, its clients work: nothing",
        Node([Holder(5, 0.4, "idle", since=-600, sm=None, user="root", owner_type="unit", owner="mps"),
        *[Holder(10 + n, 12, owner=f"u{n}", user=f"u{n}") for n in range(5)]]), minutes=90),
    Situation("one program idles on all of eight GPUs: each holding is told, to one owner",
        Node([replace(IDLE, gpu=gpu) for gpu in range(8)], gpus=8), HOARDED + " x8", 30),
    # --- clocks
    Situation("a clock drifts by a second a minute: it is told, and an idle program in time",
        Node([IDLE], extra={STAMP: lambda m: 61 * m}), HOARDED + ", VramLedgerClockSkew-i 70..85"),
    Situation("the clock goes back by an hour and, 12 minutes later, forward: what is told stays told",
        Node([IDLE], extra={STAMP: lambda m: 60 * m - 3600 * (40 <= m < 52)}), HOARDED),
    Situation("idle for an hour by a clock that is slow: told", Node([replace(IDLE, since=-62)],
        extra={STAMP: grows(60, -90)}), "GpuMemoryHoarded-w 4..6", 10),
    Situation("not yet idle for an hour by a clock that is slow: not told yet",
        Node([replace(IDLE, since=-60)], extra={STAMP: grows(60, -90)}), minutes=6),
    # --- restarts, lost scrapes and updates in the middle of a wait
    Situation("scrapes are lost within the wait for dead memory: paged in time",
        Node([DEAD], missing=away(2, 3.5)), "GpuMemoryDead-p 4..6", 15),
    Situation("an exporter restarts three times within the wait for a stuck program: paged in time",
        Node([replace(ORPHAN, state="stuck")], missing=lambda m: m in {3, 6, 8}), "GpuMemoryStuck-p 10..14",
        40),
    Situation("an exporter begins to count anew within the wait for a stopped program: told in time",
        Node([replace(TRAINER, state="stopped", since=changing_at(20, 0, 20.5))], missing=away(20, 20.5)),
        "GpuMemoryStopped-w 30..34", 60),
    Situation("a stopped program over an update each twenty minutes: told once",
        Node([replace(TRAINER, state="stopped", since=lambda m: m // 20 * 20)], missing=away(0, 5, 20)),
        "GpuMemoryStopped-w 30..46"),
    Situation("stopped and continued again and again: nothing",
        Node([replace(ORPHAN, state=lambda m: "stopped" if m % 20 < 18 else "active",
        since=lambda m: m // 20 * 20, last_active=lambda m: m - m % 20 if m % 20 < 18 else m)]), minutes=70),
    Situation("hoarded over a restart: told in time", Node([replace(IDLE, since=changing_at(3, -61, 2))]),
        HOARDED, 20),
    Situation("idle anew after work and a restart: nothing",
        Node([replace(IDLE, since=changing_at(3, -61, 2), last_active=changing_at(3, None, 2))]), minutes=30),
    Situation("the pid of another after a hoarder: nothing",
        Node([replace(IDLE, since=changing_at(3, -61, 2), start=changing_at(3, -600, 1))]), minutes=30),
    Situation("dead memory over an update, after which its owner is not known: one page, with the owner",
        Node([replace(DEAD, since=changing_at(15, 0, 15))], missing=away(10, 15),
        relabel=from_minute(15, forgotten)), "GpuMemoryDead-p 5..7"),
    Situation("the exporter is updated, two minutes away and of another version: what is told stays, once",
        Node([IDLE, replace(LEAK, pid=8)], missing=away(60, 62),
        extra={'vramledger_build_info{NODE,version="0.1.0"}': until(60, 1),
        'vramledger_build_info{NODE,version="0.2.0"}': changing_at(62, None, 1)}),
        HOARDED + ", GpuMemoryLeakSuspected-w 20..60"),
    Situation("an update is rolled back after ten minutes, and again: what is told stays, once",
        Node([IDLE, replace(LEAK, pid=8)], missing=lambda m: any(a <= m < a + 2 for a in (50, 60, 70, 80))),
        HOARDED + ", GpuMemoryLeakSuspected-w 20..60"),
    Situation("an exporter is away for 7 minutes: what was told stays, and old errors are not told",
        Node([torch(ooms=1), replace(IDLE, pid=8)], missing=away(20, 27)),
        HOARDED + ", VramLedgerExporterDown-w", 45),
    # --- labels that change, several sources
    Situation("two GPUs change their indices in a reboot, an idle program on one: told throughout",
        replace(ON_ONE_OF_TWO, relabel=from_minute(60, swapped)), "GpuMemoryHoarded-w x2"),
    Situation("a target gets a label `rack` while a program idles: told without a pause, once",
        Node([IDLE], relabel=from_minute(60, with_labels(rack="r1"))), HOARDED),
    Situation("a target gets and loses a label every ten minutes while a program leaks: told once",
        Node([LEAK], relabel=lambda m, given: {**given, "rack": "r1"} if m // 10 % 2 else given),
        "GpuMemoryLeakSuspected-w 20..60"),
    Situation("two Prometheus servers scrape a node and a third one has the series of both: told once",
        Node([IDLE], relabel=source(replica="a")), HOARDED, beside=Node([IDLE], relabel=source(replica="b"))),
    Situation("the same with a leak, and one of the two is away for ten minutes: told once, without a pause",
        Node([LEAK], relabel=source(replica="a"), missing=away(50, 60)), "GpuMemoryLeakSuspected-w 20..60",
        beside=Node([LEAK], relabel=source(replica="b"))),
    Situation("one of two replicas cannot reach the exporter: the exporter is not down",
        Node([IDLE], relabel=source(replica="a")), HOARDED, beside=Node([IDLE], relabel=source(replica="b"),
        missing=lambda m: m >= 20)),
    Situation("two clusters have a node of one name, and one pid idles here and leaks there: both told",
        Node([IDLE], relabel=source(cluster="east")), HOARDED + ", GpuMemoryLeakSuspected-w 20..60",
        beside=Node([LEAK], relabel=source(cluster="west"))),
    # --- what is missing, NaN, or ends for one scrape
    Situation("the time since when is not a number for one scrape: told without a pause",
        Node([IDLE], extra={on_gpu("process_state_since_timestamp_seconds", pid=7, state="idle",
        grade="proven"): lambda m: math.nan if 40 <= m < 40.25 else -3660}), HOARDED),
    Situation("a scrape of each 11 minutes has no process series, of a leak or idle: told without a pause",
        Node([LEAK, replace(IDLE, pid=8)],
        extra={bytes_of(pid): (lambda m: None if m % 11 == 0 else 30 * GIB) for pid in (7, 8)}),
        HOARDED + ", GpuMemoryLeakSuspected-w 20..60"),
    # --- owners
    Situation("a job is known a minute after its program began, which never worked: told once, for the job",
        Node([replace(IDLE, since=0, start=0)],
        relabel=from_minute(1, owned_by(owner_type="slurm", owner="17"))), "GpuMemoryHoarded-w 64..68", 90),
    Situation("a program is of nobody known for 10 minutes, then of its user: told once, with the user",
        Node([IDLE], relabel=from_minute(30, owned_by(owner="", owner_type="", user=""), 40)), HOARDED),
    Situation("a pid idles, ends, and is another user's who idles too: each is told after its hour",
        Node([replace(IDLE, gib=lambda m: 30 if m < 40 or m >= 42 else None, since=changing_at(41, -61, 50),
        start=changing_at(41, -600, 41))], relabel=from_minute(41, owned_by(owner="bob", user="bob"))),
        "GpuMemoryHoarded-w 4..118 to 40..120 x2"),
    Situation("the owners end for one scrape of each five minutes: one alert, with the owner",
        Node([IDLE], relabel=lambda m, given: {**given, "owner": "", "owner_type": ""} if given.get(
        "owner") and m % 5 == 0 else given), HOARDED),
    Situation("an owner is a pod for three minutes, and its user for the next three: told once",
        Node([IDLE], relabel=lambda m, given: {**given, "owner_type": "pod",
        "owner": "team/train"} if given.get("owner") and m // 3 % 2 else given), HOARDED),
    # --- scrape intervals
    *[
        Situation(f"a scrape each {every} s: an idle program, a leak and dead memory are told in time",
                  Node([replace(IDLE, pid=8), LEAK, replace(DEAD, pid=9)], every=every),
                  "GpuMemoryHoarded-w 4..12, GpuMemoryLeakSuspected-w 20..60, GpuMemoryDead-p 5..9")
        for every in (30, 60)
    ],
    Situation("a scrape each 60 s, and one of ten is lost: the same", Node([replace(IDLE, pid=8), LEAK],
        every=60, missing=lambda m: m % 10 == 3), HOARDED + ", GpuMemoryLeakSuspected-w 20..60"),
    # --- one thing that becomes another
    Situation("a program idles on one GPU and moves to another: told for each in its time",
        Node([replace(IDLE, gib=until(30, 30)), replace(IDLE, gpu=1, gib=changing_at(30, None, 30),
        since=40)], gpus=2), "GpuMemoryHoarded-w 4..118 to 30..120 x2"),
    Situation("a zombie becomes dead memory: the one ends and the other begins",
        Node([replace(ORPHAN, state=lambda m: "zombie" if m < 40 else "dead", since=changing_at(40, 0, 40))]),
        "GpuMemoryZombie-w 5..8 to 40..53, GpuMemoryDead-p 45..49"),
    Situation("an idle program works for a minute each half hour: nothing",
        Node([Holder(7, 30, lambda m: "active" if m % 30 < 1 else "idle",
        since=lambda m: m // 30 * 30 + (m % 30 >= 1), last_active=lambda m: m // 30 * 30 + min(1, m % 30))])),
]  # fmt: skip


# --- jobs of four ranks on two nodes

JOB = "n0:29500"
HUNG = 10
"""The minute at which the ranks begin to wait."""

WAITS = changing_at(HUNG, None, HUNG)


def rank(number: int, state: str | Callable[[float], str] = "active", **more: object) -> Holder:
    """Return a rank of a job of four on a GPU of its own, with the pid 100 and its number."""
    known: dict[str, object] = {
        "pid": 100 + number, "gib": 30, "state": state, "rank": Rank(number, 4, JOB), "owner_type": "slurm",
        "owner": "17", "gpu": number % 2,
    }  # fmt: skip
    return Holder(**{**known, **more})  # type: ignore[arg-type]


def waiting(number: int, since: Values = WAITS, **more: object) -> Holder:
    return rank(number, **{"waiting": since, **more})  # type: ignore[arg-type]


def ended(number: int, minute: float = HUNG) -> Holder:
    """Return a rank whose process is gone from a minute on."""
    return rank(number, gib=changing_at(minute, 30, None))


def turning(state: str) -> Callable[[float], str]:
    """Return the states of a rank that stops working when the others begin to wait."""
    return lambda minute: state if minute >= HUNG else "active"


def of_two(*holders: Holder, **more: object) -> Node:
    return Node(holders, gpus=2, **more)  # type: ignore[arg-type]


def idle(grade: Grade = Grade.PROVEN, **more: object) -> Holder:
    """Return rank 3, which does nothing."""
    return rank(3, turning("idle"), since=HUNG, grade=grade, sm=None, **more)


NEAR = of_two(waiting(0), waiting(1))
STOPPED = rank(3, turning("stopped"), since=HUNG)
HALTED = of_two(waiting(2), STOPPED)


def hangs(what: str, far: Node, told: str = "", near: Node = NEAR, minutes: float = 38) -> Situation:
    """Return a job of which ranks 0 and 1 are on one node, and 2 and 3 on another."""
    return Situation(f"of a job that hangs, {what}", replace(far), told, minutes, near).apart()


def busy(*pids: int) -> str:
    """Return that these are listed as busy without work."""
    return ", ".join(f"GpuBusyWithoutWork-i@{pid}" for pid in pids)


JOBS = [
    hangs("a rank is stopped: paged", HALTED, "GpuJobHung-p@103"),
    hangs("a rank is stuck: paged", of_two(waiting(2), rank(3, turning("stuck"))),
        "GpuJobHung-p@103, GpuMemoryStuck-p@103"),
    hangs("a rank ended: paged", of_two(waiting(2), ended(3)), "GpuJobHung-p@103"),
    hangs("a rank ended while scrapes are lost: paged", of_two(waiting(2), ended(3),
        missing=lambda m: round(m * 4) % 9 == 5), "GpuJobHung-p@103"),
    hangs("two ranks are stopped: each is paged",
        of_two(replace(STOPPED, pid=102, rank=Rank(2, 4, JOB), gpu=0), STOPPED),
        "GpuJobHung-p@102, GpuJobHung-p@103"),
    hangs("a rank does nothing: told", of_two(waiting(2), idle()), "GpuJobHung-w@103", minutes=53),
    hangs("a rank does nothing, by inference: those that wait are listed",
        of_two(waiting(2), idle(Grade.INFERRED)), busy(100, 101, 102)),
    hangs("it went on after 24 minutes: nothing at the end",
        of_two(waiting(2, lambda m: HUNG if HUNG <= m < 34 else None),
        replace(STOPPED, state=lambda m: "stopped" if HUNG <= m < 34 else "active")),
        near=Node([waiting(0, lambda m: HUNG if HUNG <= m < 34 else None)])),
    # --- who else is busy without work
    hangs("all ranks wait, and no fault is seen: all are listed", of_two(waiting(2), waiting(3)),
        busy(100, 101, 102, 103)),
    hangs("one rank works: the others are listed", of_two(waiting(2), rank(3)), busy(100, 101, 102)),
    hangs("the first rank of a server waits for requests: nothing",
        of_two(idle(framework="vllm", policy="preallocate", pid=103)), minutes=53,
        near=Node([waiting(0, framework="vllm", policy="preallocate")])),
    hangs("a helper of a rank is stopped: those that wait are listed", of_two(waiting(2), waiting(3),
        rank(3, "stopped", pid=999, gib=0.6)), busy(100, 101, 102, 103)),
    # --- ranks of another job, or of somebody who only says so
    hangs("a rank of another job is stopped",
        of_two(waiting(2), replace(STOPPED, rank=Rank(3, 4, "n0:29501"))), busy(100, 101, 102)),
    hangs("a rank of another user is stopped", of_two(waiting(2), replace(STOPPED, user="eve")),
        busy(100, 101, 102)),
    hangs("a program without a rank is stopped", of_two(waiting(2), replace(STOPPED, rank=None)),
        busy(100, 101, 102)),
    hangs("it goes on with fewer ranks", of_two(ended(3)), busy(100, 101),
        of_two(waiting(0, rank=Rank(0, 2, JOB)), waiting(1, rank=Rank(1, 2, JOB)))),
    hangs("a rank was started again", of_two(waiting(2), ended(3, 5),
        waiting(3, pid=203, gib=changing_at(6, None, 30))), busy(100, 101, 102, 203)),
    # --- less is seen: no harsher verdict
    hangs("a node's exporter is down", replace(HALTED, missing=lambda m: m >= HUNG),
        busy(100, 101) + ", VramLedgerExporterDown-w"),
    hangs("a node's driver is lost", of_two(waiting(2), rank(3), driver_up=changing_at(HUNG, 1, 0)),
        busy(100, 101) + ", GpuDriverLost-p"),
    hangs("a rank's GPU is lost", of_two(waiting(2), ended(3),
        extra={on_gpu("device_up", gpu=1): changing_at(HUNG, 1, 0)}),
        busy(100, 101, 102) + ", GpuDeviceLost-p"),
    hangs("environments cannot be read any more", of_two(waiting(2), ended(3),
        extra={series("unreadable_processes", file="environ"): 3}), busy(100, 101, 102)),
    # --- an exporter that starts again counts from its start
    hangs("an exporter restarted", HALTED, "GpuJobHung-p@103, GpuMemoryStopped-w@103", minutes=43,
        near=Node([waiting(0, lambda m: None if m < HUNG or 36 <= m < 38 else 36 if m >= 36 else HUNG)],
        extra={"process_start_time_seconds{NODE}": changing_at(36, 1, 2160)}, missing=away(36, 36.5))),
]  # fmt: skip
