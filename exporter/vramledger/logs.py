"""Write log lines to stderr, logfmt or JSON, with the keys in the order that Prometheus' own programs use."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from typing import Final

from vramledger_agent.printable import printable

LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
}
_NAMES: Final = {
    logging.DEBUG: "debug",
    logging.INFO: "info",
    logging.WARNING: "warn",
    logging.ERROR: "error",
}
_PLAIN = re.compile(r"[^\s\"=\\\x00-\x1f\x7f]+")

log = logging.getLogger("vramledger")


class _Formatter(logging.Formatter):
    """Format ``log.info("msg", extra={"fields": {...}})`` as one line."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style_name = style

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        items: dict[str, object] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": _NAMES.get(record.levelno, record.levelname.lower()),
            "source": f"{record.filename}:{record.lineno}",
            "msg": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and log.isEnabledFor(logging.DEBUG):
            items["trace"] = self.formatException(record.exc_info)
        if self.style_name == "json":
            return json.dumps(items, default=str)
        return " ".join(f"{key}={_quote(str(value))}" for key, value in items.items())


def _quote(text: str) -> str:
    return text if _PLAIN.fullmatch(text) and printable(text) == text else json.dumps(text)


def configure(level: str = "info", style: str = "logfmt") -> None:
    """Send the log to stderr at ``level`` (a key of LEVELS) as ``logfmt`` or ``json``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(style))
    log.handlers = [handler]
    log.setLevel(LEVELS[level])
    log.propagate = False
    loop = logging.getLogger("asyncio")  # the event loop's messages are lines of our log too
    loop.handlers = [handler]
    loop.propagate = False


def settings() -> tuple[str, str]:
    """Return the level and the style that :func:`configure` was last called with, for a child process."""
    formatter = log.handlers[0].formatter if log.handlers else None
    style = formatter.style_name if isinstance(formatter, _Formatter) else "logfmt"
    return _NAMES.get(log.level, "info"), style


class FailureStreaks:
    """Log a failure of each of several parts once, until the part has succeeded again."""

    def __init__(self, message: str) -> None:
        self._message = message
        self._failing: set[tuple[str, int]] = set()

    def __bool__(self) -> bool:
        """Whether a part fails now."""
        return bool(self._failing)

    def failed(self, name: str, error: BaseException, place: int = 0) -> None:
        """Record a failure of a part; ``place`` is where, if there are several."""
        if (name, place) not in self._failing:
            self._failing.add((name, place))
            what = f"{type(error).__name__}: {error}"
            log.error(self._message, exc_info=error, extra=fields(collector=name, err=what), stacklevel=2)

    def succeeded(self, name: str, place: int = 0) -> None:
        """Record that a part works."""
        self._failing.discard((name, place))


COLLECTOR_FAILED: Final = "Collector failed"
"""What a log line says of a collector that fails, whoever runs it."""


def fields(**values: object) -> dict[str, dict[str, object]]:
    """Return what ``extra=`` takes: ``log.info("sampled", extra=fields(devices=8))``."""
    return {"fields": values}
