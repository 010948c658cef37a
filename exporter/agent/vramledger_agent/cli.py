"""Run the command line ``vramledger-agent``; the exporter's, which has more commands, uses it too."""

from __future__ import annotations

import argparse
import gc
import io
import os
import sys
from importlib import import_module

from vramledger_agent import __version__
from vramledger_agent.commands.parser import Parser
from vramledger_agent.errors import VramledgerError
from vramledger_agent.printable import printable, write_plain

TYPE_CHECKING = False
if TYPE_CHECKING:  # 'run' imports nothing that starting a program does not need
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import TracebackType

COMMANDS = {name: f"vramledger_agent.commands.{name}" for name in ("run", "attach", "snapshot")}
"""The module of each command of this package."""


def build_parser(
    prog: str, description: str, epilog: str | None, modules: Iterable[str]
) -> argparse.ArgumentParser:
    """Build the parser of a command line whose commands are in these modules."""
    top = Parser(
        prog=prog,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"{prog} {__version__}")
    # Without prog, argparse makes it from a formatted usage, for which it imports shutil.
    commands = top.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=Parser, prog=prog
    )
    for module in modules:
        import_module(module).add_command(commands)
    return top


def parser(names: Iterable[str] = COMMANDS, prog: str = "vramledger-agent") -> argparse.ArgumentParser:
    """Build the parser of our command line, or of some commands."""
    description = "Report what a program's GPU frameworks hold to the exporter vramledger."
    return build_parser(prog, description, None, [COMMANDS[name] for name in names])


def main(argv: Sequence[str] | None = None, prog: str = "vramledger-agent") -> int:
    return run_command(argv, COMMANDS, lambda names: parser(names, prog))


def _no_logs(args: argparse.Namespace) -> None:
    """Set up no log: what we do in the foreground is said, and nothing else happens."""


def _print_traceback(args: argparse.Namespace, error: VramledgerError) -> None:
    if args.log_level == "debug":
        _write_traceback(type(error), error, error.__traceback__)


def _write_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    import traceback

    write_plain("".join(traceback.format_exception(kind, error, trace)), error=True)


def run_command(
    argv: Sequence[str] | None,
    commands: Mapping[str, str],
    make_parser: Callable[[Iterable[str]], argparse.ArgumentParser],
    *,
    set_up_logs: Callable[[argparse.Namespace], None] = _no_logs,
    log_traceback: Callable[[argparse.Namespace, VramledgerError], None] = _print_traceback,
) -> int:
    """Run one of some commands; return its exit status. Each is loaded late: all cost the exporter 1 MiB."""
    _open_closed_streams()
    sys.excepthook = _write_traceback
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal in ASCII shows a question mark, not a traceback
    words = sys.argv[1:] if argv is None else argv
    known = [word for word in words[:1] if word in commands]
    asked = known if known or words[:1] == ["--version"] else commands  # for scripts that ask it often
    if argv is None:  # our own process: what is imported stays; to look for garbage in it is a fifth
        gc.disable()
    top = make_parser(asked)
    args = top.parse_args(words)
    if argv is None:
        gc.freeze()
        gc.enable()
    set_up_logs(args)
    try:
        status: int = args.run(args)
    except VramledgerError as error:
        write_plain(printable(f"{top.prog}: {error}") + "\n", error=True)
        log_traceback(args, error)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has closed it, as with 'show | head'
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    return status


def _open_closed_streams() -> None:
    """Replace closed standard streams (``show >&-``), or the next opened file is one. Writing fails."""
    for number, mode in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)  # the lowest free number, as those below it are in use
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
