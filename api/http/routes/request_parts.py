"""What handlers of routes take from a request, and how the document names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from api.access.keys import Actor
from api.http.service import AdminService


def service_of(request: Request) -> AdminService:
    """Return the service that answers."""
    service: AdminService = request.app.state.service
    return service


def actor_of(request: Request) -> Actor:
    """Return who sends the request."""
    actor: Actor = request.state.actor
    return actor


def header_document(
    name: str, meaning: str, schema: Mapping[str, Any], *, is_required: bool = False
) -> dict[str, Any]:
    """Document a header that a handler reads from the request itself."""
    described = {"name": name, "in": "header", "required": is_required, "schema": dict(schema)}
    return {"parameters": [described | {"description": meaning}]}
