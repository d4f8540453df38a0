"""Refusals of the HTTP service as problems (RFC 9457): a type, its title, and one sentence.

``ProblemType`` is the table of all types. A detail names what was found, cut to ``MAX_DETAIL``
characters: an error never returns a body.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, unique
from http import HTTPStatus
from typing import Any, Protocol, cast

from pydantic import Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from api.http.schemas import Answer
from eplb.errors import ConfigError, EplbError
from telemetry.state.tasks import Refusal

MAX_DETAIL = 500  # characters
MAX_FOUND = 100  # of a refused value
MEDIA_TYPE = "application/problem+json"
PATH = "/api/v1/problems"  # below which each type is described
BLANK = "about:blank"  # of RFC 9457: no more than the status tells


@unique
class ProblemType(Enum):
    """Every problem that the service answers with: status, title, and what it means."""

    BAD_REQUEST = 400, "Bad request", "the request cannot be read"
    FOREIGN_HOST = (
        400,
        "Host not allowed",
        "the `Host` header is no loopback name, and the deployment has no secret",
    )
    NOT_AUTHENTICATED = 401, "Not authenticated", "no key or token, or a wrong one"
    FOREIGN_ORIGIN = 403, "Sent by another site", "a page of another origin sent the change"
    ROLE_TOO_LOW = 403, "Role too low", "the key has a lower role than the request needs"
    NOT_FOUND = 404, "Not found", "there is no such route, or the service keeps no audit"
    NO_SUCH_DEPLOYMENT = 404, "No such deployment", "the service shows none of this name"
    NO_SUCH_PLACEMENT = 404, "No such placement", "the store holds no placement of this generation"
    NO_SUCH_PROPOSAL = 404, "No such proposal", "the store keeps no proposal of this number"
    NO_SUCH_SIMULATION = (
        404,
        "No such simulation",
        "the service keeps no simulation of this number; it keeps the latest ones since its start",
    )
    NO_SUCH_TASK = 404, "No such task", "the store keeps no task of this number"
    NO_SUCH_EXPERT = 404, "No such expert", "the model has no such layer or expert"
    NO_SUCH_RANK = 404, "No such rank", "the current run has no rank of this number"
    METHOD_NOT_ALLOWED = 405, "Method not allowed", "the route has other methods: see `Allow`"
    NOT_ACCEPTABLE = 406, "Not acceptable", "`Accept` names no format of the load matrix"
    REQUEST_TOO_SLOW = (
        408,
        "Request too slow",
        "its headers and body have not arrived within 10 s; the connection is closed",
    )
    MOVEMENT_OFF = (
        409,
        "Movement is off",
        "the kill switch is off, or `observe` is on; a dry run is possible",
    )
    MIGRATION_OPEN = 409, "A migration is open", "it must commit or abort before the next plan"
    PROPOSAL_ENDED = 409, "Proposal has ended", "it was approved or rejected, or has expired"
    BASE_MOVED_ON = (
        409,
        "Base moved on",
        "another placement was committed since the proposal was made",
    )
    TASK_BEGUN = 409, "Task is not queued", "the controller has begun or ended the task"
    CONTROLLER_REFUSED = (
        409,
        "Refused by the controller",
        "the controller worked on the task and refused it for a reason without a type of its own",
    )
    NO_LOAD = 409, "No load yet", "no complete window of load to plan on: ask again later"
    NO_PLAN = (
        409,
        "No plan",
        "constraints, cordons or ranks that are gone leave no placement that can serve",
    )
    CANNOT_SERVE = (
        409,
        "Placement cannot serve",
        "the target of a rollback or proposal cannot serve on these ranks, or cordons forbid it",
    )
    NOTHING_TO_PROPOSE = 409, "Nothing to propose", "the plan is KEEP; the detail has its reason"
    NOT_PUBLISHED = (
        409,
        "Not published",
        "another plan came first, or the ranks' weights differ in version: ask again",
    )
    IMPOSSIBLE_THROTTLE = (
        409,
        "Impossible throttle",
        "a limit is out of range, or the mode of migrations has no such limit",
    )
    TASK_EXPIRED = 409, "Task expired", "no controller began it within `task_expiry_s`: ask again"
    TASK_ABANDONED = 409, "Task abandoned", "the controller exited during it: ask again"
    TASK_CANCELLED = 409, "Task cancelled", "it was cancelled while it was queued"
    REQUEST_IN_PROGRESS = (
        409,
        "Request in progress",
        "a request with this idempotency key is in progress; see `Retry-After`",
    )
    NO_RUN = 409, "No run", "no run has begun, or its model or topology cannot be read"
    OTHER_SHAPE = (
        409,
        "Another shape",
        "a placement of another model or other ranks than the current run, or a range of load "
        "over runs of several shapes",
    )
    NOT_EXPRESSIBLE = 409, "Not expressible", "the engine's format cannot express the placement"
    IMPOSSIBLE_PIN = (
        409,
        "Impossible pin",
        "the ranks of the current run cannot hold what is pinned; the detail names the pin",
    )
    IMPOSSIBLE_CORDON = (
        409,
        "Impossible cordon",
        "the rank is not alive, or the ranks that may take experts have too few slots for all that "
        "no cordoned rank holds",
    )
    GENERATION_MOVED_ON = (
        412,
        "Another generation serves",
        "it is not the one in `If-Match`",
    )
    SETTINGS_CHANGED = (
        412,
        "Settings were changed",
        "the revision of the live settings is not the one in `If-Match`",
    )
    BODY_TOO_LARGE = 413, "Body too large", "the body is larger than 64 KiB"
    NOT_JSON = 415, "Not JSON", "the body of a change is not `application/json`"
    INVALID_REQUEST = (
        422,
        "Invalid request",
        "a parameter, a header or the body has a value that is not accepted, or an unknown name",
    )
    KEY_REUSED = 422, "Idempotency key reused", "the key was used for another body"
    TOO_MUCH_LOAD = 422, "Too much load", "the load matrix would be larger than its format may be"
    TOO_MANY_FAILED_LOGINS = (
        429,
        "Too many failed logins",
        "ten of this address within a minute; a right key is answered nevertheless",
    )
    NOT_READY = 503, "Not ready", "ranks do not serve, or no controller leads"
    STORE_UNAVAILABLE = 503, "Store unavailable", "the store does not answer or cannot be used"
    TOO_BUSY = (
        503,
        "Too busy",
        "too many requests, event streams, load matrices or simulations are in progress; see "
        "`Retry-After`",
    )
    AUDIT_UNAVAILABLE = (
        503,
        "Audit unavailable",
        "the audit cannot be written, a full disk for example; nothing was changed",
    )
    KEYS_UNAVAILABLE = 503, "Access keys unavailable", "the file of access keys cannot be used"

    def __init__(self, status: int, title: str, meaning: str) -> None:
        self.status, self.title, self.meaning = status, title, meaning

    @property
    def label(self) -> str:
        """The last part of its URI."""
        return self.name.lower().replace("_", "-")

    @property
    def uri(self) -> str:
        """A reference to its description, relative to the service."""
        return f"{PATH}/{self.label}"


RETRY = "Retry-After"
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


class Problem(Answer):
    """A problem (RFC 9457)."""

    type: str = Field(json_schema_extra={"enum": [one.uri for one in ProblemType]})
    title: str
    status: int
    detail: str


class Refused(EplbError):
    """A request that cannot be served."""

    def __init__(self, kind: ProblemType, detail: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(detail)
        self.kind = kind
        self.headers = {} if retry_after_s is None else {RETRY: str(retry_after_s)}


def documented(*kinds: ProblemType) -> dict[int | str, dict[str, Any]]:
    """Document the problems that a route may answer with."""
    titles: dict[int | str, list[str]] = {}
    for kind in kinds:
        titles.setdefault(kind.status, []).append(kind.title)
    return {
        status: {"model": Problem, "description": "; ".join(of_status)}
        for status, of_status in titles.items()
    }


def problem(
    kind: ProblemType, detail: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Make the answer that reports a problem; one that passes by itself has ``Retry-After``."""
    passes = {RETRY: PASSES_S} if kind in PASSING else {}
    return _answer(kind.uri, kind.title, kind.status, detail, passes | dict(headers or {}))


def _answer(
    uri: str, title: str, status: int, detail: str, headers: Mapping[str, str] | None
) -> JSONResponse:
    body = Problem(type=uri, title=title, status=status, detail=_cut(detail))
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


def place_of(request: Request) -> str:
    """Method and path of a request, for a detail."""
    return f"{request.method} {_cut(request.url.path, MAX_FOUND)}"


def _cut(text: str, limit: int = MAX_DETAIL) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _refused(request: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, Refused), "registered for Refused only"
    return problem(exc.kind, str(exc), exc.headers)


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
    error = cast(InvalidRequest, exc).errors()[0]
    where = _cut(".".join(str(part) for part in error["loc"]), MAX_FOUND)
    found = _cut(f", found {error['input']!r}", MAX_FOUND) if error["type"] != "missing" else ""
    detail = f"{where}: {error['msg'][:1].lower()}{error['msg'][1:]}{found}"
    return problem(ProblemType.INVALID_REQUEST, detail)
