"""What a vLLM server is, and what its metrics say of the KV cache."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.vllm_server import metrics_page
from vramledger.readers.vllm import NOTHING, CacheFigures, find_port, parse_figures

OLD = 'vllm:gpu_cache_usage_perc{engine="0",model_name="m"} 0.5\n'
BOTH = OLD + 'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25\n'


@pytest.mark.parametrize(
    ("page", "figures"),
    [
        (metrics_page(0.03125, 59055800320, 412000), CacheFigures(0.03125, 59055800320, 412000)),
        (metrics_page(0.0, "None", "None"), CacheFigures(0.0, None, None)),
        (metrics_page(1, "5e9", "-3"), CacheFigures(1.0, None, None)),
        (metrics_page("NaN", 0, "1" * 17), NOTHING),
        (metrics_page("1.01", "1.5", 1), CacheFigures(None, None, 1)),
        (metrics_page("-0.1"), CacheFigures(None, None, 412000)),
        (metrics_page("+Inf"), CacheFigures(None, None, 412000)),
        (metrics_page("x"), CacheFigures(None, None, 412000)),
        (metrics_page(engines=(0, 1)), NOTHING),
        (metrics_page() * 2, NOTHING),
        (metrics_page() * 100, NOTHING),
        (OLD, CacheFigures(0.5, None, None)),
        (BOTH, CacheFigures(0.25, None, None)),
        ("vllm:kv_cache_usage_perc 0.5 1700000000000\r\n".replace("\r", ""), CacheFigures(0.5, None, None)),
        ("vllm:kv_cache_usage_percent 0.5\nvllm:kv_cache_usage_perc_total 1\n", NOTHING),
        ("vllm:kv_cache_usage_perc{" + "x" * 20000 + "} 0.5\n", NOTHING),
        ("", NOTHING),
        ("<html>404</html>", NOTHING),
    ],
)
def test_only_what_a_server_certainly_says_is_known(page: str, figures: CacheFigures) -> None:
    """A value that is missing, impossible, or of several engines is not known, and never 0."""
    assert parse_figures(page.encode()) == figures


@pytest.mark.parametrize(
    "line", ["a" * 16000, 'a="' * 5000, '",' * 8000, "} " * 8000, "}" + " " * 15000 + "b c"]
)
def test_a_long_line_takes_no_time(line: str) -> None:
    """No line of a server holds up the sampler, in which only one thread runs at a time: one took 2 s."""
    begun = time.process_time()
    for name in ("vllm:cache_config_info", "vllm:kv_cache_usage_perc"):
        assert parse_figures(f"{name}{{{line}}} 1".encode()).memory is None
        parse_figures(f"{name}{{{line}".encode())
    assert time.process_time() - begun < 0.5


@given(st.binary(max_size=400) | st.text(alphabet='vlm:kv_cache{}"\\=0.1 \n', max_size=400).map(str.encode))
def test_any_page_is_read_without_an_error(page: bytes) -> None:
    """Whatever a program sends instead of metrics, nothing is raised."""
    text = b"vllm:kv_cache_usage_perc" + page + b"\nvllm:cache_config_info" + page
    usage, memory, tokens = parse_figures(text)
    assert usage is None or 0 <= usage <= 1
    assert memory is None or memory > 0
    assert tokens is None or tokens > 0


@pytest.mark.parametrize(
    ("command", "port"),
    [
        ("/venv/bin/python /venv/bin/vllm serve meta/llama", 8000),
        ("/venv/bin/python3 /venv/bin/vllm serve meta/llama --port 8001 --tensor-parallel-size 2", 8001),
        ("vllm serve m --port=9 --port=10", 10),
        ("python -m vllm.entrypoints.openai.api_server --model m", 8000),
        ("python /vllm/entrypoints/openai/api_server.py --port 1", 1),
        *(("python -m vllm.entrypoints.api_server", 8000), ("vllm serve m --port 0", None)),
        *(("vllm serve m --port 65536", None), ("vllm serve m --port x", None)),
        *(("vllm serve m --port", 8000), ("vllm serve m --ssl-keyfile /k", None)),
        *(("vllm serve m --uds=/run/v", None), ("vllm serve m --headless", None)),
        *(("vllm bench serve", None), ("vllm chat", None), ("grep vllm serve.py", None)),
        *(("python my_vllm serve", None), ("VLLM::EngineCore", None), ("", None)),
    ],
)
def test_a_server_is_known_by_its_command_line(command: str, port: int | None) -> None:
    """Only a program that serves vLLM's metrics by plain HTTP is asked, at the port that it was given."""
    assert find_port(command.split()) == port
