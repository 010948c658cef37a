"""Lets requests in or turns them away, by the newest good version of the web configuration file."""

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
from vramledger.web.access.refusals import STATUS, Written, respond
from vramledger.web.access.settings import REQUIRED, AccessSettings
from vramledger.web.access.tls import make_context, names_of
from vramledger.web.answers import NO_SNIFFING

Signature = tuple[tuple[int, ...] | None, ...]

_REASONS: Mapping[PasswordResult, str | None] = {
    PasswordResult.RIGHT: None,
    PasswordResult.WRONG: "password",
    PasswordResult.SHED: "failures",
    PasswordResult.BUSY: "busy",
}

_LOOK = 1.0
# Seconds between two looks at the files: a certificate is renewed without anybody telling us.


class AccessControl:
    """The rules for all requests.

    Attributes:
        context: for new connections, None for plain HTTP.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the file; None is no rules at all.

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
        self._written = Written()
        self._good = True
        self._loaded: float | None = None
        self._seen: Signature = ()
        self._dismissals: list[Callable[[], None]] = []
        if path is not None:
            self._seen = self._signature(AccessSettings())
            self._take(*self._load(path))
            self._seen = self._signature(self._settings)
            self._explain()

    @property
    def closed(self) -> bool:
        """Whether there are passwords or a rate, so that a request may be refused at once."""
        return bool(self._settings.users or self._settings.interval)

    @property
    def headers(self) -> Iterable[tuple[str, str]]:
        """What every answer carries that does not say otherwise."""
        return self._settings.headers.items()

    def collect(self) -> Collected:
        """Give the families of access; those of the file only where there is one."""
        found: Collected = [(WEB_REFUSED, [((reason,), self._refused[reason]) for reason in WEB_REFUSALS])]
        if self._loaded is not None:
            found.append((WEB_CONFIG_LOADED, [((), self._good)]))
            found.append((WEB_CONFIG_LOADED_TIME, [((), self._loaded)]))
        return found

    def on_other_rules(self, dismiss: Callable[[], None]) -> None:
        """Have something called whenever others may come in than before: an answer without end ends there."""
        self._dismissals.append(dismiss)

    def close(self) -> None:
        """Let the thread that checks passwords end."""
        self._passwords.close()

    # --- one request ---------------------------------------------------------------------------------

    async def refusal(self, request: web.Request) -> web.Response | None:
        """Return the answer to a request that may not come in, None to one that may.

        Decided before anybody has looked at the path, so all paths look the same from outside.
        """
        reason = await self._reason(request)
        if reason is None:
            return None
        self._refused[reason] += 1
        return respond(STATUS[reason])

    def refusal_at_once(self, authorization: str, address: str, *, last: bool) -> bytes | None:
        """Return the whole answer to a GET that is refused without any computing.

        None means nothing: :meth:`refusal` decides on the request, which has cost no token yet.

        Args:
            authorization: the header, empty if there is none.
            address: the client's.
            last: whether the connection is to end with the answer.
        """
        reason = self._reason_at_once(authorization, address)
        if reason is None:
            return None
        self._refused[reason] += 1
        return self._written.get(STATUS[reason], (NO_SNIFFING, *self.headers), last=last)

    async def _reason(self, request: web.Request) -> str | None:
        """Return why a request may not come in, one of WEB_REFUSALS."""
        settings = self._settings
        if self._bucket is not None and not self._bucket.consume(self._clock()):
            return "rate"
        if settings.tls is not None and settings.tls.allowed_sans is not None:
            certificate = request.get_extra_info("peercert") or {}
            if not settings.tls.allowed_sans & names_of(certificate):
                return "certificate"
        if not settings.users:
            return None
        login = _login(request.headers.get(hdrs.AUTHORIZATION, ""))
        if login is None:
            return "password"
        verdict = await self._passwords.check(settings.users, *login, request.remote or "")
        if self._settings.users != settings.users:  # changed meanwhile: what was right may be wrong now
            return await self._reason(request)
        return _REASONS[verdict]

    def _reason_at_once(self, authorization: str, address: str) -> str | None:
        settings = self._settings
        if self._bucket is not None:  # whoever may have a token takes it in :meth:`refusal`, and they are few
            return "rate" if self._bucket.is_empty(self._clock()) else None
        if not settings.users or (settings.tls is not None and settings.tls.allowed_sans is not None):
            return None
        login = _login(authorization)
        if login is None:
            return "password"
        verdict = self._passwords.at_once(settings.users, *login, address)
        return None if verdict is None else _REASONS[verdict]

    # --- the file ------------------------------------------------------------------------------------

    async def watch(self, changed: Callable[[], Awaitable[None]]) -> None:
        """Look at the files for ever; await ``changed`` when there is a new context for new connections."""
        while True:
            await asyncio.sleep(_LOOK)
            if self._path is not None and await asyncio.to_thread(self._moved):
                await self._reload(self._path, changed)

    def _moved(self) -> bool:
        return self._signature(self._settings) != self._seen

    async def _reload(self, path: Path, changed: Callable[[], Awaitable[None]]) -> None:
        self._seen = self._signature(self._settings)
        try:
            settings, context = await asyncio.to_thread(self._load, path)
            self._check_closed(settings)
        except StartupError as error:
            self._good = False
            log.error("Kept the old web configuration", extra=fields(err=error))
            return
        others = _entitled(settings) != _entitled(self._settings)
        self._take(settings, context)
        self._seen = self._signature(settings)
        await changed()
        if others:
            for dismiss in self._dismissals:
                dismiss()
        log.info("Loaded the web configuration", extra=fields(file=path))

    def _load(self, path: Path) -> tuple[AccessSettings, ssl.SSLContext | None]:
        from vramledger.web.access.file import read_settings  # noqa: PLC0415 only who has a file loads YAML

        settings = read_settings(path)
        return settings, make_context(settings.tls) if settings.tls is not None else None

    def _take(self, settings: AccessSettings, context: ssl.SSLContext | None) -> None:
        if (settings.interval, settings.burst) != (self._settings.interval, self._settings.burst):
            self._bucket = _bucket(settings, self._clock())
        self._settings, self.context = settings, context
        self._good, self._loaded = True, time.time()

    def _check_closed(self, fresh: AccessSettings) -> None:
        """Refuse to open what is closed: an editor or a copy leaves the file empty for a moment.

        Raises:
            StartupError: the file no longer asks for TLS, certificates or passwords.
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
            message = f"--web.config.file={self._path} no longer asks for {what}; restart if that is meant"
            raise StartupError(message)

    def _signature(self, settings: AccessSettings) -> Signature:
        """Return what changes with the file and those it names, also when a link is bent to another."""
        files = (self._path, *(settings.tls.files if settings.tls is not None else ()))
        return tuple(_state(each) for each in files if each is not None)

    def _explain(self) -> None:
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
    """Return a bucket that holds ``burst`` tokens and gains one an ``interval``; None without a limit."""
    return TokenBucket(now, 1 / settings.interval, float(settings.burst)) if settings.interval else None


def _entitled(settings: AccessSettings) -> tuple[object, ...]:
    """Return what says who may come in."""
    tls = settings.tls
    return settings.users, tls and (tls.client_auth, tls.client_ca, tls.allowed_sans)


def _state(path: Path) -> tuple[int, ...] | None:
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


def _login(authorization: str) -> tuple[str, str] | None:
    scheme, _, encoded = authorization.partition(" ")
    try:
        user, colon, password = base64.b64decode(encoded.strip(), validate=True).decode().partition(":")
    except ValueError:  # no base64, or no UTF-8
        return None
    return (user, password) if colon and scheme.lower() == "basic" else None
