"""The runbooks that the exporter serves: the targets of the alerts' links."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from urllib.parse import urljoin

import pytest

from tests.support.builders import Shown, crowd
from tests.support.serving import LOOPBACK, Answer, run, served
from vramledger.config import Config
from vramledger.web import page

NAMES = sorted(path.stem for path in Path(page.__file__).with_name("runbooks").glob("*.html"))
LINKS = re.compile(r'(?:href|src)="([^"#]+)"')


def asked(*paths: str, config: Config = LOOPBACK, **headers: str) -> list[Answer]:
    """Request several paths of an exporter."""
    answers: list[Answer] = []

    async def test() -> None:
        async with served(Shown(crowd(1, 1)), config) as client:
            answers.extend([await client.ask(path, **headers) for path in paths])

    run(test)
    return answers


def test_each_runbook_is_served_with_the_policy_of_the_page() -> None:
    """A runbook's own text is served as HTML, with the headers that forbid other sources."""
    for name, answer in zip(NAMES, asked(*(f"/runbooks/{name}" for name in NAMES)), strict=True):
        title = "Runbooks" if name == "index" else name
        assert answer.status == 200
        assert f"<title>{title} · vramledger</title>" in answer.text
        assert f"<h2>{title}</h2>" in answer.text
        assert "@" not in answer.text
        assert answer.headers["Content-Security-Policy"] == page.CONTENT_SECURITY_POLICY
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
        assert not re.search(r"https?://(?!NODE)|<style|\sstyle=|\son\w+=|<script>", answer.text)


@pytest.mark.parametrize("config", [LOOPBACK, replace(LOOPBACK, page=False, telemetry_path="/gpu")])
def test_every_link_leads_somewhere(config: Config) -> None:
    """Files, other runbooks, the way back and the metrics work, with and without the live page."""

    async def test() -> None:
        async with served(Shown(crowd(1, 1)), config) as client:
            found = {
                path: await client.ask(path) for path in ["/runbooks/", *(f"/runbooks/{n}" for n in NAMES)]
            }
            linked = {
                urljoin(path, link) for path, each in found.items() for link in LINKS.findall(each.text)
            }
            broken = [path for path in sorted(linked) if (await client.ask(path)).status != 200]
        assert broken == []
        assert {f"/runbooks/{name}" for name in NAMES} - {"/runbooks/index"} <= linked

    run(test)


def test_the_index_is_at_the_folder() -> None:
    """/runbooks redirects to /runbooks/, by a relative path, and that page lists all runbooks."""
    short, index = asked("/runbooks", "/runbooks/")

    assert (short.status, short.headers["Location"]) == (308, "runbooks/")
    assert len(re.findall("<li>", index.text)) == len(NAMES) - 1


@pytest.mark.parametrize(
    "path", ["/runbooks/Other", "/runbooks/..%2fpage.py", "/runbooks/GpuMemoryDead.html"]
)
def test_nothing_else_is_served(path: str) -> None:
    """A name that is not a runbook's does not exist."""
    (answer,) = asked(path)

    assert answer.status == 404


def test_a_runbook_that_has_not_changed_is_not_sent_again() -> None:
    """With the tag of a cached page a browser gets 304."""

    async def test() -> None:
        async with served(Shown(crowd(1, 1))) as client:
            tag = (await client.ask("/runbooks/GpuMemoryDead")).headers["ETag"]
            assert (await client.ask("/runbooks/GpuMemoryDead", If_None_Match=tag)).status == 304

    run(test)
