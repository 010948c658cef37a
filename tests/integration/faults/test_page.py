"""From a fault to the message to a person: exporter, Prometheus, Alertmanager, webhook, all real."""

from __future__ import annotations

import asyncio
import gzip
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from aiohttp import web

from tests.support.faults import alertmanager, rules
from tests.support.faults.faulty import orphaned
from tests.support.faults.scene import Scene
from tests.support.host.model import GIB
from tests.support.host.programs import Fixed
from tests.support.ports import free_port
from tests.support.requirements import EACH_VERSION, require_version
from vramledger.model.reading import encode
from vramledger.sampling.replay import encode_header
from vramledger_agent.commands.parser import parse_duration

pytestmark = pytest.mark.waits

FASTER = 60
"""The factor by which every duration of the rules is shortened: an hour becomes a minute."""

PATIENCE = 60.0
SOURCES = Path(__file__).resolve().parents[3] / "exporter"

_RANGE = re.compile(r"(\[|offset )(\d+[smhd])")
_AGE = re.compile(r'(state_seconds:last\{state="orphaned"\} >= )(\d+)')


def _shorter(duration: str) -> str:
    return f"{max(1, round(parse_duration(duration) * 1000 / FASTER))}ms"


def shortened(target: Path) -> None:
    """Write the shipped rules, with every ``for``, interval and range shortened."""
    for path in rules.files():
        content = yaml.safe_load(path.read_text())
        for group in content["groups"]:
            group["interval"] = "500ms"
            for rule in group["rules"]:
                shorter = _RANGE.sub(lambda found: found[1] + _shorter(found[2]), str(rule["expr"]))
                rule["expr"] = _AGE.sub(lambda found: f"{found[1]}{int(found[2]) / FASTER:g}", shorter)
                for name in ("for", "keep_firing_for"):
                    if name in rule and not re.fullmatch(r"0[a-z]*", str(rule[name])):
                        rule[name] = _shorter(rule[name])
        (target / path.name).write_text(yaml.safe_dump(content))


def recording(path: Path, scene: Scene, begin: float, lasting: int = 60, interval: int = 1) -> None:
    """Write the readings of a simulated host over some seconds."""
    host = scene.build(Random(1), interval)  # noqa: S311 it is chance for tests
    with gzip.open(path, "wb") as file:
        file.write(encode_header("simulated"))
        for second in range(0, lasting, interval):
            file.write(encode(host.reading(begin + second)))


@contextmanager
def running(log: Path, *command: object) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until the end of the block of code."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    with log.open("ab") as out:
        process = subprocess.Popen([str(each) for each in command], stdout=out, stderr=out, env=environment)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE)


def _routing(scratch: Path, port: int) -> Path:
    """Write the shipped example configuration: only the on-call has a receiver, and waits are short."""
    config = yaml.safe_load((rules.HOME / "alertmanager.yml").read_text())
    routes = [config["route"], *config["route"]["routes"]]
    for route in routes:
        route.update(
            (name, "500ms" if name == "group_wait" else "1s")
            for name in ("group_wait", "group_interval")
            if name in route
        )
    hook = [{"url": f"http://127.0.0.1:{port}/", "send_resolved": True}]
    config["receivers"] = [
        {"name": each["name"], **({"webhook_configs": hook} if each["name"] == "oncall" else {})}
        for each in config["receivers"]
    ]
    config["templates"] = [str(rules.HOME / name) for name in config["templates"]]
    path = scratch / "alertmanager.yml"
    path.write_text(yaml.safe_dump(config))
    return path


@asynccontextmanager
async def webhook() -> AsyncIterator[tuple[int, asyncio.Queue[dict[str, Any]]]]:
    """Receive what Alertmanager sends: yield a port, and the messages."""
    messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def receive(request: web.Request) -> web.Response:
        messages.put_nowait(await request.json())
        return web.Response()

    app = web.Application()
    app.router.add_post("/", receive)
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield port, messages
    finally:
        await runner.cleanup()


def _prometheus(scratch: Path, exporter: int, alertmanager: int) -> Path:
    config = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
        "rule_files": [str(scratch / "rules" / "*.rules.yml")],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{alertmanager}"]}]}]},
        "scrape_configs": [
            {"job_name": "vramledger", "static_configs": [{"targets": [f"127.0.0.1:{exporter}"]}]}
        ],
    }
    path = scratch / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    return path


