"""Count the messages of restarts of Prometheus, in real time: ``python -m tests.lab.restarts``, half an hour.

Real Prometheus servers with our rules scrape one simulated fleet, each with an Alertmanager of its own, which
has the example's waits. One of them is never restarted. The hour is a database that is moved into the past.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from tests.integration.alerts.test_delivery import inbox
from tests.support.alerts.cases import DEAD, DEVICE, ORPHAN, TRAINER
from tests.support.alerts.holder_cases import IDLE, with_agent
from tests.support.alerts.nodes import Node, changing_at
from tests.support.alerts.promtool import ALERTS
from tests.support.faults import alertmanager, rules
from tests.support.fleet.engines import scrape
from tests.support.host.scrapes import Renderer
from tests.support.ports import free_port
from tests.support.requirements import VERSIONS, require_version

WARM, AFTER = 11 * 60, 14 * 60
"""Seconds before and after Prometheus is restarted: a `for` of 15 minutes is in its middle."""

HOUR, FEW_MINUTES = 3600, 300
GRACE = "--rules.alert.for-grace-period=1m"

RESTARTS: dict[str, tuple[int | None, int, Sequence[str]]] = {
    "none": (None, 0, [GRACE]),
    "restarted": (0, 15, [GRACE]),
    "killed: it replays its WAL": (0, 9, [GRACE]),
    "away for 5 minutes": (FEW_MINUTES, 15, [GRACE]),
    "restarted, with the grace period's default of 10 minutes": (0, 15, []),
}
"""For how many seconds it is away, by which signal it ends, and its flags."""

_DUMPED = re.compile(r'\{__name__="([^"]+)"(?:, )?(.*)\} (\S+) (\d+)')
_TIMES = re.compile("timestamp_seconds|start_time_seconds|ALERTS_FOR_STATE")


def fleet(now: float) -> list[Node]:
    """Return 16 nodes of which six have a fault; minutes are those of Unix time."""
    ago = [replace(IDLE, pid=n, gib=12, since=now - 90, start=now - 600) for n in range(100, 108)]
    bad = [
        Node(ago), Node([replace(DEAD, since=now - 1)]), Node([replace(ORPHAN, gib=30, since=now - 30)]),
        Node([replace(TRAINER, state="stopped", since=now - 40)]), Node(unattributed=10),
        Node([TRAINER], extra={f"vramledger_device_up{DEVICE}": changing_at(now + 2, 1, 0)}),
        Node([replace(with_agent(lambda m: 10 + m - now), start=now - 600)]),
        Node(missing=lambda m: m > now + 2), Node([TRAINER], driver_up=changing_at(now + 2, 1, 0)),
    ]  # fmt: skip
    return [*bad, *[Node([replace(TRAINER, start=now - 600)])] * (24 - len(bad))]


@contextmanager
def exporters(nodes: Sequence[Node]) -> Iterator[int]:
    """Serve the page of each node as it is now; yields the port."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            node, minute = nodes[int(self.path.split("/")[2])], time.time() / 60
            if node.missing(minute):
                self.send_error(503)
                return
            lines = node.page(Renderer(rules.families()), minute)
            with contextlib.suppress(ConnectionError):  # Prometheus is gone
                self.send_response(200)
                self.end_headers()
                self.wfile.write("\n".join([*lines, ""]).encode())

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, name="exporters", daemon=True).start()
        yield server.server_port
        server.shutdown()


