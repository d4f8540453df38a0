"""Refusals of the HTTP service as problems (RFC 9457): a type, its title, and one sentence.

A detail names what was found, cut to ``MAX_DETAIL`` characters: an error never returns a body.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import Annotated

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from api.http.problems import RETRY, ProblemType, Refused
from eplb.declared import Meaning, Named
from eplb.errors import ConfigError, EplbError, StaleRevision

MAX_DETAIL = 500  # characters
MAX_FOUND = 100  # characters of a refused value that are shown
MEDIA_TYPE = "application/problem+json"
BLANK = "about:blank"  # RFC 9457: the type says no more than the status
PASSING = frozenset({ProblemType.TOO_BUSY, ProblemType.REQUEST_IN_PROGRESS})
PASSES_S = "1"

OF_STATUS = {  # those of Starlette and FastAPI themselves
    400: ProblemType.BAD_REQUEST,
    404: ProblemType.NOT_FOUND,
    405: ProblemType.METHOD_NOT_ALLOWED,
}


@dataclass(frozen=True)
class ProblemDetails:
    """A problem (RFC 9457)."""

    type: Annotated[
        str, Named("where the type is described", names=tuple(one.uri for one in ProblemType))
    ]
    title: str
    status: int
    detail: Annotated[str, Meaning("what was found, and what was expected")]


def problem(
    kind: ProblemType, detail: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Make the answer that reports a problem; one that passes by itself has ``Retry-After``."""
    passes = {RETRY: PASSES_S} if kind in PASSING else {}
    return _answer(kind.uri, kind.title, kind.status, detail, passes | dict(headers or {}))


def _answer(
    uri: str, title: str, status: int, detail: str, headers: Mapping[str, str] | None
) -> JSONResponse:
    body = ProblemDetails(type=uri, title=title, status=status, detail=_cut(detail))
    return JSONResponse(asdict(body), status, headers, media_type=MEDIA_TYPE)


def report_problems(app: FastAPI) -> None:
    """Have every error of the app answered with a problem."""

    def report(request: Request, exc: Exception) -> Response:
        refusal = refusal_of(request, exc)
        assert refusal is not None, "registered for errors that have one"
        return refusal

    for kind in (EplbError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, report)


def refusal_of(request: Request, exc: Exception) -> JSONResponse | None:
    """Make the answer that reports an error; None: a fault of the service."""
    if isinstance(exc, RequestValidationError):
        return _body_refused(exc)
    if isinstance(exc, HTTPException):
        return _http_refused(request, exc)
    if isinstance(exc, Refused):
        return problem(exc.kind, str(exc))
    if isinstance(exc, StaleRevision):
        return problem(ProblemType.SETTINGS_CHANGED, str(exc))
    if isinstance(exc, ConfigError):
        return problem(ProblemType.INVALID_REQUEST, str(exc))
    if isinstance(exc, EplbError):
        return problem(ProblemType.STORE_UNAVAILABLE, f"{type(exc).__name__}: {exc}")
    return None


def place_of(request: Request) -> str:
    """Method and path of a request, for a detail."""
    return f"{request.method} {_cut(request.url.path, MAX_FOUND)}"


def _cut(text: str, limit: int = MAX_DETAIL) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _http_refused(request: Request, exc: HTTPException) -> JSONResponse:
    detail = f"{place_of(request)}: {exc.detail}"
    headers = exc.headers
    methods = request.app.openapi()["paths"].get(request.url.path)
    if exc.status_code == 405 and methods:  # Starlette names those of the path's first route alone
        headers = {"Allow": ", ".join(sorted(map(str.upper, methods)))}
    kind = OF_STATUS.get(exc.status_code)
    if kind is None:
        phrase = HTTPStatus(exc.status_code).phrase
        return _answer(BLANK, phrase, exc.status_code, detail, headers)
    return problem(kind, detail, headers)


def _body_refused(exc: RequestValidationError) -> JSONResponse:
    error = exc.errors()[0]
    if error["loc"] == ("header", "if-match"):
        tag = error["input"] if error["type"] != "missing" else ""
        if not tag:  # RFC 6585
            why = "found no If-Match, expected the ETag of GET, or *"
            return problem(ProblemType.PRECONDITION_REQUIRED, why)
        why = f'header.if-match: found {tag[:40]!r}, expected the ETag of GET, as "7", or *'
        return problem(ProblemType.INVALID_REQUEST, why)
    where = _cut(".".join(str(part) for part in error["loc"]), MAX_FOUND)
    found = _cut(f", found {error['input']!r}", MAX_FOUND) if error["type"] != "missing" else ""
    detail = f"{where}: {error['msg'][:1].lower()}{error['msg'][1:]}{found}"
    return problem(ProblemType.INVALID_REQUEST, detail)
