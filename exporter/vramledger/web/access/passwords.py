"""Check basic authentication: bcrypt runs in a thread of its own and cannot overload the host.

A hash of cost 10 takes about 50 ms of a core. So the hashing runs in one thread that yields to all others. A
correct password is remembered. An address that fails again and again is rejected before anything is computed.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import Enum

from vramledger.web.access.local_users import find_local_user, is_of_this_host, parse_address

_REMEMBERED_MAX = 100
"""The most correct logins remembered, 32 bytes each; an exporter has few users."""

_FAILURES_MAX, _FAILURE_INTERVAL = 10.0, 6.0
"""The failures that an address may have in one burst, and the seconds after which it may have another."""

_ADDRESSES_MAX = 4096
"""The maximum number of addresses whose failures count; more forget the one with the oldest failure."""

_WAITING_MAX, _WAITING_PER_SITE = 16, 4
"""The maximum number of passwords that wait, in all and of one address or site: the last waits a second."""

_NICE = 10

_NO_HASH = "." * 60
"""The hash of a name that does not exist, as long as a real one, so that it takes as long."""

_PASSWORD_MAX = 72
"""The bytes of a password that bcrypt uses. Its C and Go versions ignore the rest, Python's raises."""


class PasswordResult(Enum):
    """The result of a login: why it is refused, one of ``WEB_REFUSALS``.

    Throttled is who has failed too often, busy where too many other passwords wait.
    """

    RIGHT = ""
    WRONG = "password"
    THROTTLED = "failures"
    BUSY = "busy"


class FailureBudget:
    """Count how often each address may still fail."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._used: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def is_spent(self, address: str) -> bool:
        """Tell whether an address must not try now."""
        return self._now(address) > _FAILURES_MAX - 1

    def record_failure(self, address: str) -> None:
        """Count a failure."""
        self._used[address] = (self._now(address) + 1, self._clock())
        self._used.move_to_end(address)
        if len(self._used) > _ADDRESSES_MAX:
            self._used.popitem(last=False)

    def _now(self, address: str) -> float:
        used, since = self._used.get(address, (0.0, 0.0))
        return max(0.0, used - (self._clock() - since) / _FAILURE_INTERVAL)


class Passwords:
    """Check names and passwords against bcrypt hashes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._budget = FailureBudget(clock)
        self._secret = os.urandom(32)
        self._right: OrderedDict[bytes, None] = OrderedDict()
        self._running: dict[bytes, asyncio.Future[bool]] = {}
        self._waiting: Counter[str] = Counter()
        self._pool = ThreadPoolExecutor(1, "bcrypt", initializer=_yield_to_others)

    def close(self) -> None:
        """Let the thread end."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def check(self, users: Mapping[str, str], user: str, password: str, address: str) -> PasswordResult:
        """Check a password; failures count for ``address``, and unknown names take as long."""
        hashed = users.get(user)
        digest = self._digest(user, hashed or _NO_HASH, password)
        if digest in self._right:  # only digests of real users' hashes are ever added
            self._right.move_to_end(digest)
            return PasswordResult.RIGHT
        if self._budget.is_spent(address):
            return PasswordResult.THROTTLED
        site = _site(address)
        full = self._waiting.total() >= _WAITING_MAX or self._waiting[site] >= _WAITING_PER_SITE
        running = self._running.get(digest)
        if full and running is None:
            return PasswordResult.BUSY
        if running is None:
            running = self._start_check(digest, hashed or self._decoy(users, user), password, site)
        if running.done():  # since Python 3.14, where the thread was faster: let its end be recorded first
            await asyncio.sleep(0)
        right = await asyncio.shield(running) and hashed is not None
        if right:
            self._right[digest] = None
            if len(self._right) > _REMEMBERED_MAX:
                self._right.popitem(last=False)
            return PasswordResult.RIGHT
        self._budget.record_failure(address)
        return PasswordResult.WRONG

    def _start_check(self, digest: bytes, hashed: str, password: str, site: str) -> asyncio.Future[bool]:
        running = asyncio.get_running_loop().run_in_executor(self._pool, _matches, password, hashed)
        self._running[digest] = running
        self._waiting[site] += 1

        def ended(done: asyncio.Future[bool]) -> None:
            del self._running[digest]
            self._waiting[site] -= 1
            if not self._waiting[site]:
                del self._waiting[site]
            if not done.cancelled():
                done.exception()  # a client that still waits gets the error; without one it is not needed

        running.add_done_callback(ended)
        return running

    def _digest(self, *parts: str) -> bytes:
        """Return a name of a login that does not reveal the login; only this process has the key."""
        named = hmac.new(self._secret, digestmod=hashlib.sha256)
        for part in parts:
            data = part.encode(errors="surrogateescape")
            named.update(len(data).to_bytes(4, "big") + data)
        return named.digest()

    def _decoy(self, users: Mapping[str, str], user: str) -> str:
        """Return a hash that no password has, at a user's cost, always the same for a name."""
        costs = sorted(hashed.split("$")[2] for hashed in users.values())
        return f"$2b${costs[self._digest(user)[0] % len(costs)]}${'.' * 53}"


def connection_source(peer: object, ours: object) -> str:
    """Return a connection's key: an IPv4 address, an IPv6 /64, or the user if it comes from this host."""
    if not isinstance(peer, tuple) or not isinstance(ours, tuple):
        return ""
    user = find_local_user(peer, ours)
    local = user is not None or is_of_this_host(peer[0])
    return f"this host, user {user}" if local else failure_source(peer[0])


def failure_source(address: str) -> str:
    """Return an IPv4 address, or the /64 of an IPv6 one."""
    parsed = parse_address(address)
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    return str(ipaddress.ip_network((parsed, 64), strict=False))


def _site(source: str) -> str:
    """Return the /48 of an IPv6 source, all of whose 65,536 /64s one customer may have; another is itself."""
    network, slash, _ = source.partition("/")
    return str(ipaddress.ip_network((network, 48), strict=False)) if slash else source


def _matches(password: str, hashed: str) -> bool:
    """Tell whether a password has this hash; it takes as long as the hash's cost requires, on purpose."""
    import bcrypt  # noqa: PLC0415 only a file with users needs it

    given = password.encode(errors="surrogateescape")[:_PASSWORD_MAX]
    try:
        return bcrypt.checkpw(given, hashed.encode())
    except ValueError:  # a NUL, in older versions of bcrypt
        return False


def _yield_to_others() -> None:
    """Lower this thread's priority: Linux has one for each thread."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
