"""Every recording of a real GPU replays to its known verdict, balance and scrape."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import judging
from tests.support.judging import Entry
from vramledger.model.snapshot import Snapshot

ENTRIES = judging.load()

of_each_recording = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)


KNOWN: dict[str, list[Snapshot]] = {}


def replayed(entry: Entry) -> list[Snapshot]:
    """Replay a recording, each only once."""
    if entry.name not in KNOWN:
        KNOWN[entry.name] = judging.replay(judging.HOME, entry)
    return KNOWN[entry.name]


def test_every_file_is_promised_something() -> None:
    """The manifest names every recording and every golden scrape, and is not empty."""
    assert ENTRIES
    known = {entry.file for entry in ENTRIES} | {f"{entry.name}.metrics" for entry in ENTRIES}
    there = {path.name for path in judging.HOME.iterdir() if path.name.endswith((".jsonl.gz", ".metrics"))}
    assert there == known


@of_each_recording
def test_verdicts(entry: Entry) -> None:
    """Every holder is in its state, every ledger balances to the byte, at most 1 % is unattributed."""
    assert judging.problems(entry, replayed(entry)) == []


@of_each_recording
def test_golden_scrape(entry: Entry) -> None:
    """The last reading's scrape is unchanged: 'python -m tests.lab.recordings' rewrites it."""
    actual = judging.golden(replayed(entry)[-1]).decode()
    assert judging.golden_path(judging.HOME, entry).read_text().splitlines() == actual.splitlines()


def test_promtool_finds_nothing(require_tool: Callable[[str], Path]) -> None:
    """Prometheus' own linter accepts the golden scrapes; one whose families it has seen, it does not read."""
    promtool, seen = require_tool("promtool"), set[bytes]()
    for entry in ENTRIES:
        page = judging.golden_path(judging.HOME, entry).read_bytes()
        if not (families := set(re.findall(rb"^# TYPE (\w+)", page, re.MULTILINE))) <= seen:
            command: list[str | Path] = [promtool, "check", "metrics"]
            done = subprocess.run(command, input=page, capture_output=True, check=False)
            assert (done.returncode, done.stdout + done.stderr) == (0, b""), entry.name
            seen |= families
    assert len(seen) > 50


def test_a_broken_promise_is_noticed() -> None:
    """The judge finds differences: another state, another holder and another namespace fail."""
    entry = next(entry for entry in ENTRIES if entry.name == "stopped")
    (pid,) = entry.expected
    for wrong in (
        Entry(entry.name, entry.file, expected={pid: "idle"}),
        Entry(entry.name, entry.file, expected={}),
        Entry(entry.name, entry.file, expected=entry.expected, host_pid_namespace=False),
        Entry(entry.name, entry.file, expected=entry.expected, absent=[pid]),
        Entry(entry.name, entry.file, expected=entry.expected, policies={pid: "torch/caching/default"}),
        Entry(entry.name, entry.file, expected=entry.expected, unattributed_below=-1.0),
    ):
        assert judging.problems(wrong, replayed(entry)) != []
