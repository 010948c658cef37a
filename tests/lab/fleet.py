"""The cost of a fleet for one Prometheus: ``make fleet`` measures the table of deploy/fleet/README.md.

Each size is really scraped, with all the rules. A larger one is extrapolated by a straight line, and the
largest difference between the line and what was measured is printed with it.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.lab.bench.cost import cpu_share
from tests.support.fleet.engines import REPOSITORY, RULES, Engine, prometheus, scrape, simulated, until

GPUS = 8
INTERVAL = 15
BEYOND = 10_000
SIZES = [104, 400, 1000]
HEADER = (
    "| GPUs | series | a host | memory | CPU | slowest group | all groups |\n|--:|--:|--:|--:|--:|--:|--:|"
)
README = REPOSITORY / "deploy" / "fleet" / "README.md"
BEGIN, END = "<!-- made by: make fleet -->\n", "<!-- end -->\n"


@dataclass(frozen=True)
class Row:
    """The cost of one size: bytes, seconds of CPU a second, seconds of the slowest rule group and of all."""

    gpus: float
    series: float
    resident: float
    cpu: float
    slowest: float
    rules: float


def rules(engine: Engine) -> list[float]:
    return [float(group["evaluationTime"]) for group in engine.get("/api/v1/rules")["data"]["groups"]]


def measure(program: Path, hosts: int, seconds: float) -> Row:
    """Scrape ``hosts`` hosts for some time and measure the second half of it."""
    with tempfile.TemporaryDirectory() as home, simulated(hosts) as port:
        config = {**scrape(port, hosts, f"{INTERVAL}s"), "rule_files": [str(RULES)]}
        with prometheus(program, Path(home), config) as engine:
            until(lambda: engine.value("sum(up)") == hosts, f"{hosts} hosts up", 120)
            time.sleep(seconds / 2)
            start, rounds = time.monotonic(), []
            with cpu_share(engine.pid) as share:
                while time.monotonic() - start < seconds / 2:
                    time.sleep(INTERVAL)
                    rounds.append(rules(engine))
            series = engine.value('sum(scrape_samples_post_metric_relabeling{job="vramledger"})')
            slowest, together = (statistics.median(map(of, rounds)) for of in (max, sum))
            return Row(hosts * GPUS, series, engine.resident, share[0], slowest, together)


def line(rows: list[Row], name: str, gpus: float) -> tuple[float, float]:
    """Return a straight line's value for a size, and its largest difference from the rows."""
    points = [(row.gpus, float(getattr(row, name))) for row in rows]
    slope, start = statistics.linear_regression(*zip(*points, strict=True))
    missed = max(abs(start + slope * size - value) / value for size, value in points)
    return start + slope * gpus, missed


def printed(row: Row, mark: str = "") -> str:
    of_host = row.series / (row.gpus / GPUS)
    size = f"{row.gpus:,.0f}{mark} | {row.series:,.0f} | {of_host:,.0f} | {row.resident / 2**30:.2f} GiB"
    return f"| {size} | {row.cpu:.3f} | {row.slowest:.2f} s | {row.rules:.2f} s |"


def write(text: str) -> None:
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(f"{before}{BEGIN}{text}\n{END}{after}", encoding="utf-8")


def main() -> None:
    """Measure every size, print the table, and write it when all sizes are in it."""
    options = argparse.ArgumentParser(prog="make fleet", description=__doc__)
    options.add_argument("--gpus", type=int, nargs="+", default=SIZES)
    options.add_argument("--seconds", type=float, default=600, help="how long each size runs (default 600)")
    args = options.parse_args()
    found = shutil.which("prometheus", path=f"{REPOSITORY / '.cache/newer/bin'}:/usr/bin")
    if found is None:
        sys.exit("make fleet: there is no prometheus; bash .ci/provision/newer fetches one where it can")
    rows = []
    for gpus in args.gpus:
        rows.append(measure(Path(found), gpus // GPUS, args.seconds))
        print(printed(rows[-1]), flush=True)
    lines = [HEADER, *map(printed, rows)]
    if len(rows) > 1:
        names = ("series", "resident", "cpu", "slowest", "rules")
        extrapolated = {name: line(rows, name, BEYOND) for name in names}
        lines.append(printed(Row(BEYOND, *(extrapolated[name][0] for name in names)), " (extrapolated)"))
        missed = ", ".join(f"{name} {extrapolated[name][1]:.0%}" for name in names)
        lines.append(f"\nThe measured sizes differ from a straight line through them by at most: {missed}.")
    version = subprocess.run([found, "--version"], check=True, capture_output=True, text=True).stdout
    lines.append(
        f"Prometheus {version.split()[2]} on {os.cpu_count()} cores, {args.seconds:.0f} s each, scraped every"
        f" {INTERVAL} s. A host has {GPUS} GPUs with 8 holders each; CPU is in seconds a second; of the"
        " rules' evaluations the median is told."
    )
    print("\n".join(lines))
    if args.gpus == SIZES:
        write("\n".join(lines))


if __name__ == "__main__":
    main()
