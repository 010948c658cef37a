"""What panels ask Prometheus: the selectors of every query, and the expressions that several share.

Joins name ``cluster`` beside job and instance: where several Prometheus servers are asked as one, two
clusters may have a node of the same name. Where no series has that label, it is the same on both sides:
empty.
"""

from __future__ import annotations

from vramledger.views.colours import PARTS

TARGET_MATCHERS = 'cluster=~"$cluster", job=~"$job", instance=~"$instance"'
"""Matchers of every query; the variables of these names are on every dashboard."""

NODE_LABELS = "cluster, job, instance"
DEVICE_LABELS = f"{NODE_LABELS}, gpu, uuid"
HOLDING_LABELS = f"{NODE_LABELS}, uuid, pid"

CHOSEN_DEVICE = 'uuid=~"$uuid"'
CHOSEN_OWNER = 'owner=~"$owner"'
CHOSEN_PROCESSES = (CHOSEN_OWNER, 'pid=~"$pid"')
"""Matchers by the variables that some dashboards have besides."""

WASTED = "idle|stopped|orphaned|zombie|dead"
"""States in which a holder has memory that nobody works with."""
IDLE_OR_STOPPED = "idle|stopped"
UNOWNED = "orphaned|zombie|dead|unattributed"
"""States in which nobody answers for the memory."""

STATES = tuple(part for part in PARTS if part not in ("unattributed", "driver_reserved", "free"))
"""The states of a holding, in the order in which they are shown; a timeline's code is the place, from 1."""

DOWN, DRIVER_LOST, STALLED, WATCHING, RELEASED = range(5)
"""What :func:`exporter_status` says of an exporter."""


def selector(metric: str, *matchers: str) -> str:
    """Return a selector of a metric at the chosen targets."""
    return f"{metric}{{{', '.join([TARGET_MATCHERS, *matchers])}}}"


def increase(metric: str, *matchers: str) -> str:
    """Return by how much a counter rises from point to point."""
    return f"increase({selector(metric, *matchers)}[$__rate_interval])"


def rate(metric: str, *matchers: str) -> str:
    """Return how much a counter rises a second."""
    return f"rate({selector(metric, *matchers)}[$__rate_interval])"


def count_equal(metric: str, value: int) -> str:
    """Return how many series have a value; 0 where there are others, nothing where there is none."""
    return f"count({selector(metric)} == {value}) or 0 * count({selector(metric)})"


def utilised_share(level: str, *matchers: str) -> str:
    """Return which share of what is held works, or may, at a level of the recording rules: node or owner."""
    rule = f"vramledger_{level}:memory_{{}}_bytes:sum"
    utilised, held = (selector(rule.format(name), *matchers) for name in ("utilised", "held"))
    return f"sum({utilised})\n/ sum({held})"


def exporter_status() -> str:
    """Return how each exporter fares, :data:`DOWN` to :data:`RELEASED`; nothing of an unknown node."""
    stopped = f"changes({selector('vramledger_sample_timestamp_seconds')}[3m]) == 0"
    return f"""(
  0 * ({selector("up")} == 0)
  or on ({NODE_LABELS}) ({RELEASED} + 0 * {selector("vramledger_released_until_timestamp_seconds")})
  or on ({NODE_LABELS}) ({DRIVER_LOST} + 0 * ({selector("vramledger_up")} == 0))
  or on ({NODE_LABELS}) ({STALLED} + 0 * ({stopped}))
  or on ({NODE_LABELS}) ({WATCHING} + 0 * {selector("vramledger_up")})
)"""


def state_matcher(states: str) -> str:
    """Return a matcher of some states."""
    return f'state=~"{states}"'


def device_bytes(states: str, *matchers: str) -> str:
    """Return the bytes of each device in some states."""
    return selector("vramledger_device_memory_bytes", state_matcher(states), *matchers)


def holdings(*matchers: str) -> str:
    """Return every holding's bytes with its state and its owner's labels (a recording rule)."""
    return selector("vramledger_process:memory_bytes:owned", *matchers)


def state_since(chosen: str) -> str:
    """Return since when some holdings are in their states, milliseconds of Unix time, with their labels."""
    stamps = selector("vramledger_process:state_since_timestamp_seconds:last")
    newest = f"max by ({HOLDING_LABELS}) ({stamps})"
    return f"1000 * (0 * ({chosen}) + on ({HOLDING_LABELS}) group_left () {newest})"


def state_codes(*matchers: str) -> str:
    """Return the state of each holding as the number of its place in :data:`STATES`, from 1."""
    return "\nor\n".join(
        f"{code} + 0 * " + holdings(f'state="{state}"', *matchers) for code, state in enumerate(STATES, 1)
    )


def filtered_by_holdings(figure: str, *matchers: str) -> str:
    """Return the figures of those holdings alone that the matchers choose: by owner, state or command."""
    return f"{figure}\nand on ({HOLDING_LABELS}) {holdings(*matchers)}"


def holdings_metric(metric: str, *matchers: str) -> str:
    """Return a metric of the holdings that the matchers choose, in parentheses."""
    return f"({filtered_by_holdings(selector(metric), *matchers)})"


def bytes_beyond_need(*matchers: str) -> str:
    """Return the bytes that the chosen holdings have beyond the most that their programs have needed."""
    held = holdings_metric("vramledger_process_memory_bytes", *matchers)
    return f"sum({held}\n- on ({HOLDING_LABELS}) {selector('vramledger_process:peak_need_bytes:sum')})"


def join_processes(*matchers: str) -> str:
    """Return a join to the processes whose holdings the matchers choose, for figures without a device."""
    processes = f"{NODE_LABELS}, pid"
    return f"and on ({processes}) max by ({processes}) ({holdings(*matchers)})"


def idle_hours(*matchers: str) -> str:
    """Return GiB-hours that each owner held idle within the time range.

    The rule records every 4 minutes what the last hour came to, so a fifteenth of it is those minutes' share.
    """
    hours = selector("vramledger_owner:memory_idle_gibibyte_hours:increase1h", *matchers)
    return f"sum_over_time({hours}[$__range]) / 15"


def firing_alerts(*matchers: str) -> str:
    """Return the alerts of ours that fire at the chosen nodes, and those of no node."""
    ours = ('alertname=~"Gpu.*|VramLedger.*"', 'alertstate="firing"', 'severity!="none"')
    where = ('cluster=~"$cluster"', 'instance=~"$instance|"')
    return f"ALERTS{{{', '.join([*ours, *where, *matchers])}}}"


def rules_heartbeat() -> str:
    """Return 0 where the alerting rules are evaluated, by their heartbeat, else nothing."""
    return '0 * count(ALERTS{alertname="VramLedgerWatchdog", cluster=~"$cluster"})'
