"""The HTTP service: routes to AdminService, problems in words, and the page.

    GET  /            the page          GET  /healthz /livez /readyz /metrics
    GET  /api/v1/...  questions         POST, PATCH /api/v1/...  requests

Everything is read from the store and every request is put into it. Only loopback names are served
(a page of another site that resolves its own name to 127.0.0.1 is refused), and only JSON bodies
are read, so that no form of another site can post.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware

from api.metric_rows import Level
from api.monitor import KEPT_SCORES, KEPT_WINDOWS
from api.requests import ControlRequest, ExplainRequest, ReasonRequest, RebalanceRequest
from api.schemas import (
    ControlAnswer,
    EventAnswer,
    Health,
    Imbalance,
    Load,
    PlacementAnswer,
    PlacementLine,
    PlanAnswer,
    Problem,
    State,
    TaskAnswer,
)
from api.service import AdminService, Refused
from api.supervision import SupervisionView
from eplb import __version__
from eplb.errors import ConfigError, EplbError
from telemetry.store import LoadStore

STATIC = Path(__file__).parent / "static"
LOOPBACK_NAMES = ["127.0.0.1", "localhost", "::1", "[::1]"]
TITLES = {
    400: "Bad request",
    404: "Not found",
    405: "Method not allowed",
    409: "Conflict",
    422: "Request refused",
    503: "Not ready",
}


def _service(request: Request) -> AdminService:
    service: AdminService = request.app.state.service
    return service


Service = Annotated[AdminService, Depends(_service)]


def _problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Document the problems that a route may answer with."""
    return {status: {"model": Problem, "description": TITLES[status]} for status in statuses}


probes = APIRouter(tags=["health"])
routes = APIRouter(prefix="/api/v1")


@probes.get("/livez", summary="Is the HTTP service alive?")
def get_livez() -> Health:
    """Answers as long as the process does."""
    return Health(detail=f"eplb {__version__}")


@probes.get("/healthz", summary="Does the store answer?", responses=_problems(503))
def get_healthz(service: Service) -> Health:
    """Reads one number from the store."""
    return service.health()


@probes.get("/readyz", summary="Does every rank serve?", responses=_problems(503))
def get_readyz(service: Service) -> Health:
    """A run has begun, every rank reports, and steps go on."""
    return service.readiness()


@probes.get("/metrics", include_in_schema=False)  # text, of a format with a document of its own
def get_metrics(service: Service) -> Response:
    """Under a hundred series of the current run; counters are the run's, not this process's."""
    return Response(service.metrics.text(), media_type=service.metrics.content_type)


@routes.get("/state", summary="Everything at a glance", tags=["watch"])
def get_state(service: Service) -> State:
    """What the page shows: ranks, latest heatmap, migration, bytes, decisions, switches."""
    return service.state()


@routes.get("/load", summary="Load windows with their matrices", tags=["watch"])
def get_load(service: Service, last: Annotated[int, Query(ge=1, le=KEPT_WINDOWS)] = 1) -> Load:
    """The latest windows, oldest first, as `tokens` [T, L, E] and `rank_load` [T, L, R]."""
    return service.load(last)


@routes.get("/imbalance", summary="Imbalance over time", tags=["watch"])
def get_imbalance(
    service: Service, last: Annotated[int, Query(ge=1, le=KEPT_SCORES)] = KEPT_SCORES
) -> Imbalance:
    """Measured beside contiguous, window by window, with the rebalances between them."""
    return service.imbalance(last)


@routes.get("/placement", summary="A committed placement", tags=["watch"], responses=_problems(404))
def get_placement(
    service: Service, generation: Annotated[int | None, Query(ge=0)] = None
) -> PlacementAnswer:
    """The one that serves, or the one of a generation."""
    return service.placement(generation)


@routes.get("/placements", summary="History of placements", tags=["watch"])
def get_placements(
    service: Service, limit: Annotated[int, Query(ge=1, le=1000)] = 100
) -> list[PlacementLine]:
    """Newest first, with the reason of each."""
    return service.placements(limit)


@routes.get("/plan", summary="The open migration and the last decision", tags=["watch"])
def get_plan(service: Service) -> PlanAnswer:
    """What is moving now, and what was decided last, with the reason."""
    return service.plan()


