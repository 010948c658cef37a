"""Set the headers of every response, also of those that aiohttp writes by itself, and the encoding."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from email.utils import formatdate
from http import HTTPStatus

from aiohttp import hdrs, web
from aiohttp.web import BaseRequest

from vramledger.metrics.exposition import gzip_accepted

NO_SNIFFING = ("X-Content-Type-Options", "nosniff")


_LIST_MAX = 1024
"""The characters of a header with alternatives, of which browsers send 300; longer is absent."""


def read_list(request: BaseRequest, name: str) -> str:
    """Return a header that lists what the client accepts."""
    text = ",".join(request.headers.getall(name, []))
    return text if len(text) <= _LIST_MAX else ""


def takes_gzip(request: BaseRequest) -> bool:
    """Tell whether the client accepts a response that is compressed with gzip."""
    return gzip_accepted(read_list(request, hdrs.ACCEPT_ENCODING))


class BareResponse(web.StreamResponse):
    """A response of one line that does not say what we are, and ends its connection.

    For what the application does not see: it sends no signal for a malformed request. An open connection
    would cost the client nothing and us a lot.
    """

    def __init__(self, status: int, headers: Iterable[tuple[str, str]] = (), text: str = "") -> None:
        super().__init__(status=status, headers=dict([NO_SNIFFING, *headers]))
        self._line = f"{text or HTTPStatus(status).phrase}\n".encode()
        self.force_close()

    async def prepare(self, request: BaseRequest) -> None:
        """Write all of it."""
        fields = {
            **self.headers,
            hdrs.CONTENT_TYPE: "text/plain; charset=utf-8",
            hdrs.CONTENT_LENGTH: str(len(self._line)),
            hdrs.DATE: formatdate(usegmt=True),
            hdrs.CONNECTION: "close",
        }
        lines = [
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}",
            *map(": ".join, fields.items()),
            "",
            "",
        ]
        body = b"" if request.method == hdrs.METH_HEAD else self._line
        if isinstance(request.transport, asyncio.Transport):
            request.transport.write("\r\n".join(lines).encode("utf-8", "surrogateescape") + body)

    async def write_eof(self, data: bytes = b"") -> None:
        """Do nothing: it is written."""
