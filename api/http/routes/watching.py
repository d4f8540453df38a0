"""Routes of what an operator watches: state, load, imbalance, rebalances, the plan, events."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from api.http.requests import MAX_ID
from api.http.routes.request_parts import service_of
from api.http.schemas import (
    DriftAnswer,
    EventsPage,
    HistoryAnswer,
    Imbalance,
    Load,
    PlanAnswer,
    RebalancesPage,
    State,
)
from api.monitor.monitor import KEPT_SCORES, KEPT_WINDOWS

if TYPE_CHECKING:
    from fastapi import APIRouter


def get_state(request: Request) -> Response:
    """The data of the page: ranks, latest heatmap, migration, bytes, decisions, switches."""
    service = service_of(request)
    return _json(service.once_a_reading("state", service.state))


def get_load(request: Request, last: Annotated[int, Field(ge=1, le=KEPT_WINDOWS)] = 1) -> Load:
    """The latest windows, oldest first, as `tokens` [T, L, E] and `rank_load` [T, L, R]."""
    return service_of(request).load(last)


def get_imbalance(
    request: Request, last: Annotated[int, Field(ge=1, le=KEPT_SCORES)] = KEPT_SCORES
) -> Imbalance:
    """Measured beside contiguous, window by window, with the rebalances between them."""
    return service_of(request).imbalance(last)


def get_drift(request: Request) -> DriftAnswer:
    """Of the latest windows from those that the serving placement was planned on, by layer."""
    return service_of(request).drift()


def get_history(
    request: Request,
    seconds: Annotated[int, Field(ge=60, le=86_400)] = 900,
    points: Annotated[int, Field(ge=10, le=2000)] = 400,
) -> Response:
    """The latest `seconds` in about `points` points; marks are restarts, rebalances, switches."""
    service = service_of(request)
    made = partial(service.history, seconds, points)
    return _json(service.once_a_reading(f"history {seconds} {points}", made))


def get_rebalances(
    request: Request,
    limit: Annotated[int, Field(ge=1, le=200)] = 20,
    before: Annotated[int | None, Field(ge=0, le=MAX_ID)] = None,
) -> RebalancesPage:
    """Newest first, what each was to bring and brought: give `next` as `before` to continue."""
    return service_of(request).rebalances(limit, before)


def get_plan(request: Request) -> PlanAnswer:
    """The open migration, and the last decision with its reason."""
    return service_of(request).plan()


def get_events(
    request: Request,
    after: Annotated[int, Field(ge=0, le=MAX_ID)] = 0,
    limit: Annotated[int, Field(ge=1, le=10_000)] = 1000,
    latest: Annotated[int | None, Field(ge=1, le=1000)] = None,
) -> EventsPage:
    """Oldest first, past an id or the `latest` so many: give `next` as `after` to continue."""
    service = service_of(request)
    return service.events(after, limit) if latest is None else service.latest_events(latest)


def add_watching_routes(watch: APIRouter) -> None:
    """Add the routes."""
    watch.get("/state", summary="Everything at a glance", response_model=State)(get_state)
    watch.get("/load", summary="Load windows with their matrices")(get_load)
    watch.get("/imbalance", summary="Imbalance over time")(get_imbalance)
    watch.get("/drift", summary="Drift of the load")(get_drift)
    watch.get(
        "/history",
        summary="Imbalance by wall-clock time, over all runs",
        response_model=HistoryAnswer,
    )(get_history)
    watch.get("/rebalances", summary="The latest migrations")(get_rebalances)
    watch.get("/plan", summary="The open migration and the last decision")(get_plan)
    watch.get("/events", summary="Events")(get_events)


def _json(made: bytes) -> Response:
    return Response(made, media_type="application/json")