class Server:
    """A Prometheus and its Alertmanager, below a directory of their own."""

    def __init__(self, home: Path, inbox_url: str, exporters_port: int, flags: Sequence[str]) -> None:
        """Start Alertmanager; Prometheus is started by :meth:`start`."""
        self.home, self._flags, self._running = home, flags, list[subprocess.Popen[bytes]]()
        home.mkdir()
        (home / "templates").symlink_to(ALERTS / "templates")
        config = yaml.safe_load((ALERTS / "alertmanager.yml").read_text(encoding="utf-8"))
        for each in config["receivers"]:
            if each["name"] not in {"discard", "heartbeat"}:
                each["webhook_configs"] = [{"url": f"{inbox_url}/{home.name}/{each['name']}"}]
        (home / "alertmanager.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
        manager = free_port()
        scraped: dict[str, Any] = scrape(exporters_port, 24, "15s")
        scraped["rule_files"] = [str(ALERTS / "*.rules.yml")]
        scraped["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{manager}"]}]}]}
        (home / "prometheus.yml").write_text(yaml.safe_dump(scraped), encoding="utf-8")
        self._run(
            *alertmanager.command(VERSIONS[0]), f"--config.file={home}/alertmanager.yml",
            f"--storage.path={home}/alerts", "--cluster.listen-address=",
            f"--web.listen-address=127.0.0.1:{manager}",
        )  # fmt: skip

    def _run(self, *command: str | Path) -> None:
        with (self.home / "log").open("ab") as log:
            self._running.append(subprocess.Popen(list(map(str, command)), stdout=log, stderr=log))

    def start(self) -> None:
        """Start Prometheus on the database that is there."""
        self._run(
            require_version("prometheus", VERSIONS[0]), f"--config.file={self.home}/prometheus.yml",
            f"--storage.tsdb.path={self.home}/data", f"--web.listen-address=127.0.0.1:{free_port()}",
            *self._flags,
        )  # fmt: skip

    def stop(self, signal: int) -> None:
        """End what was started last by a signal."""
        last = self._running.pop()
        last.send_signal(signal)
        last.wait()

    def close(self) -> None:
        """End both."""
        while self._running:
            self.stop(15)


def moved(data: Path, to: Path, seconds: float) -> None:
    """Write a database with all that another one has, so many seconds earlier, and the times in it too."""
    promtool = require_version("promtool", VERSIONS[0])
    dumped = subprocess.run([promtool, "tsdb", "dump", data], capture_output=True, text=True, check=True)
    written = to.with_suffix(".txt")
    with written.open("w", encoding="utf-8") as file:
        for line in dumped.stdout.splitlines():
            if (found := _DUMPED.fullmatch(line)) and found[3] != "NaN":
                value = float(found[3]) - (seconds if _TIMES.search(found[1]) else 0)
                labels = f"{{{found[2].replace(', ', ',')}}}" if found[2] else ""
                file.write(f"{found[1]}{labels} {value!r} {int(found[4]) / 1000 - seconds:.3f}\n")
        file.write("# EOF\n")
    subprocess.run([promtool, "tsdb", "create-blocks-from", "openmetrics", written, to], check=True)


def main() -> None:
    """Print a row for each restart."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="restarts-")))
        url, got = stack.enter_context(inbox())
        port = stack.enter_context(exporters(fleet(time.time() / 60)))
        homes = {name: f"{number}" for number, name in enumerate([*RESTARTS, "away for an hour"])}
        servers = {
            name: Server(scratch / homes[name], url, port, flags) for name, (_, _, flags) in RESTARTS.items()
        }
        for server in servers.values():
            stack.callback(server.close)
            server.start()
        time.sleep(WARM)
        before = len(got)
        for name, (away, signal, _) in RESTARTS.items():
            if away is not None:
                servers[name].stop(signal)
                if not away:
                    servers[name].start()
        hour = servers["away for an hour"] = Server(scratch / homes["away for an hour"], url, port, [GRACE])
        stack.callback(hour.close)
        few = servers["away for 5 minutes"]
        shutil.copytree(few.home / "data", scratch / "stopped")
        moved(scratch / "stopped", hour.home / "data", HOUR)
        hour.start()
        time.sleep(FEW_MINUTES)
        few.start()
        time.sleep(AFTER)
        _print(homes, [(path, body, at < before) for at, (path, body) in enumerate(got)])


def _print(homes: dict[str, str], got: list[tuple[str, dict[str, Any], bool]]) -> None:
    print("| Prometheus | messages before | after it: new alerts | again | ended |\n|---|--:|--:|--:|--:|")
    for name, home in homes.items():
        known: set[tuple[str, str]] = set()
        seen: Counter[str] = Counter()
        for path, body, before in got:
            if path.split("/")[1] != home:
                continue
            firing = {(path, str(each["labels"])) for each in body["alerts"] if each["status"] == "firing"}
            kind = "before" if before else "new" if firing - known else "again" if firing else "ended"
            seen[kind] += 1
            told = sorted({f"{each['labels']['alertname']}:{each['status']}" for each in body["alerts"]})
            print(f"<!-- {name}: {path.split('/')[2]} {kind} {told} -->")
            known |= firing
        print(f"| {name} | {' | '.join(str(seen[kind]) for kind in ('before', 'new', 'again', 'ended'))} |")


if __name__ == "__main__":
    main()
