"""Show one node: its devices as ledgers, their holders, reservations against holdings, and what happened."""

from __future__ import annotations

from dataclasses import replace

from dashboards.src.dashboard import NODE, Dashboard, Row
from dashboards.src.lines import MEAN_STEP, joined, mean
from dashboards.src.panels import (
    AGE_WIDTH,
    BAD,
    BYTES,
    COUNT,
    GOOD,
    SECONDS,
    SHARE,
    YES_OR_NO,
    Column,
    Panel,
    Query,
    bar_chart,
    counted,
    ledger_graph,
    stat,
    state_timeline,
    table,
    time_series,
    value_mapping,
)
from dashboards.src.queries import (
    BLOCKER,
    DEVICE_LABELS,
    HOLDING_LABELS,
    NODE_LABELS,
    UUID_LABELS,
    age,
    device_bytes,
    device_utilisation,
    holdings,
    named_devices,
    named_in_full,
    selector,
    ten_largest,
    wasted_bytes,
)
from dashboards.src.reasons import (
    NO_AGENT,
    NO_SCHEDULER,
    Needs,
)
from dashboards.src.shared_panels import (
    ANY_DEVICE,
    BLOCKER_COLUMN,
    GPU_COLUMN,
    OWNER_COLUMN,
    PROCESS_COLUMN,
    PROGRAM_COLUMN,
    VERDICT_COLUMN,
    VERDICT_STEP_COLUMN,
    busy_without_work,
    exporters,
    firing_alert_table,
    holders,
    memory_limits,
    unowned,
    wasted,
    with_verdict_step,
)

NOT_AVAILABLE = "if the exporter is watching: no such sensor"
NOT_RESERVED = "not available: no scheduler reserves these GPUs"
DEVICE = "GPU {{device}}"
GHOST = value_mapping({0: ("no", GOOD), 1: ("yes: try it", BAD)})


def reachable_gpus() -> Panel:
    up = selector("vramledger_device_up", 'uuid!~"MIG-.*"')
    asleep = selector("vramledger_device_asleep", 'uuid!~"MIG-.*"')
    return stat(
        "GPUs reachable",
        "Whole GPUs whose ledger could be read in the newest sample; those that could not and do not sleep.",
        Query(f"sum({up})", "up"),
        Query(f"count({up} == 0 unless on ({NODE_LABELS}, uuid) {asleep}) or 0 * count({up})", "down"),
        unit=COUNT, needs=Needs(nothing="no GPU"),
    )  # fmt: skip


def memory_used() -> Panel:
    total = selector("vramledger_device_memory_total_bytes")
    return stat(
        "Memory used",
        "Share of all device memory that is in use, with the driver's reserve.",
        Query(f"1 - sum({device_bytes('free')}) / sum({total})"), unit=SHARE,
        needs=ANY_DEVICE,
    )  # fmt: skip


def active_share() -> Panel:
    total = selector("vramledger_device_memory_total_bytes")
    return stat(
        "In active use now",
        "Share of all device memory whose holders work, or may work. *Memory used* has the rest besides: of "
        "holders that do not work, of nobody, and the driver's.",
        Query(f"sum({device_bytes('active')}) / sum({total})"), unit=SHARE,
        needs=ANY_DEVICE, colour=GOOD,
    )  # fmt: skip


def device_ledgers() -> Panel:
    parts = f"sum by ({DEVICE_LABELS}, state) ({device_bytes('.+')})"
    total = f"sum by ({DEVICE_LABELS}) ({selector('vramledger_device_memory_total_bytes')})"
    share = f"{parts} / on ({DEVICE_LABELS}) group_left () {total}"
    named = f'label_replace({named_devices(share)}, "device", "GPU $1", "device", "(.*)")'
    return bar_chart(
        "Devices as ledgers",
        "One bar for each device: which share of its memory is held in which state now. A missing device "
        "does not answer, or is divided into instances that have bars of their own.",
        Query(f"sum by (device, state) ({named})"),
        row="device",
    )  # fmt: skip


