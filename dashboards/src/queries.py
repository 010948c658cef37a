"""Define the queries of panels: the selectors of every query, and the expressions that several share.

Joins name ``cluster`` beside job and instance: where several Prometheus servers are queried as one, two
clusters may have a node of the same name. If no series has that label, it is empty on both sides.
"""

from __future__ import annotations

from vramledger.views.colours import PARTS

TARGET_MATCHERS = 'cluster=~"$cluster", job=~"$job", instance=~"$instance"'
"""The matchers of every query; the variables of these names are on every dashboard."""

NODE_LABELS = "cluster, job, instance"
DEVICE_LABELS = f"{NODE_LABELS}, gpu, uuid"
UUID_LABELS = f"{NODE_LABELS}, uuid"
HOLDING_LABELS = f"{UUID_LABELS}, pid"
OWNER_LABELS = f"{NODE_LABELS}, owner_type, owner"

CHOSEN_DEVICE = 'uuid=~"$uuid"'
CHOSEN_OWNER = 'owner=~"$owner"'
CHOSEN_TEAM = 'team=~"$team"'
CHOSEN_PROCESS = 'pid=~"$pid"'
"""Matchers with the additional variables of some dashboards."""

WASTED = "idle|stopped|orphaned|zombie|stuck|dead"
"""States in which a holder may waste memory; an orphan that still works does not."""
UNOWNED = "orphaned|zombie|dead|unattributed"
"""States in which memory has no owner to ask."""

_WITHOUT_HOLDER = ("unattributed", "operating_system", "driver_reserved", "free")
HELD = f'state!~"{"|".join(_WITHOUT_HOLDER)}"'
"""Chooses the bytes that somebody holds."""
STATES = tuple(part for part in PARTS if part not in _WITHOUT_HOLDER)
"""The states of a holding, in the order in which they are shown; the code of a state in a timeline is its
position here, counted from 1."""

DOWN, DRIVER_LOST, STALLED, WATCHING, RELEASED = range(5)
"""The values of :func:`exporter_status`."""
PARTLY_BLIND = 2.5
"""The value of :func:`watch_status` beside those: watching, but not all of the node is seen."""


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


def exporter_status() -> str:
    """Return the status of each exporter, :data:`DOWN` to :data:`RELEASED`; nothing for an unknown node."""
    stopped = f"changes({selector('vramledger_sample_timestamp_seconds')}[3m]) == 0"
    return f"""(
  0 * ({selector("up")} == 0)
  or on ({NODE_LABELS}) ({RELEASED} + 0 * {selector("vramledger_released_until_timestamp_seconds")})
  or on ({NODE_LABELS}) ({DRIVER_LOST} + 0 * ({selector("vramledger_up")} == 0))
  or on ({NODE_LABELS}) ({STALLED} + 0 * ({stopped}))
  or on ({NODE_LABELS}) ({WATCHING} + 0 * {selector("vramledger_up")})
)"""


def unseen_parts() -> dict[str, str]:
    """Return how much of each node is not seen, by what it is; nothing where all of it is seen."""
    devices, processes, agents = (
        f"{selector(metric)} == 0"
        for metric in ("vramledger_device_up", "vramledger_host_pid_namespace", "vramledger_agent_up")
    )
    gpus = f"count by ({NODE_LABELS}, gpu) ({devices})"  # MIG instances are parts of one
    parts = {"GPUs": gpus, "processes": processes, "agents": agents}
    return {name: f"count by ({NODE_LABELS}) ({unseen})" for name, unseen in parts.items()}


def watch_status(status: str) -> str:
    """Return the status of each exporter, :data:`PARTLY_BLIND` where it watches but does not see all.

    Args:
        status: the values of :func:`exporter_status`, live or recorded.
    """
    unseen = "\n    or ".join(unseen_parts().values())
    return f"""(
  {PARTLY_BLIND} + 0 * ({status} == {WATCHING} and on ({NODE_LABELS}) (
    {unseen}
  ))
  or on ({NODE_LABELS}) {status}
)"""


def age(moment: str) -> str:
    """Return the seconds from a Unix time to the end of the time range.

    A host's clock may be ahead of Prometheus' clock: then it is 0, and not a time in the future.
    """
    return f"clamp_min(time() - ({moment}), 0)"


