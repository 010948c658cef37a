"""Two nodes for each threshold of each alert: one just within it, one at it; from the thresholds themselves.

Nothing here repeats a number of ``alerts/thresholds.yml``: with other thresholds these are other nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tests.support.alerts.nodes import Holder, Node, Values, changing_at, uuid
from tests.support.host.model import GIB
from vramledger.model.reading import Rank

BYTE = 1 / GIB
"""In GiB. Bytes are whole, so at a share the holder of the byte above it is named."""
SLIGHTLY = 0.001
"""GiB of 100, for a quotient whose last bit is not promised."""

NEARLY = 0.02
"""A share, where growth is measured over spans: above and below a threshold of it."""

DEVICE = f'NODE,gpu="0",uuid="{uuid(0)}"'
Thresholds = Mapping[str, float]


@dataclass(frozen=True)
class Boundary:
    """A rule at one of its thresholds.

    Attributes:
        rule: the alert, its severity, and what else tells it from another rule of the name.
        threshold: its name in ``thresholds.yml``, or what is asked where it is a yes or a no.
        quiet: a node just on the quiet side.
        fires: a node at the threshold or just beyond it.
        begins: the minute from which the condition holds there; None where that is not a whole minute, as
            with growth, which on the quiet side may look like more while it begins, and must not fire.
        minutes: how long the nodes are watched, besides ``begins`` and what the rule waits.
    """

    rule: str
    threshold: str
    quiet: Node
    fires: Node
    begins: float | None = 0.0
    minutes: float = 1.0


def torch(allocated: Values, reserved: Values = 0, overhead: float = 0.5, **figures: Values) -> Holder:
    """Return a torch program whose agent reports this number of GiB."""

    def value(values: Values, minute: float) -> float:
        return (values(minute) if callable(values) else values) or 0.0

    def pool(minute: float) -> float:
        return max(value(allocated, minute), value(reserved, minute))

    agent: dict[str, Values] = {
        "torch_allocated_bytes": allocated,
        "torch_reserved_bytes": pool,
    }
    return Holder(7, lambda minute: pool(minute) + overhead, agent=agent | figures)


def with_extra(name: str, values: Values) -> Node:
    """Return a node with one series that differs from those of other nodes."""
    return Node(extra={name: values})


def boundaries(t: Thresholds, waits: Mapping[str, float]) -> list[Boundary]:
    """Return every boundary.

    Args:
        t: the thresholds in bytes, seconds and shares.
        waits: minutes of ``for`` by rule.
    """
    return [
        *exporter_boundaries(t),
        *device_boundaries(t, waits),
        *state_boundaries(t),
        *idle_boundaries(t, waits),
        *framework_boundaries(t),
        *growth_boundaries(t, waits),
        *job_boundaries(t),
    ]


def exporter_boundaries(t: Thresholds) -> list[Boundary]:
    """Return the boundaries of the alerts about the exporter."""
    stamp, success = (
        "vramledger_sample_timestamp_seconds{NODE}",
        'vramledger_collector_success{NODE,collector="x"}',
    )
    skew, blind = t["clock_skew"], "vramledger_host_pid_namespace{NODE}"
    failing = 'prometheus_rule_{}_total{{NODE,rule_group="/etc/x.rules.yml;vramledger-growth"}}'
    slowest = 1.75  # minutes; a look back over two sees it once at least
    trainer = Holder(9, 30)
    return [
        Boundary("VramLedgerExporterDown-warning", "answers", Node(), Node(missing=lambda m: m >= 2), 2),
        *(
            Boundary(
                rule, "rises", with_extra(counter, 3), with_extra(counter, lambda m: max(3.0, m - 2)), 5.5,
            )
            for rule, counter in (
                ("VramLedgerRulesFailing-page", failing.format("evaluation_failures")),
                ("VramLedgerRulesFailing-page", failing.format("group_iterations_missed")),
            )
        ),
        *(
            Boundary(rule, "set", with_extra(flag, 1), with_extra(flag, changing_at(5, 1, 0)), 5)
            for rule, flag in (
                ("VramLedgerAgentSocketDown-warning", "vramledger_agent_socket_up{NODE}"),
                ("VramLedgerStorageFailing-warning", "vramledger_storage_up{NODE}"),
                (
                    "VramLedgerWebConfigNotReloaded-warning",
                    "vramledger_web_config_last_reload_successful{NODE}",
                ),
            )
        ),
        Boundary("VramLedgerSamplingFailed-warning", "reads", Node(), Node(driver_up=0)),
        Boundary(
            "VramLedgerSamplingStalled-warning", "moves",
            with_extra(stamp, lambda m: 60 * slowest * ((m + 1.5) // slowest)),
            with_extra(stamp, lambda m: 60 * min(m, 5)), 7,
        ),
        Boundary("VramLedgerBlind-warning-pid_namespace", "sees", Node(), with_extra(blind, 0)),
        Boundary(
            "VramLedgerBlind-warning-privileges", "unknown_bytes",
            Node(unknown=t["unknown_bytes"] / GIB - BYTE), Node(unknown=t["unknown_bytes"] / GIB),
        ),
        Boundary(
            "VramLedgerCollectorFailing-warning", "succeeds",
            with_extra(success, lambda m: float(m % slowest == 0)),
            with_extra(success, changing_at(5, 1, 0)), 7,
        ),
        Boundary(
            "VramLedgerClockSkew-info", "clock_skew",
            with_extra(stamp, lambda m: m * 60 - skew), with_extra(stamp, lambda m: m * 60 - skew - 1), 0.5,
        ),
        Boundary(
            "VramLedgerClockSkew-info", "clock_skew",
            with_extra(stamp, lambda m: m * 60 + skew), with_extra(stamp, lambda m: m * 60 + skew + 1), 0.5,
        ),
        *(
            Boundary(
                "VramLedgerSeriesDropped-info", f"{what} shown",
                with_extra(f"vramledger_{what}_dropped{{{DEVICE}}}", 0),
                with_extra(f"vramledger_{what}_dropped{{{DEVICE}}}", changing_at(5, 0, 1)), 5,
            )
            for what in ("processes", "owners")
        ),
        Boundary(
            "VramLedgerAgentSilent-info", "speaks",
            Node([replace(trainer, agent_up=1)]), Node([replace(trainer, agent_up=changing_at(5, 1, 0))]), 5,
        ),
    ]  # fmt: skip


def device_boundaries(t: Thresholds, waits: Mapping[str, float]) -> list[Boundary]:
    """Return the boundaries of the alerts about devices and reservations."""
    up, hidden = f"vramledger_device_up{{{DEVICE}}}", f"vramledger_device_hidden_holders{{{DEVICE}}}"
    full = 100 * (1 - t["nearly_full_free_share"])
    other = {'vramledger_device_up{NODE,gpu="0",uuid="GPU-new"}': changing_at(10, None, 1)}
    return [
        Boundary("GpuDeviceLost-page", "answers", Node(), with_extra(up, changing_at(5, 1, 0)), 5),
        # It is in the look back for three minutes more.
        Boundary(
            "GpuDeviceLost-page", "listed",
            Node(gpus=2, extra={up: changing_at(10, 1, None)} | other),
            Node(gpus=2, extra={up: changing_at(10, 1, None)}), 13,
        ),
        Boundary("GpuDriverLost-page", "answers", Node(), Node(driver_up=changing_at(5, 1, 0)), 5),
        Boundary(
            "GpuMemoryNearlyFull-info", "nearly_full_free_share",
            Node([Holder(7, full - SLIGHTLY)]), Node([Holder(7, full + SLIGHTLY)]),
        ),
        *_filling(t, waits["GpuMemoryFilling-warning"]),
        *_unattributed(t),
        *_hardware(),
        Boundary("GpuHiddenHolder-info", "listed", with_extra(hidden, 0), with_extra(hidden, 1)),
        *_reserved(t),
        Boundary(
            "GpuMemoryLimitNear-info", "limit_share",
            Node([Holder(7, 30)], extra=limited(100 * t["limit_share"] - SLIGHTLY)),
            Node([Holder(7, 30)], extra=limited(100 * t["limit_share"])),
        ),
        Boundary(
            "GpuOwnerOverBudget-warning", "budget", _with_budget("quiet", 0), _with_budget("loud", BYTE),
        ),
    ]  # fmt: skip


def _hardware() -> list[Boundary]:
    """Return the boundaries of faults of the hardware: a count that does not change, and one that rises."""

    def counting(rule: str, series: str, label: str) -> Boundary:
        name = f"vramledger_device_{series}{{{DEVICE},{label}}}"
        return Boundary(
            rule, "rises", with_extra(name, 4), with_extra(name, changing_at(30, 4, 5)), 30,
        )  # fmt: skip

    def flag(rule: str, series: str) -> Boundary:
        name = f"vramledger_device_{series}{{{DEVICE}}}"
        return Boundary(rule, "set", with_extra(name, 0), with_extra(name, changing_at(5, 0, 1)), 5)

    xid = f'vramledger_device_xid_errors_total{{{DEVICE},xid="%s"}}'
    granted = f'vramledger_device_reservation_info{{{DEVICE},owner_type="slurm",owner="%s"}}'
    uses = {use: f'vramledger_device_reservations{{{DEVICE},use="{use}"}}' for use in ("held", "unheld")}
    one, both = {granted % 1: 1}, {granted % 1: 1, granted % 2: 1}
    return [
        counting("GpuXidError-warning", "xid_errors_total", 'xid="94"'),
        Boundary(
            "GpuXidError-warning", "fault_xids",
            with_extra(xid % 13, changing_at(30, None, 1)),
            with_extra(xid % 79, changing_at(30, None, 1)), 30,
        ),
        counting("GpuEccUncorrectable-warning", "ecc_errors_total", 'type="uncorrected"'),
        flag("GpuRowRemapFailed-warning", "row_remap_failed"),
        flag("GpuGhost-warning", "ghost"),
        Boundary(
            "GpuReservedUnused-warning", "unheld",
            Node(extra={**one, uses["held"]: 1, uses["unheld"]: 0}),
            Node(extra={**one, uses["held"]: 0, uses["unheld"]: 1}),
        ),
        Boundary(
            "GpuReservedUnused-warning", "all of them",
            Node(extra={**both, uses["held"]: 1, uses["unheld"]: 1}),
            Node(extra={**both, uses["held"]: 0, uses["unheld"]: 2}),
        ),
    ]  # fmt: skip


def _filling(t: Thresholds, wait: float) -> list[Boundary]:
    rule, begins = "GpuMemoryFilling-warning", 30.0
    after = begins + wait + 2
    minutes, share = t["filling_within"] / 60, 100 * t["filling_free_share"]

    def in_time(crosses: float) -> Node:
        # Half of what may be free is left when the time is; so slow that it was never more.
        rate = share / 2 / minutes
        return Node([Holder(7, lambda m: 100 - share / 2 - rate * (crosses - 0.25 - m))])

    def in_share(crosses: float) -> Node:
        rate = 2 * share / minutes
        return Node([Holder(7, lambda m: 100 - share - rate * (crosses - 0.25 - m))])

    return [
        Boundary(rule, "filling_within", in_time(after), in_time(begins), begins),
        Boundary(rule, "filling_free_share", in_share(after), in_share(begins), begins),
    ]


def _unattributed(t: Thresholds) -> list[Boundary]:
    rule, share, least = "GpuMemoryUnattributed-warning", t["unattributed_share"], t["unattributed_bytes"]
    small, large = least / share / GIB / 2, least / share / GIB * 2
    at_small, at_large = least / GIB, share * large
    return [
        Boundary(
            rule, "unattributed_bytes",
            Node(unattributed=at_small - BYTE, total=small), Node(unattributed=at_small, total=small),
        ),
        Boundary(
            rule, "unattributed_share",
            Node(unattributed=at_large - BYTE, total=large),
            Node(unattributed=at_large + BYTE, total=large),
        ),
    ]  # fmt: skip


def _reserved(t: Thresholds) -> list[Boundary]:
    least = t["orphaned_bytes"] / GIB

    def node(held: float, unreserved: float, owner: str = "12") -> Node:
        extra: dict[str, Values] = {
            f'vramledger_device_reservation_info{{{DEVICE},owner_type="user",owner="{owner}"}}': 1,
            f"vramledger_device_unreserved_memory_bytes{{{DEVICE}}}": unreserved * GIB,
        }
        return Node([Holder(9, held)], extra=extra)

    rule = "GpuMemoryOutsideReservation-warning"
    return [
        Boundary(rule, "orphaned_bytes", node(30, least - BYTE), node(30, least)),
        Boundary(rule, "orphaned_bytes", node(least - BYTE, 30), node(least, 30)),
        Boundary(rule, "reserved", node(30, 30, owner="ann"), node(30, 30)),
    ]


def limited(used: float) -> dict[str, Values]:
    """Return the series of an owner that may take 100 GiB, of which so many are taken."""
    owner = 'NODE,gpu="0",uuid="GPU-00000000-0000-4000-8000-000000000000",owner_type="user",owner="ann"'
    return {
        f"vramledger_owner_memory_limit_used_bytes{{{owner}}}": used * GIB,
        f'vramledger_owner_memory_limit_bytes{{{owner},type="max"}}': 100 * GIB,
    }


def _with_budget(owner: str, more: float) -> Node:
    # One Prometheus has one set of budgets: each node's owner is another one.
    name = f'vramledger_owner:memory_budget_bytes:threshold{{owner_type="user",owner="{owner}"}}'
    return Node([Holder(9, 29 + more, owner=owner)], extra={name: 29 * GIB})


def state_boundaries(t: Thresholds) -> list[Boundary]:
    """Return the boundaries of the alerts about a holder's state, policy or size."""

    def of_state(rule: str, state: str, threshold: str) -> Boundary:
        least = t[threshold] / GIB
        quiet, fires = (Node([Holder(7, gib, state, since=0)]) for gib in (least - BYTE, least))
        return Boundary(rule, threshold, quiet, fires)

    share, context = t["orphaned_page_share"], t["stray_context_bytes"]
    small = t["orphaned_bytes"] / share / GIB / 2
    orphan = Holder(7, t["orphaned_bytes"] / GIB, "orphaned", since=0)
    works = f'vramledger_process_orphan_working{{{DEVICE},pid="7"}}'
    greedy = Holder(7, 100 * t["preallocated_share"] + BYTE, framework="tensorflow", policy="preallocate")
    beside = Holder(9, t["shared_bytes"] / GIB, owner="bob")
    stray = Holder(7, context / GIB, "idle", sm=None)
    home = replace(stray, gpu=1, gib=context * t["stray_context_times"] / GIB + BYTE, state="active")
    return [
        of_state("GpuMemoryDead-page", "dead", "dead_bytes"),
        of_state("GpuMemoryOrphaned-warning", "orphaned", "orphaned_bytes"),
        of_state("GpuMemoryStuck-page", "stuck", "stuck_bytes"),
        Boundary(
            "GpuMemoryOrphaned-page", "works",
            Node([replace(orphan, gib=50)], extra={works: 1}),
            Node([replace(orphan, gib=50)], extra={works: 0}),
        ),
        of_state("GpuMemoryZombie-warning", "zombie", "zombie_bytes"),
        of_state("GpuMemoryStopped-warning", "stopped", "stopped_bytes"),
        Boundary(
            "GpuMemoryOrphaned-page", "orphaned_page_share",
            Node([replace(orphan, gib=100 * share - BYTE)]),
            Node([replace(orphan, gib=100 * share + BYTE)]),
        ),
        Boundary(
            "GpuMemoryOrphaned-page", "orphaned_bytes",
            Node([replace(orphan, gib=t["orphaned_bytes"] / GIB - BYTE)], total=small),
            Node([orphan], total=small),
        ),
        Boundary(
            "GpuMemoryPreallocatedShared-warning", "preallocated_share",
            Node([replace(greedy, gib=100 * t["preallocated_share"] - BYTE), beside]), Node([greedy, beside]),
        ),
        Boundary(
            "GpuMemoryPreallocatedShared-warning", "shared", Node([greedy]), Node([greedy, beside]),
        ),
        Boundary(
            "GpuMemoryPreallocatedShared-warning", "shared_bytes",
            Node([greedy, replace(beside, gib=t["shared_bytes"] / GIB - BYTE)]), Node([greedy, beside]),
        ),
        Boundary(
            "GpuStrayContext-info", "stray_context_bytes",
            Node([replace(stray, gib=context / GIB + BYTE), replace(home, gib=50)], gpus=2),
            Node([stray, replace(home, gib=50)], gpus=2),
        ),
        Boundary(
            "GpuStrayContext-info", "stray_context_times",
            Node([stray, replace(home, gib=context * t["stray_context_times"] / GIB - BYTE)], gpus=2),
            Node([stray, home], gpus=2),
        ),
    ]  # fmt: skip


