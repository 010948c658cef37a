"""The files of the live page and the runbooks: what a browser may cache, load and run."""

import gzip
import re
import socket
from pathlib import Path
from urllib.parse import urljoin

import pytest
from msgspec.structs import replace

from tests.support.builders import Shown, crowd
from tests.support.serving import LOOPBACK, Answer, Client, served
from vramledger import __version__
from vramledger.config import Config, SamplingConfig
from vramledger.web import page

FOLDER = Path(page.__file__).with_name("page")
LINKS = re.compile(r'(?:href|src)="([^"#]+)"')


async def asked(*paths: str, config: Config = LOOPBACK, **headers: str) -> list[Answer]:
    async with served(Shown(crowd(1, 1)), config) as client:
        return [await client.ask(path, **headers) for path in paths]


async def everything(client: Client, **headers: str) -> dict[str, Answer]:
    """Get the page and each file that it names, by path."""
    first = await client.ask("/", **headers)
    text = gzip.decompress(first.body).decode() if headers else first.text
    files = [link for link in LINKS.findall(text) if link.startswith("page/")]
    return {"/": first, **{link: await client.ask(f"/{link}", **headers) for link in files}}


async def test_every_file_that_the_page_names_is_there_and_kept() -> None:
    """Each file of the page exists, can be cached for ever, and has the policy and its type."""
    kinds = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg", "": "text/html"}
    async with served(Shown(crowd(1, 1))) as client:
        found = await everything(client)
    assert {Path(path).name for path in found if path != "/"} >= {
        path.name for path in FOLDER.iterdir() if path.suffix in (".js", ".css", ".svg")
    }
    for path, answer in found.items():
        assert answer.status == 200, path
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Content-Security-Policy"] == page.CONTENT_SECURITY_POLICY
        kept = "no-cache" if path == "/" else "public, max-age=31536000, immutable"
        assert answer.headers["Cache-Control"] == kept
        assert answer.headers["Content-Type"].startswith(kinds[Path(path).suffix])


def test_the_policy_forbids_what_is_inline_and_what_is_elsewhere() -> None:
    """Only our own sources, no frame, no form, and no text that becomes markup."""
    assert "default-src 'none'" in page.CONTENT_SECURITY_POLICY
    assert not re.search("unsafe|http", page.CONTENT_SECURITY_POLICY)
    assert "require-trusted-types-for 'script'" in page.CONTENT_SECURITY_POLICY


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.iterdir() if path.suffix != ".svg"))
def test_the_files_keep_to_the_policy(name: str) -> None:
    """Nothing is loaded from elsewhere, nothing is inline, and text never becomes markup."""
    text = (FOLDER / name).read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")

    assert not re.search(r"https?://|//[a-z]+\.", text)
    assert not re.search(r"(inn|out)erHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script>", text)


@pytest.mark.parametrize("path", ["/", "/runbooks/GpuMemoryDead"])
async def test_a_file_that_has_not_changed_is_not_sent_again(path: str) -> None:
    """With the tag of a cached file a browser gets 304; for another encoding or version it gets the file."""
    async with served(Shown(crowd(1, 1))) as client:
        first = await client.ask(path)
        tag = first.headers["ETag"]
        assert (await client.ask(path, If_None_Match=tag)).status == 304
        assert (await client.ask(path, If_None_Match=f'"other", W/{tag}')).status == 304
        packed = await client.ask(path, If_None_Match=tag, Accept_Encoding="gzip")
        assert (packed.status, gzip.decompress(packed.body)) == (200, first.body)


async def test_all_of_it_is_small() -> None:
    """The page with all its files is below 150 kB on the wire, with room for a first event."""
    async with served(Shown(crowd(1, 1))) as client:
        found = await everything(client, Accept_Encoding="gzip")
    assert sum(len(answer.body) for answer in found.values()) < 100_000


async def test_the_page_names_itself_and_links_to_the_rest() -> None:
    """Version and links are right; links are relative, so that a proxy may serve the page anywhere."""
    (answer,) = await asked("/", config=replace(LOOPBACK, telemetry_path="/gpu"))

    links = [link for link in LINKS.findall(answer.text) if not link.startswith("page/")]
    assert links == ["gpu", "api/v1/ledger", "runbooks/", "-/ready", "api/v1/ledger"]
    assert f"<small>{__version__}</small>" in answer.text


@pytest.mark.parametrize(
    ("file", "shown"),
    [("node-7\n", "node-7"), ("<b>\n", "&lt;b&gt;"), ("", None), (None, None), ("\xff", None)],
)
async def test_title_and_heading_name_the_host(tmp_path: Path, file: str | None, shown: str | None) -> None:
    """Each of ten open pages says whose it is: the host's own name, in a container too."""
    (tmp_path / "etc").mkdir()
    if file is not None:
        (tmp_path / "etc/hostname").write_text(file, encoding="latin-1")
    (answer,) = await asked("/", config=replace(LOOPBACK, sampling=SamplingConfig(rootfs=tmp_path)))
    name = shown or socket.gethostname()

    assert f"<title>{name} · vramledger</title>" in answer.text
    assert f'<small class="host">{name}</small>' in answer.text


async def test_without_the_page_its_paths_are_not_there() -> None:
    """``--no-web.page`` leaves the metrics and the JSON, and neither page nor stream."""
    documents = ("/api/v1/ledger", "/api/v1/history", "/api/v1/leftovers")
    paths = ("/", "/api/v1/events", "/metrics", *documents)
    found = await asked(*paths, config=replace(LOOPBACK, page=False))
    assert [answer.status for answer in found] == [404, 404, 200, 200, 200, 200]


async def test_nothing_else_is_served() -> None:
    """A path that is neither a file of this version nor a runbook does not exist."""
    files = ("other/app.js", "%2e%2e/page.py", "x/..%2f..%2fapp.py")
    pages = ("Other", "..%2fpage.py", "GpuMemoryDead.html")
    found = await asked(*(f"/page/{each}" for each in files), *(f"/runbooks/{each}" for each in pages))
    assert [answer.status for answer in found] == [404] * 6


NAMES = sorted(path.stem for path in FOLDER.with_name("runbooks").glob("*.html"))


async def test_each_runbook_is_served_with_the_policy_of_the_page() -> None:
    """A runbook's own text is served as HTML, with the headers that forbid other sources."""
    for name, answer in zip(NAMES, await asked(*(f"/runbooks/{name}" for name in NAMES)), strict=True):
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
async def test_every_link_leads_somewhere(config: Config) -> None:
    """Files, other runbooks, the way back and the metrics work, with and without the live page."""
    async with served(Shown(crowd(1, 1)), config) as client:
        found = {path: await client.ask(path) for path in ["/runbooks/", *(f"/runbooks/{n}" for n in NAMES)]}
        linked = {urljoin(path, link) for path, each in found.items() for link in LINKS.findall(each.text)}
        broken = [path for path in sorted(linked) if (await client.ask(path)).status != 200]
    assert broken == []
    assert {f"/runbooks/{name}" for name in NAMES} - {"/runbooks/index"} <= linked


async def test_the_index_is_at_the_folder() -> None:
    """/runbooks redirects to /runbooks/, by a relative path, and that page lists all runbooks."""
    short, index = await asked("/runbooks", "/runbooks/")

    assert (short.status, short.headers["Location"]) == (308, "runbooks/")
    assert len(re.findall("<li>", index.text)) == len(NAMES) - 1
