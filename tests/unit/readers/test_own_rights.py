"""What our own process may see, from a status and a mount table."""

import subprocess
import sys
from pathlib import Path

import pytest

from vramledger.readers.hosts.own_process import read_own_rights

MOUNT = "proc {} proc rw,nosuid,hidepid={} 0 0\n"


@pytest.mark.parametrize(
    ("option", "expected"), [("2", True), ("invisible", True), ("0", False), ("off", False)]
)
@pytest.mark.parametrize("name", ["proc", "host proc", "pröc", "tab\there", "back\\slash"])
def test_hidepid_of_a_proc_anywhere(tmp_path: Path, name: str, option: str, expected: bool) -> None:
    """The mount table's escapes and any characters in the path do not hide the option."""
    place = tmp_path / name
    (place / "self").mkdir(parents=True)
    written = str(place).replace("\\", "\\134").replace(" ", "\\040").replace("\t", "\\011")
    (place / "self/mounts").write_text(MOUNT.format(written, option), encoding="utf-8")
    (place / "self/status").write_text("CapEff:\t0000000000080000\n", encoding="ascii")
    found = read_own_rights(place)
    assert (found.hidepid, found.capabilities) == (expected, frozenset({"sys_ptrace"}))


def test_the_locale_decides_nothing(tmp_path: Path) -> None:
    """In the C locale, as in a minimal container, a path with other letters is still the same path."""
    place = tmp_path / "pröc"
    (place / "self").mkdir(parents=True)
    (place / "self/mounts").write_text(MOUNT.format(place, 2), encoding="utf-8")
    code = """
import sys
from pathlib import Path
from vramledger.readers.hosts.own_process import read_own_rights
print(read_own_rights(Path(sys.argv[1])).hidepid)
"""
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", code, str(place)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    assert done.stdout == "True\n"
