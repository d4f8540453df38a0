"""The HTTP service: routes to AdminService, problems (RFC 9457), and the page.

    GET  /            the page          GET  /healthz /livez /readyz /metrics
    GET  /api/v1/...  queries           POST, PUT, PATCH, DELETE /api/v1/...  requests
    /deployments/NAME/...               the same, of another deployment

Queries read the store, and requests are written to it. Who asks is found in
``api/http/authentication.py``, limits are kept in ``api/http/guard.py``, and roles, revisions and
keys of requests are dependencies of the routes. The probes take no thread and never wait for the
store.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles

from api.access.audit import Audit
from api.access.keys import Actor
from api.http.authentication import Authentication
from api.http.dependencies import KeptAnswers
from api.http.deployments import PREFIX, DeploymentLookup, Deployments, Others, Prefix
from api.http.document import correct_document
from api.http.guard import DEFAULT_LIMITS, Guard, HttpLimits, check_request
from api.http.refusals import report_problems
from api.http.service import AdminService
from api.metrics.definitions import Level
from api.operations.commands import route_of
from api.operations.service import metrics
from api.operations.table import ROUTES
from api.processes.supervision import SupervisionView
from eplb import __version__
from telemetry.state.store import StateStore

TITLE = "EPLB admin API"
STATIC = Path(__file__).parent / "http" / "static"
SERVERS: list[dict[str, Any]] = [
    {"url": "/", "description": "the service's own deployment"},
    {
        "url": f"{PREFIX}{{deployment}}",
        "description": "each deployment of GET /api/v1/deployments",
        "variables": {"deployment": {"default": "demo"}},  # an example
    },
]
METRICS_LIMITS = replace(DEFAULT_LIMITS, max_connections=16, max_requests=4)


def create_app(
    store: StateStore,
    *,
    plan_wait_s: float = 10.0,
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

    audit = None if state_dir is None else Audit(state_dir)

    def serve(
        of: StateStore, supervision: Callable[[], SupervisionView] = SupervisionView
    ) -> AdminService:
        return AdminService(
            of,
            plan_wait_s=plan_wait_s,
            metrics_level=metrics_level,
            supervision=supervision,
            audit=audit,
        )

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
    app.state.audit, app.state.clock = audit, time.time
    app.state.kept_answers = KeptAnswers()
    app.add_middleware(DeploymentLookup, deployments=deployments)
    _add_checks(app, token, state_dir, actor)
    app.add_middleware(Prefix)
    app.router.routes.extend(ROUTES)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    app.add_api_route("/", _page, include_in_schema=False)
    app.add_api_route("/api/v1/openapi.json", _document, include_in_schema=False)
    app.openapi = _document  # type: ignore[method-assign]
    return app


def create_metrics_app(
    deployments: Deployments,
    *,
    token: str | None = None,
    state_dir: Path | None = None,
) -> FastAPI:
    """Make the service of /metrics alone, for an address of its own.

    Args:
        deployments: of the admin API; their figures are served.
        token: that a scrape may prove in place of an access key; not that of the admin API.
        state_dir: that has the access keys; None: there are none.
    """
    app = _bare_app("EPLB metrics")
    app.state.deployments, app.state.limits = deployments, METRICS_LIMITS
    app.state.streams = None
    app.add_middleware(DeploymentLookup, deployments=deployments)
    _add_checks(app, token, state_dir)
    route = route_of(metrics)
    assert route is not None, "the admin API has it"
    app.router.routes.append(route)
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
    report_problems(app)
    return app


@cache
def _document() -> dict[str, Any]:
    """The OpenAPI document, which all applications of a process share."""
    app = _bare_app(TITLE)
    app.servers = SERVERS
    app.router.routes.extend(ROUTES)
    document = app.openapi()
    correct_document(document)
    return document


def _add_checks(
    app: FastAPI, token: str | None, state_dir: Path | None, actor: Actor | None = None
) -> None:
    # What is added last runs first: of a request without a key that is known, no body is read.
    app.add_middleware(Guard, limits=app.state.limits, any_host=token is not None)
    app.add_middleware(Authentication, token=token, state_dir=state_dir, actor=actor)


def _page() -> FileResponse:
    policy = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
    return FileResponse(STATIC / "index.html", headers={"Content-Security-Policy": policy})
