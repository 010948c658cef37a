"""What a user does to an exporter: ``python3 stranger.py WHAT ARGUMENT...``, with nothing of ours, for ever.

A line of output says that it has begun. :func:`strange` starts one as another user.
"""

import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

USER = 60_000
_NAMESPACES = 0x10020000
_libc = ctypes.CDLL(None)


def threads(count: str, *paths: str) -> None:
    """Have so many threads, and connect to sockets again and again."""
    thread, attributes = ctypes.c_ulong(), ctypes.create_string_buffer(64)
    _libc.pthread_attr_init(attributes)
    _libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(16384))
    pause = ctypes.cast(_libc.pause, ctypes.c_void_p)
    for _ in range(int(count)):
        _libc.pthread_create(ctypes.byref(thread), attributes, pause, None)
    connect(*paths)


def mounts(count: str, *paths: str) -> None:
    """Have so many mounts at a long path, in namespaces of its own, and connect to sockets."""
    user = os.getuid()
    if _libc.unshare(_NAMESPACES):
        raise OSError
    own = f"{user} {user} 1"
    for name, text in (("setgroups", "deny"), ("uid_map", own), ("gid_map", own)):
        Path("/proc/self", name).write_text(text, encoding="ascii")
    _libc.mount(b"none", b"/tmp", b"tmpfs", 0, None)
    place = "/tmp/" + "/".join(["x" * 200] * 18)  # noqa: S108
    os.makedirs(place)  # noqa: PTH103
    for _ in range(int(count)):
        if _libc.mount(b"none", place.encode(), b"tmpfs", 0, None):
            raise OSError
    connect(*paths)


def connect(*paths: str) -> None:
    """Connect again and again, and say nothing."""
    print(flush=True)
    while True:
        for path in paths or [""]:
            for kind in (socket.SOCK_SEQPACKET, socket.SOCK_STREAM) if path else ():
                with socket.socket(socket.AF_UNIX, kind) as connection:
                    try:
                        connection.settimeout(1.0)
                        connection.connect(path)
                    except OSError:
                        pass
        time.sleep(0.004 if paths else 1.0)


def ask(path: str, request: str) -> None:
    """Send a request to the control socket again and again, and wait for its answer."""
    print(flush=True)
    while True:
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.settimeout(30.0)
                connection.connect(path)
                connection.sendall(f"{request} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
                while connection.recv(1 << 16):
                    pass
            except OSError:
                pass
        time.sleep(0.02)


def reports(path: str, text: str) -> None:
    """Send a report again and again."""
    print(flush=True)
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            try:
                connection.connect(path)
                while True:
                    connection.send(text.encode())
            except OSError:
                time.sleep(0.02)


def rename(turns: str = "0") -> None:
    """Change its name all the time, and execute itself again with a large environment."""
    if turns == "0":
        print(flush=True)
    end = time.monotonic() + 0.05
    while time.monotonic() < end:
        for name in (b"a\n\x1b[2J", b"</td><b>", b'"} 1\n'):
            _libc.prctl(15, name, 0, 0, 0)
    large = {f"X{number}": "x" * 100_000 for number in range(15)}
    os.execve(sys.executable, [sys.executable, __file__, "rename", "1"], large)  # noqa: S606


def descriptors(count: str) -> None:
    """Have so many files and sockets open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    kept = []
    for number in range(min(int(count), hard - 100) // 2):
        kept.append(os.open(os.devnull, os.O_RDONLY))
        kept.append(socket.socket(socket.AF_UNIX).detach() if number % 2 else os.dup(kept[0]))
    print(flush=True)
    signal.pause()


@contextmanager
def strange(
    what: str, *arguments: str, user: int = USER, within: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    with TemporaryDirectory(prefix="stranger-", dir="/run") as name:
        Path(name).chmod(0o755)
        script = Path(name, "stranger.py")
        script.write_text(Path(__file__).read_text("utf-8"), encoding="utf-8")
        command = [*within, "/usr/bin/python3", str(script), what, *arguments]
        with subprocess.Popen(
            command, user=user, group=user, extra_groups=[], stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "\n"
                yield process
            finally:
                process.kill()


@contextmanager
def as_user(user: int) -> Iterator[None]:
    """Act as a user, and as root again afterwards."""
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def listening_as(user: int, path: Path, kind: socket.SocketKind) -> Iterator[socket.socket]:
    """Listen at a path: for the kernel the socket is of the user who begins to listen."""
    with socket.socket(socket.AF_UNIX, kind) as listening:
        listening.bind(str(path))
        with as_user(user):
            listening.listen()
        yield listening


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
