"""Say why a figure is not there: nothing to report, no rules, no agent, no driver, and so on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dashboards.src.queries import MAXIMUM, compared_nodes, rules_heartbeat, selector
from vramledger.views.colours import GRAFANA

NOTHING, NO_RULES, NO_DRIVER = range(-1, -4, -1)
NO_AGENT, NO_NEED, NO_SENSOR, NO_COUNTERS, NO_SCHEDULER, NOT_COMPARABLE, NO_LIMIT = range(-4, -11, -1)
NO_DEVICE, NO_HOLDER, NO_SOCKET, NOT_YET = range(-11, -15, -1)
"""The values of :func:`or_why` without a figure."""

_SOURCES = {
    NO_AGENT: f"count({selector('vramledger_agent_up')} == 1)",
    NO_NEED: f"count({selector('vramledger_process_needed_peak_bytes')})",
    NO_SENSOR: f"count({selector('vramledger_device_utilization_ratio')})",
    NO_COUNTERS: f"count({selector('vramledger_device_sm_active_ratio')})",
    NO_SCHEDULER: f"count({selector('vramledger_device_reservations')})",
    NOT_COMPARABLE: f"count({compared_nodes()})",
    NO_LIMIT: f"count({selector('vramledger_owner_memory_limit_bytes', MAXIMUM)})",
    NO_DEVICE: f"count({selector('vramledger_device_up')} == 1)",
    NO_HOLDER: f"sum({selector('vramledger_device_holders')}) > 0",
    NO_SOCKET: f"count({selector('vramledger_agent_socket_up')})",
}
"""What must be there for a figure, besides an exporter and the rules."""

_WORDS = {
    NO_RULES: ("no rules", GRAFANA["orphaned"]),
    NO_AGENT: ("no agent", GRAFANA["unknown"]),
    NO_NEED: ("no need known", GRAFANA["unknown"]),
    NO_SENSOR: ("no sensor", GRAFANA["unknown"]),
    NO_COUNTERS: ("no counters", GRAFANA["unknown"]),
    NO_SCHEDULER: ("no scheduler", GRAFANA["unknown"]),
    NO_DRIVER: ("no driver", GRAFANA["orphaned"]),
    NOT_COMPARABLE: ("not comparable", GRAFANA["unknown"]),
    NO_LIMIT: ("no limit", GRAFANA["unknown"]),
    NO_DEVICE: ("no GPU answers", GRAFANA["orphaned"]),
    NO_HOLDER: ("no holder", "text"),
    NO_SOCKET: ("no socket", GRAFANA["unknown"]),
    NOT_YET: ("not known yet", GRAFANA["unknown"]),
}
"""The reasons why a figure is not there, besides :data:`NOTHING`, with their colours."""
WHY_SAID = {
    NO_RULES: "No rules: they are not loaded.",
    NO_AGENT: "No agent: no program on the chosen nodes has one that reports.",
    NO_NEED: "No need known: no agent on the chosen nodes reports one.",
    NO_SENSOR: "No sensor: the chosen GPUs do not report it.",
    NO_COUNTERS: "No counters: the chosen GPUs have none for it.",
    NO_SCHEDULER: "No scheduler: none reserves the chosen GPUs.",
    NO_DRIVER: "No driver: no chosen node's driver answers.",
    NOT_COMPARABLE: "Not comparable: no node was watched with as many GPUs at both moments; choose another "
    "beginning.",
    NO_LIMIT: "No limit: no limit of a cgroup is known there.",
}
"""What a reason means, in the description of a count."""

_RECORDED = "vramledger_node:sample_timestamp_seconds:last"
"""What the rules record of each node."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a figure needs, so that it can say why it is not there.

    Attributes:
        sources: what must be there, by the value that is returned without it; or this value and a query that
            has a result where it is there. The first that is missing is the reason.
        rules: it needs the recording rules.
        alerting: it needs the alerting rules, and not only the recording rules.
        nothing: what no figure means where all of that is there.
    """

    sources: Sequence[int | tuple[int, str]] = ()
    rules: bool = False
    alerting: bool = False
    nothing: str = "none"

    @property
    def reasons(self) -> list[int]:
        """The values of :func:`or_why` for what is missing."""
        codes = [source[0] if isinstance(source, tuple) else source for source in self.sources]
        return [*codes, *([NO_RULES] if self.rules or self.alerting else []), NO_DRIVER]

    @property
    def words(self) -> dict[object, tuple[str, str]]:
        """The words for the values of :func:`or_why`, with their colours."""
        return {NOTHING: (self.nothing, "text"), **{code: _WORDS[code] for code in self.reasons}}


def or_why(figure: str, needs: Needs) -> str:
    """Return a figure without labels, or why it is not there: :data:`NOTHING` to :data:`NOT_YET`.

    Without an exporter that answers there is no value.
    """
    answers = f"count({selector('vramledger_up')} == 1)"
    known = f"0 * {answers}"
    if needs.alerting:
        known = rules_heartbeat()
    elif needs.rules:
        known = f"0 * count({selector(_RECORDED)})"
    reasons = [f"{NOTHING} + {known}"]
    for source in reversed(needs.sources):
        code, there = source if isinstance(source, tuple) else (source, _SOURCES[source])
        reasons = [f"({each} and on () ({there}))" for each in reasons] + [f"{code} + {known}"]
    parts = [figure, "(" + "\nor ".join(reasons) + f") and on () {answers}"]
    if NO_RULES in needs.reasons:
        parts.append(f"{NO_RULES} + 0 * {answers}")
    return "\nor ".join([*parts, f"{NO_DRIVER} + 0 * count({selector('vramledger_up')})"])
