"""Define the queries of panels: the selectors of every query, and the expressions that several share.

Joins name ``cluster`` beside job and instance: where several Prometheus servers are queried as one, two
clusters may have a node of the same name. If no series has that label, it is empty on both sides.
"""

from __future__ import annotations

from collections.abc import Callable

from vramledger.views.colours import PARTS

TARGET_MATCHERS = 'cluster=~"$cluster", job=~"$job", instance=~"$instance"'
"""The matchers of every query; the variables of these names are on every dashboard."""

NODE_LABELS = "cluster, job, instance"
DEVICE_LABELS = f"{NODE_LABELS}, gpu, uuid"
UUID_LABELS = f"{NODE_LABELS}, uuid"
HOLDING_LABELS = f"{UUID_LABELS}, pid"
HOLDER_LABELS = "job, instance, uuid, pid"
"""The same, where a query is long: a GPU is in one cluster."""

CHOSEN_DEVICE = 'uuid=~"$uuid"'
CHOSEN_OWNER = 'owner=~"$owner"'
CHOSEN_TEAM = 'team=~"$team"'
CHOSEN_PROCESS = 'pid=~"$pid"'
"""Matchers with the additional variables of some dashboards."""

WASTED = "idle|stopped|orphaned|zombie|stuck|dead"
"""States in which a holder may waste memory; an orphan that still works does not."""
_WITHOUT_HOLDER = ("unattributed", "operating_system", "driver_reserved", "free")
HELD = f'state!~"{"|".join(_WITHOUT_HOLDER)}"'
"""Chooses the bytes that somebody holds."""
STATES = tuple(part for part in PARTS if part not in _WITHOUT_HOLDER)
"""The states of a holding, in the order in which they are shown."""

DOWN, DRIVER_LOST, STALLED, WATCHING, RELEASED = range(5)
"""The values of the recorded status of an exporter."""
PARTLY_BLIND, WITHOUT_RULES = 2.5, 5
"""Values of :func:`watch_status` beside those: watching, but not all of the node is seen; not recorded."""

MAXIMUM = 'type="max"'
"""Chooses the limits beyond which allocations fail."""


def selector(metric: str, *matchers: str) -> str:
    """Return a selector of a metric at the chosen targets."""
    return f"{metric}{{{', '.join([TARGET_MATCHERS, *matchers])}}}"


def increase(metric: str, *matchers: str) -> str:
    """Return how much a counter rises from point to point."""
    return f"increase({selector(metric, *matchers)}[$__rate_interval])"


def rate(metric: str, *matchers: str) -> str:
    """Return how much a counter rises a second."""
    return f"rate({selector(metric, *matchers)}[$__rate_interval])"


def count_equal(metric: str, value: int) -> str:
    """Return how many series have a value; 0 where there are others, nothing where there are none."""
    return f"count({selector(metric)} == {value}) or 0 * count({selector(metric)})"


def watch_status() -> str:
    """Return the recorded status of each exporter: :data:`DOWN` to :data:`RELEASED`, or in part."""
    return selector("vramledger_node:watch_status:code")


def age(moment: str) -> str:
    """Return the seconds from a Unix time to the end of the time range.

    A host's clock may be ahead of Prometheus' clock: then it is 0, and not a time in the future.
    """
    return f"clamp_min(time() - ({moment}), 0)"


def placed(figure: str) -> str:
    """Return a figure of devices with the label ``device``: the index, of a MIG instance also its id."""
    place = selector("vramledger_device:place:info")
    return f"{figure} * on ({UUID_LABELS}) group_left (device) {place}"


def state_matcher(states: str) -> str:
    """Return a matcher of some states."""
    return f'state=~"{states}"'


def device_bytes(states: str, *matchers: str) -> str:
    """Return the bytes of each device in some states."""
    return selector("vramledger_device_memory_bytes", state_matcher(states), *matchers)


UTILISATION_SPAN = "15m"
"""The time of which every table shows the mean utilisation: two tables with different times contradict."""


def device_utilisation() -> str:
    """Return the share of time, as a mean, in which kernels ran on each device."""
    return f"avg_over_time({selector('vramledger_device_utilization_ratio')}[{UTILISATION_SPAN}])"


def process_utilisation() -> str:
    """Return the share of SM time of each process, as a mean over the samples in which it is known."""
    return f"avg_over_time({selector('vramledger_process_sm_utilization_ratio')}[{UTILISATION_SPAN}])"


def holdings(*matchers: str) -> str:
    """Return every holding's bytes with state, first step, owner, team and framework (a record)."""
    return selector("vramledger_process:memory_bytes:explained", *matchers)


