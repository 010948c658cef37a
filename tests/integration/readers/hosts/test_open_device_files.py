"""The device files that our own processes have open."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from vramledger.readers.hosts.open_device_files import read_open_device_files

HOLD = "import sys; held = open(sys.argv[1]); print('open', flush=True); sys.stdin.read()"
CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HOLD!r}, sys.argv[1]])"


def test_what_descendants_have_open_is_found(tmp_path: Path) -> None:
    """A file that a grandchild or this process has open is found with its pid, until it is closed."""
    device = tmp_path / "nvidia0"
    device.touch()
    prefix = str(tmp_path / "nvidia")
    assert read_open_device_files(prefix) == {}
    with device.open():
        assert read_open_device_files(prefix) == {os.getpid(): [str(device)]}
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(device)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline() == b"open\n"
        (found,) = read_open_device_files(prefix).items()
        assert found[0] not in (os.getpid(), child.pid)
        assert found[1] == [str(device)]
        child.stdin.close()
    assert read_open_device_files(prefix) == {}
