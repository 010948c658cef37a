"""What every answer has in common, also those that aiohttp gives by itself."""

from __future__ import annotations

from http import HTTPStatus

from aiohttp import hdrs, web, web_protocol, web_server
from aiohttp.web_request import BaseRequest

NO_SNIFFING = ("X-Content-Type-Options", "nosniff")


class _Bare(web.Response):
    """An answer without a Server header; to malformed requests none of the application's signals is sent."""

    async def _prepare_headers(self) -> None:
        await super()._prepare_headers()
        self.headers.popall(hdrs.SERVER, None)


class _Protocol(web_protocol.RequestHandler):  # type: ignore[type-arg, unused-ignore]
    """One connection; answers errors of the protocol without a word about what we are."""

    def handle_error(
        self,
        request: BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        super().handle_error(request, status, exc, message)  # it logs, and raises when an answer has begun
        text = f"{HTTPStatus(status).phrase}\n"
        answer = _Bare(status=status, text=text, headers=dict([NO_SNIFFING]))
        answer.force_close()
        return answer


web_server.RequestHandler = _Protocol  # type: ignore[misc, attr-defined, unused-ignore]
# The server makes its connections by this name, and has no other way to be given a class.
