"""Two nodes for each threshold of each alert: one just within it, one at it; from the thresholds themselves.

Nothing here repeats a number of ``alerts/thresholds.yml``: with other thresholds these are other nodes.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from tests.support.alerts.boundary import BYTE, Boundary, around, between, changes, holding, shown
from tests.support.alerts.nodes import Holder, Node, Values, changing_at
from tests.support.alerts.parts import LAST_OOM, STAMP, TRAINER, on_gpu, series, torch
from tests.support.host.model import GIB
from vramledger.model.reading import Rank

SLIGHTLY = 0.001
"""GiB of 100, for a quotient whose last bit is not promised."""

NEARLY = 0.02
"""A share, where growth is measured over spans: above and below a threshold of it."""

Thresholds = Mapping[str, float]


def boundaries(t: Thresholds, waits: Mapping[str, float]) -> list[Boundary]:
    """Return every boundary, by thresholds in bytes, seconds and shares, and the minutes of ``for``."""
    return [
        *exporter_boundaries(t), *device_boundaries(t, waits), *state_boundaries(t),
        *idle_boundaries(t, waits), *framework_boundaries(t), *growth_boundaries(t, waits),
        *job_boundaries(t),
    ]  # fmt: skip


def exporter_boundaries(t: Thresholds) -> list[Boundary]:
    blind, success = series("host_pid_namespace"), series("collector_success", collector="x")
    skew, losing = t["clock_skew"], t["lost_scrapes_share"]
    failing = 'prometheus_rule_{}_total{{NODE,rule_group="/etc/x.rules.yml;vramledger-growth"}}'
    slowest = 1.75  # minutes; a look back over two sees it once at least

    def rising(minute: float) -> float:
        return max(3.0, minute - 2)

    def silent(minute: float) -> Node:
        return Node([Holder(9, 30, agent_up=changing_at(minute, 1, 0))])

    return [
        Boundary("VramLedgerExporterDown-warning", "answers", Node(), Node(missing=lambda m: m >= 2), 2),
        Boundary(
            "VramLedgerExporterDown-warning-sometimes", "lost_scrapes_share",
            _losing(losing - NEARLY), _losing(losing + 5 * NEARLY), None, 40,
        ),
        *(
            shown("VramLedgerRulesFailing-page", "rises", failing.format(what), 3, rising, begins=5.5)
            for what in ("evaluation_failures", "group_iterations_missed")
        ),
        *(
            changes(f"VramLedger{rule}-warning", "set", series(flag), 1, 0)
            for rule, flag in (
                ("AgentSocketDown", "agent_socket_up"),
                ("StorageFailing", "storage_up"),
                ("WebConfigNotReloaded", "web_config_last_reload_successful"),
            )
        ),
        Boundary("VramLedgerSamplingFailed-warning", "reads", Node(), Node(driver_up=0)),
        shown(
            "VramLedgerSamplingStalled-warning", "moves", STAMP,
            lambda m: 60 * slowest * ((m + 1.5) // slowest), lambda m: 60 * min(m, 5), begins=7,
        ),
        shown("VramLedgerBlind-warning-pid_namespace", "sees", blind, 1, 0),
        around(
            "VramLedgerBlind-warning-privileges", "unknown_bytes", lambda gib: Node(unknown=gib),
            t["unknown_bytes"] / GIB,
        ),
        shown(
            "VramLedgerCollectorFailing-warning", "succeeds", success,
            lambda m: float(m % slowest == 0), changing_at(5, 1, 0), begins=7,
        ),
        *(
            between(
                "VramLedgerClockSkew-info", "clock_skew",
                lambda off, sign=sign: Node(extra={STAMP: lambda m: m * 60 + sign * off}),  # type: ignore[misc]
                skew, skew + 1, begins=0.5,
            )
            for sign in (-1, 1)
        ),
        *(
            changes("VramLedgerSeriesDropped-info", f"{what} shown", on_gpu(f"{what}_dropped"), 0, 1)
            for what in ("processes", "owners")
        ),
        between("VramLedgerAgentSilent-info", "speaks", silent, math.inf, 5, begins=5),
    ]  # fmt: skip


def _losing(share: float) -> Node:
    """Return a node that does not answer this share of the scrapes, spread evenly."""
    return Node(missing=lambda m: int((m * 4 + 1) * share) > int(m * 4 * share))


def device_boundaries(t: Thresholds, waits: Mapping[str, float]) -> list[Boundary]:
    up, hidden = on_gpu("device_up"), on_gpu("device_hidden_holders")
    full, limit = 100 * (1 - t["nearly_full_free_share"]), 100 * t["limit_share"]

    def near_limit(used: float) -> Node:
        return Node([Holder(7, 30)], extra=limited(used))

    other = {on_gpu("device_up", uuid="GPU-new"): changing_at(10, None, 1)}
    return [
        changes("GpuDeviceLost-page", "answers", up, 1, 0),
        # It is in the look back for three minutes more.
        Boundary(
            "GpuDeviceLost-page", "listed",
            Node(gpus=2, extra={up: changing_at(10, 1, None)} | other),
            Node(gpus=2, extra={up: changing_at(10, 1, None)}), 13,
        ),
        Boundary("GpuDriverLost-page", "answers", Node(), Node(driver_up=changing_at(5, 1, 0)), 5),
        between(
            "GpuMemoryNearlyFull-info", "nearly_full_free_share", holding(Holder(7, 0)),
            full - SLIGHTLY, full + SLIGHTLY,
        ),
        *_filling(t, waits, agent=False),
        *_unattributed(t),
        *_hardware(t),
        shown("GpuHiddenHolder-info", "listed", hidden, 0, 1),
        *_reserved(t),
        between("GpuMemoryLimitNear-info", "limit_share", near_limit, limit - SLIGHTLY, limit),
        Boundary(
            "GpuOwnerOverBudget-warning", "budget", _with_budget("quiet", 0), _with_budget("loud", BYTE),
        ),
    ]  # fmt: skip


def _hardware(t: Thresholds) -> list[Boundary]:
    """Return the boundaries of faults of the hardware: a count that does not change, and one that rises."""

    def counting(rule: str, name: str, **label: object) -> Boundary:
        return changes(rule, "rises", on_gpu(name, 0, **label), 4, 5, 30)

    def with_xid(code: int) -> Node:
        name = on_gpu("device_xid_errors_total", xid=code)
        return Node(extra={name: changing_at(30, None, 1)})

    action = on_gpu("device_recovery_action", action="%s")
    unused = t["reserved_unused"] / 60

    def granting(jobs: int, held: float, unheld: Values) -> Node:
        granted = on_gpu("device_reservation_info", owner_type="slurm", owner="%s")
        uses = on_gpu("device_reservations", use="%s")
        infos: dict[str, Values] = {granted % (1 + job): 1 for job in range(jobs)}
        return Node(extra={**infos, uses % "held": held, uses % "unheld": unheld})

    return [
        counting("GpuXidError-warning", "device_xid_errors_total", xid=94),
        between("GpuXidError-warning", "fault_xids", with_xid, 13, 79, begins=30),
        counting("GpuEccUncorrectable-warning", "device_ecc_errors_total", type="uncorrected"),
        changes("GpuResetRequired-page", "set", on_gpu("device_reset_required"), 0, 1),
        *(
            Boundary(
                f"GpuResetRequired-{severity}", wanted,
                Node(extra={action % "none": 1}), Node(extra={action % wanted: changing_at(5, None, 1)}), 5,
            )
            for severity, wanted in (
                ("page", "node_reboot"), ("page", "gpu_reset"), ("warning", "drain_and_reset"),
                ("warning", "drain_p2p"), ("warning", "other"),
            )
        ),
        changes("GpuRowRemapFailed-warning", "set", on_gpu("device_row_remap_failed"), 0, 1),
        changes("GpuGhost-warning", "set", on_gpu("device_ghost"), 0, 1),
        *(
            Boundary("GpuReservedUnused-warning", what, granting(*quiet), granting(*fires), unused)
            for what, quiet, fires in (
                ("unheld", (1, 1, 0), (1, 0, 1)),
                ("all of them", (2, 1, 1), (2, 0, 2)),
                ("reserved_unused", (1, 0, changing_at(2, 0, 1)), (1, 0, 1)),
            )
        ),
    ]  # fmt: skip


def _filling(t: Thresholds, waits: Mapping[str, float], *, agent: bool) -> list[Boundary]:
    """Return the boundaries of a device that fills, with an agent so slowly that no other rule says it."""
    if agent:
        rule, time, share, begins = "GpuMemoryAboutToFill-page", "fill_within", "fill_used_share", 45
        free = 100 - 100 * t[share]
    else:
        rule, time, share, begins = "GpuMemoryFilling-warning", "filling_within", "filling_free_share", 30
        free = 100 * t[share]
    rate, after = 60 * free / t[time], begins + waits[rule] + 2

    def in_time(crosses: float) -> Node:
        # Half of what may be free is left when the time is; so slow that it was never more.
        return Node([Holder(7, lambda m: 100 - free / 2 - rate / 2 * (crosses - 0.25 - m))])

    def in_share(crosses: float) -> Node:
        slope = 1.03 if agent else 2
        return _grower(lambda m: 100 - free - rate * slope * (crosses - 0.25 - m), agent=agent)

    return [
        between(rule, time, in_time, after, begins, begins=begins),
        between(rule, share, in_share, after, begins, begins=begins),
    ]


def _unattributed(t: Thresholds) -> list[Boundary]:
    rule, least = "GpuMemoryUnattributed-warning", t["unattributed_bytes"] / GIB
    share = t["unattributed_share"]
    small, large = least / share / 2, least / share * 2
    return [
        around(rule, "unattributed_bytes", lambda gib: Node(unattributed=gib, total=small), least),
        around(
            rule, "unattributed_share", lambda gib: Node(unattributed=gib, total=large), share * large, BYTE
        ),
    ]


def _reserved(t: Thresholds) -> list[Boundary]:
    least = t["orphaned_bytes"] / GIB

    def node(held: float, unreserved: float, owner: str = "12") -> Node:
        extra: dict[str, Values] = {
            on_gpu("device_reservation_info", owner_type="user", owner=owner): 1,
            on_gpu("device_unreserved_memory_bytes"): unreserved * GIB,
        }
        return Node([Holder(9, held)], extra=extra)

    rule = "GpuMemoryOutsideReservation-warning"
    return [
        around(rule, "orphaned_bytes", lambda gib: node(30, gib), least),
        around(rule, "orphaned_bytes", lambda gib: node(gib, 30), least),
        Boundary(rule, "reserved", node(30, 30, owner="ann"), node(30, 30)),
    ]


def limited(used: float) -> dict[str, Values]:
    """Return the series of an owner that may take 100 GiB, of which so many are taken."""
    owner = {"owner_type": "user", "owner": "ann"}
    return {
        on_gpu("owner_memory_limit_used_bytes", 0, **owner): used * GIB,
        on_gpu("owner_memory_limit_bytes", 0, **owner, type="max"): 100 * GIB,
    }


def _with_budget(owner: str, more: float) -> Node:
    # One Prometheus has one set of budgets: each node's owner is another one.
    name = f'vramledger_owner:memory_budget_bytes:threshold{{owner_type="user",owner="{owner}"}}'
    return Node([Holder(9, 29 + more, owner=owner)], extra={name: 29 * GIB})


def state_boundaries(t: Thresholds) -> list[Boundary]:
    """Return the boundaries of the alerts about a holder's state, policy or size."""

    def of_state(rule: str, state: str, threshold: str) -> Boundary:
        return around(rule, threshold, holding(Holder(7, 0, state, since=-1440)), t[threshold] / GIB)

    def lasting(rule: str, state: str, threshold: str) -> Boundary:
        begins, after = 2.0, t[threshold] / 60
        # A second too little when the watch ends, and just enough at the minute.
        quiet, fires = (
            Node([Holder(7, 50, state, since=since)])
            for since in (begins + 1 - after + 1 / 60, begins - after)
        )
        return Boundary(rule, threshold, quiet, fires, begins)

    def with_dead(dead: float) -> Node:
        series = on_gpu("device_memory_bytes", state="dead")
        return Node(extra={on_gpu("processes_dropped"): 3, series: dead})

    def working(works: float) -> Node:
        series = on_gpu("process_orphan_working", pid=7)
        return Node([replace(orphan, gib=50)], extra={series: works})

    share, context, least = (
        t["orphaned_page_share"],
        t["stray_context_bytes"] / GIB,
        t["orphaned_bytes"] / GIB,
    )
    small, shared = least / share / 2, "GpuMemoryPreallocatedShared-warning"
    orphan = Holder(7, least, "orphaned", since=-1440)
    greedy = Holder(7, 100 * t["preallocated_share"] + BYTE, framework="tensorflow", policy="preallocate")
    beside = Holder(9, t["shared_bytes"] / GIB, owner="bob")
    display = replace(beside, gib=t["display_bytes"] / GIB, command="gnome-shell")
    stray = Holder(7, context, "idle", sm=None)
    home = replace(stray, gpu=1, state="active")
    return [
        of_state("GpuMemoryDead-page", "dead", "dead_bytes"),
        lasting("GpuMemoryDead-page", "dead", "dead_after"),
        lasting("GpuMemoryOrphaned-warning", "orphaned", "orphaned_after"),
        lasting("GpuMemoryOrphaned-page", "orphaned", "orphaned_page_after"),
        lasting("GpuMemoryZombie-warning", "zombie", "zombie_after"),
        lasting("GpuMemoryStuck-page", "stuck", "stuck_after"),
        lasting("GpuMemoryStopped-warning", "stopped", "stopped_after"),
        between("GpuMemoryDead-page-other", "dead_bytes", with_dead, t["dead_bytes"] - 1, t["dead_bytes"]),
        of_state("GpuMemoryOrphaned-warning", "orphaned", "orphaned_bytes"),
        of_state("GpuMemoryStuck-page", "stuck", "stuck_bytes"),
        between("GpuMemoryOrphaned-page", "works", working, 1, 0),
        of_state("GpuMemoryZombie-warning", "zombie", "zombie_bytes"),
        of_state("GpuMemoryStopped-warning", "stopped", "stopped_bytes"),
        around("GpuMemoryOrphaned-page", "orphaned_page_share", holding(orphan), 100 * share, BYTE),
        around("GpuMemoryOrphaned-page", "orphaned_bytes", holding(orphan, total=small), least),
        around(shared, "preallocated_share", holding(greedy, beside), 100 * t["preallocated_share"], BYTE),
        Boundary(shared, "shared", Node([greedy]), Node([greedy, beside])),
        around(shared, "shared_bytes", holding(beside, greedy), t["shared_bytes"] / GIB),
        around(shared, "display_bytes", holding(display, greedy), t["display_bytes"] / GIB),
        between(
            "GpuStrayContext-info", "stray_context_bytes", holding(stray, replace(home, gib=50), gpus=2),
            context + BYTE, context,
        ),
        around(
            "GpuStrayContext-info", "stray_context_times", holding(home, stray, gpus=2),
            context * t["stray_context_times"], BYTE,
        ),
    ]  # fmt: skip


