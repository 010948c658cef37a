"""Name the reasons for which a request is refused, and write the answers."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus

from aiohttp import hdrs

from vramledger.web.response_headers import BareResponse

STATUS = {
    reason: HTTPStatus(status)
    for reason, status in (
        ("password", 401),
        ("certificate", 403),
        ("failures", 429),
        ("busy", 503),
        ("rate", 429),
        ("host", 421),
    )
}
"""The status for each reason of ``vramledger_web_refused_requests_total``."""

_HOST_TEXT = (
    "This server listens on loopback alone and has no passwords: request it as localhost or by its address; "
    "a proxy must send such a Host header."
)


def refusal_response(reason: str, headers: Iterable[tuple[str, str]]) -> BareResponse:
    """Return the answer to a request that is refused, with the headers that every answer carries."""
    status = STATUS[reason]
    realm = [(hdrs.WWW_AUTHENTICATE, 'Basic realm="restricted"')] if status == HTTPStatus.UNAUTHORIZED else []
    return BareResponse(status, [*realm, *headers], _HOST_TEXT if reason == "host" else "")
