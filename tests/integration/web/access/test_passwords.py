"""Basic authentication: right, wrong, and how much work of the host it can cause."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import bcrypt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.own_addresses import bind_to_interface, own_addresses
from tests.support.requirements import require_root
from tests.support.secured import ALICE, header, serve_secured
from tests.support.secured import USERS as SECURED_USERS
from tests.support.stranger import as_user
from vramledger.web.access import passwords
from vramledger.web.access.passwords import PasswordResult, Passwords, connection_source

USERS = {name: bcrypt.hashpw(word.encode()[:72], bcrypt.gensalt(4)).decode() for name, word in
         (("alice", "wonder"), ("björn", "größe ☃"), ("long", "x" * 80))}  # fmt: skip


@pytest.fixture
def checks() -> Iterator[Passwords]:
    with closing(Passwords()) as made:
        yield made


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the hash of every bcrypt computation; the computations still happen."""
    real, found = passwords._matches, []  # noqa: SLF001

    def record_call(password: str, hashed: str) -> bool:
        found.append(hashed)
        return real(password, hashed)

    monkeypatch.setattr(passwords, "_matches", record_call)
    return found


@pytest.mark.parametrize(
    ("user", "password", "verdict"),
    [
        ("alice", "wonder", PasswordResult.RIGHT),
        ("björn", "größe ☃", PasswordResult.RIGHT),
        ("long", "x" * 72 + "y", PasswordResult.RIGHT),  # bcrypt knows 72 bytes, as with htpasswd and Go
        ("long", "x" * 71, PasswordResult.WRONG),
        ("alice", "Wonder", PasswordResult.WRONG),
        ("alice", "", PasswordResult.WRONG),
        ("alice", "wonder\x00", PasswordResult.WRONG),
        ("Alice", "wonder", PasswordResult.WRONG),
        ("", "", PasswordResult.WRONG),
        ("\udcff", "\udcff", PasswordResult.WRONG),
    ],
)
async def test_only_the_right_password_lets_in(
    checks: Passwords, user: str, password: str, verdict: PasswordResult
) -> None:
    """Only a name with its password is accepted, at the second time as at the first."""
    for _ in range(2):
        assert await checks.check(USERS, user, password, "192.0.2.1") is verdict


@settings(max_examples=examples(50))
@given(st.text(), st.text())
def test_no_login_breaks_the_check(user: str, password: str) -> None:
    """Every name and every password gets a result."""
    checks = Passwords()
    assert asyncio.run(checks.check(USERS, user, password, "192.0.2.1")) is PasswordResult.WRONG
    checks.close()


async def test_a_right_password_is_computed_once(checks: Passwords, seen: list[str]) -> None:
    """Prometheus causes one hash computation, not one for each scrape; a changed hash is a new password."""
    for _ in range(5):
        assert await checks.check(USERS, "alice", "wonder", "192.0.2.1") is PasswordResult.RIGHT
    assert len(seen) == 1
    for changed in ({"alice": USERS["björn"]}, {"bob": USERS["alice"]}):
        assert await checks.check(changed, "alice", "wonder", "192.0.2.1") is PasswordResult.WRONG


async def test_a_name_that_nobody_has_costs_the_same(checks: Passwords, seen: list[str]) -> None:
    """An unknown name is computed with the cost of one of the users, each time the same."""
    users = {"cheap": USERS["alice"], "dear": bcrypt.hashpw(b"x", bcrypt.gensalt(5)).decode()}
    for user in "abcdefgh":
        for _ in range(2):
            await checks.check(users, user, "x", f"192.0.2.{ord(user)}")
    costs = [hashed.split("$")[2] for hashed in seen]
    assert len(costs) == 16
    assert costs[::2] == costs[1::2]
    assert set(costs) <= {"04", "05"}


async def test_an_address_that_fails_is_turned_away_unheard(seen: list[str]) -> None:
    """After ten failures nothing is computed for an address for a while; others are not affected."""
    now = 100.0
    checks = Passwords(lambda: now)
    assert await checks.check(USERS, "alice", "wonder", "192.0.2.1") is PasswordResult.RIGHT
    for number in range(10):
        assert await checks.check(USERS, "alice", f"{number}", "192.0.2.1") is PasswordResult.WRONG
    computed = len(seen)
    for user, password in (("alice", "guess"), ("nobody", "guess"), ("björn", "größe ☃")):
        assert await checks.check(USERS, user, password, "192.0.2.1") is PasswordResult.THROTTLED
    assert len(seen) == computed
    # A password that was right before still is, and another address is not affected.
    assert await checks.check(USERS, "alice", "wonder", "192.0.2.1") is PasswordResult.RIGHT
    assert await checks.check(USERS, "alice", "guess", "192.0.2.2") is PasswordResult.WRONG
    now += 6.0
    for verdict in (PasswordResult.WRONG, PasswordResult.THROTTLED):
        assert await checks.check(USERS, "alice", "guess", "192.0.2.1") is verdict
    checks.close()


