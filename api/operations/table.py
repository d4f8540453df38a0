"""Every route of the admin API, and how an answer is had without HTTP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Response
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError

from api.http.service import AdminService
from api.operations import (
    live_settings,
    membership,
    pins,
    placements,
    plans,
    ranks,
    service,
    switches,
    watching,
)
from api.operations.commands import route_of
from eplb.errors import ConfigError

THEMES = (
    service,
    watching,
    placements,
    plans,
    ranks,
    membership,
    pins,
    switches,
    live_settings,
)
ROUTES = [
    route
    for theme in THEMES
    for router in vars(theme).values()
    if isinstance(router, APIRouter)
    for route in router.routes
    if isinstance(route, APIRoute)
]


def answer_in_process(service: AdminService, function: Callable[..., Any], **values: Any) -> Any:
    """Answer a question without HTTP, as the function of its route does."""
    answer = function(service, **values)
    return read_answer(function, bytes(answer.body)) if isinstance(answer, Response) else answer


def read_answer(function: Callable[..., Any], content: bytes) -> Any:
    """Read the JSON of an answer as its type.

    Raises:
        ConfigError: it is not of that type.
    """
    route = route_of(function)
    assert route is not None, f"{function.__name__} answers a request"
    try:
        return TypeAdapter(route.response_model).validate_json(content)
    except ValidationError as exc:
        first = exc.errors()[0]
        method = "".join(route.methods or ())
        raise ConfigError(
            f"the answer to {method} {route.path} has {'.'.join(map(str, first['loc']))!r}: "
            f"{first['msg']}, expected that of a service of this version of eplb"
        ) from exc
