"""``eplb serve``: a controller, the REST API and the page, supervised by one command.

It has no ranks: ``eplb launch`` starts them, before or after. Several may run; one controller of
all leads, and every API shows the same store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing.connection import wait
from socket import socket
from typing import Any

from api.config.addresses import numeric_address
from api.config.deployment import EVERY, HttpSettings
from api.deploy.deployment import Deployment
from api.deploy.first_placement import check_belongs, ensure_first_placement
from api.deploy.roles import controller_job
from api.deploy.secret import METRICS_TOKEN_FILE, TOKEN_FILE, write_token
from api.http.app import create_app, create_metrics_app
from api.http.deployments.served import Deployments, Others
from api.http.server import HttpService, bound_socket, check_certificate
from api.interrupts import StopSignals
from api.processes.children import Child, refusal
from api.processes.controller import run_controller
from api.processes.descriptors import raise_descriptor_limit
from api.processes.supervision import Kill, Supervised, Supervisor
from eplb import versions
from eplb.errors import StoreError
from rebalance.controller.lease import new_holder
from telemetry import deployments_of, open_store
from telemetry.state.joining import check_versions
from telemetry.state.store import StateStore

POLL_S = 0.25
LEASE_LOOK_S = 1.0
CONTROLLER = "the controller"

log = logging.getLogger(__name__)


def serve(deployment: Deployment, say: Callable[[str], None]) -> None:
    """Serve until a signal.

    Raises:
        EplbError: it cannot start; nothing is left running.
    """
    raise_descriptor_limit()
    stop = StopSignals()
    http = deployment.settings.http
    with ExitStack() as stack:
        # What may refuse the start comes before all that writes: another deployment may use the
        # store, and a start that did not happen must not be in its history.
        if http.certificate is not None:
            check_certificate(http.certificate)
        bound = bound_socket(numeric_address(http.host), http.port)
        stack.callback(bound.close)
        bound_metrics = _bound_metrics(http)
        if bound_metrics is not None:
            stack.callback(bound_metrics.close)
        store = deployment.opened_store()
        stack.callback(store.close)
        check_versions(store, versions.Announcement(versions.CONTROLLER, ""))
        check_belongs(store, deployment)
        secret, state_dir = deployment.secret, deployment.state_dir
        token_file = write_token(secret.http_token, state_dir / TOKEN_FILE)
        placement, wrote = ensure_first_placement(store, deployment, "eplb serve")
        supervisor = Supervisor(deployment.settings.supervision)
        token = secret.http_token
        app = create_app(
            store,
            metrics_level=http.metrics_level,
            supervision=supervisor.view,
            token=token,
            state_dir=state_dir,
            is_watching=True,
            others=_others(deployment),
        )
        service = HttpService(
            app,
            http.host,
            http.port,
            is_authenticated=token is not None,
            certificate=http.certificate,
            bound=bound,
        )
        service.start()
        stack.callback(service.stop)
        services, metrics_token_file = {"the HTTP service": service}, None
        if bound_metrics is not None:
            path = state_dir / METRICS_TOKEN_FILE
            metrics_token_file = write_token(secret.metrics_token, path)
            metrics = _metrics_service(deployment, app.state.deployments, bound_metrics)
            metrics.start()
            stack.callback(metrics.stop)
            services["the service of /metrics"] = metrics
        helpers = Helpers(deployment, store, supervisor, services)
        stack.callback(helpers.end)
        helpers.start()
        say(f"eplb serve: {service.url}")
        if token_file is not None:
            say(f"eplb serve: the token of the HTTP service is in {token_file}")
        if bound_metrics is not None:
            say(f"eplb serve: {metrics.url}/metrics")
        if metrics_token_file is not None:
            say(f"eplb serve: the token of that address is in {metrics_token_file}")
        did = "wrote the first placement" if wrote else "found a placement"
        say(f"eplb serve: {did}, generation {placement.generation}, in {deployment.store_shown}")
        if store.live().text("stage") == "observe":
            say("eplb serve: stage observe: plans are recorded, nothing moves (operations.md)")
        while not stop.received:
            helpers.look()


def _bound_metrics(http: HttpSettings) -> socket | None:
    """Take the address of /metrics; None: it has none of its own."""
    if not http.metrics_host:
        return None
    address = numeric_address(http.metrics_host, "http.metrics_host")
    return bound_socket(address, http.metrics_port, "http.metrics_port, http.metrics_host")


def _others(deployment: Deployment) -> Others | None:
    """The deployments of its store that are shown beside it."""
    names = deployment.settings.http.deployment_names
    if not names:
        return None

    def found() -> Sequence[str]:
        return deployments_of(deployment.store_url) if names == (EVERY,) else names

    return Others(found, partial(open_store, deployment.store_url))


def _metrics_service(deployment: Deployment, shown: Deployments, bound: socket) -> HttpService:
    """Make the service of /metrics alone, over the figures of the admin API."""
    http, token = deployment.settings.http, deployment.secret.metrics_token
    app = create_metrics_app(shown, token=token, state_dir=deployment.state_dir)
    return HttpService(
        app,
        http.metrics_host,
        http.metrics_port,
        limits=app.state.limits,
        is_authenticated=token is not None,
        certificate=http.certificate,
        bound=bound,
    )


class Helpers:
    """The supervised parts of ``eplb serve``: its controller and its HTTP services, by name."""

    def __init__(
        self,
        deployment: Deployment,
        store: StateStore,
        supervisor: Supervisor,
        services: Mapping[str, HttpService],
    ) -> None:
        self._store, self._supervisor = store, supervisor
        self._job = controller_job(deployment, new_holder())
        self._child: Child | None = None
        self._controller = self._added(CONTROLLER, "controller", self._new_controller)
        self._http = [
            (one, self._added(name, "http", partial(_started, one), reports_progress=False))
            for name, one in services.items()
        ]
        self._lease_due = 0.0

    def _added(
        self, name: str, kind: str, start: Callable[[], Kill], *, reports_progress: bool = True
    ) -> Supervised:
        supervisor = self._supervisor
        made = Supervised(
            name, kind, start, self._note, supervisor.settings, reports_progress=reports_progress
        )
        return supervisor.add(made)

    def start(self) -> None:
        """Start all of them."""
        self._controller.begin()
        for _, supervised in self._http:
            supervised.begin()

    def _new_controller(self) -> Kill:
        self._child = Child(CONTROLLER, run_controller, self._job)
        return self._child.kill

    def look(self) -> None:
        """Handle messages and exits, and restart what is due; takes a moment at most."""
        if (child := self._child) is None:
            wait([], POLL_S)
        elif wait([child.messages], POLL_S):
            message = child.receive()
            self._handle_exit(child) if message is None else self._handle(*message)
        for service, supervised in self._http:
            if supervised.is_up and not service.is_alive:
                supervised.ended(f"{supervised.name} exited unexpectedly")
            elif supervised.is_up:
                supervised.reported()
        now = self._supervisor.clock()
        if now >= self._lease_due:
            self._lease_due = now + LEASE_LOOK_S
            with suppress(StoreError):  # its age grows, which is what it is for
                self._supervisor.record_lease(self._store.lease())
        self._supervisor.check()

    def _handle(self, kind: str, body: Any) -> None:
        if kind == "failed" and not self._controller.was_ready:
            raise refusal(CONTROLLER, body)
        if kind in ("failed", "warning"):
            self._note(CONTROLLER, body if kind == "warning" else str(refusal(CONTROLLER, body)))
        if kind == "starting":
            self._controller.starting(body)
        elif kind != "failed":
            self._controller.reported()

    def _handle_exit(self, child: Child) -> None:
        self._child = None
        child.stop()
        self._controller.ended(child.exit_text())

    def _note(self, where: str, message: str) -> None:
        """Log and store a failure that ends nothing."""
        log.warning("%s: %s", where, message)
        try:
            self._store.add_event("error", {"where": where, "message": message})
        except StoreError as exc:
            log.warning("event not stored: %s", exc)

    def end(self) -> None:
        """End the controller, which gives its lease up."""
        if self._child is not None:
            self._child.command("stop")
            self._child.stop()


def _started(service: HttpService) -> Kill:
    if not service.is_alive:
        service.start()
    return service.stop
