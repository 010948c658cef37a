"""Detect the faults and print the scores: ``python -m tests.tools.faults``, or ``make faults``.

The table of the alerts goes into ``alerts/README.md``, unless only some scenarios were run. The table of the
scenarios goes to ``.cache/faults``. With ``--draws`` it runs the drawn scenarios instead, from a seed on, and
writes ``exporter/docs/DETECTION.md``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.faults import comparison, rules
from tests.support.faults.detection import alert_table, judge, scenario_table
from tests.support.faults.draws import DRAWS, GROWTH
from tests.support.faults.suite import KNOWN, SCENARIOS, Pace, RuleSet, Run, run
from tests.support.requirements import PROJECT

README = rules.HOME / "README.md"
DETECTION = PROJECT / "exporter" / "docs" / "DETECTION.md"
SCENARIO_FILE = PROJECT / ".cache" / "faults" / "scenarios.md"
BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"
SECTION = """## Detection

What `make faults` found: every scenario in several variations (sizes, periods, noise, missing scrapes,
restarts), hours of each, through the real exporter's parts and the real rule manager."""
HEALTHY_SEEDS, FAULTY_SEEDS = 2, 3

EARLIER = "af862fa"
"""The revision whose rules are compared with these."""

DRAWN_PACE = Pace(sample=60.0, step=60.0, scrape=60.0, longest=48.0, together=40)
"""The longest interval of scrapes that the rules accept: it loses the most."""


def main() -> int:
    """Run the requested scenarios; the exit status is 1 when a limit is exceeded."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.faults", description=__doc__)
    parser.add_argument("--only", default="", metavar="NAME,...", help="these scenarios alone")
    parser.add_argument("--healthy", type=int, default=HEALTHY_SEEDS, help="variations of a healthy one")
    parser.add_argument("--faulty", type=int, default=FAULTY_SEEDS, help="variations of a faulty one")
    parser.add_argument("--sample", type=float, default=15.0, help="seconds between samples")
    parser.add_argument("--step", type=float, default=60.0, help="seconds between evaluations of the rules")
    parser.add_argument("--quiet", action="store_true", help="leave alerts/README.md alone")
    parser.add_argument(
        "--draws", type=int, default=0, help="seeds of each drawn scenario, instead of the table"
    )
    parser.add_argument("--healthy-draws", type=int, default=0, help="the same for healthy ones")
    parser.add_argument("--first-seed", type=int, default=1, help="the first seed of the draws")
    parser.add_argument("--jobs", type=int, default=1, help="processes that run draws")
    parser.add_argument(
        "--compared", type=int, default=1, help="of these healthy seeds, with other rules too"
    )
    args = parser.parse_args()
    if args.draws or args.healthy_draws:
        return draw(args)
    only = [name for name in args.only.split(",") if name]
    if unknown := set(only) - set(SCENARIOS):
        parser.error(f"no scenario {sorted(unknown)}; there are {', '.join(SCENARIOS)}")
    begun = time.monotonic()
    seeds = {True: args.healthy, False: args.faulty}
    variations = [
        (name, seed)
        for name, scenario in SCENARIOS.items()
        if not only or name in only
        for seed in range(1, 1 + seeds[scenario.healthy])
    ]
    [runs] = run(variations, Pace(args.sample, args.step))
    verdict = judge(runs)
    text = alert_table(verdict, runs)
    print(text)
    SCENARIO_FILE.parent.mkdir(parents=True, exist_ok=True)
    SCENARIO_FILE.write_text(scenario_table(runs), encoding="utf-8")
    print(f"wrote {SCENARIO_FILE.relative_to(PROJECT)}")
    for title, lines in (
        ("MISSED", verdict.missed), ("FALSE", verdict.false), ("WITHOUT A NAME", verdict.nameless),
        ("WITH ANOTHER'S NAME", verdict.misnamed),
    ):  # fmt: skip
        for line in lines:
            print(f"{title} {line}")
    print(
        f"{sum(each.hours for each in runs):.0f} hours in {time.monotonic() - begun:.0f} s", file=sys.stderr
    )
    if not only and not args.quiet:
        write(README, text)
    return (
        1
        if verdict.missed
        or verdict.pages
        or verdict.nameless
        or verdict.misnamed
        or verdict.warnings_a_day > 1
        else 0
    )


def draw(args: argparse.Namespace) -> int:
    """Run drawn scenarios; the exit status is 1 if false pages may be more frequent than promised."""
    ours, theirs, simple = drawn_runs(args)
    text = comparison.comparison(ours, theirs, simple, EARLIER)
    print(text)
    pages, _ = comparison.false_pages(ours)
    missed = [f"{each.scenario}/{each.seed}" for each in ours if not comparison.is_found(each)]
    print("\n".join([*(f"FALSE {each}" for each in pages), *(f"MISSED {each}" for each in missed)]))
    if not args.only and not args.quiet:
        write(DETECTION, text)
    return int(comparison.false_pages_at_most(ours) > 1)


def drawn_runs(args: argparse.Namespace) -> list[list[Run]]:
    """Return the runs of the draws by these rules, by the earlier ones and by the simple ones."""
    only = {name for name in args.only.split(",") if name} or set(KNOWN)
    faulty = [each for each in DRAWS if not each.healthy and each.name in only]
    healthy = [name for name, each in KNOWN.items() if each.healthy and name in only]
    first = args.first_seed
    planted = [(each.name, first + seed) for each in faulty for seed in range(args.draws)]
    quiet = [(name, first + seed) for name in healthy for seed in range(args.healthy_draws)]
    compared = [each for each in quiet if each[1] < first + args.compared]
    rest = [each for each in quiet if each[1] >= first + args.compared]
    expected = {*GROWTH, *(alert for each in faulty for alert in each.expects)}

    def is_expected(rule: Mapping[str, Any]) -> bool:
        return rule["alert"] in expected

    def is_page(rule: Mapping[str, Any]) -> bool:
        return bool(rule["labels"]["severity"] == rules.PAGE)

    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        scratch = Path(folder)
        here, old = rules.HOME, comparison.rules_of(EARLIER, scratch / "earlier")
        parts = [
            _judged(planted, [here, old], is_expected, scratch / "planted", args.jobs),
            _judged(compared, [here, old], is_page, scratch / "compared", args.jobs),
            [*_judged(rest, [here], is_page, scratch / "rest", args.jobs), [], []],
        ]
    return [[each for part in parts for each in part[number]] for number in range(3)]


def _judged(
    variations: list[tuple[str, int]],
    homes: list[Path],
    wanted: Callable[[Mapping[str, Any]], bool],
    scratch: Path,
    jobs: int,
) -> list[list[Run]]:
    """Return the runs by the wanted rules of each directory, and by the simple rules."""
    scratch.mkdir()
    reduced = [rules.reduce(home, scratch / str(number), wanted) for number, home in enumerate(homes)]
    sets = [RuleSet(home=home) for home in [*reduced, comparison.SIMPLE][: 3 if len(homes) > 1 else 1]]
    homes_of = tuple(each.home for each in sets if each.home)
    return (
        run(variations, replace(DRAWN_PACE, homes=homes_of), sets, jobs) if variations else [[] for _ in sets]
    )


def write(path: Path, text: str) -> None:
    """Put the table between its marks; a page without them gets a section for it at its end."""
    page = path.read_text(encoding="utf-8")
    if BEGIN not in page or END not in page:
        page = f"{page.rstrip()}\n\n{SECTION}\n{BEGIN}\n{END}\n"
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(f"{before}{BEGIN}\n{text}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
