"""The routes of operations: parameters, OpenAPI, and answers, made from their declarations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass, make_dataclass
from functools import cache
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from api.access.authentication import OPEN
from api.http.problems import ProblemType, Refused
from api.http.refusals import MEDIA_TYPE, ProblemDetails
from api.operations.declaration import (
    IF_MATCH_MEANING,
    JSON,
    REVISION_TAG,
    Call,
    Operation,
    Page,
    Raw,
    header,
)
from eplb.declared import Meaning
from eplb.errors import ConfigError, StaleRevision

if TYPE_CHECKING:
    from fastapi import FastAPI

    from api.http.service import AdminService

OF_SCHEMES = "an access key or the deployment's token, as password; without either: this host alone"
NOT_YET = "Not done yet; see Location"
NEXT = Annotated[
    int | None, Meaning("give as `before` or `after` to continue; null: there are no more")
]


def add_operations(app: FastAPI, operations: Iterable[Operation]) -> None:
    """Add the route of each operation to an application."""
    for one in operations:
        answers: dict[int | str, dict[str, Any]] = {}
        if one.media_types:
            content = {kind: {"schema": schema} for kind, schema in one.media_types.items()}
            answers[200] = {"description": "The answer", "content": content}
        if one.is_task:
            task = resolve_name("api.http.answers:TaskAnswer")
            answers[202] = {"model": task, "description": NOT_YET}
        if any(known["name"] == "If-None-Match" for known in one.headers):
            answers[304] = {"description": "The answer is the one of `If-None-Match`"}
        app.add_api_route(
            one.path,
            _endpoint(one),
            methods=[one.method],
            tags=[one.tag],
            summary=one.summary,
            description=one.description,
            operation_id=one.name,
            status_code=one.status,
            response_model=_answer_type(one),
            response_class=JSONResponse if JSON in (one.media_types or JSON) else Response,
            responses=answers | _documented(one.all_problems),
            openapi_extra={"parameters": _headers(one)},
        )


def correct_document(document: dict[str, Any]) -> None:
    """Add the schema of problems, how a request proves its key, and descriptions of parameters.

    FastAPI makes a model of each response that has one, which takes 0.3 s for all problems.
    """
    document["components"]["schemas"]["Problem"] = adapter(ProblemDetails).json_schema()
    schemes = ("bearer", "basic")
    document["components"]["securitySchemes"] = {
        one: {"type": "http", "scheme": one, "description": OF_SCHEMES} for one in schemes
    }
    document["security"] = [*({one: []} for one in schemes), {}]
    for path, operations in document["paths"].items():
        for operation in operations.values():
            if path in OPEN:
                operation["security"] = []
            for parameter in operation.get("parameters", []):
                if "description" in parameter["schema"]:
                    parameter["description"] = parameter["schema"].pop("description")


def _documented(kinds: Iterable[ProblemType]) -> dict[int | str, dict[str, Any]]:
    """Document the problems that a route may answer with."""
    titles: dict[int | str, list[str]] = {}
    for kind in dict.fromkeys(kinds):
        titles.setdefault(kind.status, []).append(kind.title)
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {
        status: {"description": "; ".join(of_status), "content": content}
        for status, of_status in titles.items()
    }


def _headers(operation: Operation) -> list[Any]:
    found = list(operation.headers)
    if operation.if_match:
        is_required = operation.if_match == "known revision"
        schema = {"type": "string"} | ({"pattern": f"^{REVISION_TAG}$"} if is_required else {})
        about = IF_MATCH_MEANING[operation.if_match]
        found.append(header("if-match", about, schema, is_required=is_required))
    return found


@cache
def _answer_type(operation: Operation) -> Any:
    found = operation.answer_type
    if not operation.page:
        return found
    name = f"{operation.page.capitalize()}Page"
    items: Any = list[found]  # type: ignore[valid-type]
    made = make_dataclass(name, [(operation.page, items), ("next", NEXT)])
    made.__doc__ = f"{operation.summary}."
    return made


@cache  # made for the first answer of its type: a command gets few of them
def adapter(of: Any) -> TypeAdapter[Any]:
    """Give what reads and writes the JSON of a type."""
    return TypeAdapter(of)


def _encoder(operation: Operation) -> Callable[[Any], bytes]:
    """Make the function that writes an answer of an operation as JSON."""
    answer_type = _answer_type(operation)

    def encode(answer: Any) -> bytes:
        if isinstance(answer, Page):
            answer = answer_type(answer.items, answer.next)
        # A task has another type than the answer that it leads to.
        kind: Any = type(answer) if is_dataclass(answer) else answer_type
        return adapter(kind).dump_json(answer)

    return encode


def answer_in_process(service: AdminService, operation: Operation, **values: Any) -> bytes:
    """Answer a question without HTTP; returns the JSON that a request would get."""
    encode = _encoder(operation)
    answer = operation.do(Call(operation, encode, service=service), **values)
    return answer.content if isinstance(answer, Raw) else encode(answer)  # type: ignore[return-value]


def read_answer(operation: Operation, content: bytes) -> Any:
    """Read the JSON of an answer as its type.

    Raises:
        ConfigError: it is not of that type.
    """
    try:
        return adapter(_answer_type(operation)).validate_json(content)
    except ValidationError as exc:
        first = exc.errors()[0]
        raise ConfigError(
            f"the answer to {operation.route} has {'.'.join(map(str, first['loc']))!r}: "
            f"{first['msg']}, expected that of a service of this version of eplb"
        ) from exc


def _endpoint(operation: Operation) -> Callable[..., Any]:
    """Make the function that FastAPI calls for a request."""
    encode = _encoder(operation)

    def response(call: Call, answer: Any) -> Response:
        if isinstance(answer, Response):
            return answer
        raw = answer if isinstance(answer, Raw) else Raw(encode(answer))
        kind = Response if isinstance(raw.content, bytes) else StreamingResponse
        return kind(raw.content, call.status, call.headers, raw.media_type)  # type: ignore[arg-type]

    def run(request: Request, **values: Any) -> Response:
        call = Call(operation, encode, request)
        try:
            return response(call, operation.do(call, **values))
        except StaleRevision as exc:
            raise Refused(operation.stale, str(exc)) from exc

    async def run_on_loop(request: Request, **values: Any) -> Response:
        call = Call(operation, encode, request)
        return response(call, await operation.do(call, **values))

    made: Any = run_on_loop if inspect.iscoroutinefunction(operation.do) else run
    kind = inspect.Parameter.KEYWORD_ONLY
    taken = [inspect.Parameter("request", kind, annotation=Request)]
    for name, one in operation.parameters.items():
        default = inspect.Parameter.empty if one.default is ... else one.default
        taken.append(inspect.Parameter(name, kind, default=default, annotation=one.hint))
    made.__name__, made.__signature__ = operation.name, inspect.Signature(taken)
    return made  # type: ignore[no-any-return]
