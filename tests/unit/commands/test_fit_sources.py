"""What ``vramledger fit`` reads from files."""

from __future__ import annotations

from pathlib import Path

import pytest

from vramledger.commands.fit_input import DeviceUse, LedgerSample, Program
from vramledger.commands.fit_sources import choose_program, read_file
from vramledger.errors import RecordingError, StartupError


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\n", b"nonsense", b"[" * 100_000, b"{}", b"[]", b"7", b"\x1f\x8b\x00", b"\x00" * 100,
        b'{"format": "vramledger-recording", "version": 1}\n{}',
        b'{"version": 2, "devices": [{"holdings": [{"pid": "7"}]}]}',
        b'{"version": 2, "devices": []}',
        b'{"requested": 1, "pool": []}', b'{"requested": 1, "pool": {}, "framework": ["torch"]}',
        b'{"requested": 1, "pool": {"allocated": -1}, "framework": "torch"}',
        b'{"format": "vramledger-recording", "version": 99}',
    ],
)  # fmt: skip
def test_a_file_of_another_kind_is_refused(content: bytes, tmp_path: Path) -> None:
    """Whatever a file holds, it is an error in one line, which the command line prints as it is."""
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises((RecordingError, StartupError)) as raised:
        read_file(path, None)

    assert "\n" not in str(raised.value)


def sample(pid: int, started: float | None, peak: int, *uuids: str) -> LedgerSample:
    """Return a sample in which a program holds memory on some devices."""
    uses = tuple(
        DeviceUse(uuid, 0, "H200", 100, peak, peak, None, "", "", (), whole_life=False) for uuid in uuids
    )
    return LedgerSample((), {pid: Program(pid, started=started)}, {pid: uses}, "")


def test_a_pid_that_was_reused_is_another_program() -> None:
    """Samples of an earlier program under the same pid say nothing of the present one."""
    seen = choose_program([sample(7, 100.0, 50, "A"), sample(7, 900.0, 3, "A")], 7, "here")

    assert [use.peak for use in seen.uses[0]] == [3]


def test_devices_that_the_program_has_left_are_not_needed() -> None:
    """Only the devices of the newest sample count, with all that was seen of them before."""
    seen = choose_program([sample(7, 1.0, 9, "A", "B"), sample(7, 1.0, 3, "B")], 7, "here")

    assert [[(use.uuid, use.peak) for use in uses] for uses in seen.uses] == [[("B", 9), ("B", 3)]]


def test_one_of_several_programs_must_be_chosen() -> None:
    """With several holders the error names them, and says how to choose one."""
    ledgers = [sample(7, 1.0, 9, "A"), sample(8, 1.0, 9, "A")]
    with pytest.raises(StartupError, match=r"2 programs .*7, 8.*--pid"):
        choose_program(ledgers, None, "here")

    assert choose_program(ledgers[:1], None, "here").program.pid == 7
