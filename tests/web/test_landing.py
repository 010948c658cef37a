"""The page at the root: the whole book, readable without scripts, and safe whatever the host says."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from tests.builders import MIB, Shown, crowd, device, failed, holding, process, snapshot
from tests.web.serving import LOOPBACK, Answer, run, served
from vramledger import __version__
from vramledger.config import Config
from vramledger.readings import DeviceReading
from vramledger.snapshot import Snapshot, State


def ask(shown: Shown, config: Config = LOOPBACK) -> Answer:
    """Get the page of one snapshot."""
    answers: list[Answer] = []

    async def test() -> None:
        async with served(shown, config) as client:
            answers.append(await client.ask("/"))

    run(test)
    assert answers[0].status == 200
    return answers[0]


class Page(HTMLParser):
    """What a browser would make of it: tags with their attributes, and table rows as texts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.texts: list[str] = []
        self._in_cell = False
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag; a row or a cell begins a text."""
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self._in_cell = True

    def handle_data(self, data: str) -> None:
        """Note a text, in its cell as well."""
        self.texts.append(data)
        if self._in_cell:
            self.rows[-1][-1] += data

    def handle_endtag(self, tag: str) -> None:
        """End the text of a cell."""
        if tag in ("td", "th"):
            self._in_cell = False


def test_the_page_shows_the_book_and_who_holds_what() -> None:
    """Each device has its ledger by state, each holder pid, user, command, state, time, bytes and reason."""
    held = [holding(7, 300 * MIB, State.IDLE, why="no sign of work for 11 minutes"), holding(8, 200 * MIB)]
    one = device(3, held, reserved=None, unattributed=0)

    page = Page(ask(Shown(snapshot(one, processes=[process(7)]))).text)

    assert page.rows[0] == [
        *("GPU", "Name", "UUID", "total", "free", "reserved", "dead", "zombie", "orphaned", "stopped"),
        *("idle", "active", "unknown", "unattributed"),
    ]
    assert page.rows[1] == [
        *(
            "3",
            "NVIDIA H200",
            one.reading.uuid,
            "143,771.0 MiB",
            "143,271.0 MiB",
            "not known",
            "0",
            "0",
            "0",
            "0",
        ),
        *("300.0 MiB", "200.0 MiB", "0", "0"),
    ]
    since = "2026-09-21 14:12:20 UTC"
    assert page.rows[3:] == [
        ["3", "7", "ada", "train.py", "idle", since, "300.0 MiB", "no sign of work for 11 minutes"],
        ["3", "8", "", "", "active", since, "200.0 MiB", "it works"],
    ]
    exact = [attributes.get("title") for tag, attributes in page.tags if tag == "td"]
    assert f"{300 * MIB} bytes" in exact


def test_the_page_names_itself_and_links_to_the_rest() -> None:
    """Name, version, source and links, the telemetry path as configured."""
    page = Page(ask(Shown(crowd(1, 1)), replace(LOOPBACK, telemetry_path="/gpu")).text)

    links = [attributes["href"] for tag, attributes in page.tags if tag == "a"]
    assert links == ["/gpu", "/-/healthy", "/-/ready"]
    assert f"vramledger {__version__}" in page.texts
    assert any(text.startswith("Source: nvml.") for text in page.texts)
    assert not any("RECORDING" in text for text in page.texts)


def test_a_recording_says_so_loudly() -> None:
    """A replay is never taken for this host: the first thing below the title is an alert."""
    page = ask(Shown(replace(crowd(1, 1), source="replay", recording="<lively>"))).text

    banner = "This is a RECORDING (&lt;lively&gt;) of another machine. Nothing below is about this host."
    assert f'<p class="loud" role="alert">{banner}</p>' in page
    assert page.index(banner) < page.index("<table>")


@pytest.mark.parametrize(
    ("shot", "ready", "says"),
    [
        (Snapshot(), False, "The first sample has not finished yet."),
        (failed("no-driver", "load <nvidia>"), True, "No GPU data (no-driver): load &lt;nvidia&gt;"),
        (snapshot(), True, "Nobody holds GPU memory."),
    ],
    ids=["first", "failed", "nobody"],
)
def test_the_page_says_why_it_is_empty(shot: Snapshot, says: str, *, ready: bool) -> None:
    """No data, no sample yet and no holders are three different things."""
    page = ask(Shown(shot, ready)).text

    assert says in page
    assert "<table>" not in page


def test_devices_without_a_book_say_why() -> None:
    """A lost device, a divided GPU and one without figures have the reason in place of their ledger."""
    lost = replace(device(0), up=False, book=None, reading=DeviceReading(0, "GPU-0", error="lost"))
    divided = replace(device(1), book=None, reading=DeviceReading(1, "GPU-1", divided=True))
    mute = replace(device(2), book=None, reading=DeviceReading(2, "GPU-2"))

    rows = Page(ask(Shown(snapshot(lost, divided, mute))).text).rows

    assert [row[-1] for row in rows[1:4]] == [
        "no answer (lost)",
        "its MIG instances hold the memory",
        "no memory figures",
    ]


HOSTILE = """</td><script>alert(1)</script><img src=x onerror='alert("1")'>&amp;\udcff"""


def test_nothing_from_the_host_becomes_markup() -> None:
    """Names of devices, users, programs, recordings and reasons are text, whatever they contain."""
    one = device(0, [holding(7, why=HOSTILE)], name=HOSTILE, uuid=HOSTILE)
    shot = replace(
        snapshot(one, processes=[process(7, user=HOSTILE, command=HOSTILE)]),
        source="replay",
        recording=HOSTILE,
    )

    answer = ask(Shown(shot))

    page, harmless = Page(answer.text), HOSTILE.replace("\udcff", "?")
    assert not {"script", "img"} & {tag for tag, _ in page.tags}
    assert page.rows[1][1:3] == [harmless, harmless]
    assert [page.rows[3][column] for column in (2, 3, 7)] == [harmless] * 3


def test_the_page_needs_nothing_and_allows_nothing() -> None:
    """The policy forbids all but the page's own style, by its hash; nothing is loaded from elsewhere."""
    answer = ask(Shown(crowd(1, 1)))

    styles = re.findall(r"<style>(.*?)</style>", answer.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(styles[0].encode()).digest()).decode()
    assert len(styles) == 1
    assert answer.headers["Content-Security-Policy"] == (
        f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    tags = Page(answer.text).tags
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in tags}
    assert not [attributes for _, attributes in tags if "style" in attributes or "src" in attributes]
    assert "http://" not in answer.text
    assert "https://" not in answer.text
    assert "prefers-color-scheme: dark" in styles[0]
    assert ("meta", {"http-equiv": "refresh", "content": "5"}) in tags
