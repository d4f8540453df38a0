"""What handlers of routes take from a request."""

from __future__ import annotations

from starlette.requests import Request

from api.http.service import AdminService


def service_of(request: Request) -> AdminService:
    """Return the service that answers."""
    service: AdminService = request.app.state.service
    return service
