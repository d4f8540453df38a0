"""Routes of simulations: policies replayed on recorded or generated load; nothing moves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from api.http.problems import ProblemType, documented
from api.http.requests import MAX_ID
from api.http.routes.request_parts import served
from api.http.routes.simulations.runs import SimulationAnswer, SimulationRequest

if TYPE_CHECKING:
    from fastapi import APIRouter

SimulationId = Annotated[int, Field(ge=0, le=MAX_ID)]


def post_simulation(
    request: Request, body: SimulationRequest, response: Response
) -> SimulationAnswer:
    """Begins, and answers at once: `Location` has the result later. One runs at a time."""
    begun = served(request).simulations.begin(body)
    response.headers["Location"] = f"/api/v1/simulations/{begun.id}"
    return begun


def get_simulation(request: Request, simulation_id: SimulationId) -> SimulationAnswer:
    """One of the latest 16 since the service started."""
    return served(request).simulations.one(simulation_id)


def add_simulation_routes(watch: APIRouter, act: APIRouter) -> None:
    """Add the routes."""
    watch.get(
        "/simulations/{simulation_id}",
        summary="One simulation and its result",
        responses=documented(ProblemType.NO_SUCH_SIMULATION),
    )(get_simulation)
    act.post(
        "/simulations",
        summary="Compare policies on load; nothing moves",
        status_code=202,
        responses=documented(ProblemType.REQUEST_IN_PROGRESS),
    )(post_simulation)
