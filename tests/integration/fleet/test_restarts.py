"""A rolling restart of the exporters: counters keep their meaning, and no alert fires."""

from __future__ import annotations

import urllib.request
from functools import partial
from pathlib import Path

import pytest

from tests.integration.fleet.test_fleet import GPUS, HOLDERS, hurried
from tests.support.fleet.engines import prometheus, scrape, simulated, until
from tests.support.requirements import require_tool

HOSTS = 3
BYTE_SECONDS = "vramledger_owner_memory_byte_seconds_total"

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough, pytest.mark.waits]


def test_counters_keep_their_meaning(tmp_path: Path) -> None:
    """A real Prometheus that sees every host restart computes the owners' usage from their true bytes."""
    with simulated(HOSTS, GPUS, HOLDERS) as port:
        config = {**scrape(port, HOSTS, "500ms", "1s"), "rule_files": [hurried(tmp_path)]}
        with prometheus(require_tool("prometheus"), tmp_path / "data", config) as engine:

            def tell(host: int, what: str) -> None:
                url = f"http://127.0.0.1:{port}/hosts/{host}/{what}"
                urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=30).close()

            def samples(host: int, state: int) -> float:
                return engine.value(f'count_over_time((up{{instance="gpu{host:04}"}} == {state})[2m:500ms])')

            until(lambda: engine.value("count(up == 1)") == HOSTS, "all hosts up")
            for host in range(HOSTS):
                until(lambda: engine.value("min(count_over_time(up[2m]))") >= 8, "some data before")
                tell(host, "stop")
                until(partial(samples, host, 0), "the host is seen down")
                tell(host, "start")
                until(partial(engine.value, f'up{{instance="gpu{host:04}"}} == 1'), "the host is back")
            until(lambda: engine.value("min(count_over_time(up[2m]))") >= 30, "some data after")

            resets = engine.query(f"max by (instance) (resets({BYTE_SECONDS}[2m]))")
            # A host's holders over time, in two ways: by the counter, and by the bytes themselves.
            counted = engine.query(f"sum by (instance) (increase({BYTE_SECONDS}[15s]))")
            held = engine.query(
                "sum by (instance) (sum_over_time((sum by (instance)"
                " (vramledger_process_memory_bytes))[15s:500ms])) / 2"
            )
            firing = engine.query('ALERTS{alertstate="firing", severity!="none"}')

    assert set(resets.values()) == {1.0}
    assert counted.keys() == held.keys()
    assert len(counted) == HOSTS
    ratios = {name: value / held[name] for name, value in counted.items()}
    assert {name: ratio for name, ratio in ratios.items() if not 0.75 < ratio < 1.25} == {}
    assert firing == {}
