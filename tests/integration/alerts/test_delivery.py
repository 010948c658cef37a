"""What arrives at a pager and a chat, by a real Alertmanager with the receivers that the example shows."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.alerts.nodes import Node
from tests.support.alerts.parts import IDLE
from tests.support.alerts.promtool import ALERTS, firing
from tests.support.faults import alertmanager
from tests.support.faults.alertmanager import request
from tests.support.mail import mailbox
from tests.support.requirements import VERSIONS
from tests.support.waiting import wait_until

DEAD = {
    "labels": {
        "alertname": "GpuMemoryDead", "severity": "page", "cluster": "", "instance": "gpu-1:10839",
        "gpu": "0", "uuid": "GPU-1", "pid": "7", "owner_type": "slurm", "owner": "17",
    },
    "annotations": {
        "summary": "GPU memory is held by a process that no longer exists.",
        "description": "gpu-1: pid 7 of job 17 holds 20GiB on GPU 0.",
        "runbook_url": "http://runbooks/GpuMemoryDead",
    },
}  # fmt: skip
WATCHDOG = {"labels": {"alertname": "VramLedgerWatchdog", "severity": "none"}}


@contextmanager
def inbox() -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """Accept messages; yield the address, and the list of path and content of each."""
    got: list[tuple[str, Any]] = []

    class Inbox(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.append((self.path, json.loads(body)))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Inbox) as server:
        threading.Thread(target=server.serve_forever, name="inbox", daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", got
        finally:
            server.shutdown()


def filled_in(url: str, mail: int = 0) -> str:
    """Return the example with the receivers of its comment, at our address, and without its waits."""
    text = (ALERTS / "alertmanager.yml").read_text(encoding="utf-8")
    rest, _, empty = text.partition("\nreceivers:\n")
    shown = re.findall(r"^# (  (?:- name:|  ).*)$", rest, re.MULTILINE)
    examples = yaml.safe_load("\n".join(shown))
    names = {each["name"] for each in examples}
    others = [each for each in yaml.safe_load(empty) if each["name"] not in names]
    receivers = json.dumps([*examples, *others])
    for place, path in [
        ("http://deadmansswitch.example.com/vramledger", "heartbeat"),
        ("http://pager.example.com/hook", "pager"),
        ("https://chat.example.com/hook", "chat"),
    ]:
        assert place in receivers
        receivers = receivers.replace(place, f"{url}/{path}")
    receivers = receivers.replace('"mail.example.com:587"', f'"127.0.0.1:{mail}", "require_tls": false')
    waits = re.sub(r"(group_wait|group_interval): \S+", r"\1: 1s", rest)
    return f"{waits}\nreceivers: {receivers}\n"


@contextmanager
def running(version: str, folder: Path, config: str) -> Iterator[str]:
    """Run a real Alertmanager with a configuration and our templates; yield the address for alerts."""
    (folder / "templates").symlink_to(ALERTS / "templates")
    with alertmanager.running(version, folder, config) as url:
        yield f"{url}/api/v2/alerts"


@pytest.mark.parametrize("version", VERSIONS)
def test_a_page_arrives(tmp_path: Path, version: str) -> None:
    """A page reaches pager and chat in words, later its end the chat; the heartbeat has its own receiver."""
    with inbox() as (url, got), running(version, tmp_path, filled_in(url)) as manager:

        def arrived(path: str) -> list[Any]:
            return [body for to, body in got if to == path]

        begun = datetime.now(timezone.utc) - timedelta(minutes=5)
        now = {"startsAt": begun.isoformat()}
        request(manager, [{**DEAD, **now}, {**WATCHDOG, **now}])
        (page,) = wait_until(lambda: arrived("/pager"), "the page")
        (chat,) = wait_until(lambda: arrived("/chat"), "the message")
        beats = wait_until(lambda: arrived("/heartbeat"), "the heartbeat")
        request(manager, [{**DEAD, **now, "endsAt": datetime.now(timezone.utc).isoformat()}])
        _, after = wait_until(lambda: arrived("/chat")[:2] if len(arrived("/chat")) > 1 else [], "the end")

    assert [each["labels"] for each in page["alerts"]] == [
        {name: value for name, value in DEAD["labels"].items() if value}
    ]
    assert {each["labels"]["alertname"] for beat in beats for each in beat["alerts"]} == {
        "VramLedgerWatchdog"
    }
    (message,) = chat["attachments"]
    assert chat["channel"] == "#gpu"
    assert message["color"] == "danger"
    assert message["title"] == "PAGE: GPU memory is held by a process that no longer exists. (job 17)"
    assert message["title_link"] == "http://runbooks/GpuMemoryDead"
    assert message["text"].splitlines()[:2] == [
        "gpu-1: pid 7 of job 17 holds 20GiB on GPU 0.",
        f"Firing since {begun:%Y-%m-%d %H:%M} UTC. <http://runbooks/GpuMemoryDead|What to do>",
    ]
    assert after["attachments"][0]["title"].startswith("Resolved: GPU memory is held by")


def hoarded(folder: Path) -> list[dict[str, Any]]:
    """Return what the real rules raise about idle programs of several users."""
    users = ("ann", "ann", "svc-train", "root")
    holders = [
        replace(IDLE, pid=pid, gpu=pid - 7, user=user, owner=user) for pid, user in enumerate(users, start=7)
    ]
    holders[1] = replace(holders[1], notebook="ann/a.ipynb")
    found = firing(folder, Node(holders, gpus=4, instance="gpu-1:10839").series(5), 5)
    return [
        {"labels": {**each.labels, "alertname": each.name}, "annotations": each.annotations} for each in found
    ]


@pytest.mark.parametrize("version", VERSIONS)
def test_each_user_gets_their_own_in_one_mail(tmp_path: Path, version: str) -> None:
    """A user's mail and message have all alerts of that user and no other's; root and numbers get none."""
    (tmp_path / "rules").mkdir()
    alerts = hoarded(tmp_path / "rules")
    with (
        inbox() as (url, messages),
        mailbox() as (port, mails),
        running(version, tmp_path, filled_in(url, port)) as manager,
    ):
        request(manager, alerts)
        wait_until(lambda: len(mails) > 1, "two mails")
        said = wait_until(
            lambda: [body for _, body in messages if body["channel"] == "U012ABCDEF"], "the chat"
        )
        wait_until(
            lambda: any("pid 10 " in str(body) for _, body in messages), "what the platform gets of root"
        )
    by_address = {str(mail["To"]): mail for mail in mails}

    assert set(by_address) == {"ann@example.com", "training-team@example.com"}
    mail = by_address["ann@example.com"]
    assert mail["Subject"] == "GPU memory of ann: 2 to look at"
    text = mail.get_body(("plain",)).get_content().replace("\r", "")  # type: ignore[union-attr]
    assert text.startswith("You get this because programs of ann hold GPU memory.\n\n")
    assert text.count("Much GPU memory is held by a program that does nothing.") == 2
    idle = "and has done nothing since 1969-12-31 22:59:00 +0000 UTC (proven). If you do not need it:"
    of_ann = "gpu-1:10839: pid 7 (train.py) of user ann, holds 30GiB on GPU 0,"
    assert f"{of_ann} {idle} vramledger end --pid 7 ends it.\n" in text
    assert f"holds 30GiB on GPU 1 for notebook ann/a.ipynb, {idle} vramledger end --pid 8 ends it.\n" in text
    assert "What to do: http://gpu-1:10839/runbooks/GpuMemoryHoarded" in text
    assert "vramledger end --pid PID" in text
    assert f"{of_ann} {idle} vramledger end --pid 7 ends it.\n" in said[0]["attachments"][0]["text"]
    for each in (text, json.dumps(said)):
        assert re.search(r"svc-train|sudo|\b[Aa]sk (its|the) ", each) is None