def idle_boundaries(t: Thresholds, waits: Mapping[str, float]) -> list[Boundary]:
    """Return the boundaries of the alerts about unused memory."""
    idle = Holder(7, 30, "idle", sm=None)
    ledger = replace(idle, notebook="a.ipynb")
    little = t["notebook_bytes"] / GIB
    return [
        *_idle(t, waits, "GpuMemoryHoarded-warning", idle, "hoarded_idle"),
        *_idle(t, waits, "GpuMemoryHoardedWhileShort-page", idle, "hoarded_short_idle"),
        *_short(t, waits["GpuMemoryHoardedWhileShort-page"]),
        *_idle(t, waits, "GpuNotebookIdle-warning", ledger, "notebook_idle"),
        Boundary(
            "GpuNotebookIdle-warning", "notebook_bytes",
            Node([replace(ledger, gib=little - BYTE)]), Node([replace(ledger, gib=little)]),
        ),
    ]  # fmt: skip


def _wants(t: Thresholds) -> Holder:
    """Return a program that has to empty its cache again and again."""
    return replace(torch(10, torch_alloc_retries_total=lambda m: m * t["allocator_retries"]), pid=8)


def _idle(
    t: Thresholds, waits: Mapping[str, float], rule: str, holder: Holder, threshold: str
) -> list[Boundary]:
    """Return the boundary of the time, and of the bytes if it is hoarding."""
    short = [_wants(t)] if rule.startswith("GpuMemoryHoardedWhileShort") else []
    enough, begins = t[threshold] / 60, 2.0
    # It is idle for a second too little when the watch ends, a minute after the alert on the other node.
    late = begins + waits[rule] + 1 - enough + 1 / 60
    long = [
        Boundary(
            rule, threshold,
            Node([replace(holder, since=late), *short]),
            Node([replace(holder, since=begins - enough), *short]), begins,
        )
    ]  # fmt: skip
    if holder.notebook:
        return long
    share, least = t["hoarded_share"], t["hoarded_bytes"] / GIB
    small, large = least / share / 2, least / share * 2
    idle = replace(holder, since=-enough - 1)
    # No program lacks memory before there are two scrapes.
    first = 0.5 if short else 0.0
    return [
        *long,
        Boundary(
            rule, "hoarded_share",
            Node([replace(idle, gib=share * small - BYTE), *short], total=small),
            Node([replace(idle, gib=share * small + BYTE), *short], total=small), first,
        ),
        Boundary(
            rule, "hoarded_bytes",
            Node([replace(idle, gib=least - BYTE), *short], total=large),
            Node([replace(idle, gib=least), *short], total=large), first,
        ),
    ]  # fmt: skip


