"""The process that starts samplers, by itself."""

from __future__ import annotations

import socket
import subprocess
import sys

from tests.support.requirements import require_root
from vramledger.sampling.protocol import starter_command

NO_AMBIENT = """
import ctypes, os, sys
if ctypes.CDLL(None).prctl(28, 1 << 6, 0, 0, 0) != 0:  # PR_SET_SECUREBITS, SECBIT_NO_CAP_AMBIENT_RAISE
    sys.exit("the bit cannot be set")
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_it_says_what_it_could_not_give_up_or_pass_on() -> None:
    """Where the kernel refuses a step, the starter says so in its exporter's format, and goes on."""
    require_root()
    exporter, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with exporter, other:
        starter = subprocess.Popen(
            [sys.executable, "-c", NO_AMBIENT, *starter_command("{}", "info", "json")],
            stdin=other.fileno(), stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        other.close()
        exporter.send(b"kill")  # there is no sampler to kill, so nothing happens
        exporter.close()  # it ends with the exporter
        _, errors = starter.communicate(timeout=30)

    assert starter.returncode == 0
    assert '"level": "warn"' in errors
    assert errors.count("Could not give up all privileges") == errors.count("prctl: Operation not permitted")
    assert "prctl: Operation not permitted" in errors
