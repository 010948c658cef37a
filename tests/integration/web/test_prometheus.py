"""A real Prometheus scrapes the exporter, and stores the snapshot's values to the last digit."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.builders import Shown, crowd
from tests.support.certificates import Authority
from tests.support.fleet.engines import Engine, Labels, prometheus, until
from tests.support.requirements import require_tool
from tests.support.secured import ALICE, USERS, serve_secured, tls, trusting
from tests.support.serving import served
from vramledger.metrics.exposition import negotiate_format
from vramledger.web import scrape

SERIES = "vramledger_(up|device|process).*"


@asynccontextmanager
async def scraping(home: Path, port: int, up: float = 1.0, **how: object) -> AsyncIterator[Engine]:
    """Run Prometheus, scraping ``port`` once a second, from when it says whether it could."""
    job = {"job_name": "vramledger", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}], **how}
    config = {"global": dict.fromkeys(("scrape_interval", "scrape_timeout"), "1s"), "scrape_configs": [job]}
    with ExitStack() as stack:
        # In threads: the exporter that it scrapes is in this one.
        running = prometheus(require_tool("prometheus"), home, config)
        engine = await asyncio.to_thread(stack.enter_context, running)
        await asyncio.to_thread(until, lambda: list(engine.query("up").values()) == [up], f"up is {up}")
        yield engine


@pytest.mark.repeats
@pytest.mark.parametrize("protocol", ["openmetrics", "text"])
async def test_the_snapshot_arrives(protocol: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In either format up is 1, and exactly the snapshot's series exist, with their exact values."""
    formats: list[bool] = []

    def negotiated(accept: str) -> object:
        chosen = negotiate_format(accept if protocol == "openmetrics" else "")
        formats.append(chosen.openmetrics)
        return chosen

    monkeypatch.setattr(scrape, "negotiate_format", negotiated)
    async with served(Shown(crowd(2, 8))) as exporter, scraping(tmp_path, exporter.port) as engine:
        found = engine.query(f'{{__name__=~"{SERIES}"}}')
        page = (await exporter.ask("/metrics")).text
        assert formats[0] == (protocol == "openmetrics")

    target = {"instance": f"127.0.0.1:{exporter.port}", "job": "vramledger"}
    expected: dict[Labels, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if re.fullmatch(SERIES, sample.name):
                labels = {name: value for name, value in sample.labels.items() if value}
                expected[frozenset({"__name__": sample.name, **labels, **target}.items())] = sample.value
    assert len(expected) > 150
    assert found == expected


@pytest.mark.repeats
@pytest.mark.parametrize(("password", "up"), [("wonder", True), ("wrong", False)])
async def test_prometheus_gets_in(file: Path, authority: Authority, password: str, up: bool) -> None:
    """With its certificate and the password Prometheus has our data; with a wrong password it has none."""
    own = authority.sign("client", "DNS:prometheus.test")
    text = tls("  client_allowed_sans: [prometheus.test]\n", clients="ca.pem") + USERS
    files = {"ca_file": authority.pair.certificate, "cert_file": own.certificate, "key_file": own.key}
    how = {
        "scheme": "https",
        "basic_auth": {"username": ALICE[0], "password": password},
        "tls_config": {name: str(path) for name, path in files.items()},
    }
    async with (
        serve_secured(file, text, trusting(authority.pair, own)) as exporter,
        scraping(file.parent, exporter.port, float(up), **how) as engine,
    ):
        assert bool(engine.query("vramledger_up")) == up