def _short(t: Thresholds, wait: float) -> list[Boundary]:
    rule, begins = "GpuMemoryHoardedWhileShort-page", 25.0
    idle = Holder(7, 30, "idle", sm=None, since=-t["hoarded_short_idle"] / 60 - 1)
    free, enough = 100 * t["short_free_share"], math.ceil(t["short_retries"])

    def retries(times: int) -> Holder:
        return replace(torch(10, torch_alloc_retries_total=changing_at(20, 0, times)), pid=8)

    def grows(crosses: float) -> Node:
        return Node([idle, Holder(8, lambda m: 70 - free - 0.2 * (crosses - 0.25 - m))])

    return [
        Boundary(rule, "short_free_share", grows(begins + wait + 2), grows(begins), begins),
        Boundary(rule, "short_retries", Node([idle, retries(enough - 1)]), Node([idle, retries(enough)]), 20),
        Boundary(rule, "somebody", Node([idle, replace(torch(10), pid=8)]), Node([idle, _wants(t)]), 0.5),
    ]


def framework_boundaries(t: Thresholds) -> list[Boundary]:
    """Return the boundaries of the alerts about allocators."""
    # In whole bytes, so that no difference is rounded.
    share, free = math.ceil(100 * GIB * t["cache_share"]) / GIB, 100 * t["filling_free_share"]
    tiny = (
        math.ceil(share / (t["cache_factor"] + 1) * 1024) / 1024
    )  # with the cache at its share far below it
    cache, less = torch(tiny, share + tiny), torch(tiny, share + tiny - BYTE)
    beside = Holder(9, 100 - free - 0.5 - share - tiny, owner="bob")
    more, fewer = (replace(beside, gib=100 - free - 0.5 - share - tiny + by) for by in (1, -SLIGHTLY))
    hardly = replace(beside, gib=100 - free - 0.5 - share - tiny + SLIGHTLY)
    third = (1 / t["cache_factor"]) * (50 * GIB) / GIB
    return [
        Boundary("GpuFrameworkCacheHigh-info", "cache_share", Node([less]), Node([cache])),
        Boundary(
            "GpuFrameworkCacheHigh-info", "cache_factor",
            Node([torch(third + BYTE, 50)]), Node([torch(third - BYTE, 50)]),
        ),
        Boundary(
            "GpuFrameworkCacheHigh-warning", "cache_share", Node([less, more]), Node([cache, more]),
        ),
        Boundary(
            "GpuFrameworkCacheHigh-warning", "filling_free_share",
            Node([cache, fewer]), Node([cache, hardly]),
        ),
        Boundary(
            "GpuFrameworkCacheHigh-warning", "shared",
            Node([torch(tiny, 99)]), Node([torch(tiny, 97), Holder(9, 2, owner="bob")]),
        ),
        *_fragmented(t),
        *_counters(t),
    ]  # fmt: skip


