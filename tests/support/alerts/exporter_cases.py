"""Cases of the alerts about exporters, devices and reservations, firing and not, at their boundaries too."""

from __future__ import annotations

from dataclasses import replace

from tests.support.alerts.boundaries import limited
from tests.support.alerts.cases import DEVICE, TRAINER, Case
from tests.support.alerts.nodes import Node, changing_at
from tests.support.host.model import GIB

UNRESERVED = (
    'vramledger_device_unreserved_memory_bytes{NODE,gpu="0",uuid="GPU-00000000-0000-4000-8000-000000000000"}'
)
PAGE_CACHE = {f'vramledger_device_node_memory_bytes{DEVICE[:-1]},type="file"}}': 10 * GIB}
RESERVED = {f'vramledger_device_reservation_info{DEVICE[:-1]},owner_type="slurm",owner="12"}}': 1}
USES = {
    f'vramledger_device_reservations{DEVICE[:-1]},use="{use}"}}': count
    for use, count in {"held": 0, "unheld": 1, "unknown": 0}.items()
}
XID = f'vramledger_device_xid_errors_total{DEVICE[:-1].replace("{", "{{")},xid="{{}}"}}}}'
ECC = f'vramledger_device_ecc_errors_total{DEVICE[:-1].replace("{", "{{")},type="{{}}"}}}}'
FAILING = 'prometheus_rule_evaluation_failures_total{{NODE,rule_group="/etc/x.yml;{}"}}'
RELEASED = {"vramledger_released_until_timestamp_seconds{NODE}": changing_at(5, None, 1e9)}
STANDS_STILL = {"vramledger_sample_timestamp_seconds{NODE}": lambda minute: 60 * min(minute, 5)}

EXPORTER_CASES = [
    Case("empty", Node(), 40, ""),
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
    # --- causes that nobody on the node can change: the way to Prometheus, clocks, replacements, a release
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
    # --- nothing is wrong
    Case("hidden-none", Node(extra={f"vramledger_device_hidden_holders{DEVICE}": 0}), 60, ""),
    Case(
        "agent-degraded",
        Node([TRAINER], extra={'vramledger_agent_up{NODE,pid="9",reason="degraded"}': 0}),
        30,
        "",
    ),
]
