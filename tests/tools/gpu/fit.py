"""Prove on a GPU that what ``vramledger fit`` says is true: ``python -m tests.tools.gpu.fit --out DIR``.

Programs of torch, JAX (with its preallocation and without) and CuPy run beside an exporter, and ``fit`` is
asked about each. Then each runs again with exactly each limit that it named, and with three quarters of that.
Of one program as many as fit by memory run at once, each within its limit, and as many of these work as
``fit`` says take turns at full speed. Writes ``fit.json`` after each part. Two minutes; ``--rehearse`` goes
through the same motions with a driver that is not there and programs that hold nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.listening import FAKE, PROJECT, STARTUP

HERE = Path(__file__).resolve().parent
ENOUGH = 90.0
"""Seconds that programs of one part may take together."""

CLEARLY_LESS = 0.75
Facts = dict[str, Any]
NAMES = ("torch", "cupy", "jax-growth", "jax")


class Bench:
    """An exporter, programs beside it, and the results."""

    def __init__(self, place: Path, out: Path, *, scene: Any) -> None:  # noqa: ANN401 a scene or None
        self.place, self.out, self.scene = place, out, scene
        self.figures: Facts = {}
        self.rows: list[tuple[str, str, bool | None]] = []
        self.limits: dict[str, list[Facts]] = {}

    def check(self, what: str, detail: object, *, met: bool | None) -> None:
        """Record a verdict, and print it; without a GPU there is none."""
        met = None if self.scene is not None else met
        self.rows.append((what, str(detail), met))
        print(f"{'' if met is None else 'met: ' if met else 'MISSED: '}{what} [{detail}]", flush=True)
        self.write()

    def write(self) -> None:
        """Write what there is."""
        (self.out / "fit.json").write_text(json.dumps({"figures": self.figures, "rows": self.rows}, indent=1))

    def environment(self, more: Mapping[str, str], *, exporter: bool = False) -> dict[str, str]:
        """Return a program's environment, with the agent, or the exporter's."""
        base = dict(os.environ if self.scene is None else self.scene.env)
        if exporter:
            return {**base, "PYTHONPATH": str(PROJECT / "exporter")}
        path = [str(STARTUP), *([str(FAKE)] if self.scene is not None else [])]
        return {
            **base, "PYTHONPATH": os.pathsep.join(path), "VRAMLEDGER_AGENT": "1",
            "VRAMLEDGER_AGENT_SOCKET": str(self.place / "agent.sock"),
            "VRAMLEDGER_AGENT_REPORTS": str(self.place / "reports"), **more,
        }  # fmt: skip

    @contextmanager
    def exporter(self) -> Iterator[None]:
        """Run an exporter until it answers."""
        command = [
            sys.executable, "-m", "vramledger", "serve", "--web.listen-address=127.0.0.1:0",
            f"--agent.socket={self.place / 'agent.sock'}", f"--control.socket={self.place / 'control.sock'}",
        ]  # fmt: skip
        with (self.out / "serve.log").open("wb") as log:
            process = subprocess.Popen(
                command, env=self.environment({}, exporter=True), stdout=log, stderr=log
            )
        try:
            deadline = time.monotonic() + 30
            while not (self.place / "control.sock").exists() and time.monotonic() < deadline:
                time.sleep(0.1)
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)

    @contextmanager
    def program(self, name: str, *more: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
        """Start a program; it ends with the block."""
        if name == "jax-growth":
            environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        with (self.out / "programs.log").open("a") as errors:
            process = subprocess.Popen(
                [sys.executable, str(HERE / "fit_programs.py"), name, *more],
                env=self.environment(environ), text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip
        try:
            if self.scene is not None:
                self.scene.standin.device(0).set_processes([(process.pid, 2**30)])
            yield process
        finally:
            process.kill()
            process.communicate()

    def fit(self, pid: int, *, seconds: int = 5) -> Facts:
        """Ask for the answer, as JSON and as text."""
        command = [
            sys.executable, "-m", "vramledger", "fit", str(pid), "--for", f"{seconds}s",
            "--control.socket", str(self.place / "control.sock"),
        ]  # fmt: skip
        environ = self.environment({}, exporter=True)
        both = [
            subprocess.Popen([*command, *more], env=environ, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            for more in ([], ["--json"])
        ]  # fmt: skip
        (text, errors), (answer, _) = (each.communicate(timeout=60) for each in both)
        return {
            "text": text + errors,
            "status": both[1].returncode,
            "answer": json.loads(answer) if answer.startswith("{") else {},
        }


def say(process: subprocess.Popen[str], line: str | None = None, within: float = ENOUGH) -> Facts:
    """Ask a program to repeat its work if a line is given; return the next one it prints."""
    assert process.stdin is not None
    assert process.stdout is not None
    if line is not None:
        process.stdin.write(f"{line}\n")
        process.stdin.flush()
    if not select.select([process.stdout], [], [], within)[0]:
        return {"error": "said nothing"}
    text = process.stdout.readline()
    told: Facts = json.loads(text) if text else {"error": "ended", "status": process.wait()}
    return told


def learn(bench: Bench, names: tuple[str, ...]) -> None:
    """Run the programs without a limit, and ask about each; keep the limits that were named."""
    with ExitStack() as stack:
        programs = {name: stack.enter_context(bench.program(name, "hold")) for name in names}
        told = {name: say(each) for name, each in programs.items()}
        time.sleep(3)
        for name, process in programs.items():
            if process.stdin is not None and "error" not in told[name]:
                process.stdin.write("again\n")
                process.stdin.flush()
            found = {"told": told[name], **bench.fit(process.pid, seconds=3 if name != "duty" else 5)}
            bench.figures[f"{name}, unlimited"] = found
            needs = found["answer"].get("needs") or [{}]
            device = (needs[0].get("devices") or [{}])[0]
            bench.limits[name] = device.get("limits", [])
            bench.check(
                f"{name}: an answer",
                {key: needs[0].get(key) for key in ("held", "needed", "planned", "grade", "copies_by_time")}
                | {key: device.get(key) for key in ("verdict", "copies_now", "copies_empty")}
                | {"limits": [each["text"] for each in bench.limits[name]]},
                met=found["status"] == 0 and "error" not in told[name],
            )


def settings(limit: Facts, share: float = 1.0) -> dict[str, str]:
    """Return the environment for a limit, or for a share of it."""
    text: str = limit["text"]
    if share != 1.0:
        if limit["where"] == "code":
            text = re.sub(
                r"0\.\d+|(?<=\()\d+(?=[),*])|(?<==)\d+", lambda found: _less(found[0], share), text, count=1
            )
        elif re.search(r"=[\d.]+$", text):
            text = re.sub(r"[\d.]+$", lambda found: _less(found[0], share), text)
    if limit["where"] == "code":
        return {"FIT_CODE": text}
    name, _, value = text.partition("=")
    return {name: value}


def _less(number: str, share: float) -> str:
    return f"{float(number) * share:.4f}" if "." in number else str(int(int(number) * share))


def prove(bench: Bench, names: tuple[str, ...]) -> None:
    """Run each program with each of its limits, and with clearly less, two at a time."""
    cases: list[tuple[str, str, dict[str, str], bool]] = []
    for name in names:
        amounts = [each for each in bench.limits.get(name, []) if re.search(r"\d", each["text"])]
        others = [each for each in bench.limits.get(name, []) if each not in amounts]
        for limit in amounts:
            together = dict(pair for each in others for pair in settings(each).items())
            cases.append((name, limit["text"], settings(limit), True))
            if others:
                cases.append((name, limit["text"] + " and " + others[0]["text"],
                              {**settings(limit), **together}, True))  # fmt: skip
            cases.append((name, f"{CLEARLY_LESS} of {limit['text']}", settings(limit, CLEARLY_LESS), False))
    with ExitStack() as stack:
        running = [(case, stack.enter_context(bench.program(case[0], **case[2]))) for case in cases]
        end = time.monotonic() + ENOUGH
        for (name, what, environ, fits), process in running:
            told = say(process, within=max(1.0, end - time.monotonic()))
            bench.figures[f"{name}, {what}"] = {"environ": environ, "told": told}
            failed = "error" in told
            bench.check(
                f"{name}: {'runs within' if fits else 'does not run with'} {what}", told, met=failed != fits
            )


def crowd(bench: Bench) -> None:
    """Run as many copies as fit by memory, each within its limit, and as many as take turns at full speed."""
    found = bench.figures.get("duty, unlimited", {})
    need = (found.get("answer", {}).get("needs") or [{}])[0]
    device = (need.get("devices") or [{}])[0]
    fitting, turns = device.get("copies_empty") or 2, need.get("copies_by_time") or 2
    limits = bench.limits.get("duty", [])
    environ = settings(limits[0]) if limits else {}
    alone = found.get("told", {}).get("told")
    with ExitStack() as stack:
        programs = [
            stack.enter_context(bench.program("duty", "hold", **environ)) for _ in range(min(fitting, 16))
        ]
        first = [say(each) for each in programs]
        whole = [each.get("error") for each in first]
        met = fitting <= 16 and not any(whole)
        bench.check(f"{fitting} copies fit by memory", whole, met=met)
        speeds = {}
        for count in sorted({min(turns, len(programs)), len(programs)}):
            for each in programs[:count]:
                if each.stdin is not None and each.poll() is None:
                    each.stdin.write("again\n")
                    each.stdin.flush()
            speeds[count] = [say(each, within=15).get("told") for each in programs[:count]]
        bench.figures["duty, copies"] = {
            "alone": alone,
            "first": first,
            "speeds": speeds,
            "by compute": turns,
        }
        slow = [speed / alone for speed in speeds.get(turns, []) if speed and alone]
        bench.check(
            f"{turns} take turns at full speed",
            {"alone": alone, **speeds},
            met=bool(slow) and min(slow) > 0.85,
        )
        with bench.program("duty", **environ) as process:
            bench.check(f"copy {fitting + 1}", say(process, within=30), met=None)


def main() -> int:
    """Run the parts; 1 when an answer was not true."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "fit-gpu")))
    parser.add_argument("--rehearse", action="store_true", help="without a GPU: only the motions")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="vl-") as directory, ExitStack() as stack:
        scene: Any = nullcontext()
        if args.rehearse:
            from tests.tools.bench.scene import scene as make_scene

            scene = make_scene(Path(directory), 1, 0)
        bench = Bench(Path(directory), args.out, scene=stack.enter_context(scene))
        stack.enter_context(bench.exporter())
        names = ("torch",) if args.rehearse else NAMES
        parts: tuple[Callable[[], None], ...] = (
            partial(learn, bench, ("duty",)), partial(learn, bench, names), partial(prove, bench, names),
            partial(crowd, bench),
        )  # fmt: skip
        for part in parts:
            try:
                part()
            except Exception as error:  # noqa: BLE001 after one failed part the others run
                bench.check("a part failed", repr(error), met=False)
            print(f"{time.monotonic() - begun:.0f} s", flush=True)
    return 1 if any(met is False for *_, met in bench.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
