"""Allow or refuse requests, by the newest valid version of the web configuration file."""

from __future__ import annotations

import asyncio
import base64
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path

from aiohttp import hdrs, web

from vramledger.errors import StartupError
from vramledger.logs import fields, log
from vramledger.metrics.access import (
    WEB_CONFIG_LOADED,
    WEB_CONFIG_LOADED_TIME,
    WEB_REFUSALS,
    WEB_REFUSED,
)
from vramledger.metrics.families import Collected
from vramledger.rate_limit import TokenBucket
from vramledger.web.access.passwords import PasswordResult, Passwords
from vramledger.web.access.refusals import STATUS, RefusalBytes, refusal_response
from vramledger.web.access.settings import REQUIRED, AccessSettings
from vramledger.web.access.tls import alternative_names, make_context
from vramledger.web.response_headers import NO_SNIFFING

Signature = tuple[tuple[int, ...] | None, ...]

_REFUSAL_REASONS: Mapping[PasswordResult, str | None] = {
    PasswordResult.RIGHT: None,
    PasswordResult.WRONG: "password",
    PasswordResult.THROTTLED: "failures",
    PasswordResult.BUSY: "busy",
}

_POLL_INTERVAL = 1.0
"""Seconds between two checks of the files: no event says that a certificate was renewed."""