async def test_what_many_ask_at_once_is_bounded(checks: Passwords) -> None:
    """Only a limited number of passwords waits, from however many addresses; the next ones get 503."""
    asked = [checks.check(USERS, "alice", f"{number}", f"192.0.2.{number}") for number in range(200)]
    verdicts = await asyncio.gather(*asked)
    assert verdicts.count(PasswordResult.WRONG) == passwords._WAITING_MAX  # noqa: SLF001
    assert verdicts.count(PasswordResult.BUSY) == 200 - passwords._WAITING_MAX  # noqa: SLF001
    asked = [checks.check(USERS, "alice", f"{number}", "198.51.100.1") for number in range(9)]
    one = await asyncio.gather(*asked)
    assert one.count(PasswordResult.WRONG) == passwords._WAITING_PER_SITE  # noqa: SLF001
    assert await checks.check(USERS, "alice", "wonder", "198.51.100.2") is PasswordResult.RIGHT
    site = await asyncio.gather(
        *(checks.check(USERS, "alice", f"{each}", f"2001:db8:1:{each}::/64") for each in range(9)),
        checks.check(USERS, "alice", "other", "2001:db8:2::/64"),
    )
    assert site.count(PasswordResult.WRONG) == passwords._WAITING_PER_SITE + 1  # noqa: SLF001


async def test_the_same_login_twice_at_once_is_computed_once(checks: Passwords, seen: list[str]) -> None:
    """Several logins of one user that arrive together wait for one hash computation."""
    logins = (checks.check(USERS, "alice", "wonder", "192.0.2.1") for _ in range(100))
    assert set(await asyncio.gather(*logins)) == {PasswordResult.RIGHT}
    assert len(seen) == 1


def test_the_memory_of_failures_is_bounded() -> None:
    """Failures of very many addresses do not fill our memory."""
    budget = passwords.FailureBudget(lambda: 0.0)
    for number in range(3 * passwords._ADDRESSES_MAX):  # noqa: SLF001
        budget.record_failure(str(number))
    assert len(budget._used) == passwords._ADDRESSES_MAX  # noqa: SLF001


@pytest.mark.parametrize(
    ("address", "source"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_failures_are_counted_by_network(address: str, source: str) -> None:
    """An IPv6 host has 2^64 addresses; IPv4 addresses on a socket for both are not one network."""
    assert passwords.failure_source(address) == source


async def test_users_of_this_host_are_told_apart(tmp_path: Path) -> None:
    """Over loopback, wrong passwords of one user, from all addresses, refuse no other's first login."""
    require_root()

    async def status(port: int, uid: int, address: str, login: tuple[str, str]) -> int:
        with as_user(uid):
            connected = socket.create_connection(("127.0.0.1", port), source_address=(address, 0))
        reader, writer = await asyncio.open_connection(sock=connected)
        name, value = next(iter(header(login).items()))
        writer.write(f"GET /-/healthy HTTP/1.1\r\nHost: localhost\r\n{name}: {value}\r\n\r\n".encode())
        found = int((await reader.readline()).split()[1])
        writer.close()
        return found

    async with serve_secured(tmp_path / "web.yml", SECURED_USERS) as exporter:
        sources = [(f"127.0.{number}.7", ("alice", str(number))) for number in range(12)]
        assert [await status(exporter.port, 12345, *each) for each in sources] == [401] * 10 + [429] * 2
        assert await status(exporter.port, 12345, "127.9.9.9", ALICE) == 429
        assert await status(exporter.port, 12346, "127.0.0.1", ALICE) == 200


LOOPBACK = ["127.0.0.1", "127.9.9.9", "::ffff:127.0.0.9", "::1"]


@pytest.mark.parametrize("way", ["", "sends no more", "bound", "closed"])
def test_no_address_of_this_host_hides_its_user(way: str) -> None:
    """A user of this host is recognised at each of its addresses; who hides is somebody of this host."""
    require_root()
    mine = own_addresses()
    mapped = [f"::ffff:{each}" for each in mine if "." in each]
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listening:
        for address in [*LOOPBACK, *mine, *mapped]:
            (family, *_, target), *_ = socket.getaddrinfo(address, listening.getsockname()[1])
            with as_user(12345), socket.socket(family) as connected:
                if way == "bound":
                    bind_to_interface(connected, address)
                connected.connect(target)
                if way == "sends no more":
                    connected.shutdown(socket.SHUT_WR)
                elif way == "closed":
                    connected.close()
                with listening.accept()[0] as accepted:
                    source = connection_source(accepted.getpeername(), accepted.getsockname())
            # An address of a link says its interface; of the others we ask for lo.
            hidden = way == "closed" or (way == "bound" and address not in LOOPBACK and "%" not in address)
            assert source == f"this host, user {None if hidden else 12345}", address
