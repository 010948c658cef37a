"""``vramledger report``: each user is told of their own programs, by a mail program and by a webhook."""

import email
import json
import pwd
import re
from collections.abc import Iterator
from email.policy import default
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.integration.alerts.test_delivery import inbox
from tests.support.exporter import QUICK, Page, run, serving
from tests.support.players.stage import Stage
from tests.support.requirements import require_host_pid_namespace, require_root
from tests.support.standin.library import GIB, StandIn

DAEMON, BIN, UNKNOWN = 1, 2, 54321
"""Two users whom every host knows, and one whom it does not."""

CHANNEL = "<!channel>"
PAID = "/home/d/@all [pay](evil.example) <https://www.evil.example|log in>.ipynb"
"""A program's name and a notebook's path that would do something in a chat."""

SOON = ("--after=1s", "--least=2GiB")


class Hoarded(NamedTuple):
    """How to ask an exporter beside idle programs of several users, and the pids by what they are."""

    asking: dict[str, str]
    pids: dict[str, int]


@pytest.fixture(scope="module")
def hoarded(standin_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hoarded]:
    """Run the exporter until all programs are idle for a second."""
    require_host_pid_namespace()
    require_root()
    users: dict[str, int | None] = dict.fromkeys(("first", "second", "small"), DAEMON)
    users |= {"other": BIN, "stranger": UNKNOWN, "root": None}
    with StandIn(tmp_path_factory.mktemp("hoarded"), standin_library) as standin, Stage() as stage:
        odd: dict[str, Any] = {"first": {"name": CHANNEL}, "second": {"env": {"JPY_SESSION_NAME": PAID}}}
        pids = {name: stage.start(user=user, **odd.get(name, {})).pid for name, user in users.items()}
        held = [(pid, GIB if name == "small" else 3 * GIB) for name, pid in pids.items()]
        standin.device(0).set_processes(held)
        with serving(*QUICK, "--idle-after=1s", driver=standin.env()) as exporter:

            def settled(page: Page) -> bool:
                since = page.values("process_state_since_timestamp_seconds", state="idle").values()
                return len(since) == len(pids) and all(page.time - began > 1 for began in since)

            exporter.until(settled, "a second of idleness")
            yield Hoarded({**standin.env(), **exporter.found}, pids)


def told(text: str, pids: dict[str, int]) -> set[str]:
    return {name for name, pid in pids.items() if f"pid {pid} (" in text}


def test_each_user_is_told_of_their_own(hoarded: Hoarded, tmp_path: Path) -> None:
    """Mail and webhook tell each user what is held, since when and how to end it; the administrator all."""
    program = tmp_path / "sendmail"
    program.write_text(f'#!/bin/sh\nexec cat > "{tmp_path}/$3.eml"\n')
    program.chmod(0o755)
    names = {pwd.getpwuid(uid).pw_name: uid for uid in (DAEMON, BIN)}
    asking, pids = hoarded
    with inbox() as (url, got):
        sending = (f"--mail.program={program}", "--mail.domain=example.org", f"--webhook={url}/hook")
        printed = run("report", *SOON, driver=asking)
        sent = run("report", "--mail", *sending, *SOON, driver=asking)
        later = run("report", "--mail", *sending, "--after=1h", driver=asking)
    mails = {
        path.stem: email.message_from_bytes(path.read_bytes(), policy=default)
        for path in tmp_path.glob("*.eml")
    }
    texts = {name: mail.get_content() for name, mail in mails.items()}
    hooked = {body["user"]: body for _, body in got}
    everybody = set(pids) - {"small"}

    assert (printed.returncode, sent.returncode, later.returncode) == (0, 0, 0), sent.stderr
    assert told(printed.stdout, pids) == everybody
    assert set(mails) == {"root@example.org", *(f"{name}@example.org" for name in names)}
    assert told(texts["daemon@example.org"], pids) == {"first", "second"}
    assert told(texts["bin@example.org"], pids) == {"other"}
    assert told(texts["root@example.org"], pids) == everybody
    own = texts["bin@example.org"]
    assert "of user bin holds 3.00 GiB on GPU 0, and has done nothing since 20" in own
    assert f"`vramledger end --pid {pids['other']} --yes` ends it." in own
    assert ("(inferred)" in own) == ("inferred: nobody saw it work" in own)
    assert mails["bin@example.org"]["Auto-Submitted"] == "auto-generated"
    assert mails["bin@example.org"]["Reply-To"] == "root@example.org"
    raw = (tmp_path / "bin@example.org.eml").read_text()
    assert own.rstrip() in raw, "a reader that decodes nothing shows whole commands"
    assert printed.stdout.count("Its user gets no message.") == len({"root", "stranger"})
    assert set(hooked) == {None, *names}
    assert {each["pid"] for each in hooked["bin"]["holdings"]} == {pids["other"]}
    assert hooked["bin"]["text"] == own
    own = texts["daemon@example.org"]
    assert "kernel of /home/d/?all ?pay??evil.example? ?https:??evil.example?log in?.ipynb if you" in own
    everything = "".join((own, printed.stdout, *(each["text"] for each in hooked.values())))
    assert not re.search(r"[<>@\[\]]|//|www\.", everything)
    assert {(each["command"], each["notebook"]) for each in hooked["daemon"]["holdings"]} > {(CHANNEL, None)}
    assert PAID in {each["notebook"] for each in hooked["daemon"]["holdings"]}
    assert len(got) == len(names) + 1, "what has not lasted an hour is told to nobody"