def devices() -> Panel:
    by = f"sum by ({DEVICE_LABELS})"
    up = selector("vramledger_device_up")
    return table(
        "Devices",
        "The devices and their state. An empty cell is not available: the device does not answer or lacks "
        "the sensor. Busy without a holder: a CUDA program may clear it. A click on the GPU shows its ledger "
        "over time.",
        Query(f"{by} ({up})"),
        Query(f"count by ({DEVICE_LABELS}, name, gpu_instance) ({selector('vramledger_device_info')})"),
        Query(f"{by} ({selector('vramledger_device:memory_used:ratio')})"),
        Query(f"{by} ({wasted_bytes()})"),
        Query(f"{by} ({device_bytes('unattributed')})"),
        Query(f"{by} ({selector('vramledger_device_holders')})"),
        Query(f"{by} ({selector('vramledger_device_hidden_holders')})"),
        Query(f"{by} ({device_utilisation()})"),
        Query(f"{by} ({selector('vramledger_device_temperature_celsius')})"),
        Query(f"{by} ({selector('vramledger_device_ghost')})"),
        columns=[
            replace(GPU_COLUMN, width=72),
            Column("name", "Product", least=190),
            Column("gpu_instance", "MIG instance", width=92),
            Column("Value #A", "Answers", COUNT, mappings=[YES_OR_NO], width=85),
            Column("Value #C", "Memory used", SHARE, width=100),
            Column("Value #D", "Wasted", BYTES, width=100),
            Column("Value #E", "Unattributed", BYTES, width=118),
            Column("Value #F", "Holders", COUNT, width=80),
            Column("Value #G", "Hidden holders", COUNT, width=85),
            Column("Value #H", "Utilisation, 15 min", SHARE, width=116),
            Column("Value #I", "Temperature", "celsius", width=110),
            Column("Value #J", "Busy without a holder", COUNT, mappings=[GHOST], width=110),
        ],
        sort="gpu", ascending=True, width=24, height=8,
    )  # fmt: skip


def ledger_over_time() -> Panel:
    return ledger_graph(
        "Ledger over time",
        "Where each byte of the node's devices is; the parts add up to the total.",
        Query(f"sum by (state) ({device_bytes('.+')})", "{{state}}"),
        Query(f"sum({selector('vramledger_device_memory_total_bytes')})", "total"),
        total="total", width=24,
    )  # fmt: skip


def memory_used_by_device() -> Panel:
    used = f"sum by ({DEVICE_LABELS}) ({selector('vramledger_device:memory_used:ratio')})"
    return time_series(
        "Memory used, by device",
        "Share of each device that is in use; the ten fullest.",
        Query(named_devices(ten_largest(used, DEVICE_LABELS)), DEVICE),
        unit=SHARE, maximum=1,
    )  # fmt: skip


def device_reachability() -> Panel:
    return state_timeline(
        "Devices reachable",
        "Whether each device's whole ledger could be read. In a gap the exporter itself did not answer.",
        Query(
            named_devices(f"topk(64, sum by ({DEVICE_LABELS}) ({selector('vramledger_device_up')}))"), DEVICE
        ),
        mappings=[YES_OR_NO],
    )  # fmt: skip


def holders_short_of_memory() -> Panel:
    return time_series(
        "Holders that lack memory",
        "Processes that work and need more memory than there is. An idle holder on the same node then "
        "blocks them.",
        Query(
            f"sum({selector('vramledger_node:memory_short:count')})\n"
            f"or 0 * count({selector('vramledger_device:memory_used:ratio')})",
            "holders",
        ),
        unit=COUNT,
    )  # fmt: skip


def failed_allocations() -> Panel:
    when = selector("vramledger_owner_last_oom_timestamp_seconds")
    by = "owner_type, owner, framework"
    return table(
        "Owners that ran out of memory",
        "The ten newest failed allocations, by owner, also of programs that have ended. The table is "
        "empty if none failed, or if no program has an agent.",
        Query(f"bottomk(10, {age(f'max by ({by}) ({when})')})"),
        Query(f"sum by ({by}) ({selector('vramledger_owner_ooms_total')})"),
        columns=[
            OWNER_COLUMN,
            Column("framework", "Framework", width=95),
            Column("Value #A", "Ago", SECONDS, width=AGE_WIDTH),
            Column("Value #B", "Failed", COUNT, width=70),
        ],
        sort="Value #A", ascending=True, rows_of="Value #A", width=12, height=8,
    )  # fmt: skip


def failures_by_program() -> Panel:
    process = f"{NODE_LABELS}, pid"
    moment = selector("vramledger_framework_last_oom_timestamp_seconds")
    recent = f"max by ({process}) (time() - {moment} < 120)"
    victims = f"(sum by ({HOLDING_LABELS}) ({holdings()}) and on ({process}) {recent})"
    largest = f"topk by ({UUID_LABELS}) (1, {holdings()} unless on ({process}) {recent})"
    beside = f"0 * {victims} + on ({UUID_LABELS}) group_left ({BLOCKER}) {named_in_full(largest, BLOCKER)}"
    blocker = (
        f"topk by ({process}) (1, max by ({process}, {BLOCKER}) (max_over_time(({beside})[$__range:1m])))"
    )
    newest = f"last_over_time({moment}[$__range])"
    asked = f"last_over_time({selector('vramledger_framework_last_oom_requested_bytes')}[$__range])"
    names = f"max by ({process}, command, owner_type, owner) (max_over_time(({holdings()})[$__range:1m]))"
    named = f"topk by ({process}) (1, {names})"
    ages = age(f"max by ({process}, verdict) ({newest})")
    rows = f"bottomk(10, {ages} + on ({process}) group_left (command, owner_type, owner) 0 * {named})"
    return table(
        "Programs that ran out of memory",
        "The newest failed allocation of each program, also of programs that have ended: what it asked for, "
        "the verdict of its agent, what helps first, and who else held most on its GPUs just after it "
        "failed. The table is empty if none failed, or if no program has an agent.",
        Query(with_verdict_step(rows)),
        Query(f"max by ({process}) ({asked})"),
        Query(blocker),
        columns=[
            PROCESS_COLUMN,
            PROGRAM_COLUMN,
            OWNER_COLUMN,
            Column("Value #A", "Ago", SECONDS, width=AGE_WIDTH),
            Column("Value #B", "Asked", BYTES, width=80),
            VERDICT_COLUMN,
            VERDICT_STEP_COLUMN,
            BLOCKER_COLUMN,
            Column("Value #C", "Other held", BYTES, width=84),
        ],
        sort="Value #A", ascending=True, rows_of="Value #A", width=24, height=7,
    )  # fmt: skip


