"""Allow or refuse requests, by the newest valid version of the web configuration file."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import ipaddress
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from aiohttp import hdrs, web

from vramledger.config import ListenAddress
from vramledger.errors import StartupError
from vramledger.logs import fields, log
from vramledger.metrics.access import WEB_CONFIG_LOADED, WEB_CONFIG_LOADED_TIME, WEB_REFUSALS, WEB_REFUSED
from vramledger.metrics.families import Collected
from vramledger.rate_limit import TokenBucket
from vramledger.web.access.passwords import Passwords
from vramledger.web.access.tls import AccessSettings, alternative_names, make_context
from vramledger.web.response_headers import BareResponse


def names_of_loopback(
    listened: Iterable[ListenAddress], configured: Iterable[ListenAddress]
) -> frozenset[str] | None:
    """Return the names of this host that a request may have; None if other hosts may reach us, by any name.

    A web page may read what is served under its own name, whose owner chooses its address, also loopback (DNS
    rebinding). So who listens on loopback alone, without passwords, answers only to names of this host.
    """
    if not all(_is_address(each.host) and ipaddress.ip_address(each.host).is_loopback for each in listened):
        return None
    return frozenset({"localhost", socket.gethostname().lower(), *(each.host.lower() for each in configured)})


@lru_cache(maxsize=64)
def is_name_of_this_host(host: str, names: frozenset[str]) -> bool:
    """Tell whether a Host header has one of the names, or an address; an empty one is not of a browser."""
    if not host:
        return True
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return False
    return name in names or name.endswith(".localhost") or _is_address(name)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


STATUS = {"password": 401, "certificate": 403, "failures": 429, "busy": 503, "rate": 429, "host": 421}
"""The status for each reason of ``vramledger_web_refused_requests_total``."""

_HOST_TEXT = (
    "This server listens on loopback alone and has no passwords: request it as localhost or by its address; "
    "a proxy must send such a Host header."
)


def refusal_response(reason: str, headers: Iterable[tuple[str, str]]) -> BareResponse:
    """Return the answer to a request that is refused, with the headers that every answer carries."""
    realm = [(hdrs.WWW_AUTHENTICATE, 'Basic realm="restricted"')] if reason == "password" else []
    return BareResponse(STATUS[reason], [*realm, *headers], _HOST_TEXT if reason == "host" else "")


Digest = bytes | int | None

_POLL_INTERVAL = 1.0
"""Seconds between two checks of the files: no event says that a certificate was renewed."""


class AccessControl:
    """The rules for all requests."""

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._settings = AccessSettings()
        self.context: ssl.SSLContext | None = None  # for new connections, None for plain HTTP
        # the names that a request may have where nobody must log in; None for any name
        self.host_names: frozenset[str] | None = None
        self._passwords = Passwords(clock)
        self._bucket: TokenBucket | None = None
        self._refused: Counter[str] = Counter()
        self._current = True
        self._loaded_at: float | None = None
        self._digests: Mapping[Path, Digest] = {}
        self._authorities: Digest = None
        self._permission_callbacks: list[Callable[[], None]] = []
        self._client_callbacks: list[Callable[[], None]] = []
        if path is not None:
            loaded = _load(path)
            self._apply(loaded, *loaded.result())
            self._log_settings()

    @property
    def headers(self) -> Iterable[tuple[str, str]]:
        """The headers of every answer that does not set them itself."""
        return self._settings.headers.items()

    @property
    def open_to_all(self) -> bool:
        """Whether a request needs neither a password nor a certificate."""
        return not self._settings.users and not self._settings.requires_client

    def collect(self) -> Collected:
        """Return the families of access; return those of the web config file only if there is such a file."""
        found: Collected = [(WEB_REFUSED, [((reason,), self._refused[reason]) for reason in WEB_REFUSALS])]
        if self._loaded_at is not None:
            found.append((WEB_CONFIG_LOADED, [((), self._current)]))
            found.append((WEB_CONFIG_LOADED_TIME, [((), self._loaded_at)]))
        return found

    def on_permissions_changed(self, callback: Callable[[], None]) -> None:
        """Register a function to call when the permissions change, so that endless answers end."""
        self._permission_callbacks.append(callback)

    def on_clients_changed(self, callback: Callable[[], None]) -> None:
        """Register a function to call when the set of certificates that may connect has changed."""
        self._client_callbacks.append(callback)

    def close(self) -> None:
        """Let the thread that checks passwords end."""
        self._passwords.close()

    # --- one request ---------------------------------------------------------------------------------

    async def refusal(self, request: web.BaseRequest) -> web.StreamResponse | None:
        """Return the answer to a refused request; all paths look the same, as none is read."""
        reason = await self._reason(request)
        if reason is None:
            return None
        self._refused[reason] += 1
        return refusal_response(reason, self.headers)

    async def _reason(self, request: web.BaseRequest) -> str | None:
        settings = self._settings
        if self._bucket is not None and not self._bucket.consume(self._clock()):
            return "rate"
        if settings.tls is not None and settings.tls.allowed_sans is not None:
            certificate = request.get_extra_info("peercert") or {}
            if not settings.tls.allowed_sans & alternative_names(certificate):
                return "certificate"
        if not settings.users:
            names = None if settings.requires_client else self.host_names
            ours = names is None or is_name_of_this_host(request.headers.get(hdrs.HOST, ""), names)
            return None if ours else "host"
        login = _parse_login(request.headers.get(hdrs.AUTHORIZATION, ""))
        if login is None:
            return "password"
        source = getattr(request.protocol, "source", "")
        result = await self._passwords.check(settings.users, *login, source)
        # changed meanwhile: a login that was right may be wrong now
        if self._settings.users != settings.users:
            return await self._reason(request)
        return result.value or None

    # --- the file ------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Check the files for ever, if there are any."""
        while self._path is not None:
            await asyncio.sleep(_POLL_INTERVAL)
            if await asyncio.to_thread(self._files_changed):
                await self._reload(self._path)

    def _files_changed(self) -> bool:
        return any(_digest(path) != digest for path, digest in self._digests.items())

    async def _reload(self, path: Path) -> None:
        loaded = await asyncio.to_thread(_load, path)
        self._digests = loaded.digests
        try:
            settings, context = loaded.result()
            self._check_restrictions(settings)
        except StartupError as error:
            self._current = False
            log.error("Kept the old web configuration", extra=fields(err=error))
            return
        users_changed = settings.users != self._settings.users
        clients_changed = (
            settings.clients != self._settings.clients or loaded.authorities != self._authorities
        )
        self._apply(loaded, settings, context)
        for callback in self._permission_callbacks if users_changed or clients_changed else ():
            callback()
        for callback in self._client_callbacks if clients_changed else ():
            callback()
        log.info("Loaded the web configuration", extra=fields(file=path))

    def _apply(self, loaded: _Loaded, settings: AccessSettings, context: ssl.SSLContext | None) -> None:
        if (settings.interval, settings.burst) != (self._settings.interval, self._settings.burst):
            self._bucket = _bucket(settings, self._clock())
        self._settings, self.context = settings, context
        self._digests, self._authorities = loaded.digests, loaded.authorities
        self._current, self._loaded_at = True, time.time()

    def _check_restrictions(self, fresh: AccessSettings) -> None:
        """Refuse a file that removes a restriction: it may be half written. Raises StartupError."""
        kept = fresh.restrictions
        if lost := [each for each in self._settings.restrictions if each not in kept]:
            what = " and ".join(lost)
            raise StartupError(
                f"--web.config.file={self._path} no longer requires {what}; restart if you want that"
            )

    def _log_settings(self) -> None:
        settings = self._settings
        log.info(
            "Loaded the web configuration",
            extra=fields(
                file=self._path, tls=settings.tls is not None, users=len(settings.users), http2="not served"
            ),
        )
        if settings.users and settings.tls is None:
            log.warning("Passwords cross the network in the clear: the web configuration has no TLS")
        if self._path is not None and settings.users and _readable_by_all(self._path):
            log.warning(
                "Every user of this host can read the password hashes; chmod o-r it",
                extra=fields(file=self._path),
            )