def named_devices(figure: str) -> str:
    """Return a figure of devices with the label ``device``: the index, of a MIG instance also its id."""
    info = selector("vramledger_device_info", 'gpu_instance!=""')
    known = f"max by ({UUID_LABELS}, gpu_instance) ({info})"
    instances = f"({figure}) * on ({UUID_LABELS}) group_left (gpu_instance) {known}"
    both = f"({instances} or on ({UUID_LABELS}) {figure})"
    numbered = f'label_replace({both}, "place", " instance $1", "gpu_instance", "(.+)")'
    return f'label_join({numbered}, "device", "", "gpu", "place")'


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
    """Return every holding's bytes with its state and its owner's labels (a recording rule).

    They are what NVML charges to it, and what is certainly its own besides.
    """
    return selector("vramledger_process:memory_bytes:owned", *matchers)


def wasted_holdings() -> str:
    """Return every holding that is wasted, as :func:`holdings` does and as the exporter counts it.

    Idle and orphaned ones count only if it is proven or seen that they do not work.
    """
    quiet = selector("vramledger_process_state_since_timestamp_seconds", 'state="idle"', 'grade!="inferred"')
    workless = f"{selector('vramledger_process_orphan_working')} == 0"
    certain = "|".join(state for state in WASTED.split("|") if state not in ("idle", "orphaned"))
    return f"""(
  {holdings(state_matcher(certain))}
  or {holdings(state_matcher("idle"))} and on ({HOLDING_LABELS}) {quiet}
  or {holdings(state_matcher("orphaned"))} and on ({HOLDING_LABELS}) ({workless})
)"""


def perhaps_wasted_holdings() -> str:
    """Return every idle or orphaned holding that is perhaps wasted, perhaps not."""
    idle = selector("vramledger_process_state_since_timestamp_seconds", 'state="idle"', 'grade="inferred"')
    known = selector("vramledger_process_orphan_working")
    return f"""(
  {holdings(state_matcher("idle"))} and on ({HOLDING_LABELS}) {idle}
  or {holdings(state_matcher("orphaned"))} unless on ({HOLDING_LABELS}) {known}
)"""


def perhaps_wasted_bytes(*matchers: str) -> str:
    """Return the bytes of each device that are perhaps wasted, perhaps not."""
    return selector("vramledger_device_memory_perhaps_wasted_bytes", *matchers)


def wasted_bytes(*matchers: str) -> str:
    """Return the wasted bytes of each device."""
    return selector("vramledger_device_memory_wasted_bytes", *matchers)


def uncharged(*matchers: str) -> str:
    """Return the bytes of each holding that NVML charges to nobody and that are certainly its own."""
    return selector("vramledger_process_uncharged_memory_bytes", 'pid!="other"', *matchers)


def of_chosen_teams(metric: str, *matchers: str) -> str:
    """Return a metric of the owners of the chosen teams; All includes the owners whose team is not known.

    The metric has no label of the team itself: a matcher of it matches everything, or nothing.
    """
    known = f"{selector(metric, *matchers)} and on ({OWNER_LABELS}) {selector(_TEAM, CHOSEN_TEAM)}"
    others = f"{selector(metric, *matchers, CHOSEN_TEAM)} unless on ({OWNER_LABELS}) {selector(_TEAM)}"
    return f"({known} or {others})"


def sampled(figure: str) -> str:
    """Return a figure of the newest scrape, without nodes whose exporter has stopped sampling."""
    stalled = selector("vramledger_node:sampling_stalled:changes5m")
    return f"({figure} unless on ({NODE_LABELS}) {stalled})"


def held_now(*matchers: str) -> str:
    """Return what each holding has in the newest scrape, with what NVML charges to nobody."""
    charged = selector("vramledger_process_memory_bytes", 'pid!="other"', *matchers)
    charged, besides = (f"sum by ({HOLDING_LABELS}) ({each})" for each in (charged, uncharged(*matchers)))
    return f"({charged} + ({besides} or 0 * {charged}))"


def state_codes(*matchers: str) -> str:
    """Return the state of each holding as its position in :data:`STATES`, from 1."""
    return "\nor\n".join(
        f"{code} + 0 * " + holdings(f'state="{state}"', *matchers) for code, state in enumerate(STATES, 1)
    )


MEAN_HELD, MEAN_WASTED = "vramledger_owner:memory_bytes:rate4m", "vramledger_owner:memory_wasted_bytes:rate4m"
MEAN_DEVICES_WASTED = "vramledger_owner:devices_wasted:rate4m"
"""The recorded means of what owners held and wasted, and of how many whole GPUs that is."""
_DAY = 86_400
_USAGE_INTERVAL = 240
"""Seconds between two values of the recorded ``rate4m``, each a mean over that time."""
_TEAM = "vramledger_owner:team:last"


