"""The OpenAPI document: refusals of each route, how a request proves its key, descriptions."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from api.http.authentication import OPEN
from api.http.problems import V1, ProblemType
from api.http.refusals import MEDIA_TYPE, ProblemDetails

OF_SCHEMES = "an access key or the deployment's token, as password; without either: this host alone"
OF_ALL = (
    ProblemType.BAD_REQUEST,
    ProblemType.FOREIGN_HOST,
    ProblemType.NO_SUCH_DEPLOYMENT,
    ProblemType.REQUEST_TOO_SLOW,
    ProblemType.INVALID_REQUEST,
)
OF_KEYS = (ProblemType.NOT_AUTHENTICATED, ProblemType.TOO_MANY_FAILED_LOGINS)
OF_STORE = (ProblemType.STORE_UNAVAILABLE, ProblemType.TOO_BUSY, ProblemType.KEYS_UNAVAILABLE)
OF_CHANGES = (
    ProblemType.FOREIGN_ORIGIN,
    ProblemType.ROLE_TOO_LOW,
    ProblemType.BODY_TOO_LARGE,
    ProblemType.NOT_JSON,
    ProblemType.KEY_REUSED,
    ProblemType.AUDIT_UNAVAILABLE,
)

Responses = dict[int | str, dict[str, Any]]


def refused_with(*kinds: ProblemType) -> Responses:
    """Document refusals of a route beside those that every route of its kind has."""
    titles: dict[int | str, list[str]] = {}
    for kind in dict.fromkeys(kinds):
        titles.setdefault(kind.status, []).append(kind.title)
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {
        status: {"description": "; ".join(of_status), "content": content}
        for status, of_status in titles.items()
    }


def answered_as(schemas: Mapping[str, Mapping[str, Any]]) -> Responses:
    """Document an answer that is a file, by its media types, each with its JSON schema."""
    content = {kind: {"schema": schema} for kind, schema in schemas.items()}
    return {200: {"description": "The answer", "content": content}}


def correct_document(document: dict[str, Any]) -> None:
    """Add what FastAPI does not know or would say otherwise.

    FastAPI makes a model of each response that has one, which takes 0.3 s for all problems.
    """
    document["components"]["schemas"]["Problem"] = TypeAdapter(ProblemDetails).json_schema()
    schemes = ("bearer", "basic")
    document["components"]["securitySchemes"] = {
        scheme: {"type": "http", "scheme": scheme, "description": OF_SCHEMES} for scheme in schemes
    }
    document["security"] = [*({scheme: []} for scheme in schemes), {}]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if path in OPEN:
                operation["security"] = []
            summary, description = sentences_of(operation["description"])
            operation["summary"], operation["description"] = summary.removesuffix("."), description
            for parameter in operation.get("parameters", []):
                _describe(parameter)
            _add_refusals(operation["responses"], path, method)


def sentences_of(docstring: str) -> tuple[str, str]:
    """Return the first sentence of a docstring, and the others."""
    text = " ".join(inspect.cleandoc(docstring).split())
    first = re.match(r"(.+?[.?])(?: (.+))?$", text)
    assert first is not None, f"{text!r} is made of whole sentences"
    return first[1], first[2] or ""


def _describe(parameter: dict[str, Any]) -> None:
    """Have a description beside the schema, where readers look for it."""
    schema = parameter["schema"]
    if "description" in schema:
        parameter["description"] = schema.pop("description")
    if parameter["in"] == "header":
        schema.pop("title", None)
        schema.pop("default", None)


def _add_refusals(responses: dict[str, Any], path: str, method: str) -> None:
    common: tuple[ProblemType, ...] = OF_ALL
    if path.startswith(V1):
        common += OF_KEYS + OF_STORE
    if method != "get":
        common += OF_CHANGES
    last = (ProblemType.REQUEST_IN_PROGRESS,) if method == "post" else ()
    for status, response in refused_with(*common, *last).items():
        known = responses.get(str(status), {"description": ""})["description"]
        titles = [kind.title for kind in common if kind.status == status]
        titles += [title for title in known.split("; ") if title]
        titles += [kind.title for kind in last if kind.status == status]
        responses[str(status)] = response | {"description": "; ".join(dict.fromkeys(titles))}
