"""Build a command's parser: what every command needs of one, and nothing that takes long to import.

``vramledger run`` stands before each start of a program, so the modules that it imports count: there is
:mod:`argparse`, and neither ``typing`` nor ``pathlib`` nor ``logging``.
"""

from __future__ import annotations

import argparse
import re

from vramledger.agent_protocol.messages import CONSENT_VARIABLE, CONSENTS, ENABLE_VARIABLE
from vramledger.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:  # see above
    from collections.abc import Callable, Sequence
    from typing import Any, NoReturn, TypeAlias, TypeVar

    _T = TypeVar("_T")

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"  # noqa: SLF001 argparse has no public name for it
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
        self.exit(UsageError.exit_code, f"{self.prog}: {message}; see '{self.prog} --help'\n")


def argparse_type(parse: Callable[[str], _T], name: str) -> Callable[[str], _T]:
    """Let argparse report our usage errors like its own."""

    def convert(text: str) -> _T:
        try:
            return parse(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    convert.__name__ = name
    return convert


def _parse_duration(text: str) -> float:
    from vramledger.config import parse_duration  # noqa: PLC0415 only if a duration is given

    return parse_duration(text)


duration = argparse_type(_parse_duration, "duration")


def pid(text: str) -> int:
    """Read a process id."""
    if not text.isascii() or not text.isdigit() or int(text) <= 0:
        message = f"{text!r} is not a process id"
        raise argparse.ArgumentTypeError(message)
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
    """Return the environment variables that start an agent with the consents that were given.

    Without any, the program's own variable decides.
    """
    consents = [name for name in CONSENTS if getattr(args, f"allow_{name}")]
    return {ENABLE_VARIABLE: "1", **({CONSENT_VARIABLE: ",".join(consents)} if consents else {})}


def add_log(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the log."""
    group = parser.add_argument_group("log")
    group.add_argument("--log.level", dest="log_level", choices=LOG_LEVELS, default="info")
    group.add_argument("--log.format", dest="log_format", choices=["logfmt", "json"], default="logfmt")
