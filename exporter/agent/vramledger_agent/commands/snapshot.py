"""Run ``vramledger-agent snapshot``: say where a program's GPU memory was allocated, and which lines grew."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from vramledger_agent.client import request_agent
from vramledger_agent.commands.parser import (
    Commands,
    add_agent_socket,
    add_log,
    count,
    duration,
    pid,
    write_output,
)
from vramledger_agent.errors import SnapshotError, StartupError, UsageError
from vramledger_agent.private_files import create_private, remove_private
from vramledger_agent.torch_snapshots.html import snapshot_html
from vramledger_agent.torch_snapshots.safe_pickle import limit_reading, load_plain, unpacked_size
from vramledger_agent.torch_snapshots.sites import compare_snapshots
from vramledger_agent.torch_snapshots.snapshot import AllocationSnapshot, parse_snapshot
from vramledger_agent.torch_snapshots.text import difference_text, size_text, snapshot_text, training_text

_HELP = "show where a program's GPU memory was allocated"
_FORMS = """\
forms:
  %(prog)s PID            record in a running program, write a file
  %(prog)s show FILE      live bytes by the line that allocated them
  %(prog)s diff A B       which lines hold more in B than in A
"""


MAX_BYTES = 4 * 2**30
"""The largest file that is kept of what an agent writes."""

_ORIGINS = {
    "program": "the program's own history",
    "start": "the newest events of the recording that began with the program",
}


def add_command(commands: Commands) -> None:
    snapshot = commands.add_parser(
        "snapshot", help=_HELP, epilog=_FORMS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    snapshot.description = (
        "Show where a program's GPU memory was allocated. The program must run with "
        f"'{snapshot.prog.split()[0]} run --allow-snapshot'. You must be its user, or root. The files have "
        "PyTorch's own format."
    )
    snapshot.add_argument("what", nargs="+", metavar="PID|show FILE|diff A B", help="see below")
    record = snapshot.add_argument_group("recording")
    record.add_argument(
        "--for", dest="seconds", type=duration, default=10.0, metavar="DURATION",
        help="how long to record (default 10s); with --step, how long to wait for a step",
    )  # fmt: skip
    record.add_argument("--step", action="store_true", help="record exactly one training step")
    record.add_argument(
        "--cycles", action="store_true",
        help="record one training step, then run Python's collector and say which lines made the reference "
        "cycles that kept GPU memory",
    )  # fmt: skip
    record.add_argument(
        "--events", type=count, default=10_000, metavar="N",
        help="keep the newest N events (default %(default)s); the program stops while they are written",
    )  # fmt: skip
    record.add_argument("--output", type=Path, metavar="FILE", help="default snapshot-PID-TIME.pickle")
    add_agent_socket(snapshot)
    show = snapshot.add_argument_group("show and diff")
    show.add_argument(
        "--html", type=Path, metavar="FILE", help="show: write an HTML page with a chart of memory over time"
    )
    show.add_argument(
        "--top", type=count, default=20, metavar="N", help="how many lines of a program to show (default 20)"
    )
    add_log(snapshot)
    snapshot.set_defaults(run=run, prog=snapshot.prog)


def run(args: argparse.Namespace) -> int:
    match args.what:
        case ["show", file]:
            return _in_a_child([Path(file)], lambda: _show(args, Path(file)))
        case ["diff", first, second]:
            return _in_a_child([Path(first), Path(second)], lambda: _diff(args, Path(first), Path(second)))
        case [number]:
            return _record(args, _pid(number, args.prog))
    words = " ".join(args.what)
    raise UsageError(f"'{args.prog} {words}' is not a form of this command; see '{args.prog} --help'")


def _pid(text: str, prog: str) -> int:
    try:
        return pid(text)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{error}; see '{prog} --help'") from error


def _read(path: Path) -> AllocationSnapshot:
    data = load_plain(path)
    try:
        return parse_snapshot(data)
    except SnapshotError as error:
        raise SnapshotError(f"{path}: {error}") from error


def _in_a_child(paths: Sequence[Path], work: Callable[[], int]) -> int:
    """Read files of strangers in a child process with little memory and time; return the exit status.

    A small file can refer to a list so often that it needs gigabytes, and nest values so deeply that the
    interpreter crashes. Raises SnapshotError if the child has crashed, or needs more memory or time than such
    files can need.
    """
    sys.stdout.flush()
    child = os.fork()
    if child:
        try:
            ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        except BaseException:  # in C no interrupt ends it
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise
        if ended >= 0:
            return ended
        raise SnapshotError(
            f"{paths[0]} cannot be read: it is broken or hostile ({signal.Signals(-ended).name})"
        )
    with contextlib.suppress(OSError):  # load_plain says why the file cannot be read
        limit_reading(sum(unpacked_size(path) for path in paths))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        return work()
    except MemoryError as error:
        raise SnapshotError(
            f"{paths[0]} needs more memory than a snapshot of its size can need; it is broken or hostile"
        ) from error


def _diff(args: argparse.Namespace, first: Path, second: Path) -> int:
    write_output(difference_text(compare_snapshots(_read(first), _read(second)), top=args.top))
    return 0


def _show(args: argparse.Namespace, path: Path) -> int:
    snapshot = _read(path)
    if args.html is None:
        write_output(snapshot_text(snapshot, top=args.top))
        if snapshot.training is not None:
            write_output(training_text(snapshot.training, top=args.top))
        return 0
    with _create_file(args.html, exclusive=False) as file:
        os.write(file, b"")  # so that a file that cannot be written is reported before the work
        content = memoryview(
            snapshot_html(snapshot, path.name, top=max(args.top, 1)).encode("utf-8", "replace")
        )
        while content:
            content = content[os.write(file, content) :]
    write_output(f"{args.html}: open it in a browser; it needs nothing else\n")
    return 0


def _record(args: argparse.Namespace, number: int) -> int:
    path = args.output or Path(time.strftime(f"snapshot-{number}-%Y%m%dT%H%M%S.pickle"))
    arguments: dict[str, object] = {"seconds": args.seconds, "events": args.events, "step": args.step}
    if args.cycles:
        arguments["cycles"] = True
    with _create_file(path, exclusive=True) as file, _memory_file() as written:
        try:
            answer = request_agent(args.agent_socket, number, "snapshot", arguments, written)
            size = _copy_sealed(written, file)
        except BaseException:
            with contextlib.suppress(OSError):
                remove_private(path, file)
            raise
    origin = _ORIGINS.get(str(answer.get("history")), "the newest events")
    events = answer.get("events")
    counted = f"{events} events" if isinstance(events, int) and 0 <= events < 2**60 else "events"
    write_output(f"{path}: {size_text(size)}, {counted} ({origin}); read it with: {args.prog} show {path}\n")
    return 0


@contextlib.contextmanager
def _memory_file() -> Iterator[int]:
    """Make a file in memory for the agent to write: it may keep its descriptor for as long as it likes."""
    file = os.memfd_create("vramledger-snapshot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        yield file
    finally:
        os.close(file)


def _copy_sealed(source: int, target: int) -> int:
    """Copy what the agent has written; return the size.

    Raises SnapshotError if it still writes, or OSError.
    """
    try:
        fcntl.fcntl(source, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)
    except OSError as error:
        raise SnapshotError(
            f"the program still writes the snapshot ({error.strerror}); nothing was kept"
        ) from error
    status = os.fstat(source)
    size = status.st_size
    # Holes cost a hostile program nothing, and us their size.
    if size > min(MAX_BYTES, status.st_blocks * 512):
        raise SnapshotError(
            f"the program wrote {size_text(size)}, more than a snapshot has, or with holes; nothing was kept"
        )
    at = 0
    while at < size:
        at += os.sendfile(target, source, at, size - at)
    return size


@contextlib.contextmanager
def _create_file(path: Path, *, exclusive: bool) -> Iterator[int]:
    """Open a file that only its owner may read: a snapshot holds a program's paths and names."""
    try:
        file = create_private(path, exclusive=exclusive)
    except FileExistsError as error:
        raise StartupError(f"{path} already exists; name another with --output") from error
    except OSError as error:
        raise StartupError(f"cannot write {path}: {error.strerror}") from error
    try:
        yield file
    except OSError as error:
        raise StartupError(f"cannot write {path}: {error.strerror}") from error
    finally:
        os.close(file)
