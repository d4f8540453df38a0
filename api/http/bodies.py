"""Requests that are refused by their framing and by the depth of their JSON, before a handler.

A body that is nested deep ends a handler with a RecursionError. A request with both a length and
chunks may be two requests to one that stands between (RFC 9112, 6.1).
"""

from __future__ import annotations

import logging

from starlette.datastructures import Headers

from api.http.problems import ProblemType
from eplb.core.bounded_json import check_depth

CLOSES = {"connection": "close"}
log = logging.getLogger(__name__)


def framing_refusal(headers: Headers) -> tuple[ProblemType, str] | None:
    """Return why the end of a request is not certain; its connection closes after the answer."""
    if "transfer-encoding" in headers and "content-length" in headers:
        detail = "both Content-Length and Transfer-Encoding, expected one of them"
        return ProblemType.BAD_REQUEST, detail
    return None


def depth_refusal(body: bytes, place: str) -> tuple[ProblemType, str] | None:
    """Return why a body is not parsed, which is one line of the log."""
    try:
        check_depth(body.decode(errors="replace"))
    except ValueError as exc:
        log.warning("%s: a body is refused: %s", place, exc)
        return ProblemType.BAD_REQUEST, str(exc)
    return None