def _fragmented(t: Thresholds) -> list[Boundary]:
    least, share = t["fragmented_bytes"] / GIB, t["fragmented_share"]

    def node(reserved: float, split: float) -> Node:
        return Node([torch(1, reserved, torch_inactive_split_bytes=split)])

    small, large = least / share / 2, least / share * 2
    rule = "GpuMemoryFragmented-info"
    return [
        Boundary(rule, "fragmented_bytes", node(small, least - BYTE), node(small, least)),
        Boundary(
            rule, "fragmented_share", node(large, share * large - BYTE), node(large, share * large + BYTE)
        ),
    ]


def _counters(t: Thresholds) -> list[Boundary]:
    enough = math.ceil(t["allocator_retries"])

    def tries(times: int) -> Node:
        return Node([torch(10, torch_alloc_retries_total=lambda m: min(times, 4 * max(0.0, m - 20)))])

    oom = 'vramledger_framework_last_oom_timestamp_seconds{NODE,pid="9",framework="jax",verdict="too_big"}'
    ended = 'vramledger_owner_last_oom_timestamp_seconds{NODE,owner_type="pod",owner="a/b",framework="jax"}'
    trainer = Holder(9, 30)
    return [
        Boundary(
            "GpuAllocatorRetries-warning", "allocator_retries", tries(enough - 1), tries(enough),
            math.ceil((20 + enough / 4) * 2) / 2,
        ),
        Boundary(
            "GpuOutOfMemory-warning", "any",
            Node([torch(10, torch_ooms_total=0)]),
            Node([torch(10, torch_ooms_total=changing_at(20, 0, 1))]), 20,
        ),
        Boundary(
            "GpuOutOfMemory-warning-agent", "within 600 s",
            Node([trainer], extra={oom: -600}), Node([trainer], extra={oom: -599}),
        ),
        Boundary(
            "GpuOutOfMemory-warning-owner", "within 600 s",
            Node(extra={ended: -600}), Node(extra={ended: -599}),
        ),
    ]  # fmt: skip


