"""A real Prometheus scrapes the exporter, and stores the snapshot's values to the last digit."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.builders import Shown, crowd
from tests.support.certificates import Authority
from tests.support.ports import free_port
from tests.support.requirements import require_tool
from tests.support.secured import USERS, serve_secured, trusting
from tests.support.serving import Client, client, served
from vramledger.metrics.exposition import negotiate_format
from vramledger.web import scrape

CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: vramledger
    {how}
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""

SERIES = "vramledger_(up|device|process).*"

Key = frozenset[tuple[str, str]]


@asynccontextmanager
async def prometheus(
    program: Path, home: Path, port: int, how: str = "scheme: http"
) -> AsyncIterator[Client]:
    """Run Prometheus on loopback, scraping ``port`` once a second, and ask it by its API."""
    (home / "prometheus.yml").write_text(CONFIG.format(port=port, how=how), encoding="utf-8")
    own = free_port()
    with (home / "log").open("wb") as log:
        files = (f"--config.file={home / 'prometheus.yml'}", f"--storage.tsdb.path={home / 'data'}")
        listening = f"--web.listen-address=127.0.0.1:{own}"
        child = await asyncio.create_subprocess_exec(program, *files, listening, stdout=log, stderr=log)
    try:
        async with client(own) as each:
            yield each
    finally:
        child.kill()
        await child.wait()


async def query(api: Client, expression: str) -> dict[Key, float]:
    """Return the series of an instant query by their labels; none while Prometheus is not up yet."""
    try:
        answer = await api.ask(f"/api/v1/query?query={quote(expression)}")
    except aiohttp.ClientConnectionError:
        return {}
    if answer.status != 200:
        return {}
    series = json.loads(answer.body)["data"]["result"]
    return {frozenset(each["metric"].items()): float(each["value"][1]) for each in series}


async def until_up(api: Client, up: float) -> None:
    """Wait until Prometheus says whether it could scrape the exporter."""
    while list((await query(api, "up")).values()) != [up]:  # noqa: ASYNC110 another process
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("protocol", ["openmetrics", "text"])
async def test_prometheus_holds_the_snapshot(
    protocol: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In either format up is 1, and exactly the snapshot's series exist, with their exact values."""
    program = require_tool("prometheus")
    formats: list[bool] = []

    def negotiated(accept: str) -> object:
        chosen = negotiate_format(accept if protocol == "openmetrics" else "")
        formats.append(chosen.openmetrics)
        return chosen

    monkeypatch.setattr(scrape, "negotiate_format", negotiated)
    shown = Shown(crowd(2, 8))
    async with served(shown) as exporter, prometheus(program, tmp_path, exporter.port) as api:
        await until_up(api, 1.0)
        found = await query(api, f'{{__name__=~"{SERIES}"}}')
        page = (await exporter.ask("/metrics")).text
        assert formats[0] == (protocol == "openmetrics")

    target = {"instance": f"127.0.0.1:{exporter.port}", "job": "vramledger"}
    expected: dict[Key, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if re.fullmatch(SERIES, sample.name):
                labels = {name: value for name, value in sample.labels.items() if value}
                expected[frozenset({"__name__": sample.name, **labels, **target}.items())] = sample.value
    assert len(expected) > 150
    assert found == expected


@pytest.mark.parametrize(("password", "up"), [("wonder", True), ("wrong", False)])
async def test_prometheus_gets_in(tmp_path: Path, password: str, up: bool) -> None:
    """With its certificate and the password Prometheus has our data; with a wrong password it has none."""
    program = require_tool("prometheus")
    authority = Authority(tmp_path)
    authority.sign("server")
    own = authority.sign("client", "DNS:prometheus.test")
    text = (
        "tls_server_config:\n  cert_file: server.pem\n  key_file: server.key\n  client_ca_file: ca.pem\n"
        "  client_auth_type: RequireAndVerifyClientCert\n  client_allowed_sans: [prometheus.test]\n" + USERS
    )
    how = (
        f"scheme: https\n    basic_auth: {{username: alice, password: {password}}}\n    tls_config: "
        f"{{ca_file: {authority.pair.certificate}, cert_file: {own.certificate}, key_file: {own.key}}}"
    )
    async with (
        serve_secured(tmp_path / "web.yml", text, trusting(authority.pair, own)) as exporter,
        prometheus(program, tmp_path, exporter.port, how) as api,
    ):
        await until_up(api, float(up))
        assert bool(await query(api, "vramledger_up")) == up