def _bucket(settings: AccessSettings, now: float) -> TokenBucket | None:
    return TokenBucket(now, 1 / settings.interval, float(settings.burst)) if settings.interval else None


class _Loaded(NamedTuple):
    digests: Mapping[Path, Digest]  # of each file before it was read, so that a later change is never missed
    settings: AccessSettings | None = None  # None if the file is wrong
    context: ssl.SSLContext | None = None  # for TLS, None for plain HTTP
    authorities: Digest = None  # the digest of the authorities' file
    error: StartupError | None = None  # why the file is wrong

    def result(self) -> tuple[AccessSettings, ssl.SSLContext | None]:
        """Return settings and context. Raises StartupError if the file, or one that it names, is wrong."""
        if self.error is not None:
            raise self.error
        assert self.settings is not None  # noqa: S101 without an error there are settings
        return self.settings, self.context


def _load(path: Path) -> _Loaded:
    from vramledger.web.access.config_file import read_settings  # noqa: PLC0415 only a configuration file needs YAML

    digests = {path: _digest(path)}
    try:
        settings = read_settings(path)
        tls = settings.tls
        if tls is None:
            return _Loaded(digests, settings)
        digests |= {each: _digest(each) for each in tls.files}
        authorities = digests[tls.client_ca.path] if tls.client_ca.path else None
        return _Loaded(digests, settings, make_context(tls), authorities)
    except StartupError as error:
        return _Loaded(digests, error=error)


def _digest(path: Path) -> Digest:
    """Return a value of a file's content, not its time: two changes may have the same."""
    try:
        return hashlib.sha256(path.read_bytes()).digest()
    except OSError as error:
        return error.errno


def _readable_by_all(path: Path) -> bool:
    try:
        return bool(path.stat().st_mode & 0o004)
    except OSError:
        return False


def _parse_login(authorization: str) -> tuple[str, str] | None:
    scheme, _, encoded = authorization.partition(" ")
    try:
        user, colon, password = base64.b64decode(encoded.strip(), validate=True).decode().partition(":")
    except ValueError:  # not base64, or not UTF-8
        return None
    return (user, password) if colon and scheme.lower() == "basic" else None
