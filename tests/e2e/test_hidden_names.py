"""``serve --web.hide-names``: only root and the exporter's user see who the users are and what they run."""

import json
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.control_client import SNAPSHOT, ask
from tests.support.exporter import QUICK, Exporter, run, serving
from tests.support.players.stage import Player, Stage
from tests.support.requirements import require_root
from tests.support.standin.library import GIB, StandIn

NOBODY, ANN = 65534, 12345
NOTEBOOK = "/home/nobody/merger.ipynb"
SECRET = re.compile(r"nobody|merger|secretprog|\b12345\b|/home/")
THEIRS = re.compile(r"nobody|merger|/home/")


class Hidden(NamedTuple):
    """A running exporter that hides names, how to ask it, its control socket, and another user's program."""

    exporter: Exporter
    asking: dict[str, str]
    control: Path
    theirs: Player


@pytest.fixture(scope="module")
def hidden(standin_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hidden]:
    """Serve with hidden names and a storage, until both holders have their owners."""
    require_root()
    with (
        StandIn(tmp_path_factory.mktemp("hidden"), standin_library, devices=1) as standin,
        Stage() as stage,
        tempfile.TemporaryDirectory(prefix="hidden-", dir="/tmp") as name,
    ):
        theirs = stage.start(name="secretprog", user=NOBODY, env={"JPY_SESSION_NAME": NOTEBOOK})
        mine = stage.start(name="secretprog", user=ANN)
        standin.device(0).set_processes([(theirs.pid, 3 * GIB), (mine.pid, GIB)])
        directory = Path(name)
        directory.chmod(0o755)
        store = directory / "store"
        store.mkdir()
        control = directory / "control"
        flags = (f"--control.socket={control}", f"--storage.path={store}", "--web.hide-names")
        with serving(*QUICK, *flags, driver=standin.env()) as exporter:
            exporter.until(lambda page: len(page.labels("process_info", "owner") - {""}) == 2, "the owners")
            yield Hidden(exporter, {**standin.env(), **exporter.found}, control, theirs)


def stored_at(exporter: Exporter) -> str:
    """Return a Unix time of which something is stored, as soon as there is one."""
    page = exporter.until(lambda page: page.value("storage_newest_timestamp_seconds"), "the past")
    return f"{page.value('storage_newest_timestamp_seconds'):.0f}"


def test_no_surface_of_the_network_has_a_name(hidden: Hidden) -> None:
    """Metrics, JSON, page, past and leftovers have neither users nor programs nor paths."""
    exporter, now = hidden.exporter, time.time()
    texts = {path: exporter.get(path)[1] for path in ("/metrics", "/api/v1/ledger", "/api/v1/leftovers", "/")}
    scale = f"/api/v1/past/scale?from={now - 600:.0f}&to={now + 5:.0f}"
    for path in (f"/api/v1/past?at={int(stored_at(exporter)) + 1}", scale):
        status, texts[path] = exporter.get(path)
        assert (status, '"error": "' in texts[path]) == (200, False)

    for path, text in texts.items():
        assert SECRET.findall(text) == [], path
    assert str(hidden.theirs.pid) in texts["/metrics"]
    assert str(hidden.theirs.pid) in texts["/api/v1/ledger"]
    owners = exporter.scrape().labels("process_info", "owner")
    assert len(owners) == 2, "each user has a stand-in"
    assert all(re.fullmatch("user-[0-9a-f]{8}", each) for each in owners)


def test_root_sees_every_name(hidden: Hidden) -> None:
    """Root's commands show names, of the present and of the past."""
    for flags in ((), (f"--at={int(stored_at(hidden.exporter)) + 1}",)):
        done = run("show", *flags, f"--control.socket={hidden.control}", driver=hidden.asking)
        assert "merger.ipynb" in done.stdout, done.stderr
        assert "secretprog" in done.stdout


def test_another_user_sees_own_programs_alone(hidden: Hidden) -> None:
    """Over the control socket a user sees own programs whole, and of others what the page shows."""
    for request in (SNAPSHOT, ("GET", f"/past?ask=at&at={int(stored_at(hidden.exporter)) + 1}", "")):
        answer = ask(hidden.control, request, uid=ANN)
        text = answer.rest.decode(errors="replace")
        assert answer.status == 200, answer.head
        assert THEIRS.findall(text) == []
        assert "secretprog" in text
    for path in ("/api/v1/ledger", f"/past?ask=since&from=1&to={time.time() + 9:.0f}"):
        answer = ask(hidden.control, ("GET", path, ""), uid=ANN)
        assert answer.status == 200
        assert SECRET.findall(json.dumps(answer.head) + answer.rest.decode()) == []


def test_a_recording_stays_roots(hidden: Hidden) -> None:
    """Only root may take a recording of the past."""
    question = f"/past?ask=readings&from={time.time() - 60:.0f}&to={time.time():.0f}"
    assert "only root" in ask(hidden.control, ("GET", question, ""), uid=ANN).error
