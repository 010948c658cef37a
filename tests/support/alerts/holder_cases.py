"""Cases of the alerts about holders, growth, frameworks and jobs, firing and not, at their boundaries too."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from tests.support.alerts.cases import DEAD, DEVICE, ORPHAN, TRAINER, Case
from tests.support.alerts.nodes import Holder, Node, Values, changing_at, uuid, value_at
from tests.support.host.model import GIB
from vramledger.model.reading import Rank
from vramledger.model.snapshot import Grade

MIB = 1 / 1024


def grows(rate: float, base: float = 10, start: float = 0) -> Callable[[float], float]:
    """Return values that rise by this number of GiB a minute, from a minute on."""
    return lambda minute: base + rate * max(0.0, minute - start)


def with_agent(allocated: Callable[[float], float], overhead: float = 0.5, reserved: float = 0) -> Holder:
    """Return a torch program whose agent reports."""
    return Holder(
        7,
        lambda minute: max(allocated(minute), reserved) + overhead,
        agent={
            "torch_allocated_bytes": allocated,
            "torch_reserved_bytes": lambda minute: max(allocated(minute), reserved),
            "torch_allocated_peak_bytes": allocated,
            "torch_inactive_split_bytes": 0.1,
            "torch_alloc_retries_total": 0,
            "torch_ooms_total": 0,
        },
    )


def pooled(in_use: float, pool: float) -> Holder:
    """Return a JAX program with a pool that it took at its start."""
    return Holder(
        7,
        pool + 0.5,
        framework="jax",
        policy="fraction",
        agent={
            "framework_in_use_bytes": in_use,
            "framework_in_use_peak_bytes": in_use,
            "framework_pool_bytes": pool,
        },
    )


def counting(**counters: Callable[[float], float | None]) -> Holder:
    """Return a torch program with its own counters."""
    holder = with_agent(lambda _: 10)
    return replace(holder, agent={**holder.agent, **counters})


def job_of(name: str, state: str) -> Node:
    """Return a job of two ranks, of which the first is in this state, and the second waits for it."""
    ranks = [
        Holder(7, 30, state, since=0, gpu=1, sm=None, rank=Rank(0, 2, name)),
        Holder(8, 30, rank=Rank(1, 2, name), waiting=0),
    ]
    return Node(ranks, gpus=2)


def sawtooth(minute: float) -> float:
    """Return a healthy training's allocated GiB: 8 to 30, with a period that scrapes never match."""
    return 19 + 11 * math.sin(minute * 60 * 2 * math.pi / 7.3)


IDLE = Holder(7, 30, "idle", since=-61, sm=None)


def pieces(count: int, gib: float, **changes: object) -> list[Holder]:
    """Return idle programs of one user, none of which holds much."""
    return [replace(IDLE, pid=100 + number, gib=gib, **changes) for number in range(count)]  # type: ignore[arg-type]


UNCHARGED = replace(IDLE, gib=0.5)
SHORT = replace(counting(torch_alloc_retries_total=grows(0.5, 0)), pid=8)
SERVICE = replace(IDLE, owner_type="unit", owner="vllm.service", framework="vllm")
NOTEBOOK = replace(IDLE, gib=5, notebook="a.ipynb")
PREALLOCATED = Holder(7, 90, framework="tensorflow", policy="preallocate")
STRAY = [Holder(7, 0.5, "idle", gpu=0, sm=None), Holder(7, 40, gpu=1)]
LEAK = with_agent(grows(0.25))
LAST_OOM = "vramledger_framework_last_oom_timestamp_seconds"
JAX_BESIDE = {
    f'vramledger_framework_{name}_bytes{{NODE,gpu="0",uuid="{uuid(0)}",pid="7",framework="jax"}}': gib * GIB
    for name, gib in {"in_use": 2, "pool": 70}.items()
}