def mean_over_time(metric: str, *matchers: str) -> str:
    """Return a recorded mean of 4 minutes at each moment of those minutes: it is recorded at their end."""
    return f"{selector(metric, *matchers)} offset -{_USAGE_INTERVAL}s"


def byte_seconds(metric: str, *matchers: str) -> str:
    """Return what a recorded mean amounts to within the time range: the mean times seconds.

    Up to a day it is the rise of the exporter's own counter from the beginning to the end, owner by owner:
    the newest mean is up to 4 minutes old, which was 13 % of half an hour. Of what has ended, of a node whose
    exporter was started again, and beyond a day, it is the sum of the means: counters are slow over a week.
    These are series of their own, to be summed.
    """
    key = f"{OWNER_LABELS}, state" if metric == MEAN_HELD else OWNER_LABELS
    return f"({_counted(metric, key, *matchers)}\nor on ({key}) {_summed(metric, *matchers)})"


def _counted(metric: str, key: str, *matchers: str) -> str:
    """Return the rise of an exporter's counter within the time range, where it tells all, with its team.

    A counter tells all if the exporter ran all the time. An owner that holds nothing any more may lose its
    counter of a device, and get a new one later. So a rise that is less than nine tenths of the recorded
    means, but for the first, of which a part is of the time before, does not count.

    Args:
        metric: the recorded means of it.
        key: the labels of what is counted apart.
        matchers: of labels of the owners.
    """
    held = metric == MEAN_HELD
    counter = f"vramledger_owner_memory_{'' if held else 'wasted_'}byte_seconds_total"
    own = [matcher for matcher in matchers if matcher != CHOSEN_TEAM]

    def total(moment: str) -> str:
        seconds = f"{selector(counter, *own)}{moment}"
        if metric == MEAN_DEVICES_WASTED:
            memory = selector("vramledger_device:memory_total_bytes:last")
            seconds = f"{seconds} / on ({UUID_LABELS}) group_left () {memory}"
        return f"sum by ({key}) ({seconds})"

    now, then = total(""), total(" offset $__range")
    began = selector("process_start_time_seconds")
    ran = f"max by ({NODE_LABELS}) ({began}) == max by ({NODE_LABELS}) ({began} offset $__range)"
    first = f"sum by ({key}) (last_over_time(({mean_over_time(metric, *own)})[1s:1s] offset $__range))"
    sums = f"sum by ({key}) (sum_over_time({selector(metric, *own)}[$__range]))"
    least = f"{0.9 * _USAGE_INTERVAL:.0f} * ({sums} - ({first} or 0 * {now}))"
    rise = f"""({now} - ({then} or 0 * {now})
  and on ({NODE_LABELS}) ({ran}) and on () (vector($__range_s) <= {_DAY}))
  >= on ({key}) (clamp_min({least}, 0) or on ({key}) 0 * {now})"""
    team = selector(_TEAM, *(matcher for matcher in matchers if matcher == CHOSEN_TEAM))
    known = f"max by ({OWNER_LABELS}, team) ({team})"
    every = f"sum by ({OWNER_LABELS}) ({selector(counter, *matchers)})"
    teams = f"({known} or 1 + 0 * ({every} unless on ({OWNER_LABELS}) {selector(_TEAM)}))"
    return f"({rise})\n* on ({OWNER_LABELS}) group_left (team) {teams}"


def _summed(metric: str, *matchers: str, days: int = 0, back: int = 0) -> str:
    """Return the sum of recorded means within the time range, or within some days that ended some days ago.

    Each recorded mean is of the minutes before it. So a span has all means that were recorded within it, less
    the part of the first one that is of the time before, and with the part of the next one that is of the
    time within; where no next one is recorded yet, the newest goes on. What is taken off is always a part of
    a mean that was added, so that no figure is below zero. These are series of their own, to be summed.
    """
    series = selector(metric, *matchers)
    span, seconds = (f"{days}d", str(days * _DAY)) if days else ("$__range", "$__range_s")
    begin = f"{days + back}d" if days else span
    means = f"{series} offset {back}d" if back else series
    end = f"time() - {back * _DAY}" if back else "time()"
    newest = f"clamp_max({end} - timestamp({means}), {seconds}) * ({means})"
    recorded = f"{series}[{span}] offset {back}d" if back else f"{series}[{span}]"
    parts = {
        "recorded": f"sum_over_time({recorded}) * {_USAGE_INTERVAL}",
        "end": f"({_part_before(metric, f' offset {back}d' if back else '', *matchers)} or {newest})",
        "begin": f"-{_part_before(metric, f' offset {begin}', *matchers)}",
    }
    return (
        "("
        + "\nor ".join(f'label_replace({part}, "part", "{name}", "", "")' for name, part in parts.items())
        + ")"
    )