def reservations() -> Panel:
    by = f"{DEVICE_LABELS}, owner_type, owner"
    reserved = selector("vramledger_device_reservation_info")
    held = selector("vramledger_owner_memory_bytes")
    scheduled = f"and on ({DEVICE_LABELS}) {selector('vramledger_device_reservations')}"
    return table(
        "Reservations and holdings",
        "For each GPU that a scheduler assigns: for whom it is reserved, and what each owner holds of it. "
        "An owner without a reservation has no business there; one without a holding blocks the GPU. The "
        "table is empty if no scheduler reserves these GPUs.",
        Query(f"topk(50, max by ({by}) ({reserved}) or 0 * sum by ({by}) ({held} {scheduled}))"),
        Query(f"sum by ({by}) ({held})"),
        columns=[
            GPU_COLUMN,
            OWNER_COLUMN,
            Column("Value #A", "Reservation", COUNT, mappings=[YES_OR_NO], width=110),
            Column("Value #B", "Holds", BYTES, width=100),
        ],
        sort="Value #B", rows_of="Value #A", width=12, height=8,
    )  # fmt: skip


def held_without_reservation() -> Panel:
    unreserved = f"sum by ({DEVICE_LABELS}) ({selector('vramledger_device_unreserved_memory_bytes')})"
    return time_series(
        "Held without a reservation",
        "Memory on devices that a scheduler has reserved for another owner, or for no owner; the ten "
        "devices with the most.",
        Query(named_devices(ten_largest(unreserved, DEVICE_LABELS)), DEVICE),
        unit=BYTES, absent=NOT_RESERVED,
    )  # fmt: skip


def hardware() -> list[Panel]:
    def ten(figure: str) -> str:
        return named_devices(ten_largest(f"sum by ({DEVICE_LABELS}) ({figure})", DEVICE_LABELS))

    return [
        joined(
            time_series(
                title, about,
                Query(ten(figure), DEVICE),
                unit=unit, maximum=maximum, absent=NOT_AVAILABLE, step=step, width=8,
            )
        )
        for title, about, figure, unit, maximum, step in (
            (
                "Utilisation",
                "Share of time with a kernel running, as a mean of 2 minutes or more, without small ones.",
                mean("vramledger_device_utilization_ratio"),
                SHARE,
                1,
                MEAN_STEP,
            ),
            (
                "Power",
                "Power draw of each board, as a mean of 2 minutes or more.",
                mean("vramledger_device_power_watts"),
                "watt",
                None,
                MEAN_STEP,
            ),
            (
                "Temperature",
                "Temperature of each GPU chip.",
                selector("vramledger_device_temperature_celsius"),
                "celsius",
                None,
                "",
            ),
        )
    ]  # fmt: skip


def dashboard() -> Dashboard:
    """Return the dashboard of a node."""
    return Dashboard(
        NODE,
        "Node",
        "The devices of one node as ledgers, who holds them, and what happened.",
        [
            Row(
                "Now",
                [
                    exporters(),
                    reachable_gpus(),
                    memory_used(),
                    active_share(),
                    wasted(),
                    unowned(),
                    device_ledgers(),
                    devices(),
                ],
            ),
            Row("Holders", [counted(holders(height=11), "holders"), busy_without_work()]),
            Row(
                "What happened",
                [
                    counted(firing_alert_table(width=24), "firing alerts", alerting=True),
                    counted(failures_by_program(), "programs out of memory", NO_AGENT),
                    counted(failed_allocations(), "owners out of memory", NO_AGENT),
                    device_reachability(),
                ],
            ),
            Row("Over time", [ledger_over_time(), memory_used_by_device(), holders_short_of_memory()]),
            Row(
                "Reservations and limits",
                [
                    counted(reservations(), "owners of reserved GPUs", NO_SCHEDULER),
                    held_without_reservation(),
                    memory_limits(),
                ],
                collapsed=True,
            ),
            Row("Hardware", hardware(), collapsed=True),
        ],
        one_node=True,
    )
