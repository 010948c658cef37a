"""Run every scenario without a GPU: the programs' simulated memory is set on the stand-in driver."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from tests.support.standin.library import StandIn, build

DEVICES = 2
PACE = 0.02
"""Seconds between two reads of the programs' notes."""


class Rehearsal:
    """Reads the programs' notes (``programs/gpu.py``) and controls two stand-ins.

    Attributes:
        standin: the driver as the host sees it.
        blind: the driver as another PID namespace sees it: the same memory, nobody listed.
    """

    def __init__(self, directory: Path) -> None:
        self.notes = directory / "notes"
        self.notes.mkdir(parents=True)
        library = build(directory)
        self.standin = StandIn(directory, library, devices=DEVICES)
        (directory / "blind").mkdir()
        self.blind = StandIn(directory / "blind", library, devices=DEVICES)
        self._pids: dict[str, int] = {}
        self._last: object = None
        threading.Thread(target=self._follow, name="rehearsal", daemon=True).start()

    def env(self) -> dict[str, str]:
        """Return what programs and samplers need in their environment."""
        return {**self.standin.env(), "VRAMLEDGER_REHEARSAL": str(self.notes)}

    def blind_env(self) -> dict[str, str]:
        """Return what a sampler in another PID namespace needs."""
        return self.blind.env()

    def _follow(self) -> None:
        while True:
            with contextlib.suppress(FileNotFoundError):
                self._ledger(self._living())
            time.sleep(PACE)

    def _living(self) -> list[dict[str, Any]]:
        living = []
        for path in sorted(self.notes.glob("*.json")):
            facts = json.loads(path.read_text())
            facts["key"] = path.name
            facts["pid"] = self._host_pid(path.name, facts)
            facts["alive"] = _alive(facts["pid"])
            living.append(facts)
        return living

    def _host_pid(self, key: str, facts: dict[str, Any]) -> int:
        """Find the pid, in our namespace, of a program that knows only the one in its own."""
        pid: int = facts["pid"]
        if facts["namespace"] == os.stat("/proc/self/ns/pid").st_ino:  # noqa: PTH116
            return pid
        if key not in self._pids:
            for entry in Path("/proc").iterdir():
                with contextlib.suppress(OSError, ValueError):
                    inside = (entry / "status").read_text().split("NSpid:")[1].splitlines()[0].split()
                    same = (entry / "ns/pid").stat().st_ino == facts["namespace"]
                    if same and int(inside[-1]) == pid:
                        self._pids[key] = int(entry.name)
        return self._pids.get(key, 0)

    def _ledger(self, notes: list[dict[str, Any]]) -> None:
        living = [facts for facts in notes if facts["alive"]]
        shares = {facts["shares"]: facts for facts in notes if "shares" in facts}
        now = time.time()
        plan: list[tuple[Any, ...]] = []
        for device in range(DEVICES):
            here = [facts for facts in living if facts["device"] == device]
            sizes = []
            for facts in here:
                source = shares.get(facts.get("opens"))
                inherited = source["shared"] if source is not None and not source["alive"] else 0
                sizes.append((facts["pid"], facts["bytes"] + inherited))
            mps = [(facts["pid"], size) for facts, (_, size) in zip(here, sizes, strict=True) if facts["mps"]]
            nobody = sum(facts.get("unattributed", 0) for facts in here)
            kept = {facts["keeps"] for facts in here if "keeps" in facts}
            nobody += sum(shares[key]["shared"] for key in kept & shares.keys() if not shares[key]["alive"])
            busy = sorted(
                {int(facts["mps"] or facts["pid"]) for facts in here if facts.get("busy_until", 0) > now}
            )
            plan.append((sizes, mps, nobody, busy))
        if plan == self._last:
            return
        self._last = plan
        for device, (sizes, mps, nobody, busy) in enumerate(plan):
            card = self.standin.device(device)
            card.set_memory(unattributed=nobody)
            card.set_processes(sizes, mps=mps)
            card.idle()
            for pid in busy:
                card.busy(pid)
            card.set(gpu_utilization=40 if busy else 0)
            if busy:
                card.set_activity(sm=40.0, dram=5.0)
            else:
                card.be_idle()
            self.blind.device(device).set_memory(unattributed=nobody + sum(size for _, size in sizes))


def _alive(pid: int) -> bool:
    """Tell whether a process still has its memory: alive, or a zombie leader with live threads."""
    try:
        after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return after[0] not in "ZX" or int(after[17]) > 1
