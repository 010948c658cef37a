"""The program of every process that a test needs: ``python -I -S player.py SOCKET ROLE [STEPS]``.

It does its steps, connects to the stage, and then what it is ordered, until the stage is gone. A step and an
order are the same: a function below and its arguments, in JSON. What few need is imported there: a start
takes 15 ms, with the standard library alone.
"""

import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

LONGEST = 2**17
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
SYS_EXIT = {"x86_64": 60, "aarch64": 93}
"""Number of the system call that ends a thread; exit_group would end the process."""

Stage = socket.socket
"""The connection to the stage."""


def play(path: str, role: str, steps: Sequence[Sequence[Any]] = ()) -> None:
    """Do the steps, tell the stage who is there, and obey; the kernel tells the stage the pid."""
    stage = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _DRIVER.append(_listen_as_driver())
    for verb, *arguments in steps:
        VERBS[verb](stage, *arguments)
    stage.connect(path)
    stage.send(role.encode())
    obey(stage)


def obey(stage: Stage) -> None:
    """Do what is ordered and answer each order; end with the stage."""
    with suppress(ConnectionError):
        while order := stage.recv(LONGEST):
            verb, *arguments = json.loads(order)
            try:
                answer = {"answer": VERBS[verb](stage, *arguments)}
            except Exception as error:  # noqa: BLE001 the one who gave the order raises it
                answer = {"error": f"{type(error).__name__}: {error}"}
            stage.send(json.dumps(answer).encode())
    os._exit(0)


_DRIVER: list[socket.socket] = []


def _listen_as_driver() -> socket.socket:
    """Listen as libcuda does in every program that uses CUDA, seen on an H100."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    namespace = os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116 /proc's links lead to no path
    with suppress(OSError):  # a player in a sandbox, or one that has its parent's
        listener.bind(f"\0cuda-uvmfd-{namespace}-{os.getpid()}@")
        listener.listen()
    return listener


def _libc() -> Any:  # noqa: ANN401 ctypes has no types for it
    import ctypes  # noqa: PLC0415

    return ctypes.CDLL(None)


# --- who it is ----------------------------------------------------------------------------------------


def lead_session(_: Stage) -> None:
    """Lead a session of its own, as the main program of a container does (runc sees to it)."""
    if os.getsid(0) != os.getpid():
        os.setsid()


def lead_group(_: Stage) -> None:
    """Lead a process group of its own, as a program that was started at a prompt does."""
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)


def join_group(_: Stage, leader: int) -> None:
    """Join a process group of the same session."""
    os.setpgid(0, leader)


def be_user(_: Stage, uid: int) -> None:
    """Go on as another user; the interpreter may be where only root looks, so it does this itself.

    The kernel lets others see less of who did so, until it executes a program or says that it does not mind.
    """
    libc = _libc()
    os.setuid(uid)
    libc.prctl(PR_SET_DUMPABLE, 1)


def has_terminal(_: Stage) -> bool:
    """Tell whether it has a controlling terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def ignore(_: Stage, name: str) -> None:
    signal.signal(getattr(signal, name), signal.SIG_IGN)


def adopt(_: Stage) -> None:
    """Become a subreaper: adopt the descendants that lose their parents."""
    _libc().prctl(PR_SET_CHILD_SUBREAPER, 1)


def reap(_: Stage) -> None:
    """Wait for every child that ends, as an init does; nobody else does it unless told."""

    def wait(*_: object) -> None:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    signal.signal(signal.SIGCHLD, wait)
    wait()


# --- children -----------------------------------------------------------------------------------------


def start(_: Stage, command: Sequence[str], env: dict[str, str], session: bool = False) -> None:
    """Start a program, in a session of its own where asked to, and do not wait for it."""
    import subprocess  # noqa: PLC0415

    subprocess.Popen(command, env={**os.environ, **env}, start_new_session=session)


def fork(stage: Stage, path: str, role: str) -> None:
    if os.fork() == 0:
        stage.close()
        play(path, role)


def fork_workers(_: Stage, path: str, role: str, method: str, count: int) -> None:
    """Start workers by ``multiprocessing``: ``fork``, ``spawn`` or ``forkserver``."""
    import multiprocessing  # noqa: PLC0415

    context: Any = multiprocessing.get_context(method)
    for _number in range(count):
        context.Process(target=play, args=(path, role)).start()


def fork_sleepers(_: Stage, count: int, files: int, library: str) -> list[int]:
    """Fork many children, each with so many open files, as a small daemon has, and killed when we are.

    Each maps a library, if one is given. They are not players, because a Python each would take 8 MiB.
    """
    libc = _libc()
    null = os.open(os.devnull, os.O_RDWR)
    pids = []
    for _number in range(count):
        pid = os.fork()
        if pid == 0:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            for number in range(files):
                os.dup2(null, number)
            env = {**os.environ, **({"LD_PRELOAD": library} if library else {})}
            os.execvpe("sleep", ["sleep", "86400"], env)  # noqa: S606 a shell would be a process more
        pids.append(pid)
    return pids


# --- files and sockets --------------------------------------------------------------------------------

KEPT: list[Any] = []
"""What is open, or mapped, until the end."""


def open_file(_: Stage, path: str) -> None:
    KEPT.append(open(path, "rb"))  # noqa: PTH123, SIM115 it stays open


def map_file(_: Stage, path: str) -> None:
    """Map a file, a library's for example, and close it."""
    import mmap  # noqa: PLC0415

    with open(path, "rb") as file:  # noqa: PTH123
        KEPT.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


AGENT: list[socket.socket] = []
"""The connection of an agent to its exporter."""


