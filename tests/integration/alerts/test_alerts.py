"""Each alert fires, does not fire, and is tested at its boundary; and one cause makes one alert."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.alerts.boundaries import limited
from tests.support.alerts.nodes import Holder, Node, Values, changing_at, uuid, value_at
from tests.support.alerts.promtool import Alert, alert_names, alerts_over_time, expect, firing
from tests.support.host.model import GIB
from tests.support.requirements import EACH_VERSION
from vramledger.model.reading import Rank
from vramledger.model.snapshot import Grade

pytestmark = pytest.mark.timeout(600)  # promtool takes its time where others work too

MIB = 1 / 1024


class Case(NamedTuple):
    """The alerts that fire on a node at a minute, except the heartbeat: names with the severity's letter."""

    name: str
    node: Node
    minute: float
    fires: str


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


TRAINER = Holder(9, 30, owner="bob", user="bob")
IDLE = Holder(7, 30, "idle", since=-61, sm=None)
UNCHARGED = replace(IDLE, gib=0.5)
SHORT = replace(counting(torch_alloc_retries_total=grows(0.5, 0)), pid=8)
NOTEBOOK = replace(IDLE, gib=5, notebook="a.ipynb")
ORPHAN = Holder(7, 10, "orphaned", since=0)
PREALLOCATED = Holder(7, 90, framework="tensorflow", policy="preallocate")
STRAY = [Holder(7, 0.5, "idle", gpu=0, sm=None), Holder(7, 40, gpu=1)]
LEAK = with_agent(grows(0.25))

LAST_OOM = "vramledger_framework_last_oom_timestamp_seconds"
UNRESERVED = (
    'vramledger_device_unreserved_memory_bytes{NODE,gpu="0",uuid="GPU-00000000-0000-4000-8000-000000000000"}'
)
JAX_BESIDE = {
    f'vramledger_framework_{name}_bytes{{NODE,gpu="0",uuid="{uuid(0)}",pid="7",framework="jax"}}': gib * GIB
    for name, gib in {"in_use": 2, "pool": 70}.items()
}
DEVICE = '{NODE,gpu="0",uuid="GPU-00000000-0000-4000-8000-000000000000"}'
PAGE_CACHE = {f'vramledger_device_node_memory_bytes{DEVICE[:-1]},type="file"}}': 10 * GIB}


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
RESERVED = {f'vramledger_device_reservation_info{DEVICE[:-1]},owner_type="slurm",owner="12"}}': 1}

USES = {
    f'vramledger_device_reservations{DEVICE[:-1]},use="{use}"}}': count
    for use, count in {"held": 0, "unheld": 1, "unknown": 0}.items()
}
XID = f'vramledger_device_xid_errors_total{DEVICE[:-1].replace("{", "{{")},xid="{{}}"}}}}'
ECC = f'vramledger_device_ecc_errors_total{DEVICE[:-1].replace("{", "{{")},type="{{}}"}}}}'
FAILING = 'prometheus_rule_evaluation_failures_total{{NODE,rule_group="/etc/x.yml;{}"}}'

