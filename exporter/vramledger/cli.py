"""The command line: flags to a Config, a command each, and the only place with exit codes."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

from vramledger import __version__
from vramledger.acting import ALIKE, CheckOrder, EndOrder, check, end_holders
from vramledger.board import Board
from vramledger.check import MAX_LEFTOVER, Tolerance
from vramledger.config import (
    COLLECTORS,
    DEFAULT_PORT,
    IDLE_AFTER,
    Config,
    ListenAddress,
    SamplingConfig,
    parse_duration,
    parse_listen_address,
)
from vramledger.doctor import examine, report
from vramledger.document import document
from vramledger.end import Selection
from vramledger.errors import StartupError, UsageError, VramledgerError
from vramledger.history import History
from vramledger.hosts.rights import rights
from vramledger.logs import LEVELS, configure, fields, log
from vramledger.nvml.capture import capture
from vramledger.nvml.replay import Replay, bundled, header
from vramledger.nvml.supervisor import Supervisor, patience, read_once
from vramledger.readings import Reading
from vramledger.show import table
from vramledger.snapshot import Snapshot, State
from vramledger.why import evidence

_T = TypeVar("_T")

_PATH = re.compile(r"(/[\w.~-]+)+", re.ASCII)
# Braces and the like mean something to aiohttp's router.

_NO_DRIVER = ("no-library", "no-driver", "no-devices")
# Without a GPU to see, --source=auto shows a recording. Any other failure is one of this host's, and may end.


class Source(Protocol):
    """Where readings come from: a sampler, or a recording."""

    @property
    def pid(self) -> int | None:
        """Return the pid of the process that samples."""

    @property
    def idle_after(self) -> float | None:
        """Return the idle threshold in seconds that a recording asks for."""

    def readings(self) -> AsyncIterator[Reading | None]:
        """Yield readings for ever; None means that what follows is a new beginning."""


def _idle_after(told: float | None, source: Source) -> float:
    return told or source.idle_after or IDLE_AFTER


class _Parser(argparse.ArgumentParser):
    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 argparse's own
        super().__init__(allow_abbrev=False, **settings)  # a new flag must not change what an old line means

    def error(self, message: str) -> NoReturn:
        self.exit(UsageError.exit_code, f"{self.prog}: {message}; see '{self.prog} --help'\n")


def _checked(parse: Callable[[str], _T], name: str) -> Callable[[str], _T]:
    """Let argparse report our usage errors as its own."""

    def convert(text: str) -> _T:
        try:
            return parse(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    convert.__name__ = name
    return convert


_duration = _checked(parse_duration, "duration")
_address = _checked(parse_listen_address, "address")


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        message = f"{text!r} is no whole number of 0 or more"
        raise argparse.ArgumentTypeError(message)
    return int(text)


def _speed(text: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 0 < speed < float("inf"):
        message = f"{text!r} is no speed; write for example 1 or 10"
        raise argparse.ArgumentTypeError(message)
    return speed


_SIZES = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d{1,15})(|KiB|MiB|GiB)", text, flags=re.IGNORECASE | re.ASCII)
    if match is None:
        message = f"{text!r} is no size; write for example 128MiB"
        raise argparse.ArgumentTypeError(message)
    return int(match[1]) * _SIZES[match[2].upper()]


def _pid(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) <= 0:
        message = f"{text!r} is no process id"
        raise argparse.ArgumentTypeError(message)
    return int(text)


def _path(text: str) -> str:
    if not _PATH.fullmatch(text) or text.startswith(("/-/", "/api/")):
        message = (
            f"{text!r} is no path for metrics; write for example /metrics, in letters, digits and _.~-,"
            " and not below /-/ or /api/"
        )
        raise argparse.ArgumentTypeError(message)
    return text


def _source(text: str) -> str:
    if text not in ("nvml", "auto") and not (text.startswith("replay:") and len(text) > len("replay:")):
        message = f"{text!r} is no source; use nvml, auto or replay:FILE"
        raise argparse.ArgumentTypeError(message)
    return text


def _add_sampling(parser: argparse.ArgumentParser, *, idle: bool = False, collectors: bool = False) -> None:
    default = SamplingConfig()
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--sample.interval", dest="interval", type=_duration, default=default.interval, metavar="DURATION",
        help="from one sample to the next (default 1s)",
    )  # fmt: skip
    group.add_argument(
        "--sample.timeout", dest="timeout", type=_duration, default=default.timeout, metavar="DURATION",
        help="how long a sample waits for a GPU (default 1s)",
    )  # fmt: skip
    group.add_argument(
        "--path.procfs", dest="procfs", type=Path, default=default.procfs, metavar="DIR",
        help="where the host's /proc is (default /proc)",
    )  # fmt: skip
    group.add_argument(
        "--path.rootfs", dest="rootfs", type=Path, default=default.rootfs, metavar="DIR",
        help="where the host's root file system is (default /)",
    )  # fmt: skip
    if idle:
        group.add_argument(
            "--idle-after", dest="idle_after", type=_duration, default=None, metavar="DURATION",
            help="without any sign of work a holding is idle after this (default 10m,"
            " or what a recording asks for)",
        )  # fmt: skip
    if not collectors:
        return
    group = parser.add_argument_group("collectors")
    for name, (on, what) in COLLECTORS.items():
        group.add_argument(
            f"--collector.{name}", dest=f"collector_{name}", default=on,
            action=argparse.BooleanOptionalAction,
            help=f"{what} (default {'on' if on else 'off'})",
        )  # fmt: skip


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--source", type=_source, default="nvml", metavar="SOURCE",
        help="nvml, replay:FILE, or auto: the bundled recording where there is no driver (default nvml)",
    )  # fmt: skip
    parser.add_argument(
        "--replay.speed", dest="replay_speed", type=_speed, default=1.0, metavar="FACTOR",
        help="recorded seconds that pass in a second (default 1)",
    )  # fmt: skip


def _add_log(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("log")
    group.add_argument("--log.level", dest="log_level", choices=list(LEVELS), default="info")
    group.add_argument("--log.format", dest="log_format", choices=["logfmt", "json"], default="logfmt")


def _add_check(commands: argparse._SubParsersAction[_Parser]) -> None:
    check = commands.add_parser(
        "check",
        help="is this GPU clean for the next job (exit status)",
        description="Say whether GPUs are clean for the next job. Exit status: 0 clean, 1 not clean,"
        " 2 wrong flag, 3 cannot tell (no driver, a GPU without data, not in the host's PID namespace).",
    )
    check.add_argument(
        "--gpu", action="append", default=[], metavar="GPU", help="index or UUID, repeatable (default all)"
    )
    check.add_argument(
        "--max-leftover", dest="leftover", type=_size, default=MAX_LEFTOVER, metavar="SIZE",
        help="dead, orphaned, zombie and unattributed memory that counts as none (default 128MiB)",
    )  # fmt: skip
    check.add_argument("--allow-live", dest="live", action="store_true", help="live processes are no fault")
    check.add_argument(
        "--owner", dest="owners", action="append", default=[], metavar="OWNER",
        help="live processes of this owner, NAME or TYPE:NAME, are no fault; repeatable",
    )  # fmt: skip
    check.add_argument(
        "--wait", type=_duration, default=5.0, metavar="DURATION",
        help="how long a GPU may take to become clean (default 5s)",
    )  # fmt: skip
    check.add_argument("--json", action="store_true", help="print JSON")
    _add_sampling(check)
    _add_log(check)
    check.set_defaults(run=_check)


def _add_end(commands: argparse._SubParsersAction[_Parser]) -> None:
    end = commands.add_parser(
        "end",
        help="end holders by pid, state, owner or GPU, safely",
        description="End the holders that fit every kind of selector given; without --yes only say which."
        " Exit status: 0 all done or nothing to do, 1 some were refused or did not end, 2 wrong flag,"
        " 3 cannot tell.",
    )
    end.add_argument(
        "--pid", dest="pids", type=_pid, action="append", default=[], metavar="PID", help="repeatable"
    )
    end.add_argument(
        "--state", dest="states", action="append", default=[], choices=[state.value for state in State],
        help="repeatable; idle is known only after watching for --idle-after",
    )  # fmt: skip
    end.add_argument(
        "--owner", dest="owners", action="append", default=[], metavar="OWNER",
        help="NAME or TYPE:NAME, repeatable",
    )  # fmt: skip
    end.add_argument("--gpu", action="append", default=[], metavar="GPU", help="index or UUID, repeatable")
    end.add_argument(
        "--grace", type=_duration, default=10.0, metavar="DURATION",
        help="from SIGTERM to SIGKILL (default 10s)",
    )  # fmt: skip
    end.add_argument("--yes", action="store_true", help="do it, and not only say what would be done")
    _add_sampling(end, idle=True)
    _add_log(end)
    end.set_defaults(run=_end)


def parser() -> argparse.ArgumentParser:
    """Build the parser of the whole command line."""
    top = _Parser(prog="vramledger", description="An account book for GPU memory.")
    top.add_argument("--version", action="version", version=f"vramledger {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)

    serve = commands.add_parser("serve", help="the exporter", description="Serve the ledger to Prometheus.")
    web = serve.add_argument_group("web")
    web.add_argument(
        "--web.listen-address", dest="listen", type=_address, action="append", metavar="ADDRESS",
        help=f"where to listen, repeatable (default :{DEFAULT_PORT})",
    )  # fmt: skip
    web.add_argument(
        "--web.telemetry-path", dest="telemetry_path", type=_path, default="/metrics", metavar="PATH",
        help="where the metrics are (default /metrics)",
    )  # fmt: skip
    web.add_argument(
        "--web.max-requests", dest="max_requests", type=_count, default=40, metavar="N",
        help="scrapes served at once, 0 for no limit (default 40)",
    )  # fmt: skip
    _add_source(serve)
    serve.add_argument(
        "--processes.max", dest="processes_max", type=_count, default=Config().processes_max, metavar="N",
        help='holdings shown one by one on a device, the rest as pid="other"; 0 for all (default 100)',
    )  # fmt: skip
    serve.add_argument(
        "--owners.max", dest="owners_max", type=_count, default=Config().owners_max, metavar="N",
        help='owners shown one by one on a device, the rest as "other"; 0 for all (default %(default)s)',
    )  # fmt: skip
    _add_sampling(serve, idle=True, collectors=True)
    _add_log(serve)
    serve.set_defaults(run=_serve)

    show = commands.add_parser(
        "show", help="who holds what, since when and why", description="Show the ledger here."
    )
    show.add_argument("--watch", action="store_true", help="show every new sample until interrupted")
    show.add_argument("--json", action="store_true", help="print JSON, a line a sample")
    show.add_argument(
        "--why", type=_pid, default=None, metavar="PID", help="tell the whole evidence for one holder's state"
    )
    _add_source(show)
    _add_sampling(show, idle=True)
    _add_log(show)
    show.set_defaults(run=_show)

    doctor = commands.add_parser(
        "doctor",
        help="what this host can and cannot see",
        description="Say what is unseen and how to mend it.",
    )
    _add_sampling(doctor)
    _add_log(doctor)
    doctor.set_defaults(run=_doctor)

    _add_check(commands)
    _add_end(commands)

    record = commands.add_parser(
        "capture",
        help="a masked recording of this host",
        description="Record what the sampler reads, masked.",
    )
    record.add_argument("output", type=Path, metavar="FILE", help="the recording, e.g. incident.jsonl.gz")
    record.add_argument(
        "--duration",
        dest="seconds",
        type=_duration,
        default=60.0,
        metavar="DURATION",
        help="how long (default 1m)",
    )
    record.add_argument(
        "--no-mask", dest="mask", action="store_false", help="keep UUIDs, users and program names"
    )
    record.add_argument("--note", default="", help="a sentence for the recording's header")
    _add_sampling(record, collectors=True)
    _add_log(record)
    record.set_defaults(run=_capture)
    return top


def _sampling(args: argparse.Namespace) -> SamplingConfig:
    on = frozenset(
        name for name, (default, _) in COLLECTORS.items() if getattr(args, f"collector_{name}", default)
    )
    if not (args.procfs / "stat").is_file():
        message = f"--path.procfs={args.procfs} is no proc file system; mount the host's /proc there"
        raise UsageError(message)
    return SamplingConfig(
        interval=args.interval, timeout=args.timeout, procfs=args.procfs, rootfs=args.rootfs, collectors=on
    )


def _config(args: argparse.Namespace) -> Config:
    return Config(
        listen=tuple(args.listen or (ListenAddress("", DEFAULT_PORT),)),
        telemetry_path=args.telemetry_path,
        max_requests=args.max_requests,
        source=args.source,
        replay_speed=args.replay_speed,
        idle_after=args.idle_after,
        processes_max=args.processes_max,
        owners_max=args.owners_max,
        sampling=_sampling(args),
    )


async def _open(source: str, speed: float, sampling: SamplingConfig) -> tuple[Source, str, str | None]:
    """Return the source, its kind, and the name of the recording if it is one."""
    if source.startswith("replay:"):
        path = Path(source.removeprefix("replay:"))
        return Replay(path, speed), "replay", path.name
    if source == "auto":
        (reading,) = await read_once(sampling)
        if reading.failure is not None and reading.failure[0] in _NO_DRIVER:
            log.warning(
                "NO NVIDIA DRIVER: what follows is a RECORDING of another machine, not this host",
                extra=fields(reason=reading.failure[0], err=reading.failure[1], recording=bundled().name),
            )
            return Replay(bundled(), speed), "replay", bundled().name
    return Supervisor(sampling), "nvml", None


async def _snapshots(source: Source, history: History) -> AsyncIterator[Snapshot]:
    async with aclosing(source.readings()) as readings:  # type: ignore[type-var]
        async for reading in readings:
            if reading is None:
                history = history.afresh()
                continue
            try:
                snapshot = await asyncio.to_thread(history.advance, reading)
            except Exception as error:  # noqa: BLE001 one reading that makes no sense costs one sample
                log.debug("Traceback", exc_info=error)
                if isinstance(source, Replay):
                    reason, remedy = "recording", f"record {source.path} again"
                else:
                    reason, remedy = "internal", "please report this"
                failure = reason, f"a reading makes no sense ({error!r}); {remedy}"
                snapshot = history.advance(Reading(reading.time, reading.monotonic, failure=failure))
            yield snapshot


async def _serve_async(config: Config) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    log.info(
        "Starting vramledger",
        extra=fields(version=__version__, python=sys.version.split()[0], pid=os.getpid()),
    )
    waiting = asyncio.create_task(stop.wait())
    opening = asyncio.create_task(_open(config.source, config.replay_speed, config.sampling))
    await asyncio.wait({opening, waiting}, return_when=asyncio.FIRST_COMPLETED)
    if opening.done():
        await _serve_source(config, *opening.result(), waiting)
    else:
        await _cancelled(opening)
    await _cancelled(waiting)
    log.info("Stopped")


async def _serve_source(
    config: Config, source: Source, kind: str, recording: str | None, stop: asyncio.Task[bool]
) -> None:
    """Serve one source until ``stop`` is done."""
    from vramledger.web.app import serve  # noqa: PLC0415 aiohttp takes 130 ms that the other commands save

    history = History(
        idle_after=_idle_after(config.idle_after, source),
        interval=config.sampling.interval,
        source=kind,
        recording=recording,
        owners_max=config.owners_max,
    )
    board = Board(history.blank, lifetime=patience(config.sampling) if kind == "nvml" else None)

    async def publish() -> None:
        down: tuple[str, str] | None = None
        async with aclosing(_snapshots(source, history)) as snapshots:  # type: ignore[type-var]
            async for snapshot in snapshots:
                board.sampler_pid = source.pid
                await board.publish(snapshot)
                if snapshot.failure is not None and snapshot.failure != down:
                    reason, message = snapshot.failure
                    log.error("No GPU data", extra=fields(reason=reason, err=message))
                elif snapshot.up and down is not None:
                    log.info("GPU data is back", extra=fields(devices=len(snapshot.devices)))
                down = snapshot.failure

    async with serve(config, board):
        publishing = asyncio.create_task(publish())
        await asyncio.wait({publishing, stop}, return_when=asyncio.FIRST_COMPLETED)
        if publishing.done():
            publishing.result()
        await _cancelled(publishing)


async def _cancelled(task: asyncio.Task[_T]) -> None:
    """Cancel a task and wait for its end."""
    task.cancel()
    await asyncio.wait({task})


def _print(text: str) -> None:
    """Write an answer to stdout now, so that a disk that is full is noticed here and not at exit.

    Raises:
        BrokenPipeError: the reader has gone.
        StartupError: it cannot be written.
    """
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        # What is left in the buffer would fail again at exit, which then says 120 and a second message.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        message = f"cannot write to standard output: {error.strerror}; free some space or write elsewhere"
        raise StartupError(message) from error


def _serve(args: argparse.Namespace) -> int:
    asyncio.run(_serve_async(_config(args)))
    return 0


def _show(args: argparse.Namespace) -> int:
    async def run() -> int:
        source, kind, recording = await _open(args.source, args.replay_speed, _sampling(args))
        history = History(
            idle_after=_idle_after(args.idle_after, source),
            interval=args.interval,
            source=kind,
            recording=recording,
        )
        up = False
        terminal = sys.stdout.isatty()
        async with aclosing(_snapshots(source, history)) as snapshots:  # type: ignore[type-var]
            async for snapshot in snapshots:
                up = snapshot.up
                if args.why is not None and up:
                    lines = evidence(snapshot, args.why)
                    # The first sample of a process has no work to compare, and may come before its facts.
                    if snapshot.serial < ALIKE:
                        continue
                    if not lines:
                        print(
                            f"vramledger: pid {args.why} holds no GPU memory that is seen here",
                            file=sys.stderr,
                        )
                        return 1
                    _print("\n".join(lines) + "\n")
                elif args.json:
                    _print(json.dumps(document(snapshot)) + "\n")
                else:
                    clear = "\x1b[H\x1b[2J" if args.watch and terminal else ""
                    _print(clear + table(snapshot, colour=terminal and "NO_COLOR" not in os.environ))
                if not args.watch:
                    break
        return 0 if up else 1

    return asyncio.run(run())


def _check(args: argparse.Namespace) -> int:
    order = CheckOrder(
        gpus=frozenset(args.gpu),
        tolerance=Tolerance(args.leftover, args.live, frozenset(args.owners)),
        wait=args.wait,
        as_json=args.json,
    )
    return asyncio.run(check(_sampling(args), order))


def _end(args: argparse.Namespace) -> int:
    selection = Selection(
        frozenset(args.pids), frozenset(map(State, args.states)), frozenset(args.owners), frozenset(args.gpu)
    )
    if selection == Selection():
        message = "say who is meant by --pid, --state, --owner or --gpu"
        raise UsageError(message)
    order = EndOrder(selection, args.grace, args.idle_after or IDLE_AFTER, args.yes)
    return asyncio.run(end_holders(_sampling(args), order))


def _doctor(args: argparse.Namespace) -> int:
    sampling = _sampling(args)
    (reading,) = asyncio.run(read_once(sampling))
    findings = list(examine(reading, rights(sampling.procfs)))
    _print(report(findings))
    return 0 if all(finding.good for finding in findings) else 1


def _capture(args: argparse.Namespace) -> int:
    supervisor = Supervisor(_sampling(args))
    count = asyncio.run(
        capture(
            supervisor.readings(), args.output, head=header(args.note), seconds=args.seconds, mask=args.mask
        )
    )
    kind = "masked" if args.mask else "NOT masked"
    _print(
        f"{count} readings, {kind}, in {args.output}; "
        f"replay: vramledger serve --source=replay:{args.output}\n"
    )
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal in ASCII gets a question mark, not a traceback
    args = parser().parse_args(argv)
    configure(args.log_level, args.log_format)
    try:
        status: int = args.run(args)
    except VramledgerError as error:
        print(f"vramledger: {error}", file=sys.stderr)
        log.debug("Traceback", exc_info=error)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as with 'show | head'
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    return status
