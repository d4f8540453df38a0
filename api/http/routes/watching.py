"""Questions of those who watch: state, heat, load, imbalance, history, plan, events, anomalies.

Each handler is a function of the service and the arguments of the query. What follows from the
latest reading of the store is made once for each reading, however many ask for it.

Shapes:  T windows, L MoE layers, E experts, R ranks.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from api.http.requests import MAX_ID
from api.http.routes.request_parts import service_of
from api.http.service import AdminService, page_of
from api.monitor.anomalies import Anomaly
from api.monitor.history import HistoryMark, HistoryPoint
from api.monitor.monitor import KEPT_SCORES, KEPT_WINDOWS
from api.monitor.scores import heat_of
from api.monitor.state import (
    EPOCH,
    DecisionRecord,
    Heat,
    MigrationProgress,
    RebalanceMark,
    State,
    WindowScore,
)
from eplb.declared import Meaning
from telemetry.state.events import Event

if TYPE_CHECKING:
    from fastapi import APIRouter

Before = Annotated[int | None, Field(ge=0, le=MAX_ID)]
Next = Annotated[int | None, Meaning("give as `before` to continue; null: there are no more")]


@dataclass(frozen=True)
class Imbalance:
    """Imbalance over time, window by window, with the rebalances between them."""

    windows: tuple[WindowScore, ...]
    rebalances: tuple[RebalanceMark, ...]


@dataclass(frozen=True)
class LoadDrift:
    """Jensen-Shannon distance of the latest load from the load planned on, 0 to 1, less noise."""

    generation: Annotated[int | None, Meaning("generation that serves")]
    overall: Annotated[
        float | None,
        Meaning("drift of all layers; null: the load planned on is not known, or none came since"),
    ] = None
    layers: Annotated[list[float] | None, Meaning("[L] drift of each layer")] = None
    noise: Annotated[float | None, Meaning("the distance that chance alone would show")] = None


@dataclass(frozen=True)
class ImbalanceHistory:
    """Imbalance by wall-clock time, over all runs."""

    since: Annotated[float, Meaning("begin of the range", unit=EPOCH)]
    until: Annotated[float, Meaning("end of the range", unit=EPOCH)]
    points: list[HistoryPoint]
    marks: list[HistoryMark]


@dataclass(frozen=True)
class LoadWindow:
    """Steps or time of one window."""

    index: int
    first_step: int
    last_step: int
    phase: str
    generations: list[int]
    missing_ranks: list[int]
    is_complete: bool


@dataclass(frozen=True)
class Load:
    """Windows of load, oldest first."""

    windows: list[LoadWindow]
    tokens: Annotated[list[list[list[int]]], Meaning("[T, L, E] tokens routed to each expert")]
    rank_load: Annotated[list[list[list[int]]], Meaning("[T, L, R] tokens received by each rank")]


@dataclass(frozen=True)
class RebalancesPage:
    """Decisions whose migration was published, newest first."""

    rebalances: list[DecisionRecord]
    next: Next


@dataclass(frozen=True)
class TransactionLine:
    """Layers that swap together."""

    layers: list[int]
    num_moves: int
    num_rounds: int


@dataclass(frozen=True)
class OpenMigration:
    """The open migration, in the order in which it is applied."""

    progress: MigrationProgress
    moves_by_source: dict[str, int]
    transactions: list[TransactionLine]


@dataclass(frozen=True)
class PlanAnswer:
    """The open migration and the last decision."""

    migration: OpenMigration | None
    last_decision: DecisionRecord | None


@dataclass(frozen=True)
class EventsPage:
    """Events, oldest first."""

    events: list[Event]
    next: Annotated[int | None, Meaning("for `after`, of the next page; null: no more now")]


@dataclass(frozen=True)
class AnomaliesPage:
    """Anomalies, the newest first."""

    anomalies: list[Anomaly]
    next: Next


def get_state(service: AdminService) -> State:
    """The verdict and its reasons; ranks, controller, migration, decisions, switches."""
    return service.reader.reading().state


def get_heat(service: AdminService) -> Heat:
    """Of the latest window: which ranks and experts of each layer get more than their share."""
    return heat_of(service.reader.reading())


def get_load(service: AdminService, last: Annotated[int, Field(ge=1, le=KEPT_WINDOWS)] = 1) -> Load:
    """The latest windows, oldest first, as `tokens` [T, L, E] and `rank_load` [T, L, R]."""
    service.reader.reading()
    windows = service.monitor.windows(last)
    shown = [
        LoadWindow(
            index=one.index,
            first_step=one.first_step,
            last_step=one.last_step,
            phase=one.phase,
            generations=sorted(one.generations),
            missing_ranks=sorted(one.missing_ranks),
            is_complete=one.is_complete,
        )
        for one in windows
    ]
    tokens = [one.tokens.tolist() for one in windows]
    return Load(shown, tokens, [one.received.tolist() for one in windows])


def get_imbalance(
    service: AdminService, last: Annotated[int, Field(ge=1, le=KEPT_SCORES)] = KEPT_SCORES
) -> Imbalance:
    """Measured beside contiguous, window by window, with the rebalances between them."""
    seen = service.reader.reading()
    return Imbalance(seen.series[-last:], seen.marks)


def get_drift(service: AdminService) -> LoadDrift:
    """Of the latest windows from those that the serving placement was planned on, by layer."""
    seen = service.reader.reading()
    found, generation = service.monitor.drift(seen), seen.state.generation
    if found is None:
        return LoadDrift(generation)
    return LoadDrift(generation, found.overall, found.per_layer.tolist(), found.noise)


def get_history(
    service: AdminService,
    seconds: Annotated[int, Field(ge=60, le=86_400)] = 900,
    points: Annotated[int, Field(ge=10, le=2000)] = 400,
) -> ImbalanceHistory:
    """The latest `seconds` in about `points` points; marks are restarts, rebalances, switches."""
    until = service.reader.reading().state.time
    since, monitor = until - seconds, service.monitor
    found = monitor.points(since, until, points)
    return ImbalanceHistory(since, until, found, monitor.history_marks(since, until))


def get_rebalances(
    service: AdminService,
    limit: Annotated[int, Field(ge=1, le=200)] = 20,
    before: Before = None,
) -> RebalancesPage:
    """Newest first, what each was to bring and brought: give `next` as `before` to continue."""
    every = service.reader.reading().rebalances
    kept = [one for one in every if before is None or (one.plan_id or 0) < before]
    found, following = page_of(kept, limit, lambda one: one.plan_id or 0)
    return RebalancesPage(list(found), following)


def get_plan(service: AdminService) -> PlanAnswer:
    """The open migration, and the last decision with its reason."""
    state = service.reader.reading().state
    last = state.decisions[-1] if state.decisions else None
    migration, progress = service.store.published(), state.migration
    # It may have closed between the two reads: then there is none to show.
    if migration is None or progress is None or migration.plan_id != progress.plan_id:
        return PlanAnswer(None, last)
    by_source = Counter(move.source.name.lower() for move in migration.moves)
    transactions = [
        TransactionLine(list(one.layers), len(one.moves), len(one.rounds))
        for one in migration.transactions
    ]
    return PlanAnswer(OpenMigration(progress, dict(by_source), transactions), last)


def get_events(
    service: AdminService,
    after: Annotated[int, Field(ge=0, le=MAX_ID)] = 0,
    limit: Annotated[int, Field(ge=1, le=10_000)] = 1000,
    latest: Annotated[int | None, Field(ge=1, le=1000)] = None,
) -> EventsPage:
    """Oldest first, past an id or the `latest` so many: give `next` as `after` to continue."""
    store = service.store
    if latest is not None:
        return EventsPage(store.latest_events(limit=latest)[::-1], None)
    found = store.events(after=after, limit=limit + 1)
    page, following = page_of(found, limit, lambda one: one.id)
    return EventsPage(list(page), following)


def get_anomalies(
    service: AdminService,
    state: Literal["open", "ended"] | None = None,
    before: Annotated[int | None, Field(ge=1, le=MAX_ID)] = None,
    limit: Annotated[int, Field(ge=1, le=1000)] = 100,
) -> AnomaliesPage:
    """Newest first, the latest 1,000 of this service: give `next` as `before` to continue."""
    service.reader.reading()
    is_open = None if state is None else state == "open"
    return AnomaliesPage(*service.monitor.anomalies.page(before, limit, is_open))


# With a summary of each, and whether its answer is made once for each reading of the store.
ROUTES: dict[str, tuple[Callable[..., Any], str, bool]] = {
    "/state": (get_state, "Everything at a glance", True),
    "/heat": (get_heat, "Load of ranks and experts by layer", True),
    "/load": (get_load, "Load windows with their matrices", False),
    "/imbalance": (get_imbalance, "Imbalance over time", True),
    "/drift": (get_drift, "Drift of the load", False),
    "/history": (get_history, "Imbalance by wall-clock time, over all runs", True),
    "/rebalances": (get_rebalances, "The latest migrations", True),
    "/plan": (get_plan, "The open migration and the last decision", False),
    "/events": (get_events, "Events", False),
    "/anomalies": (get_anomalies, "What is wrong, and what was", True),
}


def add_watching_routes(watch: APIRouter) -> None:
    """Add the routes."""
    for path, (handler, summary, is_kept) in ROUTES.items():
        watch.get(path, summary=summary)(_answering(handler, is_kept=is_kept))


def _answering(handler: Callable[..., Any], *, is_kept: bool) -> Callable[..., Any]:
    """A route's function of the request and the handler's arguments: JSON of its answer."""

    def answer(request: Request, **arguments: Any) -> Response:
        service = service_of(request)
        make = partial(handler, service, **arguments)
        name = f"{handler.__name__} {sorted(arguments.items())}" if is_kept else None
        return Response(service.json(make, name), media_type="application/json")

    signature = inspect.signature(handler, eval_str=True)
    _, *others = signature.parameters.values()
    request = inspect.Parameter(
        "request", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Request
    )
    answer.__name__, answer.__doc__ = handler.__name__, handler.__doc__
    answer.__signature__ = signature.replace(parameters=[request, *others])  # type: ignore[attr-defined]
    return answer