CASES = [
    Case("healthy", Node([TRAINER]), 70, ""),
    Case("empty", Node(), 40, ""),
    Case("healthy-sawtooth", Node([with_agent(sawtooth)]), 200, ""),
    Case("healthy-sawtooth-of-the-driver", Node([Holder(7, sawtooth)]), 200, ""),
    # --- the exporter
    Case("down", Node(missing=lambda minute: minute >= 2), 7.5, "VramLedgerExporterDown-w"),
    Case("down-at-the-boundary", Node(missing=lambda minute: minute >= 2), 6.5, ""),
    Case("sampling-failed", Node(driver_up=0), 10.5, "VramLedgerSamplingFailed-w"),
    Case("sampling-failed-at-the-boundary", Node(driver_up=0), 9.5, ""),
    Case(
        "stalled",
        Node(extra={"vramledger_sample_timestamp_seconds{NODE}": lambda m: 60 * min(m, 5)}),
        10,
        "VramLedgerSamplingStalled-w",
    ),
    Case(
        "stalled-at-the-boundary",
        Node(extra={"vramledger_sample_timestamp_seconds{NODE}": lambda m: 60 * min(m, 5)}),
        8.5,
        "",
    ),
    Case(
        "replay-that-has-ended",
        Node(
            extra={
                "vramledger_sample_timestamp_seconds{NODE}": 5,
                'vramledger_source_info{NODE,source="replay"}': 1,
            }
        ),
        20,
        "",
    ),
    Case("blind", Node(extra={"vramledger_host_pid_namespace{NODE}": 0}), 10.5, "VramLedgerBlind-w"),
    Case("blind-at-the-boundary", Node(extra={"vramledger_host_pid_namespace{NODE}": 0}), 9.5, ""),
    Case("no-privileges", Node(unknown=1), 10.5, "VramLedgerBlind-w"),
    Case("unknown-little", Node(unknown=0.9), 30, ""),
    Case(
        "collector-fails",
        Node(extra={'vramledger_collector_success{NODE,collector="process"}': 0}),
        10.5,
        "VramLedgerCollectorFailing-w",
    ),
    Case(
        "collector-fails-at-the-boundary",
        Node(extra={'vramledger_collector_success{NODE,collector="process"}': 0}),
        9.5,
        "",
    ),
    Case(
        "clock-skew",
        Node(extra={"vramledger_sample_timestamp_seconds{NODE}": lambda m: m * 60 - 61}),
        16,
        "VramLedgerClockSkew-i",
    ),
    Case(
        "clock-skew-at-the-boundary",
        Node(extra={"vramledger_sample_timestamp_seconds{NODE}": lambda m: m * 60 - 60}),
        30,
        "",
    ),
    Case(
        "series-dropped",
        Node(extra={f"vramledger_processes_dropped{DEVICE}": 1, f"vramledger_owners_dropped{DEVICE}": 0}),
        15.5,
        "VramLedgerSeriesDropped-i",
    ),
    Case(
        "series-dropped-at-the-boundary", Node(extra={f"vramledger_processes_dropped{DEVICE}": 1}), 14.5, ""
    ),
    Case("series-not-dropped", Node(extra={f"vramledger_processes_dropped{DEVICE}": 0}), 30, ""),
    Case("agent-silent", Node([replace(TRAINER, agent_up=0)]), 5.5, "VramLedgerAgentSilent-i"),
    Case("agent-silent-at-the-boundary", Node([replace(TRAINER, agent_up=0)]), 4.5, ""),
    Case("agent-speaks", Node([replace(TRAINER, agent_up=1)]), 30, ""),
    # --- devices
    Case(
        "device-lost",
        Node(extra={f"vramledger_device_up{DEVICE}": changing_at(5, 1, 0)}),
        6.5,
        "GpuDeviceLost-p",
    ),
    Case(
        "device-lost-at-the-boundary",
        Node(extra={f"vramledger_device_up{DEVICE}": changing_at(5, 1, 0)}),
        5.5,
        "",
    ),
    Case(
        "device-gone-after-a-restart",
        Node(gpus=2, extra={f"vramledger_device_up{DEVICE}": changing_at(10, 1, None)}),
        16,
        "GpuDeviceLost-p",
    ),
    Case(
        "device-replaced",
        Node(
            gpus=2,
            missing=lambda minute: 10 <= minute < 12,
            extra={
                f"vramledger_device_up{DEVICE}": changing_at(12, 1, None),
                'vramledger_device_up{NODE,gpu="0",uuid="GPU-new"}': changing_at(12, None, 1),
            },
        ),
        20,
        "",
    ),
    Case("driver-lost", Node(driver_up=changing_at(5, 1, 0)), 10.5, "GpuDriverLost-p"),
    Case("driver-lost-at-the-boundary", Node(driver_up=changing_at(5, 1, 0)), 9.5, ""),
    Case("nearly-full", Node([replace(TRAINER, gib=95.1)]), 15.5, "GpuMemoryNearlyFull-i"),
    Case("nearly-full-at-the-boundary", Node([replace(TRAINER, gib=95.1)]), 14.5, ""),
    Case("full-of-page-cache", Node([replace(TRAINER, gib=95.1)], extra=PAGE_CACHE), 60, ""),
    Case("not-quite-full", Node([replace(TRAINER, gib=95)]), 60, ""),
    Case("unattributed", Node(unattributed=5), 15.5, "GpuMemoryUnattributed-w"),
    Case("unattributed-at-the-boundary", Node(unattributed=5), 14.5, ""),
    Case("managed-memory", Node(unattributed=4.9), 60, ""),
    Case("hidden", Node(extra={f"vramledger_device_hidden_holders{DEVICE}": 1}), 30.5, "GpuHiddenHolder-i"),
    Case("hidden-at-the-boundary", Node(extra={f"vramledger_device_hidden_holders{DEVICE}": 1}), 29.5, ""),
    Case(
        "reserved-for-another",
        Node(
            [TRAINER],
            extra=RESERVED | {UNRESERVED: 30 * GIB},
        ),
        10.5,
        "GpuMemoryOutsideReservation-w",
    ),
    Case(
        "reserved-for-another-at-the-boundary",
        Node(
            [TRAINER],
            extra=RESERVED | {UNRESERVED: 30 * GIB},
        ),
        9.5,
        "",
    ),
    Case(
        "reserved-and-a-context-beside", Node([TRAINER], extra=RESERVED | {UNRESERVED: 255 * 2**20}), 30, ""
    ),
    Case("reserved-for-nobody-known", Node([TRAINER], extra=RESERVED), 30, ""),
    Case(
        "reserved-for-its-holder",
        Node(
            [TRAINER],
            extra={f'vramledger_device_reservation_info{DEVICE[:-1]},owner_type="user",owner="bob"}}': 1},
        ),
        30,
        "",
    ),
    Case("near-its-limit", Node([TRAINER], extra=limited(95)), 15.5, "GpuMemoryLimitNear-i"),
    Case("near-its-limit-at-the-boundary", Node([TRAINER], extra=limited(95)), 14.5, ""),
    Case("below-its-limit", Node([TRAINER], extra=limited(94)), 60, ""),
    Case(
        "over-budget",
        Node(
            [replace(TRAINER, owner="cy")],
            extra={'vramledger_owner:memory_budget_bytes:threshold{owner_type="user",owner="cy"}': 29 * GIB},
        ),
        15.5,
        "GpuOwnerOverBudget-w",
    ),
    Case(
        "over-budget-at-the-boundary",
        Node(
            [replace(TRAINER, owner="di")],
            extra={'vramledger_owner:memory_budget_bytes:threshold{owner_type="user",owner="di"}': 29 * GIB},
        ),
        14.5,
        "",
    ),
    Case(
        "within-budget",
        Node(
            [replace(TRAINER, owner="ed")],
            extra={'vramledger_owner:memory_budget_bytes:threshold{owner_type="user",owner="ed"}': 30 * GIB},
        ),
        30,
        "",
    ),
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
    # --- the hardware, and what a scheduler has reserved
    Case("xid", Node(extra={XID.format(79): changing_at(20, None, 1)}), 20.5, "GpuXidError-w"),
    Case("xid-again", Node(extra={XID.format(94): changing_at(20, 3, 4)}), 20.5, "GpuXidError-w"),
    Case("xid-of-a-program", Node(extra={XID.format(31): changing_at(20, None, 1)}), 20.5, ""),
    Case("xid-long-ago", Node(extra={XID.format(79): 2}), 60, ""),
    Case(
        "xid-before-the-exporter-was-away",
        Node(missing=lambda m: 20 <= m < 24, extra={XID.format(79): 2}),
        30,
        "",
    ),
    Case(
        "ecc", Node(extra={ECC.format("uncorrected"): changing_at(20, 7, 8)}), 20.5, "GpuEccUncorrectable-w"
    ),
    Case("ecc-of-years-ago", Node(extra={ECC.format("uncorrected"): 7}), 60, ""),
    Case("ecc-corrected", Node(extra={ECC.format("corrected"): changing_at(20, 7, 8)}), 20.5, ""),
    Case(
        "ecc-while-away",
        Node(missing=lambda m: 20 <= m < 84, extra={ECC.format("uncorrected"): changing_at(30, 7, 8)}),
        87,
        "GpuEccUncorrectable-w",
    ),
    Case(
        "rows-used-up",
        Node(extra={f"vramledger_device_row_remap_failed{DEVICE}": 1}),
        5.5,
        "GpuRowRemapFailed-w",
    ),
    Case("rows-left", Node(extra={f"vramledger_device_row_remap_failed{DEVICE}": 0}), 30, ""),
    Case("ghost", Node(extra={f"vramledger_device_ghost{DEVICE}": 1}), 10.5, "GpuGhost-w"),
    Case("no-ghost", Node(extra={f"vramledger_device_ghost{DEVICE}": 0}), 30, ""),
    Case("reserved-unused", Node(extra=RESERVED | USES), 121, "GpuReservedUnused-w"),
    Case("reserved-not-yet-used", Node(extra=RESERVED | USES), 119, ""),
    Case(
        "agent-socket-down",
        Node(extra={"vramledger_agent_socket_up{NODE}": 0}),
        10.5,
        "VramLedgerAgentSocketDown-w",
    ),
    Case(
        "old-web-configuration",
        Node(extra={"vramledger_web_config_last_reload_successful{NODE}": 0}),
        10.5,
        "VramLedgerWebConfigNotReloaded-w",
    ),
    Case(
        "storage-failing",
        Node(extra={"vramledger_storage_up{NODE}": 0}),
        10.5,
        "VramLedgerStorageFailing-w",
    ),
    Case(
        "storage-that-was-full-for-a-moment",
        Node(extra={"vramledger_storage_up{NODE}": lambda m: 0 if 2 <= m < 9 else 1}),
        30,
        "",
    ),
    Case(
        "rules-failing",
        Node(extra={FAILING.format("vramledger-growth"): lambda m: m}),
        11,
        "VramLedgerRulesFailing-p",
    ),
    Case("rules-failing-of-others", Node(extra={FAILING.format("node-exporter"): lambda m: m}), 30, ""),
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
]

