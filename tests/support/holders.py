"""Real processes that a stand-in lists as holders, and the command that is tested on them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.requirements import do_without
from tests.support.standin.library import GIB, StandIn

ROOT = Path(__file__).parents[2]
INITIAL_PID_NAMESPACE = "pid:[4026531836]"

STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
MEEK = "import signal; print(flush=True); signal.pause()"


def require_host_pid_namespace() -> None:
    """Go on only where the commands see the host's processes."""
    if str(Path("/proc/self/ns/pid").readlink()) != INITIAL_PID_NAMESPACE:
        do_without("needs the host's PID namespace")


@contextmanager
def process(program: str = MEEK) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program until the end of the context; it has printed a line when the context begins."""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        try:
            running.stdout.readline()
            yield running
        finally:
            running.kill()


@contextmanager
def listed_while_alive(standin: StandIn, *running: subprocess.Popen[bytes]) -> Iterator[None]:
    """List processes with 1 GiB each, and each until it has ended, as a driver does."""
    alive = [each.pid for each in running]
    lock = threading.Lock()

    def follow(each: subprocess.Popen[bytes]) -> None:
        each.wait()
        with lock:
            alive.remove(each.pid)
            standin.device(0).set_processes([(pid, GIB) for pid in alive])

    standin.device(0).set_processes([(pid, GIB) for pid in alive])
    followers = [threading.Thread(target=follow, args=(each,)) for each in running]
    for follower in followers:
        follower.start()
    try:
        yield
    finally:
        for each in running:
            each.kill()
        for follower in followers:
            follower.join()


def vramledger(standin: StandIn, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command on the stand-in."""
    path = os.pathsep.join([str(ROOT / "exporter"), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-m", "vramledger", *arguments],
        env={**os.environ, **standin.env(), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
