"""``make bench``: measure, print one table, and end with 1 when a limit is exceeded.

Not a test: times depend on the machine and on what else it does, so the load is printed with the table.
"""

import argparse
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.lab.bench import agents, beside, crowd, inside, owners, page, sample, start
from tests.lab.bench.scene import scene
from tests.lab.bench.table import Row, markdown


def _rows(directory: Path, *, quick: bool) -> Iterator[Row]:
    with scene(directory, 8, 64) as full:
        yield from beside.measure(full, turns=1 if quick else 2, seconds=5 if quick else 13)
        yield from start.measure(full, times=1 if quick else 5)
        yield from page.measure(full, turns=1 if quick else 3, seconds=6 if quick else 10)
        yield from owners.measure(full, seconds=10 if quick else 30)
        yield from crowd.measure(full, turns=1 if quick else 2, seconds=3 if quick else 9)
    with scene(directory, 8, 0) as empty:
        yield from agents.measure(empty, turns=1 if quick else 2, seconds=5 if quick else 13)
    yield from inside.measure(times=40 if quick else 200)
    yield from sample.measure(directory, devices=8, holders=64, samples=15 if quick else 30)
    yield from sample.measure(directory, devices=8, holders=8, samples=15 if quick else 30)
    if not quick:
        for devices, holders in ((8, 8), (1, 2)):
            with scene(directory, devices, holders) as less:
                yield from beside.measure(less, turns=2, seconds=6)


def _load() -> str:
    return " ".join(f"{each:.2f}" for each in os.getloadavg())


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less than a minute, and less exact")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that everything that we started ends with us
    before, begun = _load(), time.monotonic()
    rows = []
    with tempfile.TemporaryDirectory(prefix="vramledger-bench-") as directory:
        for row in _rows(Path(directory), quick=args.quick):
            print(f"{row.at}: {row.what}", file=sys.stderr, flush=True)
            rows.append(row)
    print("\n".join(markdown(rows)))
    print(
        f"\n{os.cpu_count()} CPUs, Python {platform.python_version()}, Linux {platform.release()}; "
        f"load before {before}, after {_load()}; {time.monotonic() - begun:.0f} s."
    )
    return 1 if any(row.met is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