def connect(_: Stage, path: str) -> None:
    """Connect to an exporter as an agent does, in place of an earlier connection."""
    while AGENT:
        AGENT.pop().close()
    AGENT.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    AGENT[0].connect(path)


def say(_: Stage, *messages: object) -> None:
    """Send messages as an agent."""
    for message in messages:
        AGENT[0].send(json.dumps(message).encode())


def crowd(_: Stage, path: str, count: int) -> None:
    """Connect so many times more, and say nothing."""
    for _number in range(count):
        KEPT.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        KEPT[-1].connect(path)


def flood(_: Stage, path: str, count: int, text: str) -> None:
    """Send a text over so many connections as fast as they are read, on a thread, until the end."""
    import _thread  # noqa: PLC0415 built in: another user may not read the library
    import time  # noqa: PLC0415

    def send() -> None:
        connections: list[socket.socket] = []
        while True:
            while len(connections) < count:
                connections.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                connections[-1].connect(path)
                connections[-1].setblocking(False)
            for each in connections:
                try:
                    each.send(text.encode())
                except BlockingIOError:
                    continue
                except OSError:
                    each.close()
            connections = [each for each in connections if each.fileno() >= 0]
            time.sleep(0.01)

    _thread.start_new_thread(send, ())


def ask(_: Stage, path: str, message: object) -> object:
    """Ask an exporter on a connection of its own; return the answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(path)
        connection.send(json.dumps(message).encode())
        return json.loads(connection.recv(LONGEST))


def ask_whole(_: Stage, path: str, message: object) -> dict[str, object]:
    """Ask an exporter; return all messages of the answer, and whether a descriptor came with them."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(path)
        connection.send(json.dumps(message).encode())
        messages: list[str] = []
        passed = False
        while True:
            data, ancillary, _flags, _address = connection.recvmsg(LONGEST, socket.CMSG_SPACE(16))
            passed = passed or bool(ancillary)
            if not data:
                return {"messages": messages, "passed": passed}
            messages.append(data.decode())


def serve(_: Stage, host: str = "127.0.0.1") -> int:
    """Accept connections by TCP, as the store of a launcher does; return the port."""
    import _thread  # noqa: PLC0415 built in: another user may not read the library

    door = socket.create_server((host, 0))

    def accept() -> None:
        while True:
            KEPT.append(door.accept()[0])
            KEPT[-1].send(b"!")

    _thread.start_new_thread(accept, ())
    KEPT.append(door)
    return int(door.getsockname()[1])


def call(_: Stage, port: int, host: str = "127.0.0.1") -> None:
    """Connect by TCP, as a rank does to the store of its launcher."""
    KEPT.append(socket.create_connection((host, port)))
    KEPT[-1].recv(1)


def send(_: Stage) -> None:
    """Send on the first connection that nobody reads."""
    next(each for each in KEPT if isinstance(each, socket.socket) and each.type == socket.SOCK_STREAM).send(
        b"!"
    )


def listen(_: Stage, port: int) -> None:
    """Listen at a port for whoever comes."""
    KEPT.append(socket.create_server(("127.0.0.1", port)))


def listen_for_datagrams(_: Stage) -> int:
    """Take datagrams of UDP from whoever comes, at a port that somebody has chosen; return it."""
    for port in range(20_000, 30_000):
        door = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with suppress(OSError):
            door.bind(("127.0.0.1", port))
            KEPT.append(door)
            return port
    raise OSError("no port is free")


def call_by_datagrams(_: Stage, port: int) -> None:
    """Connect by UDP."""
    KEPT.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    KEPT[-1].connect(("127.0.0.1", port))


def half_close(_: Stage) -> None:
    """Say on the last connection that nothing more is sent."""
    KEPT[-1].shutdown(socket.SHUT_WR)


def make_socket(_: Stage, family: str = "AF_INET") -> None:
    KEPT.append(socket.socket(getattr(socket, family), socket.SOCK_STREAM))


def start_with_pipe(
    _: Stage, command: Sequence[str], env: dict[str, str], session: bool = False, socketpair: bool = False
) -> None:
    """Start a program with a pipe or a socket that it keeps, and by which we can tell it something.

    A variable of MPICH says which socket it is.
    """
    import subprocess  # noqa: PLC0415

    if socketpair:
        ours, theirs = (each.detach() for each in socket.socketpair())
    else:
        theirs, ours = os.pipe()
    env = {**env, **({"PMI_FD": str(theirs)} if socketpair else {})}
    subprocess.Popen(command, env={**os.environ, **env}, start_new_session=session, pass_fds=[theirs])
    os.close(theirs)
    KEPT.append(ours)


# --- the end ------------------------------------------------------------------------------------------


def end_main_thread(stage: Stage) -> None:
    """End the main thread only, as a crashed CUDA program does whose other threads are stuck."""
    import platform  # noqa: PLC0415
    import threading  # noqa: PLC0415

    threading.Thread(target=obey, args=(stage,)).start()
    stage.send(b'{"answer": null}')
    _libc().syscall(SYS_EXIT[platform.machine()], 0)


VERBS: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (
        *(lead_session, lead_group, join_group, be_user, ignore, has_terminal, adopt, reap),
        *(start, start_with_pipe, fork, fork_workers, fork_sleepers, serve, call, listen, send),
        *(listen_for_datagrams, call_by_datagrams, half_close, make_socket),
        *(open_file, map_file, connect, say, crowd, flood, ask, ask_whole),
        end_main_thread,
    )
}

if __name__ == "__main__":
    play(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]) if len(sys.argv) > 3 else ())
