"""Refusals of the HTTP service as problems (RFC 9457): a type, its title, and one sentence.

A detail names what was found, cut to ``MAX_DETAIL`` characters: an error never returns a body.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import Annotated, Any, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from api.http.problems import RETRY, ProblemType, Refused
from eplb.declared import Meaning, Named
from eplb.errors import ConfigError, EplbError
from telemetry.state.tasks import Refusal

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


# Refusals of the controller whose problem has another name than the reason.
_RENAMED = {
    Refusal.EXPIRED: ProblemType.TASK_EXPIRED,
    Refusal.ABANDONED: ProblemType.TASK_ABANDONED,
    Refusal.CANCELLED: ProblemType.TASK_CANCELLED,
}
OF_REFUSAL = {one.value: _RENAMED.get(one) or ProblemType[one.name] for one in Refusal}


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


def report_problems(app: Starlette, invalid: type[Exception]) -> None:
    """Have every error of the app answered with a problem.

    Args:
        app: a FastAPI application.
        invalid: FastAPI's exception for a request that does not fit its route; FastAPI is not
            imported here, because a command makes problems too.
    """
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(ConfigError, _value_refused)
    app.add_exception_handler(EplbError, _store_failed)
    app.add_exception_handler(invalid, _body_refused)
    app.add_exception_handler(HTTPException, _http_refused)


def place_of(request: Request) -> str:
    """Method and path of a request, for a detail."""
    return f"{request.method} {_cut(request.url.path, MAX_FOUND)}"


def _cut(text: str, limit: int = MAX_DETAIL) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _refused(request: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, Refused), "registered for Refused only"
    return problem(exc.kind, str(exc))


def _value_refused(request: Request, exc: Exception) -> JSONResponse:
    return problem(ProblemType.INVALID_REQUEST, str(exc))


def _store_failed(request: Request, exc: Exception) -> JSONResponse:
    return problem(ProblemType.STORE_UNAVAILABLE, f"{type(exc).__name__}: {exc}")


def _http_refused(request: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, HTTPException), "registered for HTTPException only"
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


def _body_refused(request: Request, exc: Exception) -> JSONResponse:
    error = cast(Any, exc).errors()[0]
    where = _cut(".".join(str(part) for part in error["loc"]), MAX_FOUND)
    found = _cut(f", found {error['input']!r}", MAX_FOUND) if error["type"] != "missing" else ""
    detail = f"{where}: {error['msg'][:1].lower()}{error['msg'][1:]}{found}"
    return problem(ProblemType.INVALID_REQUEST, detail)