def test_who_is_left_out_gets_no_message(hoarded: Hoarded, tmp_path: Path) -> None:
    """Neither a user of ``--except`` nor an owner whom the alerts' thresholds excuse; the list has both."""
    asking, pids = hoarded

    def excusing(key: str, value: str) -> str:
        owner = {"name": "daemons", "match": {"user": pwd.getpwuid(DAEMON).pw_name}, key: value}
        (tmp_path / "mine.yml").write_text(json.dumps({"owners": [owner]}))
        return f"--thresholds={tmp_path / 'mine.yml'}"

    with inbox() as (url, got):
        for flag in ("--except=bin", excusing("hoarded_idle", "1h")):
            done = run("report", f"--webhook={url}/hook", *SOON, flag, driver=asking)
            assert done.returncode == 0, done.stderr
    printed = run("report", *SOON, excusing("hoarded_idle", "never"), driver=asking)
    wrong = run("report", excusing("horded_idle", "never"), driver=asking)

    assert [body["user"] for _, body in got] == ["daemon", None, "bin", None]
    assert all(told(body["text"], pids) == set(pids) - {"small"} for _, body in got if body["user"] is None)
    assert printed.stdout.count("Its user gets no message.") == len({"first", "second", "root", "stranger"})
    assert wrong.returncode == 2
    assert "owners[0] (daemons): horded_idle: no such key; do you mean hoarded_idle?" in wrong.stderr


UNSENT = {
    ("--mail", "--mail.program=/nowhere/sendmail"): r"\[Errno 2\]",
    ("--mail", "--mail.program=/bin/false"): "Command",
    ("--webhook=http://127.0.0.1:1/",): "<urlopen error",
}


@pytest.mark.parametrize(("flags", "problem"), UNSENT.items())
def test_what_cannot_be_sent_is_said(hoarded: Hoarded, flags: tuple[str, ...], problem: str) -> None:
    """A message that cannot be sent is an error in one line, and the others are tried too."""
    done = run("report", *flags, *SOON, driver=hoarded.asking)
    said = rf"a message could not be sent to (daemon|bin): {problem}.* \(and 2 more\)$"
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert re.search(said, done.stderr)


def test_nobody_is_told_where_nothing_is_known(standin: StandIn) -> None:
    """Without an exporter nobody knows for how long, and one that plays a recording is none of this host."""
    alone = run("report", "--mail", driver=standin.env())
    with serving(*QUICK, "--source=auto", driver={"LD_LIBRARY_PATH": "/nowhere"}) as exporter:
        exporter.until(lambda page: page.up, "the recording")
        played = run("report", "--mail", driver=exporter.found)
    wrong = run("report", "--webhook=file:///etc/passwd", driver=standin.env())
    for done in (alone, played):
        assert done.returncode == 1
        assert "only to an exporter that runs" in done.stderr
    assert wrong.returncode == 2
    assert "does not begin with http:// or https://" in wrong.stderr
