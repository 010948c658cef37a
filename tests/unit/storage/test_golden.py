"""What an earlier version has stored stays readable: segments of each version of the format are kept here."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.past import GOLDEN, shown_facts
from tests.support.sure import sure
from vramledger.storage.answers import answer, open_past
from vramledger.storage.database import VERSION
from vramledger.storage.protocol import NAME
from vramledger.storage.state import advance, compute, start_from

VERSIONS = sorted(each.name for each in GOLDEN.iterdir())


@pytest.fixture(params=VERSIONS)
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """Return a copy of what a version has stored, and what it showed of that."""
    shutil.copy(GOLDEN / request.param / NAME, tmp_path)
    return tmp_path, json.loads((GOLDEN / request.param / "shown.json").read_text(encoding="utf-8"))


def test_the_format_of_today_is_kept(tmp_path: Path) -> None:
    """There is a file of the version that is written now, with segments that are thinned, packed and live."""
    shutil.copy(GOLDEN / f"v{VERSION}" / NAME, tmp_path)
    with open_past(tmp_path) as past:
        assert [each.step for each in past.segments()] == [120, 1, 0]


def test_stored_moments_are_shown_as_they_were(stored: tuple[Path, dict[str, Any]]) -> None:
    """Bytes, states, grades, owners and times of a moment are those that its version has shown."""
    path, expected = stored
    with open_past(path, "machine-1") as past:
        for at, shown in expected["moments"].items():
            moment = sure(past.find(float(at)))
            assert json.loads(json.dumps(shown_facts(compute(moment, float(at)).snapshot))) == shown


def test_a_report_over_stored_segments_stays_the_same(stored: tuple[Path, dict[str, Any]]) -> None:
    """Who held how much for how long does not depend on the version that asks."""
    path, expected = stored
    _, _, content = answer(path, {"ask": "since", "from": 0.0, "to": 1e11}).partition(b"\n")
    found = json.loads(content)
    assert {name: found[name] for name in ("owners", "leftovers")} == {
        name: expected[name] for name in ("owners", "leftovers")
    }


def test_an_exporter_goes_on_from_an_earlier_version(stored: tuple[Path, dict[str, Any]]) -> None:
    """The newest state of a version is one that today's accounting goes on from."""
    path, expected = stored
    with open_past(path) as past:
        newest = sure(past.newest())
    tracker, timeline = start_from(newest.header, newest.state.value)
    for entry in newest.readings:
        snapshot = advance(tracker, timeline, entry)
    (at,) = [float(each) for each in expected["moments"]][-1:]
    assert (snapshot.time or 0.0) >= at
    assert {each.pid for device in snapshot.devices for each in device.holdings} >= {
        each[0] for each in expected["moments"][str(at)]["devices"][0]["holdings"]
    }
