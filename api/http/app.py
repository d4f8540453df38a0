"""The HTTP service: routes to AdminService, problems (RFC 9457), and the page.

    GET  /            the page          GET  /healthz /livez /readyz /metrics
    GET  /api/v1/...  queries           POST, PATCH /api/v1/...  requests
    /deployments/NAME/...               the same, of another deployment

Queries read the store, and requests are written to it. Access checks and limits are in
``api/http/guard.py`` and ``api/http/connections.py``. The two probes take no thread and never wait
for the store.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Header, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, PlainTextResponse
from fastapi.staticfiles import StaticFiles

from api.access.audit import Audit
from api.access.authentication import Authentication
from api.access.changes import Changes
from api.access.keys import Actor
from api.http.deployments.choice import PREFIX, Choice, Prefix
from api.http.deployments.routes import add_deployment_routes
from api.http.deployments.served import Deployments, Others, Served
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
from api.http.problems import (
    ProblemType,
    Refused,
    correct_media_types,
    documented,
    report_problems,
)
from api.http.requests import (
    MAX_ID,
    ControlRequest,
    PauseRequest,
    ReasonRequest,
)
from api.http.routes.events.stream import add_event_stream
from api.http.routes.load_matrix import add_load_matrix
from api.http.routes.pins import add_pin_routes
from api.http.routes.placements.routes import add_placement_routes
from api.http.routes.problem_types import add_problem_types
from api.http.routes.ranks import IF_MATCH, add_rank_routes
from api.http.routes.rebalances import add_rebalance_routes
from api.http.routes.request_parts import revision_of, served, service_of
from api.http.routes.simulations.routes import add_simulation_routes
from api.http.routes.simulations.runs import Simulations
from api.http.routes.tasks import add_task_routes
from api.http.routes.watching import add_watching_routes
from api.http.schemas import (
    AuditAnswer,
    AuditPage,
    ControlAnswer,
    Health,
    WhoAnswer,
)
from api.http.service import AdminService
from api.metrics.definitions import Level
from api.metrics.exposition import metrics_text
from api.processes.supervision import SupervisionView
from eplb import __version__
from eplb.settings.deployment import DEPLOYMENT
from telemetry.state.store import StateStore

TITLE = "EPLB admin API"
STATIC = Path(__file__).parent / "static"
SERVERS: list[dict[str, Any]] = [
    {"url": "/", "description": "the service's own deployment"},
    {
        "url": f"{PREFIX}{{deployment}}",
        "description": "each deployment of GET /api/v1/deployments",
        "variables": {"deployment": {"default": DEPLOYMENT}},
    },
]
METRICS_CONNECTIONS, METRICS_REQUESTS = 16, 4  # of an address of their own


async def _service(request: Request) -> AdminService:
    return service_of(request)


Service = Annotated[AdminService, Depends(_service)]
IfMatch = Annotated[
    str, Header(pattern=r'^(\*|"[0-9]{1,19}")$', description="the ETag that was read, or *")
]

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
READING, CHANGING = (*OF_ALL, *OF_KEYS, *OF_STORE), (*OF_ALL, *OF_KEYS, *OF_STORE, *OF_CHANGES)
ONCE = documented(ProblemType.REQUEST_IN_PROGRESS)
probes = APIRouter(tags=["health"], responses=documented(*OF_ALL))
figures = APIRouter(tags=["health"], responses=documented(*OF_ALL))
watch = APIRouter(prefix="/api/v1", tags=["watch"], responses=documented(*READING))
act = APIRouter(prefix="/api/v1", tags=["act"], responses=documented(*CHANGING))


@probes.get("/livez", summary="Is the HTTP service alive?")
async def get_livez() -> Health:
    """Answers while the process runs."""
    return Health(detail=f"eplb {__version__}")


@probes.get("/healthz", summary="Does the store answer?", responses=documented(*OF_KEYS, *OF_STORE))
def get_healthz(service: Service) -> Health:
    """Reads one number from the store."""
    return service.health()


@probes.get(
    "/readyz",
    summary="Does every rank serve?",
    responses=documented(ProblemType.NOT_READY, ProblemType.STORE_UNAVAILABLE),
)
async def get_readyz(request: Request) -> Health:
    """A run has begun, every rank reports, and steps make progress."""
    return await served(request).readiness.get()


@figures.get(
    "/metrics",
    summary="Figures for Prometheus",
    response_class=PlainTextResponse,
    responses=documented(*OF_KEYS, *OF_STORE),
)
def get_metrics(request: Request) -> Response:
    """Under a hundred series of each deployment; counters are its own, not this process's.

    A path of one deployment has that one alone.
    """
    deployments: Deployments = request.app.state.deployments
    is_of_one = getattr(request.state, "asked_for", None) is not None
    chosen = [served(request)] if is_of_one else deployments.all()
    text, media_type = metrics_text(one.service.metrics for one in chosen)
    return Response(text, media_type=media_type)


add_deployment_routes(watch)
add_watching_routes(watch)
add_load_matrix(watch)
add_placement_routes(watch)
add_event_stream(watch)
add_task_routes(watch, act)
add_pin_routes(watch, act)
add_rank_routes(watch, act)
add_simulation_routes(watch, act)
add_problem_types(watch)


@watch.get("/whoami", summary="Who asks")
async def get_whoami(request: Request) -> WhoAnswer:
    """Name and role of the key."""
    actor: Actor = request.state.actor
    return WhoAnswer.model_validate({"name": actor.name, "role": actor.role.label})


@watch.get(
    "/audit",
    summary="Who changed what, and why",
    responses=documented(ProblemType.ROLE_TOO_LOW, ProblemType.NOT_FOUND),
)
def get_audit(
    request: Request,
    before: Annotated[int | None, Query(ge=1, le=MAX_ID)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> AuditPage:
    """Newest first, those before a number: give `next` as `before` to continue."""
    audit: Audit | None = request.app.state.audit
    if audit is None:
        why = "this service keeps no audit, expected one with a state folder"
        raise Refused(ProblemType.NOT_FOUND, why)
    found = audit.page(before, limit)
    following = found[-1].number if found and found[-1].number > 1 else None
    return AuditPage(entries=[AuditAnswer.model_validate(one) for one in found], next=following)


add_rebalance_routes(watch, act)


AT_REVISION = documented(ProblemType.SETTINGS_CHANGED)


@act.post(
    "/pause",
    summary="Stop all movement at once",
    responses=ONCE | AT_REVISION,
    openapi_extra=IF_MATCH,
)
def post_pause(request: Request, body: PauseRequest, response: Response) -> ControlAnswer:
    """The kill switch: no weight moves until it is resumed, or for `expires_s`."""
    return _switched(request, response, {"movement": False}, body.reason, body.expires_s)


@act.post(
    "/resume",
    summary="Let weights move again",
    responses=ONCE | AT_REVISION,
    openapi_extra=IF_MATCH,
)
def post_resume(request: Request, body: ReasonRequest, response: Response) -> ControlAnswer:
    """Ends a pause."""
    return _switched(request, response, {"movement": True}, body.reason)


@act.patch("/control", summary="Change switches", responses=AT_REVISION, openapi_extra=IF_MATCH)
def patch_control(request: Request, body: ControlRequest, response: Response) -> ControlAnswer:
    """Those that are not named stay as they are."""
    changes = body.model_dump(exclude_none=True, exclude={"reason"})
    return _switched(request, response, changes, body.reason)


def _switched(
    request: Request,
    response: Response,
    changes: dict[str, Any],
    reason: str,
    lasts_s: int | None = None,
) -> ControlAnswer:
    expected = revision_of(request, is_required=False)
    answer, tag = service_of(request).set_control(
        changes, reason, expected=expected, lasts_s=lasts_s
    )
    response.headers["ETag"] = tag
    return answer


@watch.get("/settings", summary="Live settings")
def get_settings(service: Service, response: Response) -> SettingsAnswer:
    """What applies, from which source and revision; the `ETag` is for `PATCH`."""
    return _tagged(settings_answer(service.store.live()), response)


@act.patch(
    "/settings", summary="Change live settings", responses=documented(ProblemType.SETTINGS_CHANGED)
)
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
    store: StateStore,
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
    others: Others | None = None,
) -> FastAPI:
    """Make the service of a deployment; ``HttpService`` binds it to a port.

    Args:
        store: of the deployment; the caller closes it.
        is_watching: whether the store is read in the background while the service runs; otherwise
            it is read when it is asked.
        token: that a request but the two probes may prove in place of an access key; None: without
            keys only this host can ask.
        state_dir: that has the access keys and the audit; None: there are neither.
        actor: who sends every request, for an application that is bound to no port.
        others: deployments that are shown beside it; None: there are none.
    """
    is_simulating = threading.Lock()

    def serve(
        of: StateStore, supervision: Callable[[], SupervisionView] = SupervisionView
    ) -> Served:
        service = AdminService(
            of, plan_wait_s=plan_wait_s, metrics_level=metrics_level, supervision=supervision
        )
        readiness = LatestAnswer(service.readiness, wait_s=probe_wait_s)
        return Served(service, Simulations(of, is_simulating), readiness)

    deployments = Deployments(serve(store, supervision), others, serve, is_watching=is_watching)

    @asynccontextmanager
    async def running(app: FastAPI) -> AsyncIterator[None]:
        deployments.start()
        try:
            yield
        finally:
            await asyncio.to_thread(deployments.stop)

    app = _bare_app(TITLE, running)
    app.state.deployments, app.state.limits = deployments, limits
    app.state.streams = deployments
    app.state.audit = None if state_dir is None else Audit(state_dir)
    app.add_middleware(Changes, limits=limits, state_dir=state_dir)
    app.add_middleware(Choice, deployments=deployments)
    _add_checks(app, token, state_dir, actor)
    app.add_middleware(Prefix)
    app.router.routes.extend(_routes().routes)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    app.add_api_route("/", _page, include_in_schema=False)
    app.add_api_route("/api/v1/openapi.json", _document, include_in_schema=False)
    app.openapi = _routes().openapi  # type: ignore[method-assign]
    return app


def create_metrics_app(
    deployments: Deployments,
    *,
    limits: HttpLimits = DEFAULT_LIMITS,
    token: str | None = None,
    state_dir: Path | None = None,
) -> FastAPI:
    """Make the service of /metrics alone, for an address of its own.

    Args:
        deployments: of the admin API; their figures are served.
        limits: of the admin API; this one has fewer connections and requests.
        token: that a scrape may prove in place of an access key; not that of the admin API.
        state_dir: that has the access keys; None: there are none.
    """
    few = replace(
        limits,
        max_connections=min(limits.max_connections, METRICS_CONNECTIONS),
        max_requests=min(limits.max_requests, METRICS_REQUESTS),
    )
    app = _bare_app("EPLB metrics")
    app.state.deployments, app.state.limits = deployments, few
    app.state.streams = None
    _add_checks(app, token, state_dir)
    app.include_router(figures)
    app.openapi()  # makes its routes now, and not at the first request
    return app


def _bare_app(
    title: str, lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None
) -> FastAPI:
    """An application without routes that reports problems."""
    # No documentation page: FastAPI's own loads its scripts from another site.
    app = FastAPI(
        title=title,
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,  # the document has a route like all others
        dependencies=[Depends(check_request)],
        lifespan=lifespan,
        # To a path with another slash at its end: it would lead a change to another deployment.
        redirect_slashes=False,
    )
    report_problems(app, RequestValidationError)
    return app


@cache
def _routes() -> FastAPI:
    """An application with all routes of the admin API and their document.

    Both are code, and making them takes 0.3 s: every application of a process shares them. FastAPI
    alone would make them at the first request, on the event loop.
    """
    app = _bare_app(TITLE)
    app.servers = SERVERS
    for router in (probes, figures, watch, act):
        app.include_router(router)
    correct_media_types(app.openapi())
    return app


def _add_checks(
    app: FastAPI, token: str | None, state_dir: Path | None, actor: Actor | None = None
) -> None:
    # The last is the outermost: a stranger's body is not read, and what is refused is no change.
    app.add_middleware(Guard, limits=app.state.limits, any_host=token is not None)
    app.add_middleware(Authentication, token=token, state_dir=state_dir, actor=actor)


async def _document(request: Request) -> dict[str, Any]:
    app: FastAPI = request.app
    return app.openapi()


def _page() -> FileResponse:
    policy = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
    return FileResponse(STATIC / "index.html", headers={"Content-Security-Policy": policy})