def coherent(cache: Values, *, shared: Values = 0, free: Values = 0.1) -> dict[str, Values]:
    """Return the figures of coherent memory, GiB; shared memory cannot be dropped, as page cache can."""

    def bytes_of(*sizes: Values) -> Callable[[float], float]:
        return lambda minute: GIB * sum(value_at(each, minute) or 0.0 for each in sizes)

    node = f"vramledger_device_node_memory_bytes{DEVICE[:-1]},type="
    return {
        f'vramledger_device_memory_bytes{DEVICE[:-1]},state="free"}}': bytes_of(free),
        f'{node}"file"}}': bytes_of(cache, shared),
        f'{node}"shared"}}': bytes_of(shared),
    }


def flickering(minute: float) -> float:
    """Return what the kernel keeps free beside a page cache that fills the rest, GiB: 85 to 115 MiB."""
    return (100 + 15 * math.sin(minute * 60 * 2 * math.pi / 47)) * MIB


SLOW = Holder(7, grows(40 * MIB, 86))

QUIET = {f"vramledger_device_utilization_ratio{DEVICE}": 0.004}
WELL_USED = {f"vramledger_device_utilization_ratio{DEVICE}": lambda m: 0.5 if 100 <= m % 120 < 101 else 0.001}
DEAD_AMONG_MANY = {
    f"vramledger_processes_dropped{DEVICE}": 3,
    f'vramledger_device_memory_bytes{DEVICE[:-1]},state="dead"}}': 10 * GIB,
}