@asynccontextmanager
async def servers(scratch: Path, version: str) -> AsyncIterator[tuple[str, asyncio.Queue[dict[str, Any]]]]:
    """Run Alertmanager and Prometheus on shortened rules; yield the exporter's address, and messages."""
    prometheus, manager = require_version("prometheus", version), alertmanager.command(version)
    (scratch / "rules").mkdir()
    shortened(scratch / "rules")
    ports = [free_port() for _ in range(3)]
    async with webhook() as (port, messages):
        routing = _routing(scratch, port)
        with ExitStack() as stack:
            stack.enter_context(
                running(
                    scratch / "alertmanager.log", *manager, f"--config.file={routing}",
                    f"--storage.path={scratch}/alertmanager", "--cluster.listen-address=",
                    f"--web.listen-address=127.0.0.1:{ports[0]}",
                )
            )  # fmt: skip
            stack.enter_context(
                running(
                    scratch / "prometheus.log", prometheus,
                    f"--config.file={_prometheus(scratch, ports[1], ports[0])}",
                    f"--storage.tsdb.path={scratch}/tsdb", f"--web.listen-address=127.0.0.1:{ports[2]}",
                    "--rules.alert.resend-delay=1s", "--rules.alert.for-grace-period=0s",
                )
            )  # fmt: skip
            yield f"127.0.0.1:{ports[1]}", messages


def serve(address: str, recorded: Path, *more: str) -> tuple[str, ...]:
    """Return the command of an exporter that plays a recording."""
    return (
        sys.executable, "-m", "vramledger", "serve", f"--web.listen-address={address}",
        f"--source=replay:{recorded}", *more,
    )  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("version", EACH_VERSION)
def test_an_orphan_wakes_somebody_once(version: str, tmp_path: Path) -> None:
    """One page arrives: who, where, how much, since when, what to do; later that it is resolved."""
    asyncio.run(_orphan(tmp_path, version))


async def _orphan(scratch: Path, version: str) -> None:
    scene = orphaned(Random(3))  # noqa: S311 it is chance for tests
    assert scene.onset is not None
    (culprit,) = scene.processes
    culprit.places = dict.fromkeys(culprit.places, Fixed(40 * GIB))  # an orphan that works would not page
    recording(scratch / "orphan.jsonl.gz", scene, scene.onset + 60)
    recording(scratch / "clean.jsonl.gz", Scene(scene.gpus, []), scene.onset + 60)
    async with servers(scratch, version) as (address, messages):
        log = scratch / "exporter.log"
        with running(log, *serve(address, scratch / "orphan.jsonl.gz", "--idle-after=2s")):
            page = await asyncio.wait_for(messages.get(), PATIENCE)
        with running(log, *serve(address, scratch / "clean.jsonl.gz", "--idle-after=2s")):
            end = await asyncio.wait_for(_resolved(messages), PATIENCE)
        assert messages.empty(), "one cause makes one page"

    assert page["status"] == "firing"
    (alert,) = page["alerts"]
    assert alert["labels"]["alertname"] == "GpuMemoryOrphaned"
    assert alert["labels"]["pid"] == str(culprit.pid)
    said = alert["annotations"]["description"]
    assert said.startswith(f"{address}: "), "where"
    assert f"pid {culprit.pid} ({culprit.command}) of user {culprit.user}" in said, "who"
    assert re.search(r"holds [0-9.]+GiB on GPU 0", said), "how much"
    assert re.search(r"since \d{4}-\d\d-\d\d \d\d:\d\d", said), "since when"
    assert f"vramledger end --pid {culprit.pid}" in said, "what to do"
    assert "runbook_url" in alert["annotations"]
    assert [each["labels"]["pid"] for each in end["alerts"]] == [str(culprit.pid)]


async def _resolved(messages: asyncio.Queue[dict[str, Any]]) -> dict[str, Any]:
    """Wait for the message that the alert is resolved; before it, the page is not sent again."""
    message = await messages.get()
    assert message["status"] == "resolved"
    return message
