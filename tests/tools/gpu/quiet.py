"""Everything that one quiet GPU has to show, in one run: ``python -m tests.tools.gpu.quiet --out DIR``.

Each part is a tool of its own with a time of its own. Parts that use only memory run side by side, those
whose figures are times run alone. ``--rehearse`` without a GPU. The files of all parts are packed into one,
and the words of each part are in a file of its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from tests.support.listening import PROJECT

PARTS: tuple[tuple[tuple[str, int, tuple[str, ...]], ...], ...] = (
    (("felt", 130, ("tests.tools.bench.felt", "--torch", "fake", "--torch", "real")),),
    (("fit", 120, ("tests.tools.gpu.fit",)),),
    (
        ("flight", 90, ("tests.tools.gpu.flight",)),
        ("pluggable", 80, ("tests.tools.gpu.pluggable", "--seconds", "30")),
    ),
    (("imports", 60, ("tests.tools.gpu.imports",)),),
    (("late", 80, ("tests.tools.gpu.agent", *"--only verdicts --case late-leak --case early".split())),),
    (("lock", 40, ("tests.tools.gpu.agent", *"--only lock --only hook".split())),),
    (("verdicts", 120, ("tests.tools.gpu.agent", "--only", "verdicts")),),
)
"""Parts that run after each other; each has tools that run side by side: name, seconds, command."""

MOST_SECONDS = 600


def main() -> int:
    """Run all parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "quiet-gpu")))
    parser.add_argument("--rehearse", action="store_true", help="without a GPU: only the motions")
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--most", type=int, default=MOST_SECONDS, help="seconds in all")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="vl-quiet-"))
    begun = time.monotonic()
    environ = {**os.environ, "PYTHONPATH": f"{PROJECT / 'exporter'}{os.pathsep}{PROJECT}"}
    failed = 0
    for part in PARTS:
        running = []
        for name, seconds, command in part:
            if args.only and name not in args.only:
                continue
            place = work / name
            place.mkdir(parents=True, exist_ok=True)
            more = {"felt": ["--json", str(place / "felt.json")], "imports": []}.get(
                name, ["--out", str(place)]
            )
            if args.rehearse and name != "imports":
                more.append("--quick" if name == "felt" else "--rehearse")
                command = tuple(each for each in command if each != "real")  # noqa: PLW2901
                if name == "felt":
                    command = (command[0],)  # noqa: PLW2901
            left = max(1, min(seconds, args.most - (time.monotonic() - begun)))
            with (args.out / f"{name}.txt").open("w") as log:
                limited = ["timeout", "--kill-after=3", str(left), sys.executable, "-m", *command, *more]
                running.append((name, subprocess.Popen(
                    limited, env=environ, cwd=PROJECT, stdout=log, stderr=subprocess.STDOUT
                )))  # fmt: skip
        for name, process in running:
            status = process.wait()
            failed += status != 0
            print(f"== {name}: status {status}, {time.monotonic() - begun:.0f} s", flush=True)
            print((args.out / f"{name}.txt").read_text()[-2500:], flush=True)
        pack(work, args.out / "parts.tar.gz")
    return 1 if failed else 0


def pack(work: Path, to: Path) -> None:
    """Pack the files of all parts that are not large."""
    with tarfile.open(to, "w:gz") as packed:
        for path in sorted(work.rglob("*")):
            if path.is_file() and path.stat().st_size < 4 * 2**20:
                packed.add(path, path.relative_to(work))


if __name__ == "__main__":
    sys.exit(main())