def _part_before(metric: str, ago: str, *matchers: str) -> str:
    """Return what the mean that was recorded just after a moment amounts to before it.

    Args:
        ago: the modifier that goes back to the moment; empty for now: older versions refuse an offset of 0.
        metric: of the recorded means.
        matchers: of its labels.
    """
    after = mean_over_time(metric, *matchers)
    newer = f"(time() - timestamp({after}) < 0)"
    return f"last_over_time((({newer} + {_USAGE_INTERVAL}) * ({after}))[1s:1s]{ago})"


def gibibyte_hours(metric: str, *matchers: str) -> str:
    """Return GiB-hours within the time range from a recorded mean of bytes, to be summed."""
    return f"{byte_seconds(metric, *matchers)} / 3600 / 2^30"


def weekly_gibibyte_hours(metric: str, *matchers: str, weeks: int = 0) -> str:
    """Return GiB-hours within the 7 days that ended so many weeks ago, as the sum of means."""
    return f"{_summed(metric, *matchers, days=7, back=7 * weeks)} / 3600 / 2^30"


def gpu_hours_wasted(*matchers: str) -> str:
    """Return the hours of whole GPUs that each owner has wasted within the time range, to be summed."""
    return f"{byte_seconds(MEAN_DEVICES_WASTED, *matchers)} / 3600"


def with_team(holdings: str) -> str:
    """Return holdings with the label ``team``: the namespace of a pod, otherwise the user."""
    by_user = f'label_replace({holdings}, "team", "$1", "user", "(.*)")'
    return f'label_replace({by_user}, "team", "$1", "namespace", "(.+)")'


OWNER_NAME = "who"
"""The label that names an owner with its kind."""


def named_owner(figure: str) -> str:
    """Return a figure with the label ``who``: the owner after its kind, such as user anna or job 4711.

    Without its kind a number is not known to be a job, nor a word to be a user.
    """
    joined = f'label_join({figure}, "{OWNER_NAME}", " ", "owner_type", "owner")'
    jobs = f'label_replace({joined}, "{OWNER_NAME}", "job $1", "{OWNER_NAME}", "(?:slurm|nomad) (.+)")'
    # Without an owner there is only the space between.
    known = "(unknown|other) .*| (.*)"
    return f'label_replace({jobs}, "{OWNER_NAME}", "$1$2", "{OWNER_NAME}", "{known}")'


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


def minimum_demand_of(*matchers: str) -> str:
    """Return the lowest demand of each holding within 3 minutes: without it nothing is known of growth."""
    return selector("vramledger_process:demand_bytes:min3m", *matchers)


WORKING, LEAKS, SPINS, FRAGMENTED = "working", "leaks", "spins", "fragmented"
TOO_BIG, LACKS, BLOCKS, UNPROVEN = "too_big", "lacks", "blocks", "unproven"
"""What decides the first step before the state of a holder does."""
USUAL = "usual"
"""The step of unattributed memory that a healthy device has, too."""
USUAL_UNATTRIBUTED = 128 * 2**20
"""Bytes below which unattributed memory of a device needs no step: healthy ones were measured with 66 MiB."""


