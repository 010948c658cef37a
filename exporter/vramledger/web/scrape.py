"""Answer scrapes on the telemetry path, from headers and query to the bytes of the answer."""

from __future__ import annotations

from typing import NamedTuple

from aiohttp import web
from aiohttp.helpers import rfc822_formatted_time

from vramledger.config import Config
from vramledger.errors import UsageError
from vramledger.logs import log
from vramledger.metrics.exposition import Exposition, ScrapeRequest, negotiate_format, select_collectors
from vramledger.web.render_cache import RenderCache
from vramledger.web.request_limiter import RequestLimiter
from vramledger.web.response_headers import NO_SNIFFING, takes_gzip
from vramledger.web.services import AppServices

_NO_SNIFFING = b"%b: %b\r\n" % tuple(each.encode() for each in NO_SNIFFING)


class Scrape:
    """Answer GET and HEAD on the telemetry path from the newest snapshot, never waiting for a GPU."""

    def __init__(
        self, config: Config, services: AppServices, exposition: Exposition, render_cache: RenderCache
    ) -> None:
        self._config = config
        self._services = services
        self._exposition = exposition
        self._render_cache = render_cache
        self._limiter = RequestLimiter(config.max_requests)

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Serve one scrape; 503 above ``--web.max-requests`` at the same time, 400 for wrong filters."""
        return await self._limiter.serve(request, self._respond)

    def answer_again(self, scrape: RepeatedScrape) -> bytes | None:
        """Return the whole answer to a GET that comes again; None if it cannot be made at once.

        What may fail is left to :meth:`serve`, which reports it.
        """
        if self._limiter.full:
            return None
        wanted, snapshot = scrape.wanted, self._services.snapshot
        try:
            body = self._render_cache.at_once(
                snapshot, wanted, lambda: self._exposition.render(snapshot, wanted)
            )
        except Exception as error:  # noqa: BLE001 see above
            log.debug("Cannot answer at once", exc_info=error)
            return None
        if body is None:
            return None
        head = b"%bContent-Length: %d\r\nDate: %b\r\n%b\r\n" % (
            scrape.head,
            len(body),
            rfc822_formatted_time().encode(),
            _NO_SNIFFING,
        )
        return head + body

    async def _respond(self, request: web.Request) -> web.Response:
        query = request.query
        try:
            selected = select_collectors(
                self._config, query.getall("collect[]", []), query.getall("exclude[]", [])
            )
        except UsageError as error:
            return web.Response(status=400, text=f"{error}\n")
        exposition_format = negotiate_format(",".join(request.headers.getall("Accept", [])))
        wanted = ScrapeRequest(
            collectors=selected,
            names=frozenset(query.getall("name[]")) if "name[]" in query else None,
            openmetrics=exposition_format.openmetrics,
            compressed=takes_gzip(request),
        )
        snapshot = self._services.snapshot
        page = await self._render_cache.share(
            snapshot, wanted, lambda: self._exposition.render(snapshot, wanted)
        )
        return ScrapePage(page, wanted, exposition_format.content_type)


class RepeatedScrape(NamedTuple):
    """A scrape that may come again.

    Attributes:
        wanted: what was requested.
        head: the beginning of the answer to a GET of HTTP/1.1, up to the headers that every answer has.
    """

    wanted: ScrapeRequest
    head: bytes


class ScrapePage(web.Response):
    """The answer to a scrape, and what is needed to answer it again."""

    def __init__(self, page: bytes, wanted: ScrapeRequest, content_type: str) -> None:
        headers = {"Content-Type": content_type, "Vary": "Accept, Accept-Encoding"}
        if wanted.compressed:
            headers["Content-Encoding"] = "gzip"
        super().__init__(body=page, headers=headers)
        lines = ("HTTP/1.1 200 OK", *map(": ".join, headers.items()), "")
        self.repeated = RepeatedScrape(wanted, "\r\n".join(lines).encode())