class AccessControl:
    """The rules for all requests.

    Attributes:
        context: for new connections, None for plain HTTP.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the file; without a file there are no rules.

        Raises:
            StartupError: the file, or one that it names, is wrong.
        """
        self._path = path
        self._clock = clock
        self._settings = AccessSettings()
        self.context: ssl.SSLContext | None = None
        self._passwords = Passwords(clock)
        self._bucket: TokenBucket | None = None
        self._refused: Counter[str] = Counter()
        self._refusal_bytes = RefusalBytes()
        self._current = True
        self._loaded_at: float | None = None
        self._loaded_signature: Signature = ()
        self._permission_callbacks: list[Callable[[], None]] = []
        if path is not None:
            self._loaded_signature = self._signature(AccessSettings())
            self._apply(*self._load(path))
            self._loaded_signature = self._signature(self._settings)
            self._log_settings()

    @property
    def restricted(self) -> bool:
        """Whether there are passwords or a rate, so that a request may be refused immediately."""
        return bool(self._settings.users or self._settings.interval)

    @property
    def headers(self) -> Iterable[tuple[str, str]]:
        """The headers of every answer that does not set them itself."""
        return self._settings.headers.items()

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

    def close(self) -> None:
        """Let the thread that checks passwords end."""
        self._passwords.close()

    # --- one request ---------------------------------------------------------------------------------

    async def refusal(self, request: web.Request) -> web.Response | None:
        """Return the answer to a request that is refused, None for one that is allowed.

        It decides before anything reads the path, so all paths look the same from outside.
        """
        reason = await self._reason(request)
        if reason is None:
            return None
        self._refused[reason] += 1
        return refusal_response(STATUS[reason])

    def refusal_at_once(self, authorization: str, address: str, *, last: bool) -> bytes | None:
        """Return the whole answer to a GET that is refused without any computing.

        None means that nothing is decided yet: :meth:`refusal` then decides, and the request has not used a
            token.

        Args:
            authorization: the header, empty if there is none.
            address: the client's.
            last: whether the connection is to end with the answer.
        """
        reason = self._reason_at_once(authorization, address)
        if reason is None:
            return None
        self._refused[reason] += 1
        return self._refusal_bytes.get(STATUS[reason], (NO_SNIFFING, *self.headers), last=last)

    async def _reason(self, request: web.Request) -> str | None:
        """Return why a request is refused, one of WEB_REFUSALS."""
        settings = self._settings
        if self._bucket is not None and not self._bucket.consume(self._clock()):
            return "rate"
        if settings.tls is not None and settings.tls.allowed_sans is not None:
            certificate = request.get_extra_info("peercert") or {}
            if not settings.tls.allowed_sans & alternative_names(certificate):
                return "certificate"
        if not settings.users:
            return None
        login = _parse_login(request.headers.get(hdrs.AUTHORIZATION, ""))
        if login is None:
            return "password"
        result = await self._passwords.check(settings.users, *login, request.remote or "")
        # changed meanwhile: a login that was right may be wrong now
        if self._settings.users != settings.users:
            return await self._reason(request)
        return _REFUSAL_REASONS[result]

    def _reason_at_once(self, authorization: str, address: str) -> str | None:
        settings = self._settings
        # :meth:`refusal` takes the token of a request that may have one; these requests are few
        if self._bucket is not None:
            return "rate" if self._bucket.is_empty(self._clock()) else None
        if not settings.users or (settings.tls is not None and settings.tls.allowed_sans is not None):
            return None
        login = _parse_login(authorization)
        if login is None:
            return "password"
        result = self._passwords.check_at_once(settings.users, *login, address)
        return None if result is None else _REFUSAL_REASONS[result]

    # --- the file ------------------------------------------------------------------------------------

    async def watch(self, changed: Callable[[], Awaitable[None]]) -> None:
        """Check the files for ever; await ``changed`` when there is a new context for new connections."""
        while True:
            await asyncio.sleep(_POLL_INTERVAL)
            if self._path is not None and await asyncio.to_thread(self._files_changed):
                await self._reload(self._path, changed)

    def _files_changed(self) -> bool:
        return self._signature(self._settings) != self._loaded_signature

    async def _reload(self, path: Path, changed: Callable[[], Awaitable[None]]) -> None:
        self._loaded_signature = self._signature(self._settings)
        try:
            settings, context = await asyncio.to_thread(self._load, path)
            self._check_restrictions(settings)
        except StartupError as error:
            self._current = False
            log.error("Kept the old web configuration", extra=fields(err=error))
            return
        permissions_changed = _permissions(settings) != _permissions(self._settings)
        self._apply(settings, context)
        self._loaded_signature = self._signature(settings)
        await changed()
        if permissions_changed:
            for callback in self._permission_callbacks:
                callback()
        log.info("Loaded the web configuration", extra=fields(file=path))

    def _load(self, path: Path) -> tuple[AccessSettings, ssl.SSLContext | None]:
        from vramledger.web.access.config_file import read_settings  # noqa: PLC0415 only a configuration file needs YAML

        settings = read_settings(path)
        return settings, make_context(settings.tls) if settings.tls is not None else None

    def _apply(self, settings: AccessSettings, context: ssl.SSLContext | None) -> None:
        if (settings.interval, settings.burst) != (self._settings.interval, self._settings.burst):
            self._bucket = _bucket(settings, self._clock())
        self._settings, self.context = settings, context
        self._current, self._loaded_at = True, time.time()

    def _check_restrictions(self, fresh: AccessSettings) -> None:
        """Refuse a file that removes a restriction: a file may be empty while it is written.

        Raises:
            StartupError: the file no longer requires TLS, certificates or passwords.
        """
        old = self._settings
        lost = [
            what
            for what, before, now in (
                ("TLS", old.tls, fresh.tls),
                ("passwords", old.users, fresh.users),
                (
                    "client certificates",
                    old.tls and old.tls.client_auth == REQUIRED,
                    fresh.tls and fresh.tls.client_auth == REQUIRED,
                ),
            )
            if before and not now
        ]
        if lost:
            what = " and ".join(lost)
            message = f"--web.config.file={self._path} no longer requires {what}; restart if you want that"
            raise StartupError(message)

    def _signature(self, settings: AccessSettings) -> Signature:
        """Return a value that changes with the file, with the files that it names, and with link targets."""
        files = (self._path, *(settings.tls.files if settings.tls is not None else ()))
        return tuple(_file_signature(each) for each in files if each is not None)

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
    """Return a bucket that holds ``burst`` tokens and gains one in each ``interval``.

    Return None when there is no limit.
    """
    return TokenBucket(now, 1 / settings.interval, float(settings.burst)) if settings.interval else None


def _permissions(settings: AccessSettings) -> tuple[object, ...]:
    """Return the part of the settings that decides who may connect."""
    tls = settings.tls
    return settings.users, tls and (tls.client_auth, tls.client_ca, tls.allowed_sans)


def _file_signature(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError as error:
        return (error.errno or 0,)
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


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