def wasted_holdings(*matchers: str) -> str:
    """Return every holding that is wasted, as the exporter counts it."""
    return selector("vramledger_process:memory_bytes:wasted", *matchers)


def perhaps_wasted_holdings(*matchers: str) -> str:
    """Return every idle or orphaned holding that is perhaps wasted, perhaps not."""
    return selector("vramledger_process:memory_bytes:perhaps_wasted", *matchers)


def perhaps_wasted_bytes(*matchers: str) -> str:
    """Return the bytes of each device that are perhaps wasted, perhaps not."""
    return selector("vramledger_device_memory_perhaps_wasted_bytes", *matchers)


def wasted_bytes(*matchers: str) -> str:
    """Return the wasted bytes of each device."""
    return selector("vramledger_device_memory_wasted_bytes", *matchers)


def uncharged(*matchers: str) -> str:
    """Return the bytes of each holding that NVML charges to nobody and that are certainly its own."""
    return selector("vramledger_process_uncharged_memory_bytes", 'pid!="other"', *matchers)


def newest_bytes() -> str:
    """Return what each holder holds now: what is recorded of it is up to 4 minutes old."""
    both = selector("", '__name__=~"vramledger_process_(uncharged_)?memory_bytes"')
    return f"sum by ({HOLDER_LABELS}) ({both})"


def newest_holdings() -> str:
    """Return :func:`holdings` with what each holds now: the record is up to 4 minutes old."""
    return f"{holdings()} * 0 + on ({HOLDER_LABELS}) group_left () {newest_bytes()}"


def sampled(figure: str) -> str:
    """Return a figure of the newest scrape, without nodes whose exporter has stopped sampling."""
    stalled = selector("vramledger_node:sampling_stalled:changes5m")
    return f"({figure} unless on ({NODE_LABELS}) {stalled})"


MEAN_HELD, MEAN_WASTED = "vramledger_owner:memory_bytes:rate4m", "vramledger_owner:memory_wasted_bytes:rate4m"
MEAN_DEVICES_WASTED = "vramledger_owner:devices_wasted:rate4m"
"""The recorded means of what owners held and wasted, and of how many whole GPUs that is."""
MEANS_PER_HOUR = 15
"""Recorded means in an hour: each is of 4 minutes. A sum of them is right to 4 minutes at each end."""


def of_teams(metric: str) -> str:
    """Return the record of whole teams instead of owners: a hundredth of the series in a day of jobs."""
    return metric.replace("_owner:", "_team:")


def mean_over_time(metric: str, *matchers: str) -> str:
    """Return a recorded mean of 4 minutes at each moment of those minutes: it is recorded at their end."""
    return f"{selector(metric, *matchers)} offset -240s"


def hours(metric: str, *matchers: str, span: str = "$__range", ago: str = "") -> str:
    """Return what a recorded mean amounts to within a span, times hours."""
    return f"sum_over_time({selector(metric, *matchers)}[{span}]{ago}) / {MEANS_PER_HOUR}"


def gibibyte_hours(metric: str, *matchers: str, span: str = "$__range", ago: str = "") -> str:
    """Return GiB-hours within a span from a recorded mean of bytes, to be summed."""
    return f"{hours(metric, *matchers, span=span, ago=ago)} / 2^30"


def of_chosen(figure: Callable[..., str], metric: str, *matchers: str) -> str:
    """Return a figure of a mean of the chosen teams' owners; where all are chosen, of whole teams.

    The pattern of All matches any instance, and no owner is called like one: so one of the two chooses no
    series. A day of all owners' series took Prometheus 28 s of CPU.
    """
    teams = figure(of_teams(metric), 'instance=~"$owner"', CHOSEN_TEAM, *matchers)
    owners = figure(metric, 'instance!~"$owner"', CHOSEN_OWNER, CHOSEN_TEAM, *matchers)
    return f"({teams} or {owners})"


def chosen_hours(metric: str, *matchers: str) -> str:
    """Return what the chosen owners' recorded mean amounts to within the time range, times hours."""
    return of_chosen(hours, metric, *matchers)


def ten_largest(figure: str, by: str) -> str:
    """Return the ten series with the highest value within the time range, at each point the same.

    The highest of as many points as the graph draws: fixed steps would be too many over a week.
    """
    highest = f"max_over_time(({figure})[$__range:$__interval] @ end())"
    return f"{figure}\nand on ({by}) topk(10, {highest})"


def sum_of_others(figure: str, by: str) -> str:
    """Return the sum of what :func:`ten_largest` leaves out."""
    highest = f"max_over_time(({figure})[$__range:$__interval] @ end())"
    return f"sum({figure}\nunless on ({by}) topk(10, {highest}))"


