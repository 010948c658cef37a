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
UNCHARGED = replace(IDLE, gib=0.5)
SHORT = replace(counting(torch_alloc_retries_total=grows(0.5, 0)), pid=8)
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

HOLDER_CASES = [
    Case("healthy", Node([TRAINER]), 70, ""),
    Case("healthy-sawtooth", Node([with_agent(sawtooth)]), 200, ""),
    Case("healthy-sawtooth-of-the-driver", Node([Holder(7, sawtooth)]), 200, ""),
    # --- holders
    Case("dead", Node([replace(ORPHAN, state="dead")]), 5, "GpuMemoryDead-p"),
    Case("dead-at-the-boundary", Node([replace(ORPHAN, state="dead")]), 4.5, ""),
    Case("dead-context", Node([replace(ORPHAN, state="dead", gib=255 * MIB)]), 30, ""),
    Case("orphaned", Node([ORPHAN]), 30, "GpuMemoryOrphaned-w"),
    Case("orphaned-at-the-boundary", Node([ORPHAN]), 4.5, ""),
    Case("orphaned-at-once", Node([ORPHAN]), 5, "GpuMemoryOrphaned-w"),
    Case("orphaned-context", Node([replace(ORPHAN, gib=255 * MIB)]), 30, ""),
    Case("orphaned-much", Node([replace(ORPHAN, gib=20)]), 10, "GpuMemoryOrphaned-w GpuMemoryOrphaned-p"),
    Case("zombie", Node([replace(ORPHAN, state="zombie")]), 5, "GpuMemoryZombie-w"),
    Case("zombie-at-the-boundary", Node([replace(ORPHAN, state="zombie")]), 4.5, ""),
    Case("stopped", Node([replace(ORPHAN, state="stopped")]), 30, "GpuMemoryStopped-w"),
    Case("stopped-at-the-boundary", Node([replace(ORPHAN, state="stopped")]), 29.5, ""),
    Case("hoarded", Node([IDLE]), 5, "GpuMemoryHoarded-w"),
    Case("hoarded-at-the-boundary", Node([IDLE]), 4.5, ""),
    Case("hoarded-managed", Node([replace(UNCHARGED, managed=30)]), 5, "GpuMemoryHoarded-w"),
    Case("hoarded-managed-little", Node([replace(UNCHARGED, managed=9)]), 60, ""),
    Case("hoarded-that-was-left", Node([replace(UNCHARGED, left=30)]), 5, "GpuMemoryHoarded-w"),
    Case("hoarded-perhaps", Node([replace(UNCHARGED, most=30), replace(UNCHARGED, pid=8, most=30)]), 60, ""),
    Case("hoarded-an-hour", Node([replace(IDLE, since=-54.5)]), 10, ""),
    Case("hoarded-by-what-is-seen", Node([replace(IDLE, grade=Grade.SEEN)]), 5, "GpuMemoryHoarded-w"),
    Case("idle-only-by-inference", Node([replace(IDLE, grade=Grade.INFERRED, gib=70)]), 60, ""),
    Case("hoarded-by-share", Node([replace(IDLE, gib=8)], total=40), 6, "GpuMemoryHoarded-w"),
    Case("hoarded-little", Node([replace(IDLE, gib=9.9)]), 60, ""),
    Case("server-that-holds-on-purpose", Node([replace(IDLE, framework="vllm", gib=90)]), 60, ""),
    Case(
        "server-nobody-asked-for-a-day",
        Node([replace(IDLE, framework="vllm", since=-1441)]),
        6,
        "GpuMemoryHoarded-w",
    ),
    Case(
        "hoarded-while-short",
        Node([replace(IDLE, since=-31), SHORT]),
        9,
        "GpuMemoryHoardedWhileShort-p",
    ),
    Case(
        "hoarded-that-was-left-while-short",
        Node([replace(UNCHARGED, left=30, since=-31), SHORT]),
        9,
        "GpuMemoryHoardedWhileShort-p",
    ),
    # Managed memory gives way: whoever lacks memory beside it does not lack that.
    Case("managed-while-short", Node([replace(UNCHARGED, managed=30, since=-31), SHORT]), 9, ""),
    Case(
        "managed-and-charged-while-short",
        Node([replace(UNCHARGED, gib=12, managed=30, since=-31), SHORT]),
        9,
        "GpuMemoryHoardedWhileShort-p",
    ),
    Case(
        "hoarded-while-nobody-is-short",
        Node([replace(IDLE, since=-31), replace(with_agent(lambda _: 10), pid=8)]),
        8,
        "",
    ),
    Case("notebook", Node([NOTEBOOK]), 5, "GpuNotebookIdle-w"),
    Case("notebook-at-the-boundary", Node([NOTEBOOK]), 4, ""),
    Case("notebook-idle-only-by-inference", Node([replace(NOTEBOOK, grade=Grade.INFERRED)]), 60, ""),
    Case("notebook-with-a-context", Node([replace(NOTEBOOK, gib=0.9)]), 30, ""),
    Case("notebook-in-use", Node([replace(NOTEBOOK, state="active")]), 90, ""),
    Case("preallocated", Node([PREALLOCATED, replace(TRAINER, gib=2)]), 15, "GpuMemoryPreallocatedShared-w"),
    Case("preallocated-at-the-boundary", Node([PREALLOCATED, replace(TRAINER, gib=2)]), 14.5, ""),
    Case("preallocated-alone", Node([PREALLOCATED]), 60, ""),
    Case("preallocated-less", Node([replace(PREALLOCATED, gib=49), replace(TRAINER, gib=2)]), 60, ""),
    Case("stray", Node(STRAY, gpus=2), 15, "GpuStrayContext-i"),
    Case(
        "stray-beside-managed",
        Node([STRAY[0], Holder(7, 0.5, gpu=1, managed=40)], gpus=2),
        15,
        "GpuStrayContext-i",
    ),
    Case("stray-at-the-boundary", Node(STRAY, gpus=2), 14.5, ""),
    Case(
        "stray-only-by-inference",
        Node([replace(each, grade=Grade.INFERRED) for each in STRAY], gpus=2),
        60,
        "",
    ),
    Case("both-in-use", Node([replace(STRAY[0], state="active"), STRAY[1]], gpus=2), 60, ""),
    Case("stuck", Node([replace(ORPHAN, state="stuck")]), 10, "GpuMemoryStuck-p"),
    Case("stuck-at-the-boundary", Node([replace(ORPHAN, state="stuck")]), 9.5, ""),
    Case(
        "orphaned-much-that-works",
        Node(
            [replace(ORPHAN, gib=50)], extra={f'vramledger_process_orphan_working{DEVICE[:-1]},pid="7"}}': 1}
        ),
        20,
        "GpuMemoryOrphaned-w",
    ),
    # --- growth
    Case("leak", Node([LEAK]), 45, "GpuMemoryLeakSuspected-w"),
    Case("leak-at-the-boundary", Node([LEAK]), 25, ""),
    Case(
        "leak-that-fills",
        Node([with_agent(grows(1, 10))]),
        86,
        "GpuMemoryLeakSuspected-w GpuMemoryAboutToFill-p GpuMemoryFilling-w",
    ),
    Case("leak-fast", Node([with_agent(grows(6, 10))]), 14, "GpuMemoryLeakSuspected-w"),
    Case(
        "native-leak",
        Node(
            [
                replace(
                    LEAK,
                    agent={
                        **LEAK.agent,
                        "torch_allocated_bytes": 10,
                        "torch_reserved_bytes": 10,
                    },
                )
            ]
        ),
        45,
        "GpuMemoryLeakSuspected-w",
    ),
    Case("growing", Node([Holder(7, grows(0.25))]), 45, "GpuMemoryGrowing-w"),
    Case("growing-at-the-boundary", Node([Holder(7, grows(0.25))]), 25, ""),
    Case(
        "growing-that-fills",
        Node([Holder(7, grows(1, 10))]),
        86,
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
        Node([replace(TRAINER, gib=86)], extra=coherent(grows(0.4, 0), free=grows(-0.4, 13.5))),
        33,
        "",
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
            [replace(TRAINER, gib=80)], extra=coherent(1, shared=lambda m: m / 5, free=lambda m: 19 - m / 5)
        ),
        80,
        "GpuMemoryFilling-w",
    ),
    Case(
        "leak-that-has-used-up-the-page-cache",
        Node(
            [with_agent(grows(1, 10))],
            extra=coherent(lambda m: max(0, 50 - m), free=lambda m: max(0, 90 - max(m, 50))),
        ),
        86,
        "GpuMemoryLeakSuspected-w GpuMemoryAboutToFill-p GpuMemoryFilling-w",
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
    Case("cache-at-the-boundary", Node([with_agent(lambda _: 5, reserved=30)]), 29.5, ""),
    Case(
        "cache-shared",
        Node([with_agent(lambda _: 5, reserved=60), replace(TRAINER, gib=28)]),
        30.5,
        "GpuFrameworkCacheHigh-i GpuFrameworkCacheHigh-w",
    ),
    Case(
        "cache-of-cupy",
        Node([replace(pooled(2, 30), framework="cupy", policy="caching")]),
        30.5,
        "GpuFrameworkCacheHigh-i",
    ),
    Case("pool-taken-in-advance", Node([pooled(2, 70)]), 90, ""),
    Case("pool-that-cannot-be-emptied", Node([replace(pooled(2, 70), policy="growth")]), 90, ""),
    Case(
        "pool-taken-in-advance-beside-torch",
        Node([replace(with_agent(lambda _: 5), gib=75)], extra=JAX_BESIDE),
        90,
        "",
    ),
    Case("cache-in-use", Node([with_agent(lambda _: 12, reserved=30)]), 90, ""),
    Case(
        "fragmented",
        Node([counting(torch_reserved_bytes=lambda _: 20, torch_inactive_split_bytes=lambda _: 6)]),
        15.5,
        "GpuMemoryFragmented-i",
    ),
    Case(
        "fragmented-at-the-boundary",
        Node([counting(torch_reserved_bytes=lambda _: 20, torch_inactive_split_bytes=lambda _: 6)]),
        14.5,
        "",
    ),
    Case(
        "split-within-a-step",
        Node(
            [
                counting(
                    torch_reserved_bytes=lambda _: 20,
                    torch_inactive_split_bytes=lambda m: 6 if int(m) % 2 else 1,
                )
            ]
        ),
        60,
        "",
    ),
    Case("retries", Node([counting(torch_alloc_retries_total=grows(1, 0))]), 12, "GpuAllocatorRetries-w"),
    Case("retries-at-the-boundary", Node([counting(torch_alloc_retries_total=grows(1, 0))]), 9, ""),
    Case("few-retries", Node([counting(torch_alloc_retries_total=lambda m: min(4.0, m // 2))]), 60, ""),
    Case("out-of-memory", Node([counting(torch_ooms_total=changing_at(20, 0, 1))]), 20.5, "GpuOutOfMemory-w"),
    Case(
        "out-of-memory-at-first-sight",
        Node([counting(torch_ooms_total=changing_at(20, None, 1))]),
        20.5,
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
        "hoarded-over-a-restart", Node([replace(IDLE, since=changing_at(3, -61, 2))]), 6, "GpuMemoryHoarded-w"
    ),
    Case(
        "idle-anew-after-work-and-a-restart",
        Node([replace(IDLE, since=changing_at(3, -61, 2), last_active=changing_at(3, None, 2))]),
        30,
        "",
    ),
    Case(
        "pid-of-another-after-a-hoarder",
        Node([replace(IDLE, since=changing_at(3, -61, 2), start=changing_at(3, -600, 1))]),
        30,
        "",
    ),
    Case(
        "pid-of-another-that-holds-more",
        Node([Holder(7, lambda minute: 10 if minute < 20 else 12 + minute, start=changing_at(20, -600, 20))]),
        45,
        "",
    ),
    Case(
        "hoarded-by-a-clock-that-is-slow",
        Node([replace(IDLE, since=-62)], extra={"vramledger_sample_timestamp_seconds{NODE}": grows(60, -90)}),
        5.5,
        "GpuMemoryHoarded-w",
    ),
    Case(
        "hoarded-by-a-clock-that-is-slow-at-the-boundary",
        Node([replace(IDLE, since=-60)], extra={"vramledger_sample_timestamp_seconds{NODE}": grows(60, -90)}),
        6,
        "",
    ),
    # --- distributed jobs; test_jobs.py has what is not one, and what is on two nodes
    Case("hung", job_of("a", "stopped"), 26, "GpuJobHung-p"),
    Case("hung-not-yet", job_of("b", "stopped"), 24, ""),
    Case("hung-by-one-that-does-nothing", job_of("c", "idle"), 41, "GpuJobHung-w"),
    Case("busy-without-work", Node([Holder(8, 30, waiting=0)]), 26, "GpuBusyWithoutWork-i"),
    # --- values at their boundaries
    Case("orphaned-not-quite-much", Node([replace(ORPHAN, gib=19.9)]), 20, "GpuMemoryOrphaned-w"),
    Case("orphaned-256", Node([replace(ORPHAN, gib=256 * MIB)]), 5, "GpuMemoryOrphaned-w"),
    Case("dead-256", Node([replace(DEAD, gib=256 * MIB)]), 5, "GpuMemoryDead-p"),
    Case("zombie-context", Node([replace(ORPHAN, state="zombie", gib=255 * MIB)]), 30, ""),
    Case("stopped-with-little", Node([replace(ORPHAN, state="stopped", gib=0.9)]), 60, ""),
    Case("hoarded-not-quite-a-share", Node([replace(IDLE, gib=7.9)], total=40), 60, ""),
    Case("short-hoarder-not-yet", Node([replace(IDLE, since=-20), replace(TRAINER, gib=2)]), 8, ""),
    Case(
        "preallocated-managed",
        Node([replace(PREALLOCATED, gib=0.5, managed=50), replace(TRAINER, gib=2)]),
        15,
        "GpuMemoryPreallocatedShared-w",
    ),
    Case(
        "preallocated-half",
        Node([replace(PREALLOCATED, gib=50), replace(TRAINER, gib=2)]),
        15,
        "GpuMemoryPreallocatedShared-w",
    ),
    Case("stray-with-data", Node([replace(STRAY[0], gib=701 * MIB), STRAY[1]], gpus=2), 60, ""),
    Case("stray-beside-little", Node([STRAY[0], replace(STRAY[1], gib=2799 * MIB)], gpus=2), 60, ""),
    Case("leak-that-does-not-fill-yet", Node([with_agent(grows(1, 10))]), 79, "GpuMemoryLeakSuspected-w"),
    Case("cache-of-a-small-share", Node([with_agent(lambda _: 1, reserved=10)]), 90, ""),
    Case(
        "fragmented-little",
        Node([counting(torch_reserved_bytes=lambda _: 8, torch_inactive_split_bytes=lambda _: 3.9)]),
        60,
        "",
    ),
    Case(
        "fragmented-a-small-share",
        Node([counting(torch_reserved_bytes=lambda _: 21, torch_inactive_split_bytes=lambda _: 6)]),
        60,
        "",
    ),
]
