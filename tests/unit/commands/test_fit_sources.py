"""What ``vramledger fit`` reads from files."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.builders import agent, device, holding, snapshot
from tests.support.sure import sure
from vramledger.accounting.holders.policies import CONTEXT_BYTES
from vramledger.commands.fit import CANNOT_TELL, Fit, fit_json, fit_lines
from vramledger.commands.fit_devices import PERHAPS, make_offer
from vramledger.commands.fit_input import DeviceUse, LedgerSample, OfferedDevice, Program, read_ledger
from vramledger.commands.fit_sources import choose_program, read_file
from vramledger.commands.memory_need import assess_need
from vramledger.errors import RecordingError, StartupError
from vramledger.model.snapshot import State
from vramledger.views.ledger_json import snapshot_json

GIB = 2**30


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


@pytest.mark.parametrize("requested", [62 * GIB, None])
@pytest.mark.parametrize(
    ("framework", "pool"),
    [
        ("jax", {"in_use": 20 * GIB, "in_use_peak": 20 * GIB, "pool": 60 * GIB, "limit": 60 * GIB}),
        ("tensorflow", {"in_use": 19 * GIB, "in_use_peak": 20 * GIB}),
        ("cupy", {"in_use": 20 * GIB, "pool": 22 * GIB}),
        ("torch", {"allocated": 20 * GIB, "allocated_peak": 20 * GIB, "reserved": 22 * GIB}),
    ],
)
def test_every_report_is_read(
    framework: str, pool: dict[str, int], requested: int | None, tmp_path: Path
) -> None:
    """What was in use as the allocation failed is needed at least; with it nothing certainly fits."""
    path = tmp_path / "oom-1.json"
    content = {"pid": 7, "framework": framework, "ordinal": None, "requested": requested, "pool": pool}
    path.write_text(json.dumps({"version": 1, "verdict": "unknown", **content}))
    seen = read_file(path, None)
    need = assess_need(seen.uses[0])
    roomy = make_offer(need, ledger_devices()[0], seen.program, live=False)
    found = Fit(seen, (need,), ((roomy,),), "here", of_this_host=True, headroom=0.1)
    text = "\n".join(fit_lines(found))
    assert need.bytes == 20 * GIB + CONTEXT_BYTES
    assert (need.wanted is None, need.enough, roomy.verdict) == (requested is None, None, PERHAPS)
    assert found.status == CANNOT_TELL
    assert "wanted       not known: an allocation failed" in text or requested is not None
    assert json.loads(json.dumps(fit_json(found)))["needs"][0]["failed"]


def test_a_report_without_any_figure_is_read(tmp_path: Path) -> None:
    """A framework that counts nothing leaves the need unknown, and it is still a report."""
    path = tmp_path / "oom-1.json"
    path.write_text(json.dumps({"pid": 7, "framework": "jax", "requested": None, "pool": {}}))
    need = assess_need(read_file(path, None).uses[0])
    assert (need.bytes, need.failed, need.enough) == (None, True, None)


def test_a_failure_of_unknown_size_in_a_ledger_counts() -> None:
    """A program that has failed does not fit for certain, also if nobody knows with how many bytes."""
    document = _document()
    (agent_of_7,) = [each["agent"] for each in document["devices"][0]["holdings"] if each["pid"] == 7]
    agent_of_7["last_oom"] = {"framework": "torch", "requested": None, "on_this_device": True}
    need = assess_need(choose_program([read_ledger(document, "file")], 7, "").uses[0])
    assert (need.failed, need.enough) == (True, None)


def ledger_devices() -> tuple[OfferedDevice, ...]:
    """Return one empty device."""
    return read_ledger(snapshot_json(snapshot(device(0))), "the sample").devices


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


WRONG: list[object] = [
    None, -1, 0, 1, 2**62, 2**70, 1.5, 1e-320, 1e308, float("inf"), "", "x" * 1000, "\x1b[2J", [], [None],
    [3], {}, {"frameworks": 1}, True, [{}], [{"pid": 7}],
]  # fmt: skip


def _document() -> dict[str, Any]:
    """Return a ledger with everything that is read: a program with an agent, others, and a scheduler."""
    shot = snapshot(
        device(0, [holding(7, 8 * GIB, sm=0.5), holding(8, 9 * GIB, State.IDLE)], activity={"sm": 0.1}),
        device(1, [holding(7, GIB)], utilization={"gpu": 0.4}, activity={"sm": 0.2}),
    )
    shot = replace(shot, agents={7: agent(shot.devices[0].reading.uuid)}, watched_since=0.0)
    document: dict[str, Any] = json.loads(json.dumps(snapshot_json(shot)))
    document["devices"][1] |= {
        "cgroup_limits": [{"cgroup": "/ada", "maximum": GIB, "used": 0}],
        "schedulers": ["slurm"],
        "reservations": [{"owner_type": "user", "owner": "ada"}],
    }
    document["devices"][0]["holdings"][0]["limited_by"] = ["/ada"]
    return document


def _places(data: object, path: tuple[object, ...] = ()) -> Iterator[tuple[object, ...]]:
    inner: Iterable[tuple[object, object]] = ()
    if isinstance(data, dict):
        inner = data.items()
    elif isinstance(data, list):
        inner = enumerate(data)
    for key, value in inner:
        yield from _places(value, (*path, key))
    yield path


@given(place=st.sampled_from(sorted(_places(_document()), key=str)), value=st.sampled_from(WRONG))
def test_any_value_of_a_saved_ledger_may_be_wrong(place: tuple[Any, ...], value: object) -> None:
    """With any wrong value the whole answer is given, as text and as JSON, or the file is refused."""
    document: Any = _document()
    if place:
        inner = document
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = value
    else:
        document = value
    try:
        seen = choose_program([read_ledger(document, "file")], 7, "from file")
    except (RecordingError, StartupError):
        return
    needs = tuple(assess_need(uses) for uses in seen.uses)
    offers = tuple(
        tuple(make_offer(need, each, seen.program, live=True) for each in sure(seen.ledger).devices)
        for need in needs
    )
    found = Fit(seen, needs, offers, "here", of_this_host=True, headroom=0.1)
    assert found.status in (0, 1, 3)
    assert all(line.isprintable() for line in fit_lines(found))
    json.dumps(fit_json(found), allow_nan=False)