def growth_boundaries(t: Thresholds, waits: Mapping[str, float]) -> list[Boundary]:
    """Return the boundaries of the alerts about growth."""
    leak, growing = "GpuMemoryLeakSuspected-warning", "GpuMemoryGrowing-warning"

    def slope(share: float, span: float, *, agent: bool) -> list[Node]:
        rates = [100 * share / span * (1 + by) for by in (-NEARLY, NEARLY)]
        return [_grower(lambda m, rate=rate: 10 + rate * m, agent=agent) for rate in rates]  # type: ignore[misc]

    def of_span(rule: str, threshold: str, span: float, ends: float) -> Boundary:
        quiet, fires = slope(t[threshold], span, agent=rule == leak)
        return Boundary(rule, threshold, quiet, fires, None, ends)

    def levelling(steady: float) -> Node:
        return _grower(lambda m: 10 + 20 * (1 - steady ** (m / 15)), agent=True)

    return [
        # They end before the next longer span would see what the shorter one does not.
        of_span(leak, "growth_fast_share", 6, 16),
        of_span(leak, "growth_medium_share", 30, 42),
        of_span(leak, "growth_slow_share", 180, 222),
        of_span(growing, "growth_medium_share", 30, 42),
        of_span(growing, "growth_slow_share", 180, 222),
        Boundary(
            leak, "growth_steady", levelling(t["growth_steady"] * (1 - NEARLY)),
            levelling(t["growth_steady"] * (1 + NEARLY)), None, 50,
        ),
        *_about_to_fill(t, waits["GpuMemoryAboutToFill-page"]),
    ]  # fmt: skip


