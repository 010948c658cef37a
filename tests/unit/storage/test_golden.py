"""What an earlier version has stored stays readable: segments of each version of the format are kept here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.past import GOLDEN, shown_facts
from vramledger.storage.archive import Archive, open_directory
from vramledger.storage.moments import advance, compute, start_from
from vramledger.storage.report import make_report
from vramledger.storage.segments import VERSION

VERSIONS = sorted(each.name for each in GOLDEN.iterdir())


@pytest.fixture(params=VERSIONS)
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Archive, dict[str, Any]]:
    """Return a copy of what a version has stored, and what it showed of that."""
    for each in (GOLDEN / request.param).iterdir():
        shutil.copy(each, tmp_path)
    expected = json.loads((GOLDEN / request.param / "shown.json").read_text(encoding="utf-8"))
    return Archive(open_directory(tmp_path), "machine-1"), expected


def test_the_format_of_today_is_kept() -> None:
    """There are segments of the version that is written now: whole, thinned, and still being written."""
    names = [each.name for each in (GOLDEN / f"v{VERSION}").glob("*.gz")]
    assert sorted(each.split(".", 1)[1] for each in names) == ["1s.gz", "2m.gz", "live.gz"]


def test_stored_moments_are_shown_as_they_were(stored: tuple[Archive, dict[str, Any]]) -> None:
    """Bytes, states, grades, owners and times of a moment are those that its version has shown."""
    archive, expected = stored
    for at, shown in expected["moments"].items():
        moment = archive.find(float(at))
        assert moment is not None, at
        found = shown_facts(compute(moment, float(at)).snapshot)
        assert json.loads(json.dumps(found)) == shown


def test_a_report_over_stored_segments_stays_the_same(stored: tuple[Archive, dict[str, Any]]) -> None:
    """Who held how much for how long does not depend on the version that asks."""
    archive, expected = stored
    found = json.loads(json.dumps(make_report(archive, 0.0, 1e11)))
    assert {name: found[name] for name in ("owners", "leftovers")} == {
        name: expected[name] for name in ("owners", "leftovers")
    }


def test_an_exporter_goes_on_from_an_earlier_version(stored: tuple[Archive, dict[str, Any]]) -> None:
    """The newest state of a version is one that today's accounting goes on from."""
    archive, expected = stored
    newest = archive.newest()
    assert newest is not None
    tracker, timeline = start_from(newest.header, newest.state.value)
    for entry in newest.readings:
        snapshot = advance(tracker, timeline, entry)
    (at,) = [float(each) for each in expected["moments"]][-1:]
    assert (snapshot.time or 0.0) >= at
    assert {each.pid for device in snapshot.devices for each in device.holdings} >= {
        each[0] for each in expected["moments"][str(at)]["devices"][0]["holdings"]
    }
