"""What vramledger costs on a GPU, beside nvitop-exporter: ``python -m tests.lab.gpu.cost OUT``.

Both run at the same time and are scraped by the same clock: two holders and a scrape a second, then 25
holders, nine of them with the agent, at a scrape a second, in 15 and in 60 seconds. Writes ``OUT/cost.json``.
``--rehearse`` uses the stand-in driver, and ``--quick`` shorter windows. Less than five minutes.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

from tests.lab.bench import cost
from tests.lab.bench.programs import Page, Program, running
from tests.lab.bench.scene import ROOT, Scene, sleepers
from tests.support.standin.library import StandIn, build
from vramledger_agent.commands.run import STARTUP

MIB = 2**20
PLAIN = 16
AGENTS = 9
FEW = 2
WARM_UP = 36.0
"""Seconds: a GPU that goes on with what it does is sampled less often after ten, and a holder is read again
30 s after it was first seen."""
FAKE = ROOT / "tests" / "support" / "frameworks" / "standin"

HOLDER = """
import sys, time, torch
held = torch.ones(2**18, device="cuda")
torch.cuda.synchronize()
print("ready", flush=True)
while True:
    if sys.argv[1] == "busy":
        held.mul_(1.0)
        torch.cuda.synchronize()
    else:
        time.sleep(1.0)
"""


def window(programs: dict[str, Program], seconds: float, interval: float) -> dict[str, Any]:
    """Scrape all at the same interval for some seconds; return what each has cost."""
    pages: dict[str, list[Page]] = {name: [] for name in programs}
    with ExitStack() as stack:
        shares = {name: stack.enter_context(cost.cpu_share(each.pid)) for name, each in programs.items()}
        begun, number = time.monotonic(), 0.5
        while number * interval <= seconds:
            time.sleep(max(0.0, begun + number * interval - time.monotonic()))
            for name, each in programs.items():
                pages[name].append(each.scrape())
            number += 1
        time.sleep(max(0.0, begun + seconds - time.monotonic()))
    told: dict[str, Any] = {"seconds": seconds, "interval": interval}
    for name, each in programs.items():
        memory, taken = cost.memory(each.pid), [page.seconds for page in pages[name]]
        told[name] = {
            "ms_per_second": 1000 * shares[name][0], "scrape_median_ms": 1000 * statistics.median(taken),
            "scrape_most_ms": 1000 * max(taken), "scrapes": len(taken), "series": pages[name][-1].series,
            "rss_mib": memory.rss / MIB, "pss_mib": None if memory.pss is None else memory.pss / MIB,
        }  # fmt: skip
    return told


@contextmanager
def started(command: list[str], env: dict[str, str]) -> Iterator[int]:
    """Start a holder, wait until it has said a line, and end it with the block."""
    process = subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    try:
        if not process.stdout.readline():
            raise SystemExit(f"a holder did not start: {command}")
        yield process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class Place:
    """The machine: a GPU, or the stand-in for a rehearsal."""

    def __init__(self, directory: Path, holding: ExitStack, *, rehearse: bool) -> None:
        self._holding = holding
        self._standin: StandIn | None = None
        self._pids: list[int] = []
        path = os.pathsep.join([str(ROOT / "exporter"), str(ROOT / "exporter/agent"), str(ROOT)])
        inherited = os.environ.get("PYTHONPATH", "")
        env = {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{inherited}"}
        if rehearse:
            library = build(directory)
            self._library = str(library)
            self._standin = holding.enter_context(StandIn(directory, library, devices=1))
            self._standin.latencies()
            env |= self._standin.env()
        elif shutil.which("nvidia-smi") is None:
            raise SystemExit("there is no GPU here; --rehearse needs none")
        self.socket = directory / "agent.sock"
        # a GPU has no stand-in, and what runs in the scene does not ask for it
        self.scene = Scene(cast("StandIn", self._standin), 1, PLAIN + AGENTS, env, directory)

    def _list(self) -> None:
        if self._standin is not None:
            device = self._standin.device(0)
            device.set_processes([(pid, 518 * MIB) for pid in self._pids])
            device.busy(self._pids[0])

    def hold(self, count: int) -> None:
        """Start holders without the agent; the first of all is busy."""
        if self._standin is not None:
            self._pids += self._holding.enter_context(sleepers(count, self._library))
        else:
            for number in range(count):
                kind = "quiet" if self._pids or number else "busy"
                command = [sys.executable, "-c", HOLDER, kind]
                self._pids.append(self._holding.enter_context(started(command, dict(self.scene.env))))
        self._list()

    def hold_with_agents(self, count: int) -> None:
        """Start holders of 64 MiB of torch's, with the agent."""
        env = {**self.scene.env, "VRAMLEDGER_AGENT": "1", "VRAMLEDGER_AGENT_SOCKET": str(self.socket)}
        path = [STARTUP, env["PYTHONPATH"], *([str(FAKE)] if self._standin is not None else [])]
        env["PYTHONPATH"] = os.pathsep.join(path)
        if self._standin is not None:
            env["LD_PRELOAD"] = self._library  # a holder that does not map the driver is read again each time
        command = [sys.executable, str(Path(__file__).with_name("programs.py")), "hold", "64"]
        self._pids += [self._holding.enter_context(started(command, env)) for _ in range(count)]
        self._list()


def _lines(program: Program, start: str) -> int:
    return sum(line.startswith(start) for line in program.scrape().text.splitlines())


def measure(out: Path, *, rehearse: bool, quick: bool) -> None:
    """Measure everything, and write after each step what is known."""
    share = 0.2 if quick else 1.0
    told: dict[str, Any] = {"python": platform.python_version(), "cpus": os.cpu_count()}

    def keep(name: str, figures: object) -> None:
        told[name] = figures
        told["load"] = os.getloadavg()
        (out / "cost.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
        print(name, json.dumps(figures), flush=True)

    with tempfile.TemporaryDirectory(prefix="cost-") as directory, ExitStack() as holding:
        place = Place(Path(directory), holding, rehearse=rehearse)
        place.hold(FEW)
        time.sleep(3.0)
        with (
            running(place.scene, "ours", "--no-collector.agent") as ours,
            running(place.scene, "peer") as peer,
        ):
            time.sleep(WARM_UP)
            keep("2 holders, 1 s", window({"ours": ours, "peer": peer}, 20 * share, 1))
        place.hold(PLAIN - FEW)
        with (
            running(place.scene, "ours", f"--agent.socket={place.socket}") as ours,
            running(place.scene, "peer") as peer,
        ):
            both = {"ours": ours, "peer": peer}
            place.hold_with_agents(AGENTS)
            deadline = time.monotonic() + 25.0
            while _lines(ours, "vramledger_agent_info") < AGENTS and time.monotonic() < deadline:
                time.sleep(0.5)
            time.sleep(WARM_UP)
            keep("agents", _lines(ours, "vramledger_agent_info"))
            keep("holders", _lines(ours, "vramledger_process_info"))
            keep("25 holders, 1 s", window(both, 30 * share, 1))
            keep("25 holders, 15 s", window(both, 30 * share, 15 * share))
            keep("25 holders, 60 s", window(both, 60 * share, 60 * share))
            (out / "page.txt").write_text(ours.scrape().text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rehearse", action="store_true", help="with the stand-in driver")
    parser.add_argument("--quick", action="store_true", help="a fifth of the time")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    measure(args.out, rehearse=args.rehearse, quick=args.quick)


if __name__ == "__main__":
    main()