def _grower(values: Callable[[float], float], *, agent: bool) -> Node:
    return Node([torch(values) if agent else Holder(7, values)])


def _about_to_fill(t: Thresholds, wait: float) -> list[Boundary]:
    rule, begins = "GpuMemoryAboutToFill-page", 45.0
    after = begins + wait + 2
    minutes, used = t["fill_within"] / 60, 100 * t["fill_used_share"]

    def in_time(crosses: float) -> Node:
        left = (100 - used) / 2
        return Node([Holder(7, lambda m: 100 - left - left / minutes * (crosses - 0.25 - m))])

    def in_share(crosses: float) -> Node:
        rate = 2 * (100 - used) / minutes
        return Node([Holder(7, lambda m: used - rate * (crosses - 0.25 - m))])

    return [
        Boundary(rule, "fill_within", in_time(after), in_time(begins), begins),
        Boundary(rule, "fill_used_share", in_share(after), in_share(begins), begins),
    ]


def _always_for(minutes: float) -> Callable[[float], float]:
    """Return the minute so many minutes ago, the first one before."""
    return lambda now: max(0.0, now - minutes)


def job_boundaries(t: Thresholds) -> list[Boundary]:
    """Return the boundaries of the alerts about ranks that wait."""
    table = []
    for rule, threshold, other in (
        ("GpuJobHung-page", "hung_after", "stopped"),
        ("GpuJobHung-warning", "hung_idle_after", "idle"),
        ("GpuBusyWithoutWork-info", "busy_without_work", "active"),
    ):
        most = t[threshold] / 60
        quiet, fires = (
            Node(
                [
                    Holder(7, 30, other, sm=None, gpu=1, rank=Rank(0, 2, f"{rule} {name}")),
                    Holder(8, 30, rank=Rank(1, 2, f"{rule} {name}"), waiting=since),
                ],
                gpus=2,
            )
            for name, since in (("quiet", _always_for(most - 0.25)), ("fires", 0))
        )
        table.append(Boundary(rule, threshold, quiet, fires, math.ceil(most * 2) / 2))
    return table
