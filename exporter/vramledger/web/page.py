"""Serve the runbooks, and the files of the live page: read once, compressed, and never changed.

All files but the first are in a folder that is named by the content of them all. So a browser can keep them
for ever and still never mixes two versions. Paths in them are relative: a proxy may serve the page under any
path.
"""

from __future__ import annotations

import gzip
import hashlib
import socket
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path

from aiohttp import hdrs, web
from msgspec import Struct

from vramledger import __version__
from vramledger.views.colours import PARTS
from vramledger.web.response_headers import read_list, takes_gzip

_FOLDER = Path(__file__).parent / "page"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
"""Nothing inline, nothing from another site, no frame, no text that becomes markup."""

_SECURITY_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class PageFile(Struct, frozen=True):
    """One file, ready to be sent."""

    content_type: str
    body: bytes
    packed: bytes
    etag: str

    @classmethod
    def from_body(cls, name: str, body: bytes) -> PageFile:
        """Compress a file; the suffix of its name gives its type."""
        packed = gzip.compress(body, 9, mtime=0)
        return cls(_TYPES[Path(name).suffix], body, packed, hashlib.sha256(body).hexdigest()[:16])


class Page:
    """The page at ``/`` and its files, which the runbooks use too."""

    def __init__(self, telemetry_path: str, *, live: bool, host: str) -> None:
        """Read the files; pages link to ``telemetry_path`` and name ``host``."""
        found = {path.name: path.read_bytes() for path in sorted(_FOLDER.iterdir()) if path.suffix in _TYPES}
        found["colours.css"] = "\n".join(_colour_rules()).encode()
        index, self._runbook = found.pop("index.html").decode(), found.pop("runbook.html").decode()
        digest = hashlib.sha256(b"".join(name.encode() + body for name, body in sorted(found.items())))
        self.folder = digest.hexdigest()[:16]
        self._files: Mapping[str, PageFile] = {
            name: PageFile.from_body(name, body) for name, body in found.items()
        }
        metrics = telemetry_path.lstrip("/")
        self._texts = {
            "FILES": f"page/{self.folder}",
            "VERSION": __version__,
            "HOST": host,
            "METRICS": metrics,
            "HOME": "" if live else metrics,
        }
        self._index = PageFile.from_body("index.html", self._fill(index).encode())

    def _fill(self, shell: str) -> str:
        for mark, text in self._texts.items():
            shell = shell.replace(f"@{mark}@", escape(text))
        return shell

    def runbook(self, title: str, body: str) -> PageFile:
        """Return the page of a runbook, whose ``body`` is HTML."""
        filled = self._fill(self._runbook).replace("@TITLE@", escape(title)).replace("@BODY@", body)
        return PageFile.from_body("runbook.html", filled.encode())

    async def serve_index(self, request: web.Request) -> web.Response:
        """Serve the page itself, which the browser requests again each time."""
        return respond(request, self._index, "no-cache")

    async def serve_file(self, request: web.Request) -> web.Response:
        """Serve one of the page's files."""
        found = self._files.get(request.match_info["name"])
        if found is None or request.match_info["folder"] != self.folder:
            raise web.HTTPNotFound
        return respond(request, found, "public, max-age=31536000, immutable")


def read_host_name(rootfs: Path) -> str:
    """Return the name of the host with this root file system; in a container our own name is another one."""
    try:
        words = (rootfs / "etc/hostname").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        words = []
    return words[0] if words else socket.gethostname()


def respond(request: web.Request, file: PageFile, cache: str) -> web.Response:
    """Send a file, or 304 to a browser that has it; ``cache`` is how long it may be kept."""
    packed = takes_gzip(request)
    tag = f'"{file.etag}{"-gz" if packed else ""}"'
    headers = {**_SECURITY_HEADERS, "ETag": tag, "Cache-Control": cache, "Vary": "Accept-Encoding"}
    if tag in [each.strip().removeprefix("W/") for each in read_list(request, hdrs.IF_NONE_MATCH).split(",")]:
        return web.Response(status=304, headers=headers)
    headers["Content-Type"] = file.content_type
    if packed:
        headers["Content-Encoding"] = "gzip"
    return web.Response(body=file.packed if packed else file.body, headers=headers)


def _colour_rules() -> Iterator[str]:
    """Yield the parts' colours as style rules, for both themes: the reader's choice or the system's."""
    light = " ".join(f"--{part}: {style.light};" for part, style in PARTS.items())
    dark = " ".join(f"--{part}: {style.dark};" for part, style in PARTS.items())
    yield f":root {{ {light} }}"
    yield f"@media (prefers-color-scheme: dark) {{ :root:not([data-theme=light]) {{ {dark} }} }}"
    yield f":root[data-theme=dark] {{ {dark} }}"
    for part, style in PARTS.items():
        yield f".part-{part} {{ --part: var(--{part}); --texture: var(--texture-{style.texture}); }}"


_RUNBOOKS = Path(__file__).parent / "runbooks"
"""Their texts, written there from the Markdown beside the alerts' rules; links in them are relative, too."""

_INDEX = "index"


class Runbooks:
    """The runbooks and their index; a page is built on request, because requests are rare."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._bodies = {path.stem: path.read_text(encoding="utf-8") for path in _RUNBOOKS.glob("*.html")}

    async def redirect(self, _: web.Request) -> web.Response:
        """Redirect a browser to the index, whose links are relative to its folder."""
        return web.Response(status=308, headers={"Location": "runbooks/"})

    async def serve(self, request: web.Request) -> web.Response:
        """Serve the runbook that the path names, or the index."""
        name = request.match_info.get("name", _INDEX)
        if name not in self._bodies:  # rules may give each name a prefix
            name = next((each for each in self._bodies if name.endswith(each)), name)
        body = self._bodies.get(name)
        if body is None:
            raise web.HTTPNotFound
        title = "Runbooks" if name == _INDEX else name
        return respond(request, self._page.runbook(title, body), "no-cache")
