"""Detect the faults and print the scores: ``python -m tests.lab.faults``, or ``make faults``.

The table goes into ``exporter/docs/measurements/alerts.md``, unless only some scenarios were run.
"""

import argparse
import sys
import time
from pathlib import Path

from tests.support.faults.detection import alert_table, draw_table, false_pages, judge, time_to_detect
from tests.support.faults.draws import DRAWS
from tests.support.faults.suite import KNOWN, SCENARIOS, Pace, run
from tests.support.requirements import PROJECT

MEASURED = PROJECT / "exporter" / "docs" / "measurements" / "alerts.md"
BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"
HEALTHY_SEEDS, FAULTY_SEEDS = 2, 3

DRAWN_PACE = Pace(sample=60.0, step=60.0, scrape=60.0, longest=48.0, together=40)
"""The longest interval of scrapes that the rules accept: it loses the most."""


def main() -> int:
    """Run the requested scenarios; the exit status is 1 when a limit is exceeded."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.faults", description=__doc__)
    parser.add_argument("--only", default="", metavar="NAME,...", help="these scenarios alone")
    parser.add_argument("--healthy", type=int, default=HEALTHY_SEEDS, help="variations of a healthy one")
    parser.add_argument("--faulty", type=int, default=FAULTY_SEEDS, help="variations of a faulty one")
    parser.add_argument("--sample", type=float, default=15.0, help="seconds between samples")
    parser.add_argument("--step", type=float, default=60.0, help="seconds between evaluations of the rules")
    parser.add_argument("--quiet", action="store_true", help="do not change the page")
    parser.add_argument(
        "--draws", type=int, default=0, help="seeds of each drawn scenario, instead of the table"
    )
    parser.add_argument("--healthy-draws", type=int, default=0, help="the same for healthy ones")
    parser.add_argument("--first-seed", type=int, default=1, help="the first seed of the draws")
    parser.add_argument("--jobs", type=int, default=1, help="processes that run draws")
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
        write(MEASURED, text)
    wrong = verdict.missed or verdict.pages or verdict.nameless or verdict.misnamed
    return int(bool(wrong) or verdict.warnings_a_day > 1)


def draw(args: argparse.Namespace) -> int:
    """Run drawn scenarios; the exit status is 1 if healthy work was paged."""
    only = {name for name in args.only.split(",") if name} or set(KNOWN)
    seeds = {True: args.healthy_draws, False: args.draws}
    names = [name for name, each in KNOWN.items() if each.healthy or each in DRAWS]
    variations = [
        (name, args.first_seed + seed)
        for name in names
        if name in only
        for seed in range(seeds[KNOWN[name].healthy])
    ]
    [runs] = run(variations, DRAWN_PACE, most_processes=args.jobs)
    pages, _ = false_pages(runs)
    missed = [each for each in runs if not KNOWN[each.scenario].healthy and time_to_detect(each) is None]
    print(draw_table(runs))
    told = [f"FALSE {each}" for each in pages] + [f"MISSED {each.scenario}/{each.seed}" for each in missed]
    print("\n".join(told))
    return int(bool(pages))


def write(path: Path, text: str) -> None:
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(f"{before}{BEGIN}\n{text}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