def mean_of_largest(metric: str, by: str, *matchers: str) -> str:
    """Return a recorded mean by some labels, of the ten with the highest sum within the time range."""
    chosen = _ten_largest_sums(metric, by, *matchers)
    return f"sum by ({by}) ({mean_over_time(metric, *matchers)}\nand on ({by}) {chosen})"


def mean_of_others(metric: str, by: str, *matchers: str) -> str:
    """Return the sum of what :func:`mean_of_largest` leaves out."""
    chosen = _ten_largest_sums(metric, by, *matchers)
    return f"sum({mean_over_time(metric, *matchers)}\nunless on ({by}) {chosen})"


def _ten_largest_sums(metric: str, by: str, *matchers: str) -> str:
    # A sum of what is recorded is as exact as the tables of GiB-hours, and needs no subquery.
    return f"topk(10, sum by ({by}) (sum_over_time({selector(metric, *matchers)}[$__range] @ end())))"


GROWTH_SPANS = {"6m": "90s", "30m": "150s", "3h": "6m", "12h": "65m", "1d": "65m", "6d": "65m"}
"""The spans over which the leak alerts look for steady growth, and how long a record of each holds."""


def steady_growth_of(span: str, *matchers: str) -> str:
    """Return by how much each holding's minimum demand has grown within a span, where it grew steadily."""
    grown = selector(f"vramledger_process:demand_growth_bytes:delta{span}", *matchers)
    return f"last_over_time({grown}[{GROWTH_SPANS[span]}])"


def listed(*matchers: str) -> str:
    """Return the condition that a holding is there now: its records stay for minutes after its end."""
    either = selector("", '__name__=~"vramledger_process_(uncharged_)?memory_bytes"', *matchers)
    return f"and on ({HOLDER_LABELS}) {either}"


def growth_rate(*matchers: str) -> str:
    """Return how fast each holding grows that grows steadily over any of these spans, in bytes a second."""
    return selector("vramledger_process:demand_growth_bytes:rate", *matchers)


def minimum_demand_of(*matchers: str) -> str:
    """Return the lowest demand of each holding within 3 minutes: without it nothing is known of growth."""
    return selector("vramledger_process:demand_bytes:min3m", *matchers)


def demand_rate(*matchers: str) -> str:
    """Return :func:`growth_rate`, and else the rise of the minimum demand of each holding within 15 minutes.

    Only above every minimum of the hour before: else a sawtooth would rise. What has ended has a rise for 3
    minutes more, in which its minimum is looked for.
    """
    rise = selector("vramledger_process:demand_rise_bytes:delta15m", *matchers)
    return f"({growth_rate(*matchers)} or on ({HOLDER_LABELS}) sum by ({DEVICE_LABELS}, pid) ({rise}) / 900)"


def time_until_full(*matchers: str) -> str:
    """Return in how many seconds each device is full if its holders grow on as in the last 15 minutes."""
    return (
        f"clamp_min({selector('vramledger_device:full_timestamp_seconds:estimate', *matchers)} - time(), 0)"
    )


WORKING, LEAKS, SPINS, FRAGMENTED = "working", "leaks", "spins", "fragmented"
TOO_BIG, LACKS, BLOCKS, UNPROVEN = "too_big", "lacks", "blocks", "unproven"
"""What decides the first step before the state of a holder does, as ``vramledger_process:step:info`` says."""
USUAL = "usual"
"""The step of unattributed memory that a healthy device has, too."""
USUAL_UNATTRIBUTED = 128 * 2**20
"""Bytes below which unattributed memory of a device needs no step: healthy ones were measured with 66 MiB."""


def largest_beside() -> str:
    """Return the largest other holder just after each program's newest failed allocation, in the range."""
    beside = f"max_over_time({selector('vramledger_process:memory_bytes:blocker')}[$__range])"
    return f"topk by ({NODE_LABELS}, pid) (1, max by ({NODE_LABELS}, pid, blocker) ({beside}))"


ALERT_MATCHERS = 'cluster=~"$cluster", job=~"$job|", instance=~"$instance|"'
"""Chooses alerts at the chosen nodes, and those without a node."""


def firing_alerts(*matchers: str) -> str:
    """Return the place of each firing alert's severity in page, warning and info, from 1 (a record)."""
    return f"vramledger_alert:severity:code{{{', '.join([ALERT_MATCHERS, *matchers])}}}"


def rules_heartbeat() -> str:
    """Return 0 where the alerting rules are evaluated, from their heartbeat, otherwise nothing."""
    return '0 * count(ALERTS{alertname=~".*VramLedgerWatchdog", cluster=~"$cluster"})'
