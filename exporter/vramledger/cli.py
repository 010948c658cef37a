"""Run the whole command line: the exporter's commands, and those of the agent's package."""

from __future__ import annotations

from vramledger_agent import cli

TYPE_CHECKING = False
if TYPE_CHECKING:  # 'vramledger run' imports nothing that starting a program does not need
    import argparse
    from collections.abc import Iterable, Sequence

    from vramledger.errors import VramledgerError

_EPILOG = """\
Start with 'vramledger doctor': it says what this host lets vramledger see. Then, for example:
  vramledger show                    who holds the memory of these GPUs, since when and why
  vramledger fit PID                 what that program needs, and which GPU here has it free
  vramledger end --state orphaned    which leftovers it would end; it ends them only with --yes
  vramledger serve                   the exporter, with the live page at http://localhost:10839/

'vramledger COMMAND --help' has the flags of a command."""

_ELSEWHERE = {
    **cli.COMMANDS,
    # These have their place beside what they judge.
    "slurm": "vramledger.slurm.command",
    "taint": "vramledger.kubernetes.command",
}

_COMMANDS = {
    name: _ELSEWHERE.get(name, f"vramledger.commands.{name}")
    for name in (
        "serve show report fit doctor check end run attach snapshot reclaim release capture rules slurm "
        "taint".split()
    )
}


def parser(names: Iterable[str] = _COMMANDS) -> argparse.ArgumentParser:
    """Build the parser of the whole command line, or of some commands."""
    modules = [_COMMANDS[name] for name in names]
    return cli.build_parser("vramledger", "A ledger for GPU memory.", _EPILOG, modules)


def _set_up_logs(args: argparse.Namespace) -> None:
    if getattr(args, "logs", True):
        from vramledger.logs import configure  # noqa: PLC0415 'run' replaces this process and logs nothing

        configure(args.log_level, args.log_format)


def _log_traceback(_: argparse.Namespace, error: VramledgerError) -> None:
    from vramledger.logs import log  # noqa: PLC0415 see above

    log.debug("Traceback", exc_info=error)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status."""
    return cli.run_command(argv, _COMMANDS, parser, set_up_logs=_set_up_logs, log_traceback=_log_traceback)
