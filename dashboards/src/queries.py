"""What panels ask Prometheus: the selectors of every query, and the expressions that several share.

Joins name ``cluster`` beside job and instance: where several Prometheus servers are asked as one, two
clusters may have a node of the same name. Where no series has that label, it is the same on both sides:
empty.
"""

from __future__ import annotations

from vramledger.views.colours import PARTS

TARGETS = 'cluster=~"$cluster", job=~"$job", instance=~"$instance"'
"""Matchers of every query; the variables of these names are on every dashboard."""

NODE = "cluster, job, instance"
DEVICE = f"{NODE}, gpu, uuid"
HOLDING = f"{NODE}, uuid, pid"

WASTED = "idle|stopped|orphaned|zombie|dead"
"""States in which a holder has memory that nobody works with."""
QUIET = "idle|stopped"
ABANDONED = "orphaned|zombie|dead|unattributed"
"""States in which nobody answers for the memory."""

STATES = tuple(part for part in PARTS if part not in ("unattributed", "reserved", "free"))
"""The states of a holding, in the order in which they are shown; a timeline's code is the place, from 1."""

DOWN, LOST, STALLED, WATCHING, RELEASED = range(5)
"""What :func:`status` says of an exporter."""


def of(metric: str, *matchers: str) -> str:
    """Return a selector of a metric at the chosen targets."""
    return f"{metric}{{{', '.join([TARGETS, *matchers])}}}"


def increase(metric: str, *matchers: str) -> str:
    """Return by how much a counter rises from point to point."""
    return f"increase({of(metric, *matchers)}[$__rate_interval])"


def rate(metric: str, *matchers: str) -> str:
    """Return how much a counter rises a second."""
    return f"rate({of(metric, *matchers)}[$__rate_interval])"


def number(metric: str, value: int) -> str:
    """Return how many series have a value; 0 where there are others, nothing where there is none."""
    return f"count({of(metric)} == {value}) or 0 * count({of(metric)})"


def working_share(level: str, *matchers: str) -> str:
    """Return which share of what is held works, or may, at a level of the recording rules: node or owner."""
    rule = f"vramledger_{level}:memory_{{}}_bytes:sum"
    return f"sum({of(rule.format('utilised'), *matchers)})\n/ sum({of(rule.format('held'), *matchers)})"


def status() -> str:
    """Say how each exporter fares, :data:`DOWN` to :data:`RELEASED`; nothing of a node that nobody knows."""
    return f"""(
  0 * ({of("up")} == 0)
  or on ({NODE}) ({RELEASED} + 0 * {of("vramledger_released_until_timestamp_seconds")})
  or on ({NODE}) ({LOST} + 0 * ({of("vramledger_up")} == 0))
  or on ({NODE}) ({STALLED} + 0 * (changes({of("vramledger_sample_timestamp_seconds")}[3m]) == 0))
  or on ({NODE}) ({WATCHING} + 0 * {of("vramledger_up")})
)"""


def state(states: str) -> str:
    """Return a matcher of some states."""
    return f'state=~"{states}"'


def held(states: str, *matchers: str) -> str:
    """Return the bytes of each device in some states."""
    return of("vramledger_device_memory_bytes", state(states), *matchers)


def owned(*matchers: str) -> str:
    """Return every holding's bytes with its state and its owner's labels (a recording rule)."""
    return of("vramledger_process:memory_bytes:owned", *matchers)


def since(holdings: str) -> str:
    """Return since when some holdings are in their states, milliseconds of Unix time, with their labels."""
    stamps = of("vramledger_process:state_since_timestamp_seconds:last")
    return f"1000 * (0 * ({holdings}) + on ({HOLDING}) group_left () max by ({HOLDING}) ({stamps}))"


def codes(*matchers: str) -> str:
    """Return the state of each holding as the number of its place in :data:`STATES`, from 1."""
    return "\nor\n".join(
        f"{code} + 0 * " + owned(f'state="{state}"', *matchers) for code, state in enumerate(STATES, 1)
    )


def its(metric: str, *matchers: str, by: str = HOLDING) -> str:
    """Return a metric of those processes alone that the matchers choose: by owner, state or command."""
    return f"{of(metric)}\nand on ({by}) {owned(*matchers)}"


def idle_hours(*matchers: str) -> str:
    """Return GiB-hours that each owner held idle within the time range.

    The rule records every 4 minutes what the last hour came to, so a fifteenth of it is those minutes' share.
    """
    hours = of("vramledger_owner:memory_idle_gibibyte_hours:increase1h", *matchers)
    return f"sum_over_time({hours}[$__range]) / 15"


def alerts(*matchers: str) -> str:
    """Return the alerts of ours that fire at the chosen nodes, and those of no node."""
    ours = ('alertname=~"Gpu.*|VramLedger.*"', 'alertstate="firing"', 'severity!="none"')
    where = ('cluster=~"$cluster"', 'instance=~"$instance|"')
    return f"ALERTS{{{', '.join([*ours, *where, *matchers])}}}"


def rules_run() -> str:
    """Return 0 where the alerting rules are evaluated, by their heartbeat, else nothing."""
    return '0 * count(ALERTS{alertname="VramLedgerWatchdog", cluster=~"$cluster"})'