@routes.get("/events", summary="Events", tags=["watch"])
def get_events(
    service: Service,
    after: Annotated[int, Query(ge=0)] = 0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> list[EventAnswer]:
    """Oldest first, past an id: ask again with the last id to go on."""
    return service.events(after, limit)


@routes.get("/tasks/{task_id}", summary="One task", tags=["act"], responses=_problems(404))
def get_task(service: Service, task_id: int) -> TaskAnswer:
    """A request that the controller works off, and its result."""
    return service.task(task_id)


@routes.post(
    "/rebalances",
    summary="Plan now; move only when dry_run is false",
    tags=["act"],
    responses=_problems(409, 422)
    | {202: {"model": TaskAnswer, "description": "Not done yet; see Location"}},
)
def post_rebalance(service: Service, body: RebalanceRequest, response: Response) -> TaskAnswer:
    """Asks the controller and waits a while for its answer."""
    return _answered(service.rebalance(body), response)


@routes.post(
    "/explanations",
    summary="Why is this expert there?",
    tags=["watch"],
    responses=_problems(409, 422)
    | {202: {"model": TaskAnswer, "description": "Not done yet; see Location"}},
)
def post_explanation(service: Service, body: ExplainRequest, response: Response) -> TaskAnswer:
    """Asks the controller to plan now and to say why; moves nothing. Words are in `sentences`."""
    return _answered(service.explain(body), response)


def _answered(task: TaskAnswer, response: Response) -> TaskAnswer:
    """The task, with the status that says whether it is done."""
    if task.state in ("queued", "running"):
        response.status_code = 202
        response.headers["Location"] = f"/api/v1/tasks/{task.id}"
    return task


@routes.post("/pause", summary="Stop all movement at once", tags=["act"])
def post_pause(service: Service, body: ReasonRequest) -> ControlAnswer:
    """The kill switch: no weight moves until it is resumed."""
    return service.set_control(ControlRequest(reason=body.reason, movement=False, observe=None))


@routes.post("/resume", summary="Let weights move again", tags=["act"])
def post_resume(service: Service, body: ReasonRequest) -> ControlAnswer:
    """Undoes a pause."""
    return service.set_control(ControlRequest(reason=body.reason, movement=True, observe=None))


@routes.patch("/control", summary="Change switches", tags=["act"], responses=_problems(422))
def patch_control(service: Service, body: ControlRequest) -> ControlAnswer:
    """Those that are not named stay as they are."""
    return service.set_control(body)


def create_app(
    store: LoadStore,
    *,
    plan_wait_s: float = 10.0,
    metrics_level: Level = "default",
    supervision: Callable[[], SupervisionView] = SupervisionView,
) -> FastAPI:
    """Make the service of one deployment; who binds it to a port is the caller's business."""
    # No documentation page: FastAPI's own loads its scripts from another site.
    app = FastAPI(
        title="EPLB admin API",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url="/api/v1/openapi.json",
    )
    app.state.service = AdminService(
        store, plan_wait_s=plan_wait_s, metrics_level=metrics_level, supervision=supervision
    )
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=LOOPBACK_NAMES, www_redirect=False)
    app.include_router(probes)
    app.include_router(routes)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    app.add_api_route("/", _page, include_in_schema=False)
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(ConfigError, _value_refused)
    app.add_exception_handler(EplbError, _store_failed)
    app.add_exception_handler(RequestValidationError, _body_refused)
    app.add_exception_handler(HTTPException, _http_refused)
    return app


def _page() -> FileResponse:
    policy = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
    return FileResponse(STATIC / "index.html", headers={"Content-Security-Policy": policy})


def _problem(status: int, detail: str) -> JSONResponse:
    problem = Problem(title=TITLES.get(status, "Refused"), status=status, detail=detail)
    return JSONResponse(
        problem.model_dump(), status_code=status, media_type="application/problem+json"
    )


def _refused(request: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, Refused), "registered for Refused only"
    return _problem(exc.status, str(exc))


def _value_refused(request: Request, exc: Exception) -> JSONResponse:
    return _problem(422, str(exc))


def _store_failed(request: Request, exc: Exception) -> JSONResponse:
    return _problem(503, f"{type(exc).__name__}: {exc}")


def _http_refused(request: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, HTTPException), "registered for HTTPException only"
    return _problem(exc.status_code, f"{request.method} {request.url.path}: {exc.detail}")


def _body_refused(request: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, RequestValidationError), "registered for RequestValidationError only"
    error = exc.errors()[0]
    where = ".".join(str(part) for part in error["loc"])
    found = f", found {error['input']!r}" if error["type"] != "missing" else ""
    return _problem(422, f"{where}: {error['msg'][:1].lower()}{error['msg'][1:]}{found}")
