"""The telemetry path and the probes, over HTTP."""

import asyncio
import gzip
import socket
import threading
from contextlib import AbstractAsyncContextManager, ExitStack

import pytest
from msgspec.structs import replace

from tests.support.builders import Shown, crowd, failed
from tests.support.serving import HEALTH, LOOPBACK, Client, connected, served, until, until_answered
from vramledger.metrics import devices
from vramledger.metrics.contract import collectors
from vramledger.metrics.exposition import Exposition, ScrapeRequest
from vramledger.metrics.families import Collected
from vramledger.model.snapshot import Snapshot
from vramledger.web.app import serve

STEADY = "/metrics?exclude[]=exporter"
"""The page without the exporter's own figures, which change by themselves."""


def steady() -> Exposition:
    """Make an exposition whose collectors take no time, so that two renders are equal."""
    return Exposition(0, lambda: None, clock=lambda: 0.0)


async def test_the_default_answer_is_text() -> None:
    """A client without special headers gets text 0.0.4, uncompressed."""
    async with served(Shown(crowd(1, 2))) as client:
        answer = await client.ask("/metrics")

    assert answer.status == 200
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert answer.headers["Vary"] == "Accept, Accept-Encoding"
    assert "Content-Encoding" not in answer.headers
    assert "\nvramledger_up 1.0\n" in answer.text
    assert "\nprocess_cpu_seconds_total " in answer.text


async def test_openmetrics_and_gzip_on_request() -> None:
    """Format and compression follow the headers, in every combination, for the same page."""
    openmetrics = "application/openmetrics-text; version=1.0.0; charset=utf-8"
    async with served(Shown(crowd(1, 2)), exposition=steady()) as client:
        plain = await client.ask(STEADY, Accept="application/openmetrics-text; version=1.0.0")
        small = await client.ask(STEADY, Accept="application/openmetrics-text", Accept_Encoding="gzip")
        text = await client.ask(STEADY, Accept_Encoding="gzip, deflate")

    assert plain.headers["Content-Type"] == small.headers["Content-Type"] == openmetrics
    assert small.headers["Content-Encoding"] == text.headers["Content-Encoding"] == "gzip"
    assert plain.text.endswith("\n# EOF\n")
    assert gzip.decompress(small.body) == plain.body
    assert gzip.decompress(text.body).startswith(b"# HELP vramledger_build_info ")


@pytest.mark.parametrize("encoding", ["", "gzip"])
@pytest.mark.parametrize("path", [STEADY, "/", "/-/healthy", "/-/ready"])
async def test_head_has_the_headers_of_get_and_no_body(path: str, encoding: str) -> None:
    """HEAD answers as GET does, with the same length and without the body."""
    async with served(Shown(crowd(1, 2)), exposition=steady()) as client:
        got = await client.ask(path, Accept_Encoding=encoding)
        head = await client.ask(path, "HEAD", Accept_Encoding=encoding)

    assert (head.status, got.status, head.body) == (200, 200, b"")
    assert int(got.headers["Content-Length"]) == len(got.body) > 0
    same = ("Content-Type", "Content-Length", "Content-Encoding", "Vary", "Server")
    assert [head.headers.get(name) for name in same] == [got.headers.get(name) for name in same]


