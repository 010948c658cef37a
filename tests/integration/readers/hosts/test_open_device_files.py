"""The device files that our own processes have open."""

import os
from pathlib import Path

from tests.support.players.stage import Stage
from vramledger.readers.hosts.driver_watch import read_open_device_files


def test_what_descendants_have_open_is_found(tmp_path: Path, stage: Stage) -> None:
    """A file that a grandchild or this process has open is found with its pid, until it is closed."""
    device = tmp_path / "nvidia0"
    device.touch()
    prefix = str(tmp_path / "nvidia")
    assert read_open_device_files(prefix) == {}
    with device.open():
        assert read_open_device_files(prefix) == {os.getpid(): [str(device)]}
    child = stage.start().start(("open_file", str(device)))
    assert read_open_device_files(prefix) == {child.pid: [str(device)]}
    child.end()
    assert read_open_device_files(prefix) == {}
