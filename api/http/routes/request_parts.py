"""What handlers of routes take from a request, and how the document names it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from api.access.keys import Actor
from api.http.deployments.served import Served
from api.http.problems import ProblemType, Refused
from api.http.service import ANY, AdminService

TAG = r'(\*|"[0-9]{1,19}")'  # of a revision


def service_of(request: Request) -> AdminService:
    """Return what answers for the deployment of the path."""
    return served(request).service


def served(request: Request) -> Served:
    """Return the deployment of the path, with what answers for it."""
    found: Served = request.state.served
    return found


def actor_of(request: Request) -> Actor:
    """Return who sends the request."""
    actor: Actor = request.state.actor
    return actor


def revision_of(request: Request, *, is_required: bool = True) -> int | None:
    """Return the revision that a change of live settings names; None: whatever it is now.

    Raises:
        Refused: ``If-Match`` is no entity tag, or is missing where it is required. Where it is
            not, what is no tag of a revision is a precondition that fails (RFC 9110, 13.1.1).
    """
    tag = request.headers.get("if-match", "" if is_required else ANY)
    if not re.fullmatch(TAG, tag):
        why = f'header.if-match: found {tag[:40]!r}, expected the ETag of GET, as "7", or *'
        kind = ProblemType.INVALID_REQUEST if is_required else ProblemType.SETTINGS_CHANGED
        raise Refused(kind, why)
    return None if tag == ANY else int(tag.strip('"'))


def header_document(
    name: str, meaning: str, schema: Mapping[str, Any], *, is_required: bool = False
) -> dict[str, Any]:
    """Document a header that a handler reads from the request itself."""
    described = {"name": name, "in": "header", "required": is_required, "schema": dict(schema)}
    return {"parameters": [described | {"description": meaning}]}
