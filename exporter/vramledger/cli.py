"""Run the whole command line; only this module has exit codes."""

from __future__ import annotations

import argparse
import io
import os
import sys
from importlib import import_module

from vramledger import __version__
from vramledger.commands.parser import Parser
from vramledger.errors import VramledgerError

TYPE_CHECKING = False
if TYPE_CHECKING:  # 'vramledger run' imports nothing that starting a program does not need
    from collections.abc import Iterable, Sequence

_EPILOG = """\
Start with 'vramledger doctor': it says what this host lets vramledger see. Then, for example:
  vramledger show                    who holds the memory of these GPUs, since when and why
  vramledger fit PID                 what that program needs, and which GPU here has it free
  vramledger end --state orphaned    which leftovers it would end; it ends them only with --yes
  vramledger serve                   the exporter, with the live page at http://localhost:10839/

'vramledger COMMAND --help' has the flags of a command."""

_COMMANDS = tuple(
    "serve show fit doctor check end run attach snapshot reclaim release capture slurm taint".split()
)


def parser(names: Iterable[str] = _COMMANDS) -> argparse.ArgumentParser:
    """Build the parser of the whole command line, or of some commands.

    A command is loaded only when its parser is built: all of them would cost the exporter 1 MiB for ever.
    """
    top = Parser(
        prog="vramledger",
        description="A ledger for GPU memory.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"vramledger {__version__}")
    # Without prog, argparse makes it from a formatted usage, for which it imports shutil.
    commands = top.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=Parser, prog=top.prog
    )
    for name in names:
        import_module(f"vramledger.commands.{name}").add_command(commands)
    return top


def _open_closed_streams() -> None:
    """Replace standard streams that are closed (``vramledger show >&-``).

    Otherwise the next file that is opened would be standard output. Nothing can be written to the
    replacement, so that output that is lost is an error.
    """
    for number, mode in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)  # the lowest free number, as those below it are in use
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115


def _log_traceback(error: VramledgerError) -> None:
    from vramledger.logs import log  # noqa: PLC0415 see above

    log.debug("Traceback", exc_info=error)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status."""
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal in ASCII shows a question mark, not a traceback
    words = sys.argv[1:] if argv is None else argv
    known = [word for word in words[:1] if word in _COMMANDS]
    asked = known if known or words[:1] == ["--version"] else _COMMANDS  # for scripts that ask it often
    args = parser(asked).parse_args(words)
    if getattr(args, "logs", True):
        from vramledger.logs import configure  # noqa: PLC0415 'run' replaces this process and logs nothing

        configure(args.log_level, args.log_format)
    try:
        status: int = args.run(args)
    except VramledgerError as error:
        print(f"vramledger: {error}", file=sys.stderr)
        _log_traceback(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has closed it, as with 'show | head'
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    return status