@pytest.mark.parametrize("path", ["/metrics", "/", "/-/healthy", "/-/ready"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
async def test_only_get_and_head(path: str, method: str) -> None:
    """Any other method gets 405 with the allowed methods."""
    async with served(Shown(crowd(1, 1))) as client:
        answer = await client.ask(path, method)

    assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")
    assert answer.text == "This path accepts only GET, HEAD.\n"


@pytest.mark.parametrize(
    ("query", "status", "says"),
    [
        ("collect[]=ledger&exclude[]=xid", 400, "collect[] and exclude[] cannot be combined; give one of"),
        (
            "collect[]=nonsense",
            400,
            "no collector of this name is on: 'nonsense'; these are on: agent, energy",
        ),
        ("name[]=nothing", 200, ""),
        ("name[]=vramledger_up", 200, "# HELP vramledger_up "),
        ("name[]=vramledger_up&collect[]=xid", 200, "# HELP vramledger_up "),
        ("collect%5B%5D=xid", 200, "# HELP vramledger_build_info "),
    ],
)
async def test_filters(query: str, status: int, says: str) -> None:
    """Filters select, one line names their faults, and an unknown name gives an empty page."""
    async with served(Shown(crowd(1, 1))) as client:
        answer = await client.ask(f"/metrics?{query}")

    assert answer.text.startswith(says)
    assert (answer.status, bool(answer.text)) == (status, bool(says))
    assert status == 200 or answer.text.count("\n") == 1


async def test_exclude_and_several_names_choose_families() -> None:
    """exclude[] drops a collector's families, and name[] may be given twice."""
    two = "name[]=vramledger_up&name[]=vramledger_device_up"
    async with served(Shown(crowd(1, 1))) as client:
        others, both = [(await client.ask(f"/metrics?{each}")).text for each in ("exclude[]=ledger", two)]

    assert "# TYPE vramledger_build_info" in others
    assert "# TYPE vramledger_device_memory_total_bytes" not in others
    assert both.count("# TYPE") == 2


async def test_ready_is_the_end_of_the_first_sample() -> None:
    """Before the first attempt at a sample has ended, /-/ready is 503 and /-/healthy 200."""
    shown = Shown(ready=False)
    async with served(shown) as client:
        early = await client.ask("/-/ready")
        assert (early.status, early.text.count("\n")) == (503, 1)
        assert (await client.ask("/-/healthy")).status == 200
        assert "\nvramledger_up 0.0\n" in (await client.ask("/metrics")).text

        shown.snapshot, shown.ready = failed(), True
        assert (await client.ask("/-/ready")).status == 200


async def test_other_paths_are_404_in_one_line() -> None:
    """Other paths do not exist, and the answer says where the metrics are."""
    async with served(Shown(), replace(LOOPBACK, telemetry_path="/gpu/metrics")) as client:
        for path in ("/metrics", "/-/reload", "/metrics/", "/favicon.ico"):
            answer, said = await client.ask(path), "There is nothing here; the metrics are at /gpu/metrics\n"
            assert (answer.status, answer.text) == (404, said)
        assert (await client.ask("/gpu/metrics")).status == 200


async def test_metrics_may_be_at_the_root() -> None:
    """With --web.telemetry-path=/ the metrics replace the landing page."""
    async with served(Shown(), replace(LOOPBACK, telemetry_path="/")) as client:
        assert "\nvramledger_up 0.0\n" in (await client.ask("/")).text


class Gate:
    """A collector that waits until the test allows it to continue, and counts its calls."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.entered = 0

    def __call__(self, shot: Snapshot) -> Collected:
        self.entered += 1
        assert self.open.wait(20), "the test never opened the gate"
        return devices.collect(shot, "ledger")

    async def reached(self) -> None:
        await until(lambda: self.entered)

    def served(self) -> AbstractAsyncContextManager[Client]:
        """Serve one request at a time, whose answer waits for the gate."""
        slow = Exposition(0, lambda: None, collect={**collectors(0), "ledger": self})
        return served(Shown(crowd(1, 1)), replace(LOOPBACK, max_requests=1), slow)


async def test_beyond_max_requests_is_503_at_once() -> None:
    """While --web.max-requests scrapes run, the next one gets one line and 503; probes still answer."""
    gate = Gate()
    async with gate.served() as client:
        running = asyncio.create_task(client.ask(STEADY))
        await gate.reached()
        refused = await client.ask(STEADY)
        alive = await client.ask("/-/healthy")
        gate.open.set()
        done = await running
        after = await client.ask("/metrics")

    assert (refused.status, refused.text) == (503, "--web.max-requests=1 is reached; try again later.\n")
    assert [answer.status for answer in (alive, done, after)] == [200] * 3


async def test_new_filters_take_no_place_of_a_whole_scrape() -> None:
    """Who always asks for other names keeps places of filtered scrapes only, and Prometheus is answered."""
    gate, rendered = Gate(), list[ScrapeRequest]()

    class Noted(Exposition):
        def render(self, snapshot: Snapshot, request: ScrapeRequest) -> bytes:
            rendered.append(request)
            return super().render(snapshot, request)

    async def both_have_begun() -> bool:
        return len(rendered) == 2

    slow = Noted(0, lambda: None, collect={**collectors(0), "ledger": gate})
    async with served(Shown(crowd(1, 1)), replace(LOOPBACK, max_requests=1), slow) as client:
        running = asyncio.create_task(client.ask("/metrics?name[]=a1"))
        await gate.reached()
        refused = await client.ask("/metrics?name[]=a2")
        whole = asyncio.create_task(client.ask("/metrics"))
        await until(both_have_begun)
        gate.open.set()
        answers = [await running, refused, await whole]

    assert [each.status for each in answers] == [200, 503, 200]


@pytest.mark.parametrize("path", ["/metrics", "/api/v1/ledger"])
async def test_answers_that_nobody_reads_do_not_pile_up(path: str) -> None:
    """With --web.max-requests answers that wait to be read, the next one is not even made."""
    async with served(Shown(crowd(4, 64)), replace(LOOPBACK, max_requests=2), kernel_keeps=4096) as client:
        with ExitStack() as stack:
            for _ in range(2):
                reader = stack.enter_context(socket.create_connection(("127.0.0.1", client.port)))
                reader.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            await until_answered(lambda: client.ask(path), 503)
            assert (await client.ask("/-/healthy")).status == 200
        await until_answered(lambda: client.ask(path), 200)


async def test_a_defect_is_one_line_and_500() -> None:
    """If rendering itself fails, the client gets one line, no traceback, and the next scrape works."""

    class Once(Exposition):
        failing = True

        def render(self, *arguments: object) -> bytes:
            if self.failing:
                self.failing = False
                raise ValueError("secret")
            return super().render(*arguments)  # type: ignore[arg-type]

    async with served(Shown(), exposition=Once(0, lambda: None)) as client:
        answer = await client.ask("/metrics")
        assert (answer.status, answer.text.count("\n")) == (500, 1)
        assert "secret" not in answer.text
        assert (await client.ask("/metrics")).status == 200


async def test_the_server_does_not_tell_its_versions() -> None:
    """No answer says which program or version made it, not even for invalid requests."""
    async with serve(LOOPBACK, Shown()) as (address,):
        answers = []
        for request in (HEALTH.replace(b"1.1", b"1.0"), b"\x16\x03\x01rubbish\r\n\r\n"):
            async with connected(address.port, request) as (reader, _):
                answers.append((await reader.read()).decode())

    assert [answer.split()[1] for answer in answers] == ["200", "400"]
    for answer in answers:
        assert "\r\nServer:" not in answer
        assert "\r\nX-Content-Type-Options: nosniff\r\n" in answer
        assert "aiohttp" not in answer


async def test_no_answer_is_guessed_at() -> None:
    """Every answer, errors included, tells browsers to accept its content type as given."""
    async with served(Shown(crowd(1, 1))) as client:
        for path, status in (
            *(("/metrics", 200), ("/api/v1/ledger", 200), ("/", 200), ("/-/ready", 200)),
            *(("/nowhere", 404), ("/metrics?collect[]=x", 400)),
        ):
            answer = await client.ask(path)
            assert (answer.status, answer.headers["X-Content-Type-Options"]) == (status, "nosniff")
        assert (await client.ask("/", "POST")).headers["X-Content-Type-Options"] == "nosniff"


async def test_a_client_that_leaves_hurts_nobody() -> None:
    """When a client disconnects during its scrape, its place is free and the next is served."""
    gate = Gate()
    async with gate.served() as client:
        with socket.create_connection(("127.0.0.1", client.port)) as gone:
            gone.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await gate.reached()
        gate.open.set()
        await until_answered(lambda: client.ask("/metrics"), 200)