RELEASED = {"vramledger_released_until_timestamp_seconds{NODE}": changing_at(5, None, 1e9)}
STANDS_STILL = {"vramledger_sample_timestamp_seconds{NODE}": lambda minute: 60 * min(minute, 5)}
DEAD = replace(ORPHAN, state="dead")

CASES += [
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
    Case(
        "device-lost-after-a-replacement",
        Node(
            gpus=2,
            missing=lambda minute: 10 <= minute < 12,
            extra={
                f"vramledger_device_up{DEVICE}": changing_at(12, 1, None),
                'vramledger_device_up{NODE,gpu="0",uuid="GPU-new"}': lambda m: (
                    None if m < 12 else float(m < 20)
                ),
            },
        ),
        22,
        "GpuDeviceLost-p",
    ),
    Case("released", Node(driver_up=changing_at(5, 1, 0), extra=RELEASED), 30, ""),
    Case("released-and-still", Node(extra=RELEASED | STANDS_STILL), 30, ""),
    Case("released-from-the-beginning", Node(driver_up=0, extra={next(iter(RELEASED)): 1e9}), 30, ""),
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
    Case("hidden-none", Node(extra={f"vramledger_device_hidden_holders{DEVICE}": 0}), 60, ""),
    Case(
        "agent-degraded",
        Node([TRAINER], extra={'vramledger_agent_up{NODE,pid="9",reason="degraded"}': 0}),
        30,
        "",
    ),
]


