"""Set the headers of every response, also of those that aiohttp writes by itself, and the encoding."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus

from aiohttp import hdrs, web
from aiohttp.web_request import BaseRequest

from vramledger.metrics.exposition import gzip_accepted

NO_SNIFFING = ("X-Content-Type-Options", "nosniff")


def takes_gzip(request: BaseRequest) -> bool:
    """Tell whether the client accepts a response that is compressed with gzip."""
    return gzip_accepted(",".join(request.headers.getall(hdrs.ACCEPT_ENCODING, [])))


class BareResponse(web.Response):
    """A response of one line that does not say what we are, and ends its connection.

    For what the application does not see: it sends no signal for a malformed request. An open connection
    would cost the client nothing and us a lot.
    """

    def __init__(self, status: int, headers: Iterable[tuple[str, str]] = (), text: str = "") -> None:
        text = text or HTTPStatus(status).phrase
        super().__init__(status=status, text=f"{text}\n", headers=dict([NO_SNIFFING, *headers]))
        self.force_close()

    async def _prepare_headers(self) -> None:
        await super()._prepare_headers()
        self.headers.popall(hdrs.SERVER, None)