HOLDER_CASES = [
    Case("healthy", Node([TRAINER]), 70, ""),
    Case("healthy-sawtooth", Node([with_agent(sawtooth)]), 200, ""),
    Case("healthy-sawtooth-of-the-driver", Node([Holder(7, sawtooth)]), 200, ""),
    # --- holders
    Case("dead", Node([replace(ORPHAN, state="dead")]), 5, "GpuMemoryDead-p"),
    Case("orphaned", Node([ORPHAN]), 30, "GpuMemoryOrphaned-w"),
    Case("orphaned-only-by-inference", Node([replace(ORPHAN, grade=Grade.INFERRED, gib=70)]), 60, ""),
    Case("orphaned-much", Node([replace(ORPHAN, gib=20)]), 10, "GpuMemoryOrphaned-w GpuMemoryOrphaned-p"),
    Case("zombie", Node([replace(ORPHAN, state="zombie")]), 5, "GpuMemoryZombie-w"),
    Case("stopped", Node([replace(ORPHAN, state="stopped")]), 30, "GpuMemoryStopped-w"),
    Case("hoarded", Node([IDLE]), 5, "GpuMemoryHoarded-w"),
    Case("hoarded-managed", Node([replace(UNCHARGED, managed=30)]), 5, "GpuMemoryHoarded-w"),
    Case("hoarded-managed-little", Node([replace(UNCHARGED, managed=9)]), 60, ""),
    Case("hoarded-that-was-left", Node([replace(UNCHARGED, left=30)]), 5, "GpuMemoryHoarded-w"),
    Case("hoarded-perhaps", Node([replace(UNCHARGED, most=30), replace(UNCHARGED, pid=8, most=30)]), 60, ""),
    Case("hoarded-by-what-is-seen", Node([replace(IDLE, grade=Grade.SEEN)]), 5, "GpuMemoryHoarded-w"),
    Case("idle-only-by-inference", Node([replace(IDLE, grade=Grade.INFERRED, gib=70)]), 60, ""),
    Case("server-that-holds-on-purpose", Node([replace(SERVICE, gib=90)]), 60, ""),
    Case("server-nobody-asked-for-a-day", Node([replace(SERVICE, since=-1441)]), 6, "GpuMemoryHoarded-w"),
    # What a program says of itself excuses nothing.
    *(
        Case(f"hoarded-by-a-{label}-{name}", Node([replace(IDLE, **{label: name})]), 5, fires)  # type: ignore[arg-type]
        for label, name, fires in (
            ("framework", "vllm", "GpuMemoryHoarded-w"),
            ("command", "vllm", "GpuMemoryHoarded-w"),
            ("policy", "preallocate", "GpuMemoryHoarded-w"),
            ("notebook", "a.ipynb", "GpuMemoryHoarded-w GpuNotebookIdle-w"),
        )
    ),
    Case(
        "a-notebook-while-another-is-short", Node([replace(IDLE, since=-31, notebook="a.ipynb"), SHORT]), 9,
        "GpuMemoryHoardedWhileShort-p",
    ),
    Case("hoarded-while-short", Node([replace(IDLE, since=-31), SHORT]), 9, "GpuMemoryHoardedWhileShort-p"),
    Case(
        "hoarded-that-was-left-while-short", Node([replace(UNCHARGED, left=30, since=-31), SHORT]), 9,
        "GpuMemoryHoardedWhileShort-p",
    ),
    # Managed memory gives way: whoever lacks memory beside it does not lack that.
    Case("managed-while-short", Node([replace(UNCHARGED, managed=30, since=-31), SHORT]), 9, ""),
    Case(
        "managed-and-charged-while-short", Node([replace(UNCHARGED, gib=12, managed=30, since=-31), SHORT]),
        9, "GpuMemoryHoardedWhileShort-p",
    ),
    # --- hoarding in pieces
    Case("hoarded-in-pieces", Node(pieces(12, 6)), 6, "GpuMemoryHoardedInPieces-w"),
    Case(
        "contexts-beside-a-training", Node([*pieces(24, 0.5), replace(TRAINER, owner="bob", user="bob")]), 6,
        "GpuMemoryHoardedInPieces-w",
    ),
    Case("many-that-work", Node(pieces(24, 3.5, state="active")), 90, ""),
    Case("many-idle-only-by-inference", Node(pieces(24, 3.5, grade=Grade.INFERRED)), 90, ""),
    Case(
        "pieces-in-many-jobs-of-a-user",
        Node([replace(each, owner_type="slurm", owner=str(each.pid)) for each in pieces(12, 6)]), 6,
        "GpuMemoryHoardedInPieces-w",
    ),
    Case(
        "pieces-of-a-service",
        Node(pieces(12, 6, owner_type="unit", owner="ray.service", user="ray", since=-1441)), 6,
        "GpuMemoryHoardedInPieces-w",
    ),
    Case(
        "containers-of-root",
        Node(
            [
                replace(each, owner_type="container", owner=f"c{each.pid}", user="root")
                for each in pieces(12, 6)
            ]
        ),
        30,
        "",
    ),
    Case(
        "pieces-of-many-users",
        Node([replace(each, owner=f"u{each.pid}", user=f"u{each.pid}") for each in pieces(24, 3)]), 30, "",
    ),
    Case(
        "pieces-of-many-users-while-short",
        Node(
            [
                *(
                    replace(each, owner=f"u{each.pid}", user=f"u{each.pid}")
                    for each in pieces(24, 3, since=-31)
                ),
                SHORT,
            ]
        ),
        9,
        "GpuMemoryHoardedInPieces-w",
    ),
    Case(
        "managed-pieces-of-many-users-while-short",
        Node(
            [
                *(
                    replace(each, owner=f"u{each.pid}", user=f"u{each.pid}", managed=3)
                    for each in pieces(24, 0.1, since=-31)
                ),
                SHORT,
            ]
        ),
        9,
        "",
    ),
    Case(
        "idle-contexts-of-notebooks", Node(pieces(24, 0.5, notebook="a.ipynb")), 6,
        "GpuMemoryHoardedInPieces-w",
    ),
    Case("hoarded-and-a-piece", Node([IDLE, *pieces(1, 6)]), 6, "GpuMemoryHoarded-w"),
    Case("notebook", Node([NOTEBOOK]), 5, "GpuNotebookIdle-w"),
    Case("notebook-idle-only-by-inference", Node([replace(NOTEBOOK, grade=Grade.INFERRED)]), 60, ""),
    Case("notebook-in-use", Node([replace(NOTEBOOK, state="active")]), 90, ""),
    Case("preallocated", Node([PREALLOCATED, replace(TRAINER, gib=2)]), 15, "GpuMemoryPreallocatedShared-w"),
    Case("stray", Node(STRAY, gpus=2), 15, "GpuStrayContext-i"),
    Case(
        "stray-beside-managed", Node([STRAY[0], Holder(7, 0.5, gpu=1, managed=40)], gpus=2), 15,
        "GpuStrayContext-i",
    ),
    Case(
        "stray-only-by-inference", Node([replace(each, grade=Grade.INFERRED) for each in STRAY], gpus=2), 60,
        "",
    ),
    Case("both-in-use", Node([replace(STRAY[0], state="active"), STRAY[1]], gpus=2), 60, ""),
    Case("stuck", Node([replace(ORPHAN, state="stuck")]), 10, "GpuMemoryStuck-p"),
    Case(
        "orphaned-much-that-works",
        Node(
            [replace(ORPHAN, gib=50)], extra={f'vramledger_process_orphan_working{DEVICE[:-1]},pid="7"}}': 1},
        ),
        20, "GpuMemoryOrphaned-w",
    ),
    Case("dead-among-many", Node([TRAINER], extra=DEAD_AMONG_MANY), 6, "GpuMemoryDead-p"),
    # --- held, and hardly used
    Case("held-hardly-used", Node([TRAINER], extra=QUIET), 375, "GpuHeldHardlyUsed-w"),
    Case("held-hardly-used-not-yet", Node([TRAINER], extra=QUIET), 365, ""),
    Case("held-hardly-used-little", Node([replace(TRAINER, gib=24)], extra=QUIET), 375, ""),
    Case(
        "held-hardly-used-in-pieces",
        Node([replace(TRAINER, gib=4, pid=pid) for pid in range(10, 18)], extra=QUIET), 375,
        "GpuHeldHardlyUsed-w",
    ),
    Case("held-and-used-now-and-then", Node([TRAINER], extra=WELL_USED), 380, ""),
    Case("held-on-purpose", Node([replace(SERVICE, state="active", gib=90)], extra=QUIET), 375, ""),
    Case(
        "held-by-what-calls-itself-vllm", Node([replace(TRAINER, framework="vllm", gib=90)], extra=QUIET),
        375, "GpuHeldHardlyUsed-w",
    ),
    Case(
        "held-hardly-used-over-nightly-updates", Node([TRAINER], missing=lambda m: m % 120 < 6, extra=QUIET),
        390, "GpuHeldHardlyUsed-w",
    ),
    # --- growth
    Case("leak", Node([LEAK]), 45, "GpuMemoryLeakSuspected-w"),
    Case("leak-at-the-boundary", Node([LEAK]), 25, ""),
    Case(
        "leak-that-fills", Node([with_agent(grows(1, 10))]), 86,
        "GpuMemoryLeakSuspected-w GpuMemoryAboutToFill-p GpuMemoryFilling-w",
    ),
    Case("leak-fast", Node([with_agent(grows(6, 10))]), 14, "GpuMemoryLeakSuspected-w"),
    Case(
        "native-leak",
        Node([replace(LEAK, agent={**LEAK.agent, "torch_allocated_bytes": 10, "torch_reserved_bytes": 10})]),
        45, "GpuMemoryLeakSuspected-w",
    ),
    Case("growing", Node([Holder(7, grows(0.25))]), 45, "GpuMemoryGrowing-w"),
    Case("growing-at-the-boundary", Node([Holder(7, grows(0.25))]), 25, ""),
    Case(
        "growing-that-fills", Node([Holder(7, grows(1, 10))]), 86,
        "GpuMemoryGrowing-w GpuMemoryAboutToFill-p GpuMemoryFilling-w",
    ),
    Case(
        "growing-into-page-cache",  # which the kernel drops before an allocation fails
        Node([SLOW], total=96, extra=coherent(lambda m: 9.5 - m * 40 * MIB, free=flickering)),
        90,
        "",
    ),
    Case(
        "page-cache-that-grows",
        Node([replace(TRAINER, gib=86)], extra=coherent(grows(0.4, 0), free=grows(-0.4, 13.5))), 33, "",
    ),
    Case(
        "full-of-shared-memory",  # which the kernel cannot drop
        Node([replace(TRAINER, gib=50)], extra=coherent(1, shared=48.9, free=0.1)),
        15.5,
        "GpuMemoryNearlyFull-i",
    ),
    Case(
        "shared-memory-that-grows",
        Node(
            [replace(TRAINER, gib=80)], extra=coherent(1, shared=lambda m: m / 5, free=lambda m: 19 - m / 5),
        ),
        80, "GpuMemoryFilling-w",
    ),
    Case(
        "leak-that-has-used-up-the-page-cache",
        Node(
            [with_agent(grows(1, 10))],
            extra=coherent(lambda m: max(0, 50 - m), free=lambda m: max(0, 90 - max(m, 50))),
        ),
        86, "GpuMemoryLeakSuspected-w GpuMemoryAboutToFill-p GpuMemoryFilling-w",
    ),
    Case("growing-managed", Node([Holder(7, 0.5, managed=grows(0.25))]), 45, "GpuMemoryGrowing-w"),
    Case(
        "growing-managed-that-fills",  # it does not run out of memory, nor does anybody beside it
        Node([Holder(7, 0.5, managed=grows(1, 10))]),
        86,
        "GpuMemoryGrowing-w GpuMemoryFilling-w",
    ),
    Case(
        "growing-beside-managed-memory",  # which gives way before an allocation fails
        Node([Holder(7, grows(1, 5)), Holder(8, 0.5, managed=20)]),
        71.5,
        "GpuMemoryGrowing-w GpuMemoryFilling-w",
    ),
    Case(
        "managed-that-comes-and-goes",  # each time a little more, and nothing in between
        Node([Holder(7, 0.5, managed=lambda minute: 10 + minute / 4 if minute % 2 < 1 else None)]),
        45,
        "",
    ),
    Case("managed-that-becomes-certain", Node([Holder(7, 0.5, managed=changing_at(20, None, 40))]), 45, ""),
    Case("growing-perhaps", Node([Holder(7, 0.5, most=50), Holder(8, grows(0.01), most=50)]), 45, ""),
    Case("warm-up", Node([Holder(7, lambda minute: 40 - 30 * math.exp(-minute / 10))]), 100, ""),
    Case("a-cache-that-is-no-leak", Node([with_agent(sawtooth, reserved=40)]), 70, ""),
    # --- frameworks
    Case("cache", Node([with_agent(lambda _: 5, reserved=30)]), 30.5, "GpuFrameworkCacheHigh-i"),
    Case(
        "cache-shared", Node([with_agent(lambda _: 5, reserved=60), replace(TRAINER, gib=28)]), 30.5,
        "GpuFrameworkCacheHigh-i GpuFrameworkCacheHigh-w",
    ),
    Case(
        "cache-of-cupy", Node([replace(pooled(2, 30), framework="cupy", policy="caching")]), 30.5,
        "GpuFrameworkCacheHigh-i",
    ),
    Case("pool-taken-in-advance", Node([pooled(2, 70)]), 90, ""),
    Case("pool-that-cannot-be-emptied", Node([replace(pooled(2, 70), policy="growth")]), 90, ""),
    Case(
        "pool-taken-in-advance-beside-torch",
        Node([replace(with_agent(lambda _: 5), gib=75)], extra=JAX_BESIDE), 90, "",
    ),
    Case(
        "fragmented",
        Node([counting(torch_reserved_bytes=lambda _: 20, torch_inactive_split_bytes=lambda _: 6)]), 15.5,
        "GpuMemoryFragmented-i",
    ),
    Case(
        "split-within-a-step",
        Node(
            [
                counting(
                    torch_reserved_bytes=lambda _: 20,
                    torch_inactive_split_bytes=lambda m: 6 if int(m) % 2 else 1,
                ),
            ],
        ),
        60, "",
    ),
    Case("retries", Node([counting(torch_alloc_retries_total=grows(1, 0))]), 12, "GpuAllocatorRetries-w"),
    Case("out-of-memory", Node([counting(torch_ooms_total=changing_at(20, 0, 1))]), 20.5, "GpuOutOfMemory-w"),
    Case(
        "out-of-memory-at-first-sight", Node([counting(torch_ooms_total=changing_at(20, None, 1))]), 20.5,
        "GpuOutOfMemory-w",
    ),
    Case(
        "out-of-memory-of-tensorflow",
        Node(
            [TRAINER],
            extra={
                f'{LAST_OOM}{{NODE,pid="9",framework="tensorflow",verdict="too_big"}}': changing_at(
                    20, None, 1190
                )
            },
        ),
        20.5,
        "GpuOutOfMemory-w",
    ),
    Case(
        "out-of-memory-of-torch-that-its-agent-reports-too",
        Node(
            [replace(counting(torch_ooms_total=changing_at(20, 0, 1)), pid=9)],
            extra={
                f'{LAST_OOM}{{NODE,pid="9",framework="torch",verdict="too_big"}}': changing_at(20, None, 1190)
            },
        ),
        20.5,
        "GpuOutOfMemory-w",
    ),
    Case("out-of-memory-long-ago", Node([counting(torch_ooms_total=lambda _: 1)]), 25, ""),
    # --- causes that nobody on the node can change: the way to Prometheus, clocks, replacements, a release
    Case("dead-over-missing-scrapes", Node([DEAD], missing=lambda m: 2 <= m < 3.5), 5, "GpuMemoryDead-p"),
    Case("stopped-over-missing-scrapes", Node([TRAINER], missing=lambda m: int(m * 4) % 7 == 0), 60, ""),
    Case(
        "stopped-over-an-update",
        Node(
            [replace(ORPHAN, state="stopped", since=changing_at(16, 0, 16))], missing=lambda m: 10 <= m < 16,
        ),
        32.5, "GpuMemoryStopped-w",
    ),
    Case(
        "dead-over-an-update-of-five-minutes",
        Node([replace(DEAD, since=changing_at(15, 0, 15))], missing=lambda m: 10 <= m < 15), 19,
        "GpuMemoryDead-p",
    ),
    Case(
        "stopped-and-continued",
        Node(
            [
                replace(
                    ORPHAN, state=lambda m: "stopped" if m % 20 < 18 else "active",
                    since=lambda m: m // 20 * 20, last_active=lambda m: m - m % 20 if m % 20 < 18 else m,
                ),
            ],
        ),
        70, "",
    ),
    Case(
        "hoarded-over-a-restart", Node([replace(IDLE, since=changing_at(3, -61, 2))]), 6, "GpuMemoryHoarded-w"
    ),
    Case(
        "idle-anew-after-work-and-a-restart",
        Node([replace(IDLE, since=changing_at(3, -61, 2), last_active=changing_at(3, None, 2))]), 30, "",
    ),
    Case(
        "pid-of-another-after-a-hoarder",
        Node([replace(IDLE, since=changing_at(3, -61, 2), start=changing_at(3, -600, 1))]), 30, "",
    ),
    Case(
        "pid-of-another-that-holds-more",
        Node([Holder(7, lambda minute: 10 if minute < 20 else 12 + minute, start=changing_at(20, -600, 20))]),
        45, "",
    ),
    Case(
        "hoarded-by-a-clock-that-is-slow",
        Node([replace(IDLE, since=-62)], extra={"vramledger_sample_timestamp_seconds{NODE}": grows(60, -90)}),
        5.5, "GpuMemoryHoarded-w",
    ),
    Case(
        "hoarded-by-a-clock-that-is-slow-at-the-boundary",
        Node([replace(IDLE, since=-60)], extra={"vramledger_sample_timestamp_seconds{NODE}": grows(60, -90)}),
        6, "",
    ),
    # --- distributed jobs; test_jobs.py has what is not one, and what is on two nodes
    Case("hung", job_of("a", "stopped"), 26, "GpuJobHung-p"),
    Case("hung-by-one-that-does-nothing", job_of("c", "idle"), 41, "GpuJobHung-w"),
    Case("busy-without-work", Node([Holder(8, 30, waiting=0)]), 26, "GpuBusyWithoutWork-i"),
    # --- values at their boundaries
    Case(
        "preallocated-managed", Node([replace(PREALLOCATED, gib=0.5, managed=50), replace(TRAINER, gib=2)]),
        15, "GpuMemoryPreallocatedShared-w",
    ),
    Case(
        "preallocated-half", Node([replace(PREALLOCATED, gib=50), replace(TRAINER, gib=2)]), 15,
        "GpuMemoryPreallocatedShared-w",
    ),
]  # fmt: skip
