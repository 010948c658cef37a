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
ACTION = f'vramledger_device_recovery_action{DEVICE[:-1].replace("{", "{{")},action="{{}}"}}}}'
FAILING = 'prometheus_rule_evaluation_failures_total{{NODE,rule_group="/etc/x.yml;{}"}}'
RELEASED = {"vramledger_released_until_timestamp_seconds{NODE}": changing_at(5, None, 1e9)}
STANDS_STILL = {"vramledger_sample_timestamp_seconds{NODE}": lambda minute: 60 * min(minute, 5)}

EXPORTER_CASES = [
    Case("empty", Node(), 40, ""),
    # --- the exporter
    Case("down", Node(missing=lambda minute: minute >= 2), 7.5, "VramLedgerExporterDown-w"),
    Case("sampling-failed", Node(driver_up=0), 10.5, "VramLedgerSamplingFailed-w"),
    Case(
        "stalled", Node(extra={"vramledger_sample_timestamp_seconds{NODE}": lambda m: 60 * min(m, 5)}), 10,
        "VramLedgerSamplingStalled-w",
    ),
    Case(
        "replay-that-has-ended",
        Node(
            extra={
                "vramledger_sample_timestamp_seconds{NODE}": 5,
                'vramledger_source_info{NODE,source="replay"}': 1,
            },
        ),
        20, "",
    ),
    Case("blind", Node(extra={"vramledger_host_pid_namespace{NODE}": 0}), 10.5, "VramLedgerBlind-w"),
    Case("no-privileges", Node(unknown=1), 10.5, "VramLedgerBlind-w"),
    Case(
        "collector-fails", Node(extra={'vramledger_collector_success{NODE,collector="process"}': 0}), 10.5,
        "VramLedgerCollectorFailing-w",
    ),
    Case(
        "clock-skew", Node(extra={"vramledger_sample_timestamp_seconds{NODE}": lambda m: m * 60 - 61}), 16,
        "VramLedgerClockSkew-i",
    ),
    Case(
        "series-dropped",
        Node(extra={f"vramledger_processes_dropped{DEVICE}": 1, f"vramledger_owners_dropped{DEVICE}": 0}),
        15.5, "VramLedgerSeriesDropped-i",
    ),
    Case("agent-silent", Node([replace(TRAINER, agent_up=0)]), 5.5, "VramLedgerAgentSilent-i"),
    Case(
        "a-third-of-the-scrapes-fails", Node(missing=lambda minute: int(minute * 4) % 3 == 0), 40,
        "VramLedgerExporterDown-w",
    ),
    Case("down-for-seven-minutes", Node(missing=lambda minute: 10 <= minute < 17), 50, ""),
    # --- devices
    Case(
        "device-lost", Node(extra={f"vramledger_device_up{DEVICE}": changing_at(5, 1, 0)}), 6.5,
        "GpuDeviceLost-p",
    ),
    Case(
        "device-gone-after-a-restart",
        Node(gpus=2, extra={f"vramledger_device_up{DEVICE}": changing_at(10, 1, None)}), 16,
        "GpuDeviceLost-p",
    ),
    Case(
        "device-replaced",
        Node(
            gpus=2, missing=lambda minute: 10 <= minute < 12,
            extra={
                f"vramledger_device_up{DEVICE}": changing_at(12, 1, None),
                'vramledger_device_up{NODE,gpu="0",uuid="GPU-new"}': changing_at(12, None, 1),
            },
        ),
        20, "",
    ),
    Case(
        "device-that-must-be-reset-and-answers-nothing-else",
        Node(
            extra={
                f"vramledger_device_up{DEVICE}": changing_at(5, 1, 0),
                f"vramledger_device_reset_required{DEVICE}": changing_at(5, 0, 1),
            },
        ),
        7.5, "GpuResetRequired-p",
    ),
    Case(
        "device-asleep",
        Node(
            extra={
                f"vramledger_device_up{DEVICE}": changing_at(5, 1, 0),
                f"vramledger_device_asleep{DEVICE}": changing_at(5, None, 1),
            },
        ),
        30, "",
    ),
    Case("needs-a-reset", Node([TRAINER], extra={ACTION.format("gpu_reset"): 1}), 2.5, "GpuResetRequired-p"),
    Case("needs-a-drain", Node([TRAINER], extra={ACTION.format("drain_p2p"): 1}), 2.5, "GpuResetRequired-w"),
    Case(
        "needs-what-is-not-known", Node([TRAINER], extra={ACTION.format("other"): 1}), 2.5,
        "GpuResetRequired-w",
    ),
    Case(
        "was-reset-in-time",
        Node([TRAINER], extra={ACTION.format("gpu_reset"): lambda m: 1 if m < 0.5 else None}), 30, "",
    ),
    Case("driver-lost", Node(driver_up=changing_at(5, 1, 0)), 10.5, "GpuDriverLost-p"),
    Case("nearly-full", Node([replace(TRAINER, gib=95.1)]), 15.5, "GpuMemoryNearlyFull-i"),
    Case("full-of-page-cache", Node([replace(TRAINER, gib=95.1)], extra=PAGE_CACHE), 60, ""),
    Case("unattributed", Node(unattributed=5), 15.5, "GpuMemoryUnattributed-w"),
    Case("hidden", Node(extra={f"vramledger_device_hidden_holders{DEVICE}": 1}), 30.5, "GpuHiddenHolder-i"),
    Case(
        "reserved-for-another", Node([TRAINER], extra=RESERVED | {UNRESERVED: 30 * GIB}), 10.5,
        "GpuMemoryOutsideReservation-w",
    ),
    Case("reserved-for-nobody-known", Node([TRAINER], extra=RESERVED), 30, ""),
    Case("near-its-limit", Node([TRAINER], extra=limited(95)), 15.5, "GpuMemoryLimitNear-i"),
    Case(
        "over-budget",
        Node(
            [replace(TRAINER, owner="cy")],
            extra={'vramledger_owner:memory_budget_bytes:threshold{owner_type="user",owner="cy"}': 29 * GIB},
        ),
        15.5, "GpuOwnerOverBudget-w",
    ),
    # --- the hardware, and what a scheduler has reserved
    Case("xid", Node(extra={XID.format(79): changing_at(20, None, 1)}), 20.5, "GpuXidError-w"),
    Case("xid-again", Node(extra={XID.format(94): changing_at(20, 3, 4)}), 20.5, "GpuXidError-w"),
    Case(
        "xid-before-the-exporter-was-away", Node(missing=lambda m: 20 <= m < 24, extra={XID.format(79): 2}),
        30, "",
    ),
    Case(
        "ecc", Node(extra={ECC.format("uncorrected"): changing_at(20, 7, 8)}), 20.5, "GpuEccUncorrectable-w"
    ),
    Case("ecc-corrected", Node(extra={ECC.format("corrected"): changing_at(20, 7, 8)}), 20.5, ""),
    Case(
        "ecc-while-away",
        Node(missing=lambda m: 20 <= m < 84, extra={ECC.format("uncorrected"): changing_at(30, 7, 8)}), 92,
        "GpuEccUncorrectable-w",
    ),
    Case(
        "rows-used-up", Node(extra={f"vramledger_device_row_remap_failed{DEVICE}": 1}), 5.5,
        "GpuRowRemapFailed-w",
    ),
    Case("ghost", Node(extra={f"vramledger_device_ghost{DEVICE}": 1}), 10.5, "GpuGhost-w"),
    Case("reserved-unused", Node(extra=RESERVED | USES), 121, "GpuReservedUnused-w"),
    Case(
        "agent-socket-down", Node(extra={"vramledger_agent_socket_up{NODE}": 0}), 10.5,
        "VramLedgerAgentSocketDown-w",
    ),
    Case(
        "old-web-configuration", Node(extra={"vramledger_web_config_last_reload_successful{NODE}": 0}), 10.5,
        "VramLedgerWebConfigNotReloaded-w",
    ),
    Case(
        "storage-failing", Node(extra={"vramledger_storage_up{NODE}": 0}), 10.5, "VramLedgerStorageFailing-w"
    ),
    Case(
        "storage-that-was-full-for-a-moment",
        Node(extra={"vramledger_storage_up{NODE}": lambda m: 0 if 2 <= m < 9 else 1}), 30, "",
    ),
    Case(
        "rules-failing", Node(extra={FAILING.format("vramledger-growth"): lambda m: m}), 11,
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
    Case(
        "decommissioned-with-a-GPU-that-is-gone",
        Node(
            gpus=2,
            extra={
                f"vramledger_device_up{DEVICE}": changing_at(10, 1, None),
                "up{NODE}": changing_at(14, 1, None),
            },
            missing=lambda minute: minute >= 14,
        ),
        45, "",
    ),
    # --- nothing is wrong
    Case(
        "agent-degraded", Node([TRAINER], extra={'vramledger_agent_up{NODE,pid="9",reason="degraded"}': 0}),
        30, "",
    ),
]  # fmt: skip
