"""The programs that play in the scenarios: ``python actors.py SOCKET ROLE [ARGUMENT]``.

Each tells who it is by a datagram to SOCKET; the kernel adds its pid, translated into the receiver's PID
namespace. Standard library only, and no import of ours: these are other people's programs.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

PR_SET_CHILD_SUBREAPER = 36
SYS_EXIT = {"x86_64": 60, "aarch64": 93}
PROGRAM = os.path.realpath(sys.executable)


def report(path: str, name: str) -> None:
    """Tell the test that this process plays ``name``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.sendto(name.encode(), path)


def hold(path: str, _: str = "") -> None:
    """Play the process that holds GPU memory: exist until killed."""
    report(path, "holder")
    while True:
        signal.pause()


def start(path: str, role: str, argument: str = "", **options: object) -> None:
    """Start another actor and do not wait for it."""
    command = [PROGRAM, "-I", __file__, path, role, argument]
    subprocess.Popen(command, **options)  # type: ignore[call-overload]


def lead() -> None:
    """Lead a session, as the main program of a container does (runc sees to it)."""
    if os.getsid(0) != os.getpid():
        os.setsid()


def wait() -> None:
    """Live on as a parent, until killed."""
    while True:
        signal.pause()


def brief(path: str, _: str) -> None:
    """Play a holder that ends at once."""
    report(path, "holder")


def start_worker(path: str, kind: str, number: int) -> None:
    """Start a worker as the launcher of this kind does."""
    rank = {**os.environ, "LOCAL_RANK": str(number), "TORCHELASTIC_RUN_ID": "none"}
    holder = [PROGRAM, "-I", __file__, path, "holder"]
    if kind == "torchrun":
        subprocess.Popen(holder, env=rank, start_new_session=True)
    elif kind == "shells":
        subprocess.Popen(["sh", "-c", '"$@"; true', "sh", *holder], env=rank, start_new_session=True)
    elif kind == "jupyter":
        kernel = {**os.environ, "JPY_PARENT_PID": str(os.getpid())}
        command = [*holder, "-f", f"/run/kernel-{number}.json"]
        subprocess.Popen(command, env=kernel, start_new_session=True)
    else:
        subprocess.Popen(holder)


def parent(path: str, kind: str) -> None:
    """Play a program with two workers, started from a shell's prompt: it leads its process group."""
    if os.getsid(0) != os.getpid():
        os.setpgid(0, 0)
    report(path, "launcher")
    if kind in ("spawn", "fork", "forkserver"):
        context = multiprocessing.get_context(kind)
        workers = [context.Process(target=hold, args=(path,)) for _ in range(2)]  # type: ignore[attr-defined]
        for worker in workers:
            worker.start()
    else:
        for number in range(2):
            start_worker(path, kind, number)
    wait()


def daemon(path: str, _: str) -> None:
    """Become a daemon in the classic way: fork, own session, fork, no terminal."""
    if os.fork():
        os.wait()
        return
    os.setsid()
    report(path, "launcher")
    if os.fork():
        return
    os.chdir("/")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    hold(path)


def ready_daemon(path: str, _: str) -> None:
    """Start a daemon and stay until it is ready, as service managers ask of ``Type=forking``."""
    report(path, "launcher")
    if os.fork():
        sys.stdin.readline()
        return
    os.setsid()
    hold(path)


def manager(path: str, _: str) -> None:
    """Play a service manager with one service."""
    report(path, "launcher")
    start(path, "service", start_new_session=True)
    wait()


def service(path: str, _: str) -> None:
    """Play a service's main process, with the environment that systemd gives it."""
    os.environ["SYSTEMD_EXEC_PID"] = str(os.getpid())
    os.execv(PROGRAM, [PROGRAM, "-I", __file__, path, "holder"])  # noqa: S606


def shim(path: str, _: str) -> None:
    """Play a container's shim: it starts the container's program, whose variables are not its own."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    report(path, "launcher")
    start_worker(path, "torchrun", 0)
    wait()


def subreaper(path: str, kind: str) -> None:
    """Adopt orphaned descendants; start a holder, or a parent (``kind``) that starts some."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    init(path, kind)


def init(path: str, kind: str) -> None:
    """Play pid 1 of a container, or another reaper: start one program and reap what comes."""
    lead()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    report(path, "reaper")
    if kind:
        start(path, "parent", kind)
    else:
        start(path, "holder")
    wait()


def holding_init(path: str, _: str) -> None:
    """Play the main program of a container, which holds GPU memory itself and has a worker that does."""
    lead()
    report(path, "holder")
    start(path, "holder")
    wait()


def zombie_leader(path: str, _: str) -> None:
    """End the main thread only, as a crashed CUDA program does whose other threads are stuck."""
    threading.Thread(target=time.sleep, args=(3600,)).start()
    report(path, "holder")
    ctypes.CDLL(None).syscall(SYS_EXIT[platform.machine()], 0)


def negligent(path: str, _: str) -> None:
    """Never wait for a child that has ended."""
    report(path, "launcher")
    start(path, "brief")
    wait()


ROLES: dict[str, Callable[[str, str], None]] = {
    "brief": brief,
    "daemon": daemon,
    "holder": hold,
    "holding-init": holding_init,
    "init": init,
    "manager": manager,
    "negligent": negligent,
    "parent": parent,
    "ready-daemon": ready_daemon,
    "service": service,
    "shim": shim,
    "subreaper": subreaper,
    "zombie-leader": zombie_leader,
}


if __name__ == "__main__":
    ROLES[sys.argv[2]](sys.argv[1], sys.argv[3] if len(sys.argv) > 3 else "")
