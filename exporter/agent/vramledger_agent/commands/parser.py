"""Build a command's parser and write its output, with no import that takes long."""

from __future__ import annotations

import argparse
import os
import re
import sys

from vramledger_agent.errors import StartupError, UsageError
from vramledger_agent.printable import printable, write_plain
from vramledger_agent.protocol.messages import CONSENT_VARIABLE, CONSENTS, DEFAULT_SOCKET, ENABLE_VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:  # see above
    from collections.abc import Callable, Sequence
    from typing import Any, NoReturn, TypeAlias, TypeVar

    _T = TypeVar("_T")

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
"""The object to which a command adds itself."""

LOG_LEVELS = ("debug", "info", "warn", "error")


_NEGATIVE = re.compile(r"-\d+(\.\d+)?((ms|[smhd])(\d+(\.\d+)?(ms|[smhd]))*)?")
"""What is a value although it begins like a flag: a number, and a span before now such as ``-6h``."""


class Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line and accepts no abbreviated flags."""

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 argparse's own
        # a new flag must not change what an old command line means
        super().__init__(allow_abbrev=False, **settings)
        self._negative_number_matcher = _NEGATIVE

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Refuse here what is not known: argparse would leave it to the program, whose help has no flags."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """Exit with a line that says what is wrong and where to read more."""
        write_plain(printable(f"{self.prog}: {message}; see '{self.prog} --help'") + "\n", error=True)
        sys.exit(UsageError.exit_code)


def argparse_type(parse: Callable[[str], _T], name: str) -> Callable[[str], _T]:
    """Let argparse report our usage errors like its own."""

    def convert(text: str) -> _T:
        try:
            return parse(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    convert.__name__ = name
    return convert


_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_LONGEST_DURATION = 3660 * 86400.0
"""Ten years. Beyond some longer time clocks, timers and calendars overflow, each at its own limit."""

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


def parse_duration(text: str) -> float:
    """Read a duration as Prometheus writes it (``1m30s``), in seconds. Raises UsageError if it is not one."""
    seconds = sum(float(number) * _UNITS[unit] for number, unit in _DURATION.findall(text))
    if _DURATION.sub("", text) or seconds <= 0:
        raise UsageError(f"{text!r} is not a duration; write for example 500ms, 1s, 10m or 1h30m")
    if seconds > _LONGEST_DURATION:
        raise UsageError(
            f"{text[:40]!r} is too long for a duration; write at most {_LONGEST_DURATION / 86400:.0f}d"
        )
    return seconds


duration = argparse_type(parse_duration, "duration")


def pid(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a process id")
    return int(text)


def add_consents(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that say which requests the program's agent accepts."""
    parser.add_argument(
        "--allow-reclaim", action="store_true", help="let root and your user make it free cached memory"
    )
    parser.add_argument(
        "--allow-snapshot", action="store_true", help="let root and your user take snapshots of it"
    )


def agent_settings(args: argparse.Namespace) -> dict[str, str]:
    """Return the variables that start an agent with these consents; by default the program's own count."""
    consents = [name for name in CONSENTS if getattr(args, f"allow_{name}")]
    return {ENABLE_VARIABLE: "1", **({CONSENT_VARIABLE: ",".join(consents)} if consents else {})}


def count(text: str) -> int:
    """Read a whole number of 0 or more."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return int(text)


def add_agent_socket(parser: argparse.ArgumentParser, default: str | None = DEFAULT_SOCKET) -> None:
    """Declare the flag of the agents' socket; without a default it is that of the exporter that was asked."""
    from pathlib import Path

    usual = DEFAULT_SOCKET if default else "that of the exporter"

    parser.add_argument(
        "--agent.socket", dest="agent_socket", type=Path, default=default and Path(default), metavar="PATH",
        help=f"where agents in users' programs connect to the exporter (default {usual})",
    )  # fmt: skip


def add_log(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("log")
    group.add_argument("--log.level", dest="log_level", choices=LOG_LEVELS, default="info")
    group.add_argument("--log.format", dest="log_format", choices=["logfmt", "json"], default="logfmt")


def write_output(*parts: str) -> None:
    """Write to stdout now: a full disk shows here. Raises BrokenPipeError or StartupError if it fails."""
    try:
        write_plain(*parts, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        # What is left in the buffer would fail again at exit, with status 120 and a second message.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise StartupError(
            f"cannot write to standard output: {error.strerror}; free some space or write elsewhere"
        ) from error
