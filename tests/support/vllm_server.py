"""A program that stands for ``vllm serve``: it serves vLLM's metrics, and starts who has the memory."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.support.ports import free_port
from tests.support.waiting import wait_until

CONFIG = (
    'block_size="16",cache_dtype="auto",calculate_kv_scales="False",enable_prefix_caching="True",'
    'gpu_memory_utilization="0.92",kv_cache_memory_bytes="{memory}",kv_cache_size_tokens="{tokens}",'
    'mamba_block_size="None",num_cpu_blocks="None",num_gpu_blocks="25750",sliding_window="None"'
)


def metrics_page(
    usage: object = 0.03125, memory: object = None, tokens: object = 412_000, engines: Sequence[int] = (0,)
) -> str:
    """Return metrics with the names and labels of vLLM, only those that are read and one that is not."""
    model, config = 'model_name="a \\"b\\" } c"', CONFIG.format(memory=memory, tokens=tokens)
    page = ""
    for name, words, labels, value in (
        ("num_requests_running", "Number of requests in model execution batches.", model, 1.0),
        ("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", model, usage),
        ("cache_config_info", "Information of the LLMEngine CacheConfig", config, 1.0),
    ):
        page += f"# HELP vllm:{name} {words}\n# TYPE vllm:{name} gauge\n"
        page += "".join(f'vllm:{name}{{engine="{each}",{labels}}} {value}\n' for each in engines)
    return page


_PROGRAM = """
import http.server, os, subprocess, sys, time, pathlib
home, host = pathlib.Path(__file__).parent, "{host}"
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        with (home / "asked").open("a") as asked:
            asked.write(f"{{self.path}} {{dict(self.headers)}}\\n")
        body = (home / "page").read_bytes()
        if (home / "slow").exists():
            self.wfile.write(b"HTTP/1.1 200 OK\\r\\n")
            while True:
                self.wfile.write(b"X: y\\r\\n")
                time.sleep(0.1)
        self.send_response(200 if self.path == "/metrics" else 404)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for at in range(0, len(body), 1000):
            part = body[at:at + 1000]
            self.wfile.write(b"%x\\r\\n%s\\r\\n" % (len(part), part))
        self.wfile.write(b"0\\r\\n\\r\\n")
    def log_message(self, *words):
        pass
class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    def handle_error(self, *words):
        pass
port = int(os.environ["LISTEN_AT"])
server = Server((host, port), Handler) if port else None
engine = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
(home / "engine.new").write_text(str(engine.pid))
(home / "engine.new").rename(home / "engine")
server.serve_forever() if server else engine.wait()
"""


class VllmServer(NamedTuple):
    """A server that runs: its pid, the pid of its engine, its port, and the folder with its page."""

    pid: int
    engine: int
    port: int
    home: Path

    def say(self, page: str) -> None:
        (self.home / "page.new").write_text(page, encoding="utf-8")
        (self.home / "page.new").rename(self.home / "page")

    def asked(self) -> list[str]:
        path = self.home / "asked"
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


@contextmanager
def serve_vllm(
    home: Path,
    *,
    host: str = "127.0.0.1",
    listens: bool = True,
    wrapper: Sequence[str] = (),
    port: int | None = None,
) -> Iterator[VllmServer]:
    """Run a server until the block ends; it listens unless ``listens`` is False."""
    home.mkdir(exist_ok=True)
    program = home / "vllm"
    program.write_text(_PROGRAM.format(host=host), encoding="utf-8")
    port = free_port() if port is None else port
    command = [*wrapper, sys.executable, str(program), "serve", "some/model", f"--port={port}"]
    environment = {**os.environ, "LISTEN_AT": str(port if listens else 0)}
    with subprocess.Popen(command, env=environment) as process:
        try:
            wait_until((home / "engine").exists, "the engine")
            engine = int((home / "engine").read_text(encoding="ascii"))
            server = VllmServer(process.pid, engine, port, home)
            server.say(metrics_page())
            yield server
        finally:
            process.kill()
