"""Score the alerts: precision, recall and time to detect, and the alerts of a day of healthy work."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import median

from tests.support.faults import rules
from tests.support.faults.draws import GROWTH
from tests.support.faults.evaluation import Firing
from tests.support.faults.rules import PAGE, WARNING
from tests.support.faults.scene import Scenario
from tests.support.faults.suite import KNOWN, SCENARIOS, Run

LOUD = (PAGE, WARNING)

UNPLANTED = "No scenario: "
"""Begins the line of the alerts that no scenario raises, below the table."""

LINGERS = 240.0
"""Seconds for which the rules know a holder after its end: they look back 3 minutes."""

_WITHOUT_PID = frozenset(
    "GpuDeviceLost GpuDriverLost GpuResetRequired VramLedgerAbsent VramLedgerManyExportersDown"
    " VramLedgerRulesFailing".split()
)
"""Pages about a device, a host or Prometheus, whose text lists the holders instead of a label naming one."""


@dataclass(slots=True)
class Score:
    planted: int = 0  # variations in which it had to fire
    found: int = 0  # those in which it did, in time
    right: int = 0  # firings in variations whose label allows them
    wrong: int = 0  # firings in others
    times: list[float] = field(default_factory=list)  # from the onset to the first right firing


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a run of the suite comes to.

    ``missed`` and ``false`` are sentences, one a failure of the bars; ``nameless`` are pages without pid and
    owner, ``misnamed`` alerts that blame somebody whose pid it was not.
    """

    scores: dict[str, Score]
    missed: list[str]
    false: list[str]
    hours: float
    pages: int
    warnings: int
    nameless: list[str]
    misnamed: list[str]

    @property
    def warnings_a_day(self) -> float:
        """Warnings in a simulated day of healthy work."""
        return self.warnings / max(self.hours / 24, 1e-9)


def judge(runs: Sequence[Run]) -> Verdict:
    """Compare every firing with the label of its scenario."""
    scores = {alert.name: Score() for alert in rules.alerts() if alert.severity != "none"}
    missed: list[str] = []
    false: list[str] = []
    hours, quiet = 0.0, {PAGE: 0, WARNING: 0}
    for run in runs:
        scenario = SCENARIOS[run.scenario]
        if scenario.healthy:
            hours += run.hours
        for firing in run.firings:
            right = _right(scenario, run, firing)
            score = scores[firing.alert]
            score.right += right
            score.wrong += not right and (firing.severity in LOUD or not scenario.healthy)
            if not right and firing.severity in LOUD:
                false.append(_of(run, firing))
                if scenario.healthy:
                    quiet[firing.severity] += 1
        for alert in scenario.expects:
            scores[alert].planted += 1
            begun = _found(run, alert)
            why = _late(scenario, run, alert, begun)
            if begun is not None:
                scores[alert].times.append(begun - (run.onset or 0))
            if why:
                missed.append(f"{run.scenario}/{run.seed}: {alert} {why}")
            else:
                scores[alert].found += 1
    fired = [(run, firing) for run in runs for firing in run.firings]
    return Verdict(
        scores, missed, false, hours, quiet[PAGE], quiet[WARNING],
        nameless=[_of(run, each) for run, each in fired if not _named(each)],
        misnamed=[_of(run, each) for run, each in fired if not _rightly(run, each)],
    )  # fmt: skip


def _right(scenario: Scenario, run: Run, firing: Firing) -> bool:
    """Tell whether the label allows that this alert fires then."""
    if firing.alert in scenario.always:
        return True
    return firing.alert in (*scenario.expects, *scenario.allows) and firing.begin >= (run.onset or 0)


def _found(run: Run, alert: str) -> float | None:
    begins = [each.begin for each in run.firings if each.alert == alert and each.begin >= (run.onset or 0)]
    return min(begins, default=None)


def _late(scenario: Scenario, run: Run, alert: str, begun: float | None) -> str:
    """Say why a fault does not count as found; empty when it does."""
    if begun is None:
        return "did not fire"
    if scenario.leak and run.full is not None and begun >= run.full > (run.onset or 0):
        return f"fired {begun - run.full:.0f} s after the card was full to nine tenths"
    hold = min(each.hold + each.age for each in rules.alerts() if each.name == alert)
    late = begun - (run.onset or 0) - hold
    if scenario.within is not None and late > scenario.within:
        return f"fired {late:.0f} s after its for, {scenario.within:.0f} are allowed"
    return ""


def _named(firing: Firing) -> bool:
    """Tell whether a page about a holder has its pid and its owner as labels."""
    if firing.severity != PAGE or firing.alert in _WITHOUT_PID:
        return True
    return all(firing.labels.get(name) for name in ("pid", "owner", "owner_type"))


def _rightly(run: Run, firing: Firing) -> bool:
    """Tell whether the owner that an alert names has the pid when it begins to fire, or had it as a rank."""
    pid, owner = firing.labels.get("pid"), firing.labels.get("owner")
    if not pid or not owner:
        return True
    lingers = inf if firing.labels.get("rank_state") == "ended" else LINGERS
    return any(
        str(each.pid) == pid and each.owner == owner and each.begin <= firing.begin < each.end + lingers
        for each in run.tenancies
    )


