"""What the tests run in a process of its own."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn


class Odd(Exception):  # noqa: N818 any name will do
    """An error that can be pickled, and not be made again."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)
        self.second = second


def identity(*arguments: Any, **named: Any) -> tuple[int, Any, Any]:  # noqa: ANN401
    """Return the own pid and what came."""
    return os.getpid(), arguments, named


def blob(size: int) -> bytearray:
    return bytearray(b"x") * size


def fail() -> NoReturn:
    """Fail in a line of its own."""
    raise ValueError("on purpose")


def fail_oddly() -> NoReturn:
    raise Odd("first", "second")


def die(number: int) -> None:
    os.kill(os.getpid(), number)


def leave(status: int) -> NoReturn:
    sys.exit(status)


def vanish(status: int) -> NoReturn:
    os._exit(status)


def unpicklable() -> object:
    """Return what cannot be carried."""
    return lambda: 1


def variable(name: str) -> str | None:
    return os.environ.get(name)


def hang(file: str) -> None:
    Path(file).write_text(str(os.getpid()), encoding="ascii")
    time.sleep(600)


class Array:
    """An array of any framework: it says where it is by DLPack's protocol."""

    def __init__(self, kind: int) -> None:
        self.kind = kind

    def __dlpack_device__(self) -> tuple[int, int]:
        if not self.kind:
            raise ValueError("it has no place")
        return self.kind, 0


def leave_a_child() -> int:
    """Start a process in a session of its own, and return its pid while it runs."""
    return subprocess.Popen(["sleep", "600"], start_new_session=True).pid


def hang_with_children(file: str) -> None:
    """Start processes, of which one has left the session and one its parent; write their pids, and hang."""
    pids = [os.getpid()]
    for leaves in (False, True):
        read, write = os.pipe()
        if os.fork() == 0:
            if leaves:
                os.setsid()
            elif os.fork() != 0:
                os._exit(0)
            os.write(write, b"%d" % os.getpid())
            time.sleep(600)
        pids.append(int(os.read(read, 20)))
    Path(file).write_text(" ".join(map(str, pids)), encoding="ascii")
    time.sleep(600)


def call_isolated(number: int) -> int:
    """Call another isolated function, as the task of a daemonic worker does."""
    from vramledger_agent import isolated  # noqa: PLC0415 the parent may not have it

    pid, (given,), _ = isolated(identity, number)
    assert pid != os.getpid()
    return int(given)
