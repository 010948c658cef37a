"""Where the exporter listens, and what it says when it cannot."""

import asyncio
import contextlib
import logging
import resource
import socket
from contextlib import AsyncExitStack

import pytest
from msgspec.structs import replace

from tests.support.builders import Shown
from tests.support.requirements import do_without
from tests.support.serving import HEALTH, LOOPBACK, client, connected
from vramledger.config import Config, ListenAddress
from vramledger.errors import StartupError
from vramledger.web import app, error_log
from vramledger.web.app import serve


def on(*addresses: tuple[str, int]) -> Config:
    """Make a configuration that listens at these addresses."""
    return replace(LOOPBACK, listen=tuple(ListenAddress(host, port) for host, port in addresses))


async def test_listening_is_logged_with_the_real_port(caplog: pytest.LogCaptureFixture) -> None:
    """The log has a line for each address, with the port that the system chose, and the port answers."""
    with caplog.at_level(logging.INFO, "vramledger"):
        async with serve(on(("127.0.0.1", 0), ("127.0.0.1", 0)), Shown()) as addresses:
            for address in addresses:
                async with client(address.port) as each:
                    assert (await each.ask("/-/healthy")).text == "vramledger is healthy.\n"

    assert len({address.port for address in addresses} - {0}) == 2
    logged = [vars(record)["fields"] for record in caplog.records if record.message == "Listening"]
    pages = [(address, f"http://127.0.0.1:{address.port}/") for address in addresses]
    assert [(each["address"], each["page"]) for each in logged] == pages


async def test_an_empty_host_is_every_address_of_both_kinds() -> None:
    """Without a host one port answers on IPv4 and on IPv6."""
    if not socket.has_dualstack_ipv6():
        do_without("needs IPv6")
    async with serve(on(("", 0)), Shown()) as (address,):
        for host in ("127.0.0.1", "::1"):
            async with connected(address.port, b"GET /-/healthy HTTP/1.0\r\n\r\n", host) as (reader, _):
                assert (await reader.read()).endswith(b"vramledger is healthy.\n")


async def test_without_ipv6_an_empty_host_is_every_ipv4_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without IPv6 in the kernel the exporter still listens."""
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    async with serve(on(("", 0)), Shown()) as (address,), client(address.port) as each:
        assert address.host == "0.0.0.0"  # noqa: S104 - that is the promise
        assert (await each.ask("/-/healthy")).status == 200


async def test_a_name_is_all_its_addresses_on_one_port() -> None:
    """A host name with several addresses listens on each, with one port."""
    async with serve(on(("localhost", 0)), Shown()) as addresses:
        assert len({address.port for address in addresses}) == 1
        async with client(addresses[0].port) as each:
            assert (await each.ask("/-/healthy")).status == 200


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
async def test_a_taken_port_is_one_line_that_says_what_to_do(host: str) -> None:
    """If the port is taken, the message says which, how to find its user, and how to choose another."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError) as error:
            async with serve(on(("127.0.0.1", 0), (host, port)), Shown()):
                pytest.fail("it listened on a taken port")

    assert str(error.value) == (
        f"cannot listen on {host}:{port}: the port is taken; stop what listens there "
        f"(ss -ltnp 'sport = :{port}') or choose another with --web.listen-address"
    )
    assert error.value.exit_code == 1


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("192.0.2.1", "cannot listen on 192.0.2.1:80: this host has no such address"),  # TEST-NET-1
        *((name, f"cannot listen on {name}:80: that is not a host name") for name in ("a..b", "a" * 64)),
    ],
)
async def test_what_is_no_address_of_ours_is_one_line(host: str, why: str) -> None:
    """An address of another host, or a name that cannot be looked up, is named with the flag to correct."""
    with pytest.raises(StartupError) as error:
        async with serve(on((host, 80)), Shown()):
            pytest.fail("it listened on an address of nobody")

    assert str(error.value) == f"{why}; correct --web.listen-address"


async def test_the_port_is_free_when_serving_has_ended() -> None:
    """After the end of the block no port is open, even if a client kept its connection."""
    async with AsyncExitStack() as stack:
        async with serve(LOOPBACK, Shown()) as (address,):
            reader, _ = await stack.enter_async_context(connected(address.port, HEALTH))
            await reader.readuntil(b"healthy.\n")
        assert await reader.read() == b""
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", address.port)


@pytest.mark.parametrize(("sent", "answer"), [(b"", b""), (b"GET / HTT", b""), (HEALTH, b"healthy.\n")])
async def test_who_asks_no_more_goes(sent: bytes, answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection without a whole request, or without another one, ends by itself."""
    monkeypatch.setattr(app, "_KEEP_ALIVE", 0.01)
    async with serve(LOOPBACK, Shown()) as (address,), connected(address.port, sent) as (reader, _):
        assert (await reader.read()).rpartition(b"vramledger is ")[2] == answer


async def test_serving_takes_all_descriptors_it_may() -> None:
    """The soft limit on open files, 1024 by default, does not limit the number of clients."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard - 1), hard))
    try:
        async with serve(LOOPBACK, Shown()):
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_errors_of_the_event_loop_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """If asyncio runs out of descriptors again and again, the log has one line a minute about it."""
    error = OSError(24, "Too many open files")
    what = {"message": "socket.accept() out of system resource", "exception": error}
    with caplog.at_level(logging.ERROR):
        async with serve(LOOPBACK, Shown()):
            for _ in range(1000):
                asyncio.get_running_loop().call_exception_handler(what)
    (record,) = caplog.records
    assert vars(record)["fields"]["what"] == "socket.accept() out of system resource"


def test_what_the_log_left_out_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    """A minute later the next error of the event loop is a line, with the number of those in between."""
    clock = iter((0.0, 1.0, 59.0, 60.0))
    handle = error_log.limited_exception_handler(lambda: next(clock))
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        for _ in range(4):
            handle(loop, {"message": "torn"})
    assert [vars(record)["fields"]["not_logged_before"] for record in caplog.records] == [0, 2]