def idle_boundaries(t: Thresholds, waits: Mapping[str, float]) -> list[Boundary]:
    idle = Holder(7, 30, "idle", sm=None)
    ledger = replace(idle, notebook="a.ipynb")
    return [
        *_idle(t, waits, "GpuMemoryHoarded-warning", idle, "hoarded_idle"),
        *_idle(t, waits, "GpuMemoryHoardedWhileShort-page", idle, "hoarded_short_idle"),
        *_short(t, waits["GpuMemoryHoardedWhileShort-page"]),
        *_in_pieces(t),
        *_idle(t, waits, "GpuNotebookIdle-warning", ledger, "notebook_idle"),
        around("GpuNotebookIdle-warning", "notebook_bytes", holding(ledger), t["notebook_bytes"] / GIB),
    ]  # fmt: skip


def _wants(t: Thresholds, held: float = 30, total: float = 100) -> Holder:
    """Return a program that empties its cache again and again; half of what is held beside it is free."""
    return torch(total - 1.5 * held, retries=lambda m: m * t["allocator_retries"], pid=8)


def _idle(
    t: Thresholds, waits: Mapping[str, float], rule: str, holder: Holder, threshold: str
) -> list[Boundary]:
    """Return the boundary of the time, and of the bytes if it is hoarding."""
    short = rule.startswith("GpuMemoryHoardedWhileShort")

    def beside(*of: float) -> list[Holder]:
        return [_wants(t, *of)] if short else []

    enough, begins = t[threshold] / 60, 2.0
    # It is idle for a second too little when the watch ends, a minute after the alert on the other node.
    late = begins + waits[rule] + 1 - enough + 1 / 60
    long = [
        Boundary(
            rule, threshold,
            Node([replace(holder, since=late), *beside()]),
            Node([replace(holder, since=begins - enough), *beside()]), begins,
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
        around(
            rule, "hoarded_share", holding(idle, *beside(share * small, small), total=small), share * small,
            BYTE, begins=first,
        ),
        around(
            rule, "hoarded_bytes", holding(idle, *beside(least, large), total=large), least, begins=first
        ),
    ]  # fmt: skip


def _in_pieces(t: Thresholds) -> list[Boundary]:
    """Return the boundaries of the sums of idle programs that hold a little each."""
    share, least = t["hoarded_share"], t["hoarded_bytes"] / GIB
    small, large = least / share / 2, least / share * 2
    rule = "GpuMemoryHoardedInPieces-warning"

    def of(gib: float, since: float, total: float = 100) -> Node:
        return Node(
            [Holder(100 + each, gib / 4, "idle", sm=None, since=since) for each in range(4)], total=total
        )

    def of_many(gib: float, since: float, total: float) -> Node:
        held = [*of(gib, since).holders, _wants(t, gib, total)]
        return Node([replace(each, user=f"u{each.pid}", owner=f"u{each.pid}") for each in held], total=total)

    table: list[Boundary] = []

    def of_all(name: str, node: Callable[[float, float, float], Node], threshold: str, first: float) -> None:
        begun, more = -t[threshold] / 60, 4 * BYTE
        table.extend((
            Boundary(name, threshold, node(30, 9, 100), node(30, begun + 2, 100), 2),
            between(
                name, "hoarded_share", lambda gib: node(gib, begun - 1, small),
                share * small - more, share * small + more, begins=first,
            ),
            between(
                name, "hoarded_bytes", lambda gib: node(gib, begun - 1, large),
                least - more, least, begins=first,
            ),
        ))  # fmt: skip

    of_all(rule, of, "hoarded_idle", 0)
    of_all(f"{rule}-several", of_many, "hoarded_short_idle", 0.5)
    return table


def _short(t: Thresholds, wait: float) -> list[Boundary]:
    rule, begins = "GpuMemoryHoardedWhileShort-page", 25.0
    idle = Holder(7, 30, "idle", sm=None, since=-t["hoarded_short_idle"] / 60 - 1)
    free, enough = 100 * t["short_free_share"], math.ceil(t["short_retries"])

    def retries(times: int) -> Holder:
        return replace(torch(55, retries=changing_at(20, 0, times)), pid=8)

    def grows(crosses: float) -> Node:
        return Node([idle, Holder(8, lambda m: 70 - free - 0.2 * (crosses - 0.25 - m))])

    return [
        Boundary(rule, "short_free_share", grows(begins + wait + 2), grows(begins), begins),
        Boundary(rule, "short_retries", Node([idle, retries(enough - 1)]), Node([idle, retries(enough)]), 20),
        Boundary(rule, "somebody", Node([idle, replace(torch(55), pid=8)]), Node([idle, _wants(t)]), 0.5),
        between(
            rule, "room", lambda free: Node([idle, _wants(t, (free + 30.5) / 1.5)]), 30, 30 - BYTE, begins=0.5
        ),
    ]


def framework_boundaries(t: Thresholds) -> list[Boundary]:
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
        Boundary("GpuFrameworkCacheHigh-warning", "cache_share", Node([less, more]), Node([cache, more])),
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

    def splitting(reserved: float) -> Callable[[float], Node]:
        return lambda split: Node([torch(1, reserved, split=split)])

    small, large = least / share / 2, least / share * 2
    rule = "GpuMemoryFragmented-info"
    return [
        around(rule, "fragmented_bytes", splitting(small), least),
        around(rule, "fragmented_share", splitting(large), share * large, BYTE),
    ]


def _counters(t: Thresholds) -> list[Boundary]:
    enough = math.ceil(t["allocator_retries"])

    def tries(times: int) -> Node:
        return Node([torch(10, retries=lambda m: min(times, 4 * max(0.0, m - 20)))])

    def out_of_memory(minute: float) -> Node:
        return Node([torch(10, ooms=changing_at(minute, 0, 1))])

    ended = series("owner_last_oom_timestamp_seconds", owner_type="pod", owner="a/b", framework="jax")
    return [
        Boundary(
            "GpuAllocatorRetries-warning", "allocator_retries", tries(enough - 1), tries(enough),
            math.ceil((20 + enough / 4) * 2) / 2,
        ),
        between("GpuOutOfMemory-warning", "any", out_of_memory, math.inf, 20, begins=20),
        Boundary(
            "GpuOutOfMemory-warning-agent", "within 600 s",
            Node([TRAINER], extra={LAST_OOM: -600}), Node([TRAINER], extra={LAST_OOM: -599}),
        ),
        shown("GpuOutOfMemory-warning-owner", "within 600 s", ended, -600, -599),
    ]  # fmt: skip


def growth_boundaries(t: Thresholds, waits: Mapping[str, float]) -> list[Boundary]:
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
        *_filling(t, waits, agent=True),
    ]  # fmt: skip


def _grower(values: Callable[[float], float], *, agent: bool) -> Node:
    return Node([torch(values, overhead=0) if agent else Holder(7, values)])


def _always_for(minutes: float) -> Callable[[float], float]:
    """Return the minute so many minutes ago, the first one before."""
    return lambda now: max(0.0, now - minutes)


def job_boundaries(t: Thresholds) -> list[Boundary]:
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
