"""``eplb serve``: a controller, the REST API and the page, supervised by one command.

It has no ranks: ``eplb launch`` starts them, before or after. Several may run; one controller of
all leads, and every API shows the same store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from socket import socket

from api.app import create_app, create_metrics_app
from api.config.deployment import EVERY, HttpSettings
from api.deploy.deployment import Deployment
from api.deploy.first_placement import check_belongs, ensure_first_placement
from api.http.deployments import Deployments, Others
from api.http.server import HttpService, bound_socket, check_certificate
from api.interrupts import StopSignals
from api.processes.commands import Commands, Notifier, once_reached, set_title, settle
from api.processes.supervision import note_in
from eplb import versions
from eplb.errors import ConfigError
from eplb.settings.deployment import numeric_address
from rebalance.weights.link.secret import METRICS_TOKEN_FILE, TOKEN_FILE, write_token
from telemetry import deployments_of, open_store
from telemetry.state.holder import new_holder
from telemetry.state.joining import Heartbeat, check_versions
from telemetry.state.store import StateStore

POLL_S = 0.25

log = logging.getLogger(__name__)


def serve(deployment: Deployment, controller: Sequence[str], say: Callable[[str], None]) -> None:
    """Serve until a signal.

    Args:
        deployment: of the store that is shown.
        controller: the words of its controller's command.
        say: prints a line for operators.

    Raises:
        EplbError: it cannot start, or an HTTP service ended; nothing is left running.
    """
    set_title("serve")
    stop, notifier = StopSignals(), Notifier()
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

        def tell(line: str) -> None:
            say(f"eplb serve: {line}")

        store = once_reached(partial(_joined, deployment), stop, notifier, tell)
        if store is None:
            return
        stack.callback(store.close)
        secret, state_dir = deployment.secret, deployment.state_dir
        token_file = write_token(secret.http_token, state_dir / TOKEN_FILE)
        did = "an engine's plug-in leads"
        if not deployment.is_of_engine:
            first = partial(ensure_first_placement, store, deployment, "eplb serve")
            if (started := once_reached(first, stop, notifier, tell)) is None:
                return
            placement, did = started
            did = f"{did}, generation {placement.generation}"
        commands = Commands(deployment.settings.supervision, note_in(store), stop)
        token = secret.http_token
        app = create_app(
            store,
            metrics_level=http.metrics_level,
            supervision=commands.view,
            token=token,
            state_dir=state_dir,
            is_watching=True,
            others=_others(deployment, store),
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
        services, metrics_token_file = [service], None
        if bound_metrics is not None:
            path = state_dir / METRICS_TOKEN_FILE
            metrics_token_file = write_token(secret.metrics_token, path)
            metrics = _metrics_service(deployment, app.state.deployments, bound_metrics)
            metrics.start()
            stack.callback(metrics.stop)
            services.append(metrics)
        stack.callback(commands.end_all)  # the controller gives its lease up
        if not deployment.is_of_engine:
            commands.add("the controller", "controller", controller)
        say(f"eplb serve: {service.url}")
        if token_file is not None:
            say(f"eplb serve: the token of the HTTP service is in {token_file}")
        if bound_metrics is not None:
            say(f"eplb serve: {metrics.url}/metrics")
        if metrics_token_file is not None:
            say(f"eplb serve: the token of that address is in {metrics_token_file}")
        say(f"eplb serve: {did}, in {deployment.store_shown}")
        stack.enter_context(Heartbeat(deployment.opened_store, versions.SERVICE, new_holder()))
        if store.live().text("stage") == "observe":
            say("eplb serve: stage observe: plans are recorded, nothing moves (operations.md)")
        notifier.ready()
        settle()
        while not stop.received:
            commands.look(POLL_S)
            for one in services:
                if not one.is_alive:
                    raise ConfigError(f"the HTTP service on {one.url} exited unexpectedly")
            notifier.alive()
    say(f"eplb serve: ended by {stop.name}; ranks do not depend on it")


def _joined(deployment: Deployment) -> StateStore:
    """Open the store of a deployment that this process may join."""
    store = deployment.opened_store()
    try:
        check_versions(store, versions.Announcement(versions.CONTROLLER, ""))
        check_belongs(store, deployment)
    except BaseException:
        store.close()
        raise
    return store


def _bound_metrics(http: HttpSettings) -> socket | None:
    """Take the address of /metrics; None: it has none of its own."""
    if not http.metrics_host:
        return None
    address = numeric_address(http.metrics_host, "http.metrics_host")
    return bound_socket(address, http.metrics_port, "http.metrics_port, http.metrics_host")


def _others(deployment: Deployment, store: StateStore) -> Others:
    """The deployments of its store that are shown beside it, its EP groups among them."""
    names = deployment.settings.http.deployment_names

    def found() -> Sequence[str]:
        chosen = deployments_of(deployment.store_url) if names == (EVERY,) else names
        return list(dict.fromkeys((*chosen, *store.groups())))

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
