"""Refusals of the HTTP service as problems (RFC 9457): a status, a title and one sentence.

A detail names what was found, cut to ``MAX_DETAIL`` characters: an error never returns a body.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from api.http.schemas import Problem
from api.http.service import Refused
from eplb.errors import ConfigError, EplbError

MAX_DETAIL = 500  # characters
MAX_FOUND = 100  # of a refused value
MEDIA_TYPE = "application/problem+json"
TITLES = {
    400: "Bad request",
    401: "Not authenticated",
    403: "Forbidden",
    404: "Not found",
    405: "Method not allowed",
    406: "Not acceptable",
    409: "Conflict",
    412: "Precondition failed",
    413: "Body too large",
    415: "Unsupported media type",
    422: "Request refused",
    429: "Too many failed logins",
    503: "Not ready",
}


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Document the problems that a route may answer with."""
    return {status: {"model": Problem, "description": TITLES[status]} for status in statuses}


def problem(status: int, detail: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Make the answer that reports a problem."""
    body = Problem(title=TITLES.get(status, "Refused"), status=status, detail=_cut(detail))
    return JSONResponse(body.model_dump(), status, headers, media_type=MEDIA_TYPE)


class InvalidRequest(Protocol):
    """What FastAPI raises for a request that does not fit its route."""

    def errors(self) -> Sequence[Any]:
        """Describe each part that does not fit."""


def report_problems(app: Starlette, invalid: type[Exception]) -> None:
    """Have every error of the app answered with a problem.

    Args:
        app: a FastAPI application.
        invalid: FastAPI's exception for a request that does not fit its route; an InvalidRequest.
    """
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(ConfigError, _value_refused)
    app.add_exception_handler(EplbError, _store_failed)
    app.add_exception_handler(invalid, _body_refused)
    app.add_exception_handler(HTTPException, _http_refused)


def correct_media_types(schema: dict[str, Any]) -> None:
    """Document problems under the media type that they are sent with; FastAPI assumes JSON."""
    for operations in schema["paths"].values():
        for operation in operations.values():
            for status, response in operation["responses"].items():
                if int(status) >= 400:
                    (body,) = response["content"].values()
                    response["content"] = {MEDIA_TYPE: body}


def _cut(text: str, limit: int = MAX_DETAIL) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _refused(request: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, Refused), "registered for Refused only"
    return problem(exc.status, str(exc))


def _value_refused(request: Request, exc: Exception) -> JSONResponse:
    return problem(422, str(exc))


def _store_failed(request: Request, exc: Exception) -> JSONResponse:
    return problem(503, f"{type(exc).__name__}: {exc}")


def _http_refused(request: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, HTTPException), "registered for HTTPException only"
    place = f"{request.method} {_cut(request.url.path, MAX_FOUND)}"
    headers = exc.headers
    methods = request.app.openapi()["paths"].get(request.url.path)
    if exc.status_code == 405 and methods:  # Starlette names those of the path's first route alone
        headers = {"Allow": ", ".join(sorted(map(str.upper, methods)))}
    return problem(exc.status_code, f"{place}: {exc.detail}", headers)


def _body_refused(request: Request, exc: Exception) -> JSONResponse:
    error = cast(InvalidRequest, exc).errors()[0]
    where = _cut(".".join(str(part) for part in error["loc"]), MAX_FOUND)
    found = _cut(f", found {error['input']!r}", MAX_FOUND) if error["type"] != "missing" else ""
    return problem(422, f"{where}: {error['msg'][:1].lower()}{error['msg'][1:]}{found}")