def _of(run: Run, firing: Firing) -> str:
    about = {name: firing.labels[name] for name in ("gpu", "pid", "source", "owner") if name in firing.labels}
    told = f"{firing.severity} {firing.alert} {about} from {firing.begin:.0f} to {firing.end:.0f} s"
    return f"{run.scenario}/{run.seed}: {told}"


def alert_table(verdict: Verdict, runs: Sequence[Run]) -> str:
    """Return the table of the alerts and the summary, as Markdown."""
    return "\n".join([*_alerts(verdict), "", *_summary(verdict, runs)]) + "\n"


def _alerts(verdict: Verdict) -> Iterator[str]:
    yield "| alert | found | minutes until it fires: median | longest |"
    yield "|---|---|---|---|"
    wrong = []
    for name, score in sorted(verdict.scores.items()):
        if not score.planted:
            continue
        if score.wrong:
            wrong.append(f"{name} {score.right / (score.right + score.wrong):.0%}")
        found = f"{score.found}" if score.found == score.planted else f"{score.found} of {score.planted}"
        times = [_span(median(score.times)), _span(max(score.times))] if score.times else ["-", "-"]
        yield f"| {' | '.join([name, found, *times])} |"
    yield f"\nPrecision is 100 %, but: {', '.join(wrong) or 'none'}."
    unplanted = [name for name, score in sorted(verdict.scores.items()) if not score.planted]
    if unplanted:
        yield f"\n{UNPLANTED}{', '.join(unplanted)}."


def _summary(verdict: Verdict, runs: Sequence[Run]) -> Iterator[str]:
    planted = sum(score.planted for score in verdict.scores.values())
    found = sum(score.found for score in verdict.scores.values())
    seeds = len({run.seed for run in runs})
    yield (
        f"{found} of {planted} planted alerts found; {verdict.pages} pages and {verdict.warnings} warnings "
        f"({verdict.warnings_a_day:.2f} a day) in {verdict.hours:.0f} simulated hours of healthy work; "
        f"{seeds} seeds."
    )
    healthy = [name for name, scenario in SCENARIOS.items() if scenario.healthy]
    fired = [(run.scenario, each.severity in LOUD) for run in runs for each in run.firings]
    loud = {name: fired.count((name, True)) for name in healthy}
    named = ", ".join(f"`{name}` {count}" for name, count in loud.items() if count)
    yield f"Pages and warnings in healthy scenarios, the allowed ones included: {named or 'none'}."


def time_to_detect(run: Run) -> float | None:
    """Return the seconds until an alert told of what was drawn; of a leak, before the card is full."""
    scenario = KNOWN[run.scenario]
    begins = [_found(run, alert) for alert in (GROWTH if scenario.leak else scenario.expects)]
    begun = min((each for each in begins if each is not None), default=None)
    onset = run.onset or 0
    if begun is None or (scenario.leak and run.full is not None and begun >= run.full > onset):
        return None
    return begun - onset


def false_pages(runs: Iterable[Run]) -> tuple[list[str], float]:
    """Return each page about a node in a healthy draw, also an allowed one, and the node-hours."""
    healthy = [run for run in runs if KNOWN[run.scenario].healthy]
    pages = [
        f"{run.scenario}/{run.seed}: {each.alert} at {each.begin / 60:.0f} min"
        for run in healthy
        for each in run.firings
        if each.severity == PAGE and each.labels.get("instance")
    ]
    return pages, sum(run.hours for run in healthy)


def draw_table(runs: Sequence[Run]) -> str:
    """Return how many draws of each scenario were found, and the false pages, as Markdown."""
    lines = ["| scenario | found | minutes until it fires, median |", "|---|---|---|"]
    times: dict[str, list[float | None]] = {}
    for run in runs:
        if not KNOWN[run.scenario].healthy:
            times.setdefault(run.scenario, []).append(time_to_detect(run))
    for name, each in times.items():
        found = [seconds for seconds in each if seconds is not None]
        lines.append(f"| {name} | {len(found)} of {len(each)} | {_span(median(found)) if found else '-'} |")
    pages, hours = false_pages(runs)
    return "\n".join([*lines, "", f"{len(pages)} pages in {hours:,.0f} node-hours of healthy work.", ""])


def names_in(markdown: Iterable[str]) -> list[str]:
    """Return the alerts in the table of a text and in the line of those without a scenario."""
    lines = list(markdown)
    rows = [line.split("|")[1].strip() for line in lines if line.startswith("|") and "---" not in line]
    others = [line.removeprefix(UNPLANTED).rstrip(".") for line in lines if line.startswith(UNPLANTED)]
    return sorted({name for name in rows if name != "alert"}.union(*(each.split(", ") for each in others)))


def _span(seconds: float) -> str:
    minutes = seconds / 60
    return f"{minutes:.0f}" if minutes < 120 else f"{minutes / 60:.1f} h"
