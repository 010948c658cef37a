"""The KV cache of a vLLM server's engine: on the page of metrics, in the terminal, in the JSON."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.exporter import QUICK, run, serving
from tests.support.standin.library import GIB, StandIn
from tests.support.vllm_server import metrics_page, serve_vllm


def test_the_kv_cache_of_an_engine(standin: StandIn, tmp_path: Path) -> None:
    """Only with the flag the server is asked; then its figures are part of the holding's."""
    with serve_vllm(tmp_path / "server") as server:
        server.say(metrics_page(0.03125, 55 * GIB, 412_000))
        standin.device(0).set_processes([(server.engine, 70 * GIB)])
        pid = str(server.engine)
        with serving(*QUICK, driver=standin.env()) as exporter:
            page = exporter.until(lambda page: page.values("process_memory_bytes"), "the holder")
            assert page.value("collector_success", collector="vllm") is None
        assert server.asked() == []

        with serving(*QUICK, "--collector.vllm", driver=standin.env()) as exporter:
            page = exporter.until(lambda page: page.values("process_kv_cache_usage_ratio"), "the figures")
            assert page.value("process_kv_cache_usage_ratio", pid=pid) == 0.03125
            assert page.value("process_kv_cache_bytes", pid=pid) == 55 * GIB
            assert page.value("process_kv_cache_tokens", pid=pid) == 412_000
            assert page.value("collector_success", collector="vllm") == 1
            why = run("show", "--why", pid, driver=exporter.found)
            assert "55.00 GiB of what it holds, 412,000 tokens, 3.1% in use by requests" in why.stdout
            listed = run("show", "--json", driver=exporter.found)
            (holding,) = json.loads(listed.stdout)["devices"][0]["holdings"]
            assert holding["kv_cache"] == {"usage": 0.03125, "memory": 55 * GIB, "tokens": 412_000}