def found(alerts: list[Alert]) -> list[str]:
    """Return each alert as its name and its severity's letter."""
    return sorted(f"{alert.name}-{alert.labels['severity'][0]}" for alert in alerts)


@pytest.fixture(scope="module", params=EACH_VERSION)
def fired(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return the alerts of each case at its minute; one Prometheus watches all cases."""
    nodes = {case.name: (case.node, case.minute) for case in CASES}
    assert len(nodes) == len(CASES), "no name stands for two cases"
    samples = alerts_over_time(
        nodes, (case.minute for case in CASES), tmp_path_factory.mktemp("cases"), request.param
    )
    fires: dict[str, list[str]] = {case.name: [] for case in CASES}
    for key, times in samples.items():
        labels = dict(key)
        name = labels.get("instance", "")
        if labels["alertstate"] == "firing" and nodes[name][1] * 60 in times:
            fires[name].append(f"{labels['alertname']}-{labels['severity'][0]}")
    return fires


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fires(case: Case, fired: dict[str, list[str]]) -> None:
    """The alerts that should fire do, and no others, whatever else happens on this node and on others."""
    assert sorted(fired[case.name]) == sorted(case.fires.split())


def test_absent(tmp_path: Path) -> None:
    """An alert fires when there is no exporter at all."""
    assert found(firing(tmp_path, [{"series": "other", "values": "0x50"}], 10.5)) == ["VramLedgerAbsent-p"]


ANSWERS, SILENT = 'up{job="vramledger",instance="a:1"}', 'up{job="vramledger",instance="b:2"}'


@pytest.mark.parametrize(
    ("series", "link"),
    [
        ({ANSWERS: "1x99", SILENT: "1x4 0x99"}, "http://a:1/runbooks/VramLedgerExporterDown"),
        ({SILENT: "1x4 0x99"}, ""),
        ({ANSWERS: "1x8 _x99", SILENT: "0x8 _x99"}, "http://a:1/runbooks/VramLedgerAbsent"),
    ],
    ids=["another one answers", "none answers", "none is known any more"],
)
def test_the_link_leads_to_an_exporter_that_answers(
    series: dict[str, str], link: str, tmp_path: Path
) -> None:
    """If the alert's own exporter cannot answer, the link leads to another one, or is missing."""
    given = [{"series": name, "values": values} for name, values in series.items()]
    [alert] = firing(tmp_path, given, 18)

    assert alert.annotations["runbook_url"] == link


@pytest.mark.parametrize("stores", [True, False])
def test_an_alert_links_to_the_page_as_it_was(tmp_path: Path, stores: bool) -> None:
    """With a storage the link carries the time of the evaluation; without one there is none."""
    stored = {"vramledger_storage_newest_timestamp_seconds{NODE}": lambda m: 60 * m}
    [alert] = firing(tmp_path, Node([DEAD], extra=stored if stores else {}).series(6), 6)

    name = alert.labels["instance"]
    assert alert.annotations["page_url"] == (f"http://{name}/#at=360" if stores else "")


@pytest.mark.parametrize(
    "series",
    [[{"series": "other", "values": "0x50"}], [{"series": 'up{job="vramledger"}', "values": "0x50"}]],
)
def test_not_absent(series: list[dict[str, str]], tmp_path: Path) -> None:
    """An exporter that is configured is not absent; no alert fires before the 10 minutes are over."""
    known = "VramLedgerExporterDown-w" if "up" in series[0]["series"] else ""
    assert found(firing(tmp_path, series, 9.5)) == known.split()


def test_the_heartbeat_always_beats(tmp_path: Path) -> None:
    """The watchdog fires when there is nothing to watch, and while other alerts fire."""
    beats = {'ALERTS{alertname="VramLedgerWatchdog",alertstate="firing"}': 1}
    assert expect(tmp_path, [{"series": "other", "values": "0x50"}], 1, beats) == ""
    assert expect(tmp_path, Node([DEAD], driver_up=0).series(10), 10, beats) == ""


def test_every_alert_is_tested() -> None:
    """Each alert has a case in which it fires."""
    fires = {word.rpartition("-")[0] for case in CASES for word in case.fires.split()}

    of_fleets = {"VramLedgerAbsent", "VramLedgerManyExportersDown", "VramLedgerScrapesTooRare"}
    assert set(alert_names()) - fires == {"VramLedgerWatchdog", *of_fleets}


def test_a_silent_agent_says_why(tmp_path: Path) -> None:
    """The text has the exporter's reason, and an agent that is only degraded does not count as silent."""
    silent = {'vramledger_agent_up{NODE,pid="9",reason="refused"}': 0}
    [alert] = firing(tmp_path, Node([TRAINER], extra=silent).series(6), 6)
    assert "(reason: refused)" in alert.annotations["description"]