def with_step(holdings: str) -> str:
    """Return holdings with the label ``step``: the first of these that is true, otherwise their state.

    A holder is an orphan that works; its demand grows steadily (it leaks); it keeps its GPU busy without
    work (it spins); much of its pool is free pieces of used blocks (it is fragmented); it lacks memory on
    a GPU of its own (it is too big), or beside others; it works on a GPU where another one lacks memory (it
    blocks); or it is idle only by inference, so that nobody may end it.
    """
    short = selector("vramledger_process:memory_short_bytes:wanting")
    active = selector("vramledger_process:state_since_timestamp_seconds:last", 'state="active"')
    shared = selector("vramledger_process:memory_bytes:owned")
    grows = "\n    or ".join(steady_growth_of(span) for span in GROWTH_SPANS)
    causes = {
        WORKING: f"{selector('vramledger_process_orphan_working')} == 1",
        LEAKS: grows,
        SPINS: selector("vramledger_process_busy_without_work_since_timestamp_seconds"),
        FRAGMENTED: selector("vramledger_process:torch_fragmented_bytes:min30m"),
        TOO_BIG: f"{short} unless on ({UUID_LABELS}) count by ({UUID_LABELS}) ({shared}) > 1",
        LACKS: short,
        BLOCKS: f"{active} and on ({UUID_LABELS}) {short} unless on ({HOLDING_LABELS}) {short}",
        UNPROVEN: selector(
            "vramledger_process_state_since_timestamp_seconds", 'state="idle"', 'grade="inferred"'
        ),
    }
    marked = f"\n  or on ({HOLDING_LABELS}) ".join(
        f'label_replace(1 + 0 * max by ({HOLDING_LABELS}) ({cause}), "step", "{step}", "", "")'
        for step, cause in causes.items()
    )
    return f"""(
  {holdings} * on ({HOLDING_LABELS}) group_left (step) (
  {marked})
  or on ({HOLDING_LABELS}) label_replace({holdings}, "step", "$1", "state", "(.*)")
)"""


BLOCKER = "blocker"
"""The label that names the largest other holder."""


def just_after_failure(figure: str, failed: str) -> str:
    """Return a figure where an allocation failed on the same node within the last two minutes.

    Args:
        figure: any series of nodes.
        failed: Unix times of failures.
    """
    return f"{figure} and on ({NODE_LABELS}) (time() - {failed} < 120)"


def named_in_full(held: str, label: str) -> str:
    """Return holdings with a label that names program, pid, owner and node of each in one text."""
    of_owner = f'label_join({named_owner(held)}, "owner_and_node", " on ", "{OWNER_NAME}", "instance")'
    named = f'label_join({of_owner}, "program_and_pid", " ", "command", "pid")'
    return f'label_join({named}, "{label}", " of ", "program_and_pid", "owner_and_node")'


def demand_rate(*matchers: str) -> str:
    """Return the rise of the minimum demand of each holding within 15 minutes, in bytes a second.

    Only above every minimum of the hour before: else a sawtooth would rise. What has ended has a rise for 3
    minutes more, in which its minimum is looked for: it is left out.
    """
    return _rates_of(holdings(*matchers), *matchers)


def filling_rate(*matchers: str) -> str:
    """Return :func:`demand_rate` of holdings that fill their device with it: no preallocated pools."""
    return _rates_of(holdings('policy!~"preallocate|fraction"', *matchers), *matchers)


def _rates_of(held: str, *matchers: str) -> str:
    rise = selector("vramledger_process:demand_rise_bytes:delta15m", *matchers)
    return f"(sum by ({DEVICE_LABELS}, pid) ({rise}) / 900\nand on ({HOLDING_LABELS}) {held})"


def compared_nodes() -> str:
    """Return the nodes that were watched with as many GPUs at both ends of the time range."""

    def watched_whole(at: str) -> str:
        up = selector("vramledger_device_up")
        status = selector("vramledger_node:exporter_status:code")
        return f"(sum by ({NODE_LABELS}) ({up}{at}) and on ({NODE_LABELS}) {status}{at} == {WATCHING})"

    return f"({watched_whole('')} == {watched_whole(' offset $__range')})"


MAXIMUM = 'type="max"'
"""Chooses the limits beyond which allocations fail."""

_OUR_ALERTS = (
    *('alertname=~".*(Gpu|VramLedger)[A-Z].*"', 'severity!="none"'),
    *('cluster=~"$cluster"', 'instance=~"$instance|"'),
)


def firing_alerts(*matchers: str) -> str:
    """Return our alerts that fire at the chosen nodes, and those without a node."""
    firing = (*_OUR_ALERTS, 'alertstate="firing"', *matchers)
    return f"ALERTS{{{', '.join(firing)}}}"


def alert_ages(*matchers: str) -> str:
    """Return for how many seconds the condition of each of our firing alerts holds."""
    since = f"ALERTS_FOR_STATE{{{', '.join([*_OUR_ALERTS, *matchers])}}}"
    return age(f"{since} and ignoring (alertstate) {firing_alerts(*matchers)}")


def rules_heartbeat() -> str:
    """Return 0 where the alerting rules are evaluated, from their heartbeat, otherwise nothing."""
    return '0 * count(ALERTS{alertname=~".*VramLedgerWatchdog", cluster=~"$cluster"})'
