"""Set the headers of every response, also of those that aiohttp writes by itself, and the encoding."""

from __future__ import annotations

from http import HTTPStatus

from aiohttp import hdrs, web, web_protocol, web_server
from aiohttp.web_request import BaseRequest

from vramledger.metrics.exposition import gzip_accepted

NO_SNIFFING = ("X-Content-Type-Options", "nosniff")


def takes_gzip(request: BaseRequest) -> bool:
    """Tell whether the client accepts a response that is compressed with gzip."""
    return gzip_accepted(",".join(request.headers.getall(hdrs.ACCEPT_ENCODING, [])))


class _ErrorResponse(web.Response):
    """A response without a Server header; for a malformed request the application sends no signal."""

    async def _prepare_headers(self) -> None:
        await super()._prepare_headers()
        self.headers.popall(hdrs.SERVER, None)


class _HttpProtocol(web_protocol.RequestHandler):  # type: ignore[type-arg, unused-ignore]
    """One connection; its answers to protocol errors do not reveal what we are."""

    def handle_error(
        self,
        request: BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        super().handle_error(
            request, status, exc, message
        )  # this call logs, and raises when a response has begun
        text = f"{HTTPStatus(status).phrase}\n"
        response = _ErrorResponse(status=status, text=text, headers=dict([NO_SNIFFING]))
        response.force_close()
        return response


web_server.RequestHandler = _HttpProtocol  # type: ignore[misc, attr-defined, unused-ignore]
"""The server makes its connections by this name, and a class cannot be given to it in another way."""
