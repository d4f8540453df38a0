"""Operations that watch a deployment: state, load, imbalance, rebalances, plan, events, anomalies.

Shapes:  T windows, L MoE layers, E experts, R ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, Literal

from fastapi import Request, Response
from pydantic import TypeAdapter

from api.http.answers import (
    Imbalance,
    ImbalanceHistory,
    OpenMigration,
    PlanAnswer,
    TransactionLine,
)
from api.http.arguments import MAX_ID, MAX_INDEX, After, Before, Limit, Next, page_of
from api.http.dependencies import Service, reading
from api.http.document import answered_as
from api.http.event_stream import EventStream
from api.http.problems import ProblemType, Refused
from api.http.service import AdminService
from api.monitor import KEPT_SCORES, KEPT_WINDOWS
from api.monitor.anomalies import Anomaly
from api.monitor.scores import heat_of
from api.monitor.state import DecisionRecord, Heat, State
from api.operations.commands import Answer, Ask, command
from api.terminal.printing import TIME_OR_AGE, cell, listing, more, time_of
from eplb.clock import duration_text
from eplb.declared import Meaning
from telemetry.state.events import Event, PlanDecision

reads = reading()

LAST_ID = "Last-Event-ID"


def once_a_reading(
    service: AdminService, name: str, of: TypeAdapter[Any], make: Callable[[], Any]
) -> Response:
    """Make an answer once for each reading of the store: many clients may ask for it."""
    reader = service.reader
    if reader.is_running:
        made = service.of_reading.get(reader.reading(), name, lambda: of.dump_json(make()))
    else:  # each look is a reading of its own
        made = of.dump_json(make())
    return Response(made, media_type="application/json")


STATE, HEAT = TypeAdapter(State), TypeAdapter(Heat)
IMBALANCE, HISTORY = TypeAdapter(Imbalance), TypeAdapter(ImbalanceHistory)


@reads.get("/state", response_model=State)
def state(service: Service) -> Response:
    """State of the deployment. The verdict and its reasons; ranks, controller, migration,
    decisions, switches.
    """
    return once_a_reading(service, "state", STATE, lambda: service.reader.reading().state)


@reads.get("/heat", response_model=Heat)
def heat(service: Service) -> Response:
    """Load of ranks and experts by layer. Of the latest window: which ranks and experts of each
    layer get more than their share.
    """
    return once_a_reading(service, "heat", HEAT, lambda: heat_of(service.reader.reading()))


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
class LoadAnswer:
    """Windows of load, oldest first."""

    windows: list[LoadWindow]
    tokens: Annotated[list[list[list[int]]], Meaning("[T, L, E] tokens routed to each expert")]
    rank_load: Annotated[list[list[list[int]]], Meaning("[T, L, R] tokens received by each rank")]


@reads.get("/load")
def load(
    service: Service,
    last: Annotated[int, Meaning("number of windows", at_least=1, at_most=KEPT_WINDOWS)] = 1,
) -> LoadAnswer:
    """Load windows with their matrices. The latest windows, oldest first, as `tokens` [T, L, E] and
    `rank_load` [T, L, R].
    """
    service.reader.reading()
    windows = service.monitor.windows(last)
    return LoadAnswer(
        [
            LoadWindow(
                one.index,
                one.first_step,
                one.last_step,
                one.phase,
                sorted(one.generations),
                sorted(one.missing_ranks),
                one.is_complete,
            )
            for one in windows
        ],
        [one.tokens.tolist() for one in windows],
        [one.received.tolist() for one in windows],
    )


Kind = Annotated[str | None, Meaning("only of this kind; null: of each", max_length=40)]
OfRank = Annotated[
    int | None, Meaning("only those that name this rank", at_least=0, at_most=MAX_INDEX)
]
Time = Meaning("seconds since the epoch", at_least=0, at_most=1e11)
End = Meaning("seconds since the epoch, not included; null: now", at_least=0, at_most=1e11)


@reads.get("/imbalance", response_model=Imbalance)
def imbalance(
    service: Service,
    last: Annotated[
        int, Meaning("number of windows", at_least=1, at_most=KEPT_SCORES)
    ] = KEPT_SCORES,
) -> Response:
    """Imbalance over time. Measured beside contiguous, window by window, with the rebalances
    between them.
    """

    def make() -> Imbalance:
        seen = service.reader.reading()
        return Imbalance(seen.series[-last:], seen.marks)

    return once_a_reading(service, f"imbalance {last}", IMBALANCE, make)


@dataclass(frozen=True)
class LoadDrift:
    """Jensen-Shannon distance of the latest load from the load planned on, 0 to 1, less noise."""

    generation: Annotated[int | None, Meaning("the generation that ranks serve")]
    overall: Annotated[
        float | None,
        Meaning("over all layers; null: the load planned on is not known, or none came since"),
    ] = None
    layers: Annotated[list[float] | None, Meaning("[L]")] = None
    noise: Annotated[float | None, Meaning("the distance that chance alone would show")] = None


@reads.get("/drift")
def drift(service: Service) -> LoadDrift:
    """Drift of the load. How far the latest windows are from those that the placement was planned
    on, by layer.
    """
    seen = service.reader.reading()
    found, generation = service.monitor.drift(seen), seen.state.generation
    if found is None:
        return LoadDrift(generation)
    return LoadDrift(generation, found.overall, found.per_layer.tolist(), found.noise)


@reads.get("/history", response_model=ImbalanceHistory)
def history(
    service: Service,
    seconds: Annotated[
        int, Meaning("length of the range, which ends now", at_least=60, at_most=86_400)
    ] = 900,
    points: Annotated[int, Meaning("number of points, about", at_least=10, at_most=2000)] = 400,
) -> Response:
    """Imbalance by wall-clock time, over all runs. The latest `seconds` in about `points` points;
    marks are restarts, rebalances, switches.
    """

    def make() -> ImbalanceHistory:
        until, monitor = service.reader.reading().state.time, service.monitor
        since = until - seconds
        found = monitor.points(since, until, points)
        return ImbalanceHistory(since, until, found, monitor.history_marks(since, until))

    return once_a_reading(service, f"history {seconds} {points}", HISTORY, make)


@dataclass(frozen=True)
class RebalancesPage:
    """The latest migrations."""

    rebalances: list[DecisionRecord]
    next: Next


@reads.get("/rebalances")
def rebalances(
    service: Service,
    limit: Annotated[int, Meaning("most that are returned", at_least=1, at_most=200)] = 20,
    before: Before = None,
) -> RebalancesPage:
    """The latest migrations. Newest first, what each was to bring and brought: give `next` as
    `before` to continue.
    """
    every = service.reader.reading().rebalances
    kept = [one for one in every if before is None or (one.plan_id or 0) < before]
    return RebalancesPage(*page_of(kept, limit, lambda one: one.plan_id or 0))


@reads.get("/plan")
def plan(service: Service) -> PlanAnswer:
    """The open migration and the last decision. With the moves by source, and the reason of the
    decision.
    """
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


@dataclass(frozen=True)
class EventsPage:
    """Events."""

    events: list[Event]
    next: Next


@reads.get("/events")
def events(
    service: Service,
    after: After = 0,
    limit: Annotated[int, Meaning("most that are returned", at_least=1, at_most=10_000)] = 1000,
    latest: Annotated[
        int | None,
        Meaning("number of latest events, in place of `after`", at_least=1, at_most=1000),
    ] = None,
    since: Annotated[float, Time] = 0.0,
    until: Annotated[float | None, End] = None,
    kind: Kind = None,
    rank: OfRank = None,
) -> EventsPage:
    """Events. Oldest first: past an id, or the `latest`; give `next` as `after` to continue."""
    store = service.store
    kept = store.events_onwards(after) if latest is None else store.events_backwards()
    wanted = (
        one
        for one in kept
        if one.time >= since
        and (until is None or one.time < until)
        and kind in (None, one.kind)
        and (rank is None or one.is_about(rank))
    )
    found = list(islice(wanted, latest or limit + 1))
    if latest is not None:
        return EventsPage(found[::-1], None)
    return EventsPage(*page_of(found, limit, lambda one: one.id))


def plan_words(plan: PlanDecision) -> str:
    """Give a decision in words; its reason often begins with the imbalance."""
    before, after = plan.imbalance_before or 0.0, plan.imbalance_after
    figures = f"{before:.3f} -> {after:.3f}, {plan.moves} moves in {duration_text(plan.cost_s)}"
    return f"{plan.decision} {figures}: {plan.reason}"


def show_events(found: dict[str, Any]) -> None:
    """Print events, each with what people need of it; --json has the rest."""

    def words(event: Event) -> str:
        if isinstance(event.fact, PlanDecision):
            return plan_words(event.fact)
        items = [
            (name, one)
            for name, one in event.detail.items()
            if name == "seconds" or not isinstance(one, dict | list)
        ]
        return " ".join(f"{name}={cell(name, value)}" for name, value in items)

    shown = (one | {"detail": words(Event(**one))} for one in found["events"])
    listing(shown, "id time kind detail", none="no events")
    more(found)


def ask_for_events(
    ask: Ask,
    last: Annotated[int, Meaning("number of latest events", at_least=1, at_most=1000)] = 20,
    after: Annotated[
        int | None,
        Meaning(
            "events past this id, oldest first, in place of the latest", at_least=0, at_most=MAX_ID
        ),
    ] = None,
    since: Annotated[str | None, Meaning(f"from this time on: {TIME_OR_AGE}")] = None,
    until: Annotated[str | None, Meaning("before this time, or before this age")] = None,
    kind: Kind = None,
    rank: OfRank = None,
) -> Answer:
    """Show what happened: decisions, commits, deaths, switches."""
    page: dict[str, Any] = {"latest": last} if after is None else {"after": after}
    return ask(
        events,
        since=time_of("--since", since) if since else None,
        until=time_of("--until", until) if until else None,
        kind=kind,
        rank=rank,
        **page,
    )


command(
    "events",
    "eplb events --since 2h --kind error --rank 3",
    ask_for_events,
    of=events,
    show=show_events,
)


# Fields of one event, as a reader of event streams parses them.
EVENT_TEXTS = {
    "id": "41",
    "event": "message",
    "data": '{"id": 41, "time": 1790000000.0, "kind": "commit", "detail": {"generation": 7}}',
}
STREAM_FORM = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in EVENT_TEXTS},
    "required": ["data"],
    "examples": [EVENT_TEXTS],
}


@reads.get(
    "/events/stream",
    response_class=Response,
    responses=answered_as({"text/event-stream": STREAM_FORM}),
    openapi_extra={
        "parameters": [
            {
                "name": LAST_ID,
                "in": "header",
                "required": False,
                "schema": {"type": "integer", "minimum": 0, "maximum": MAX_ID},
                "description": "in place of `after`: a browser that returns",
            }
        ]
    },
)
async def event_stream(
    request: Request,
    service: Service,
    after: Annotated[
        int | None, Meaning("events past this id; null: from now on", at_least=0, at_most=MAX_ID)
    ] = None,
) -> Response:
    """Events as they happen. Past an id or from now on; the latest 1,000 are kept for clients that
    return. The event `missed` states that older ones came between: read them from `/api/v1/events`.
    """
    given = request.headers.get(LAST_ID)
    if given is not None:
        if not (given.isascii() and given.isdigit() and int(given[:20]) <= MAX_ID):
            why = f"{LAST_ID} is {given[:40]!r}, expected a number 0..{MAX_ID}"
            raise Refused(ProblemType.INVALID_REQUEST, why)
        after = int(given)
    shared = request.app.state
    return EventStream(service, after, shared.limits, shared.deployments)


@dataclass(frozen=True)
class AnomaliesPage:
    """What is wrong, and what was."""

    anomalies: list[Anomaly]
    next: Next


@reads.get("/anomalies")
def anomalies(
    service: Service,
    state: Annotated[Literal["open", "ended"] | None, Meaning("null: both")] = None,
    before: Annotated[
        int | None, Meaning("only those before this number", at_least=1, at_most=MAX_ID)
    ] = None,
    limit: Limit = 100,
) -> AnomaliesPage:
    """What is wrong, and what was. Newest first, the latest 1,000 of this service: give `next` as
    `before` to continue.
    """
    service.reader.reading()
    is_open = None if state is None else state == "open"
    return AnomaliesPage(*service.monitor.anomalies.page(before, limit, is_open))


def show_anomalies(found: dict[str, Any]) -> None:
    """Print what is wrong and what was."""
    shown = (one | {"until": one["until"] or "now"} for one in found["anomalies"])
    listing(shown, "id severity kind since until text:what", none="no anomalies")


command(
    "anomalies",
    "eplb anomalies --state open; eplb anomalies --last 100 --json",
    anomalies,
    show=show_anomalies,
    about="List what is wrong and what was, newest first; of a store, what is wrong now, "
    "and events.",
    names={"limit": "last"},
    defaults={"limit": 20},
)
