"""The stand-in driver of one node: it lists what the holders of ``holder.py`` say, while they live."""

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.standin.library import StandIn, Unit

POLL = 0.02
"""Seconds between two looks at the holders; a driver frees 20 GiB in 94 ms."""


class NodeDriver:
    """The driver of one node, and the thread that keeps its lists of processes."""

    def __init__(self, directory: Path, library: Path, *, devices: int) -> None:
        directory.mkdir()
        self.directory = directory / "holds"
        self.directory.mkdir()
        self.directory.chmod(0o1777)
        self.standin = StandIn(directory, library, devices=devices)
        self.standin.path.chmod(0o666)
        self._listed: Mapping[Any, Any] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, and end every hang."""
        self._stop.set()
        self._thread.join()
        self.standin.release()

    def forget_dead(self) -> None:
        """Free the memory that belongs to no process, as a reset of the GPU does."""
        for path, hold in self._holds():
            if hold["start"] is None:
                path.unlink(missing_ok=True)

    @property
    def holders(self) -> list[int]:
        """Return the pids that hold memory now."""
        return sorted(pid for pid, _ in self.holdings)

    @property
    def holdings(self) -> list[tuple[int, list[int]]]:
        """Return each pid that holds memory now, with the GPUs."""
        return [(hold["pid"], hold["gpus"]) for _, hold in self._holds()]

    def _holds(self) -> list[tuple[Path, dict[str, Any]]]:
        """Return what is held now; each hold is a file, which is made in one rename and removed by anyone."""
        current = []
        for path in sorted(self.directory.glob("*.hold")):
            try:
                hold = json.loads(path.read_text())
            except FileNotFoundError:
                continue
            if hold["start"] is None or _lives(hold["pid"], hold["start"]):
                current.append((path, hold))
            else:
                path.unlink(missing_ok=True)
        return current

    def _run(self) -> None:
        while not self._stop.wait(POLL):
            listed: dict[tuple[int, int | None], list[tuple[int, int]]] = {}
            for _, hold in self._holds():
                for gpu in hold["gpus"]:
                    listed.setdefault((gpu, hold["mig"]), []).append((hold["pid"], hold["bytes"]))
            if listed == self._listed:
                continue
            self._listed = listed
            for gpu in range(self.standin.device_count):
                device = self.standin.device(gpu)
                device.set_processes(listed.get((gpu, None), []))
                for position, raw in enumerate(device.raw.instances):
                    if raw.present:
                        Unit(raw).set_processes(listed.get((gpu, position), []))


def _lives(pid: int, start: str) -> bool:
    """Tell whether the process still has its memory: the driver frees it before it becomes a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[19] == start and fields[0] not in ("X", "Z")
