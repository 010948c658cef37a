"""Serve the runbooks of the alerts at ``/runbooks/NAME``: what an alert means and what to do first.

Their text is in runbooks/, written there from the Markdown beside the alerts' rules. Links in them are
relative, as those of the live page are.
"""

from __future__ import annotations

from pathlib import Path

from aiohttp import web

from vramledger.web.page import Page, respond

_FOLDER = Path(__file__).parent / "runbooks"
_INDEX = "index"


class Runbooks:
    """The runbooks and their index; a page is built on request, because requests are rare."""

    def __init__(self, page: Page) -> None:
        """Read the texts; ``page`` gives them their frame."""
        self._page = page
        self._bodies = {path.stem: path.read_text(encoding="utf-8") for path in _FOLDER.glob("*.html")}

    async def redirect(self, _: web.Request) -> web.Response:
        """Redirect a browser to the index, whose links are relative to its folder."""
        return web.Response(status=308, headers={"Location": "runbooks/"})

    async def serve(self, request: web.Request) -> web.Response:
        """Serve the runbook that the path names, or the index."""
        name = request.match_info.get("name", _INDEX)
        body = self._bodies.get(name)
        if body is None:
            raise web.HTTPNotFound
        title = "Runbooks" if name == _INDEX else name
        return respond(request, self._page.runbook(title, body), "no-cache")
