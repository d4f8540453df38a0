"""The HTTP service: routes to AdminService, problems (RFC 9457), and the page.

    GET  /            the page          GET  /healthz /livez /readyz /metrics
    GET  /api/v1/...  queries           POST, PATCH /api/v1/...  requests

Queries read the store, and requests are written to it. Access checks and limits are in
``api/http/guard.py`` and ``api/http/connections.py``. The two probes take no thread and never wait
for the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Header, Query, Request, Response
from fastapi import Path as InPath
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, PlainTextResponse
from fastapi.staticfiles import StaticFiles

from api.access.audit import Audit
from api.access.authentication import Authentication
from api.access.changes import Changes
from api.access.keys import Actor
from api.http.guard import Guard, check_request
from api.http.latest import WAIT_S, LatestAnswer
from api.http.limits import DEFAULT_LIMITS, HttpLimits
from api.http.live_settings import (
    SettingsAnswer,
    SettingsRequest,
    change_settings,
    entity_tag,
    settings_answer,
)
from api.http.problems import correct_media_types, documented, report_problems
from api.http.proposals import Proposals
from api.http.requests import (
    MAX_ID,
    ControlRequest,
    ExplainRequest,
    ProposalRequest,
    ReasonRequest,
    RebalanceRequest,
    RollbackRequest,
)
from api.http.routes.event_stream import add_event_stream
from api.http.routes.load_matrix import add_load_matrix
from api.http.routes.placements import add_placement_routes
from api.http.schemas import (
    AuditAnswer,
    AuditPage,
    ControlAnswer,
    EventAnswer,
    Health,
    HistoryAnswer,
    Imbalance,
    Load,
    PlanAnswer,
    ProposalAnswer,
    ProposalLine,
    RebalanceAnswer,
    State,
    TaskAnswer,
    WhoAnswer,
)
from api.http.service import ANY, AdminService, Refused
from api.metrics.definitions import Level
from api.monitor.monitor import KEPT_SCORES, KEPT_WINDOWS
from api.processes.supervision import SupervisionView
from eplb import __version__
from telemetry.proposals import ProposalState
from telemetry.store import LoadStore, TaskState

STATIC = Path(__file__).parent / "static"


async def _service(request: Request) -> AdminService:
    service: AdminService = request.app.state.service
    return service


async def _proposals(request: Request) -> Proposals:
    return Proposals(request.app.state.service)


async def _actor(request: Request) -> str:
    actor: Actor = request.state.actor
    return actor.name


Waiting = Annotated[Proposals, Depends(_proposals)]
By = Annotated[str, Depends(_actor)]
Service = Annotated[AdminService, Depends(_service)]
Id = Annotated[int, Query(ge=0, le=MAX_ID)]
TaskId = Annotated[int, InPath(ge=0, le=MAX_ID)]
ProposalId = Annotated[int, InPath(ge=0, le=MAX_ID)]
# Neither "str | None", because a header cannot be null, nor a pattern: what is no tag of the
# generation that serves is a precondition that fails.
IfGeneration = Annotated[
    str,
    Header(
        alias="if-match",
        description="the generation that must serve, in quotes; *: any",
    ),
]
IfMatch = Annotated[
    str, Header(pattern=r'^(\*|"[0-9]{1,19}")$', description="the ETag that was read, or *")
]

probes = APIRouter(tags=["health"], responses=documented(400, 422))
watch = APIRouter(prefix="/api/v1", tags=["watch"], responses=documented(400, 422, 503))
act = APIRouter(prefix="/api/v1", tags=["act"], responses=documented(400, 403, 413, 415, 422, 503))
TASK_ANSWERS = documented(409) | {
    202: {"model": TaskAnswer, "description": "Not done yet; see Location"}
}


@probes.get("/livez", summary="Is the HTTP service alive?")
async def get_livez() -> Health:
    """Answers while the process runs."""
    return Health(detail=f"eplb {__version__}")


@probes.get("/healthz", summary="Does the store answer?", responses=documented(503))
def get_healthz(service: Service) -> Health:
    """Reads one number from the store."""
    return service.health()


@probes.get("/readyz", summary="Does every rank serve?", responses=documented(503))
async def get_readyz(request: Request) -> Health:
    """A run has begun, every rank reports, and steps make progress."""
    latest: LatestAnswer = request.app.state.readiness
    return await latest.get()


@probes.get(
    "/metrics",
    summary="Figures for Prometheus",
    response_class=PlainTextResponse,
    responses=documented(503),
)
def get_metrics(service: Service) -> Response:
    """Under a hundred series of the current run; counters are the run's, not this process's."""
    return Response(service.metrics.text(), media_type=service.metrics.content_type)


@watch.get("/state", summary="Everything at a glance", response_model=State)
def get_state(service: Service) -> Response:
    """The data of the page: ranks, latest heatmap, migration, bytes, decisions, switches."""
    return _json(service.once_a_reading("state", service.state))


@watch.get("/load", summary="Load windows with their matrices")
def get_load(service: Service, last: Annotated[int, Query(ge=1, le=KEPT_WINDOWS)] = 1) -> Load:
    """The latest windows, oldest first, as `tokens` [T, L, E] and `rank_load` [T, L, R]."""
    return service.load(last)


add_load_matrix(watch)


@watch.get("/imbalance", summary="Imbalance over time")
def get_imbalance(
    service: Service, last: Annotated[int, Query(ge=1, le=KEPT_SCORES)] = KEPT_SCORES
) -> Imbalance:
    """Measured beside contiguous, window by window, with the rebalances between them."""
    return service.imbalance(last)


@watch.get(
    "/history",
    summary="Imbalance by wall-clock time, over all runs",
    response_model=HistoryAnswer,
)
def get_history(
    service: Service,
    seconds: Annotated[int, Query(ge=60, le=86_400)] = 900,
    points: Annotated[int, Query(ge=10, le=2000)] = 400,
) -> Response:
    """The latest `seconds` in about `points` points; marks are restarts, rebalances, switches."""
    made = partial(service.history, seconds, points)
    return _json(service.once_a_reading(f"history {seconds} {points}", made))


def _json(made: bytes) -> Response:
    return Response(made, media_type="application/json")


@watch.get("/rebalances", summary="The latest migrations")
def get_rebalances(
    service: Service, limit: Annotated[int, Query(ge=1, le=200)] = 20
) -> list[RebalanceAnswer]:
    """Newest first: what each was to bring, what it cost, what it brought."""
    return service.rebalances(limit)


add_placement_routes(watch)


@watch.get("/plan", summary="The open migration and the last decision")
def get_plan(service: Service) -> PlanAnswer:
    """The open migration, and the last decision with its reason."""
    return service.plan()


@watch.get("/events", summary="Events")
def get_events(
    service: Service,
    after: Id = 0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    latest: Annotated[int | None, Query(ge=1, le=1000)] = None,
) -> list[EventAnswer]:
    """Oldest first, past an id or the `latest` so many: repeat with the last id to continue."""
    return service.events(after, limit) if latest is None else service.latest_events(latest)


add_event_stream(watch)


@watch.get("/tasks/{task_id}", summary="One task", responses=documented(404))
def get_task(service: Service, task_id: TaskId) -> TaskAnswer:
    """A request that the controller works off, and its result."""
    return service.task(task_id)


@watch.get("/tasks", summary="Tasks in a state")
def get_tasks(
    service: Service,
    state: TaskState = "queued",
    after: Id = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> list[TaskAnswer]:
    """Oldest first, past an id: repeat with the last id to continue."""
    return service.tasks(state, after, limit)


@act.post("/tasks/{task_id}/cancel", summary="Cancel a queued task", responses=documented(404, 409))
def post_cancel(service: Service, task_id: TaskId, body: ReasonRequest) -> TaskAnswer:
    """Only before the controller begins it; a migration is stopped by a pause."""
    return service.cancel(task_id, body.reason)


@watch.get("/whoami", summary="Who asks")
async def get_whoami(request: Request) -> WhoAnswer:
    """Name and role of the key."""
    actor: Actor = request.state.actor
    return WhoAnswer.model_validate({"name": actor.name, "role": actor.role.label})


@watch.get("/audit", summary="Who changed what, and why", responses=documented(403, 404))
def get_audit(
    request: Request,
    before: Annotated[int | None, Query(ge=1, le=MAX_ID)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> AuditPage:
    """Newest first, those before a number: give `next` as `before` to continue."""
    audit: Audit | None = request.app.state.audit
    if audit is None:
        raise Refused(404, "this service keeps no audit, expected one with a state folder")
    found = audit.page(before, limit)
    following = found[-1].number if found and found[-1].number > 1 else None
    return AuditPage(entries=[AuditAnswer.model_validate(one) for one in found], next=following)


@act.post(
    "/rebalances",
    summary="Plan now; move only when dry_run is false",
    responses=TASK_ANSWERS | documented(412),
)
def post_rebalance(
    service: Service, body: RebalanceRequest, response: Response, if_match: IfGeneration = ANY
) -> TaskAnswer:
    """Submits a task to the controller and waits a while for its result."""
    return _answered(service.rebalance(body, if_match), response)


@act.post(
    "/rollbacks",
    summary="Back to an earlier placement; move only when dry_run is false",
    responses=TASK_ANSWERS | documented(412),
)
def post_rollback(
    service: Service, body: RollbackRequest, response: Response, if_match: IfGeneration = ANY
) -> TaskAnswer:
    """Submits a task to the controller and waits a while for its result."""
    return _answered(service.rollback(body, if_match), response)


@watch.get("/proposals", summary="Plans that wait for an approval")
def get_proposals(waiting: Waiting, state: ProposalState | None = None) -> list[ProposalLine]:
    """Newest first, the latest 50: open ones, and how the others ended."""
    return waiting.all(state)


@watch.get("/proposals/{proposal_id}", summary="One proposal", responses=documented(404))
def get_proposal(waiting: Waiting, proposal_id: ProposalId) -> ProposalAnswer:
    """With its target, its moves, what it changes in each layer, and why."""
    return waiting.one(proposal_id)


@act.post(
    "/proposals",
    summary="Plan now and store the plan; nothing moves",
    status_code=201,
    response_model=ProposalAnswer,
    responses=TASK_ANSWERS,
)
def post_proposal(waiting: Waiting, body: ProposalRequest, by: By) -> Response:
    """Submits a task to the controller and waits a while; `Location` is of the proposal."""
    made = waiting.create(body, by)
    status, kind = (202, "tasks") if isinstance(made, TaskAnswer) else (201, "proposals")
    place = {"Location": f"/api/v1/{kind}/{made.id}"}
    return Response(made.model_dump_json(), status, place, "application/json")


@act.post(
    "/proposals/{proposal_id}/approve",
    summary="Carry out a proposal",
    responses=TASK_ANSWERS | documented(404, 412),
)
def post_approval(
    waiting: Waiting,
    proposal_id: ProposalId,
    body: ReasonRequest,
    by: By,
    response: Response,
    if_match: IfGeneration = ANY,
) -> TaskAnswer:
    """Moves to exactly the stored target, or to none: 409 when its base moved on."""
    return _answered(waiting.approve(proposal_id, body.reason, by, if_match), response)


@act.post(
    "/proposals/{proposal_id}/reject",
    summary="End a proposal",
    responses=documented(404, 409),
)
def post_rejection(
    waiting: Waiting, proposal_id: ProposalId, body: ReasonRequest, by: By
) -> ProposalLine:
    """It can be approved no more."""
    return waiting.reject(proposal_id, body.reason, by)


@act.post(
    "/explanations",
    summary="Why is this expert there?",
    responses=TASK_ANSWERS,
)
def post_explanation(service: Service, body: ExplainRequest, response: Response) -> TaskAnswer:
    """Plans now and explains one expert; moves nothing. The text is in `sentences`."""
    return _answered(service.explain(body), response)


def _answered(task: TaskAnswer, response: Response) -> TaskAnswer:
    """The task, with status 202 until it is done."""
    if task.state in ("queued", "running"):
        response.status_code = 202
        response.headers["Location"] = f"/api/v1/tasks/{task.id}"
    return task


@act.post("/pause", summary="Stop all movement at once")
def post_pause(service: Service, body: ReasonRequest) -> ControlAnswer:
    """The kill switch: no weight moves until it is resumed."""
    return service.set_control(ControlRequest(reason=body.reason, movement=False))


@act.post("/resume", summary="Let weights move again")
def post_resume(service: Service, body: ReasonRequest) -> ControlAnswer:
    """Ends a pause."""
    return service.set_control(ControlRequest(reason=body.reason, movement=True))


@act.patch("/control", summary="Change switches")
def patch_control(service: Service, body: ControlRequest) -> ControlAnswer:
    """Those that are not named stay as they are."""
    return service.set_control(body)


@watch.get("/settings", summary="Live settings")
def get_settings(service: Service, response: Response) -> SettingsAnswer:
    """What applies, from which source and revision; the `ETag` is for `PATCH`."""
    return _tagged(settings_answer(service.store.live()), response)


@act.patch("/settings", summary="Change live settings", responses=documented(412))
def patch_settings(
    service: Service,
    body: SettingsRequest,  # type: ignore[valid-type]
    if_match: IfMatch,
    response: Response,
) -> SettingsAnswer:
    """At the revision in `If-Match`. Those that are not named stay; null removes a live value."""
    return _tagged(change_settings(service.store, body, if_match), response)


def _tagged(answer: SettingsAnswer, response: Response) -> SettingsAnswer:
    response.headers["ETag"] = entity_tag(answer)
    return answer


def create_app(
    store: LoadStore,
    *,
    plan_wait_s: float = 10.0,
    probe_wait_s: float = WAIT_S,
    metrics_level: Level = "default",
    supervision: Callable[[], SupervisionView] = SupervisionView,
    limits: HttpLimits = DEFAULT_LIMITS,
    token: str | None = None,
    state_dir: Path | None = None,
    is_watching: bool = False,
    actor: Actor | None = None,
) -> FastAPI:
    """Make the service of one deployment; ``HttpService`` binds it to a port.

    Args:
        is_watching: whether the store is read in the background while the service runs; otherwise
            it is read when it is asked.
        token: that a request but the two probes may prove in place of an access key; None: without
            keys only this host can ask.
        state_dir: that has the access keys and the audit; None: there are neither.
        actor: who sends every request, for an application that is bound to no port.
    """
    service = AdminService(
        store, plan_wait_s=plan_wait_s, metrics_level=metrics_level, supervision=supervision
    )

    @asynccontextmanager
    async def watching(app: FastAPI) -> AsyncIterator[None]:
        service.reader.start()
        try:
            yield
        finally:
            await asyncio.to_thread(service.reader.stop)

    # No documentation page: FastAPI's own loads its scripts from another site.
    app = FastAPI(
        title="EPLB admin API",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,  # the document has a route like all others
        dependencies=[Depends(check_request)],
        lifespan=watching if is_watching else None,
    )
    app.state.service, app.state.limits = service, limits
    app.state.readiness = LatestAnswer(service.readiness, wait_s=probe_wait_s)
    # The last is the outermost: a stranger's body is not read, and what is refused is no change.
    app.state.audit = None if state_dir is None else Audit(state_dir)
    app.add_middleware(Changes, deployment=store.deployment, limits=limits, state_dir=state_dir)
    app.add_middleware(Guard, limits=limits, any_host=token is not None)
    app.add_middleware(Authentication, token=token, state_dir=state_dir, actor=actor)
    for router in (probes, watch, act):
        app.include_router(router)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    app.add_api_route("/", _page, include_in_schema=False)
    app.add_api_route("/api/v1/openapi.json", _document, include_in_schema=False)
    report_problems(app, RequestValidationError)
    correct_media_types(app.openapi())
    return app


async def _document(request: Request) -> dict[str, Any]:
    app: FastAPI = request.app
    return app.openapi()


def _page() -> FileResponse:
    policy = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
    return FileResponse(STATIC / "index.html", headers={"Content-Security-Policy": policy})
