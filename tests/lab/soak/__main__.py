"""``python -m tests.lab.soak PART``: run a part of the soak, print its table; 1 when a figure is bad."""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.lab.soak import attacks, faults
from tests.lab.soak.table import markdown


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.soak", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of everything that is drawn (default 1)")
    parts = parser.add_subparsers(dest="part", required=True)
    wrong = parts.add_parser("faults", help="faults of the driver, one after the other")
    wrong.add_argument("--faults", type=int, default=10_000_000)
    strangers = parts.add_parser("attacks", help="what other users of the host do to it, a kind at a time")
    strangers.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        place = Path(directory)
        if args.part == "faults":
            rows = list(faults.inject(place, faults=args.faults, seed=args.seed).rows())
        else:
            rows = list(attacks.run(place, seconds=args.seconds))
    print(*markdown(rows), sep="\n")
    return int(any(row.good is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
