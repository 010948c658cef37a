"""Write a refusal: the same whether aiohttp writes it or we do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from email.utils import formatdate
from http import HTTPStatus

from aiohttp import hdrs, web

STATUS = {
    reason: HTTPStatus(status)
    for reason, status in (
        ("password", 401),
        ("certificate", 403),
        ("failures", 429),
        ("busy", 503),
        ("rate", 429),
    )
}
"""The status for each reason of ``vramledger_web_refused_requests_total``."""

_REALM = 'Basic realm="restricted"'


def refusal_response(status: HTTPStatus) -> web.Response:
    """Return a refusal for aiohttp to write, the last answer on its connection.

    An open connection would cost the client nothing and us a lot: Python's garbage collection over the
    objects of five thousand such connections stopped everything for 0.6 s.
    """
    answer = web.Response(status=status, text=_body_text(status))
    if status == HTTPStatus.UNAUTHORIZED:
        answer.headers[hdrs.WWW_AUTHENTICATE] = _REALM
    answer.force_close()
    return answer


class RefusalBytes:
    """Keep refusals as bytes, the same as aiohttp makes of :func:`refusal_response`.

    Written once a second.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """Take the time, in Unix seconds, from ``clock``."""
        self._clock = clock
        self._cached: dict[tuple[HTTPStatus, bool], bytes] = {}
        self._made_from: tuple[int, list[tuple[str, str]]] = (0, [])

    def get(self, status: HTTPStatus, extra: Iterable[tuple[str, str]], *, last: bool) -> bytes:
        """Return the whole answer to a GET.

        Args:
            status: the status of the answer.
            extra: headers that every answer carries.
            last: whether the connection ends with it.
        """
        made_from = int(self._clock()), list(extra)
        if made_from != self._made_from:
            self._made_from, self._cached = made_from, {}
        answer = self._cached.get((status, last))
        if answer is None:
            answer = self._cached[status, last] = _response_bytes(status, *made_from, last=last)
        return answer


def _body_text(status: HTTPStatus) -> str:
    return f"{status.phrase}\n"


def _response_bytes(
    status: HTTPStatus, second: int, extra: Iterable[tuple[str, str]], *, last: bool
) -> bytes:
    body = _body_text(status)
    headers: dict[str, str] = {hdrs.CONTENT_TYPE: "text/plain; charset=utf-8"}
    if status == HTTPStatus.UNAUTHORIZED:
        headers[hdrs.WWW_AUTHENTICATE] = _REALM
    headers[hdrs.CONTENT_LENGTH] = str(len(body))
    headers[hdrs.DATE] = formatdate(second, usegmt=True)
    if last:
        headers[hdrs.CONNECTION] = "close"
    for name, value in extra:
        headers.setdefault(name, value)
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status.value} {status.phrase}\r\n{lines}\r\n{body}".encode()
