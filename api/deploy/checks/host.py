"""``eplb check``: the configuration and this host, before anything is started.

Each check gives one finding: the component, what was found, and where that is wrong what was
expected. A check that fails hides no other.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from api.config.addresses import numeric_address
from api.deploy.checkpoint import check_same_checkpoint
from api.deploy.checks.costs import Costs, amount, available_memory, costs_of
from api.deploy.checks.finding import Finding, as_finding
from api.deploy.checks.tls import check_certificates
from api.deploy.deployment import Deployment
from api.deploy.first_placement import check_belongs
from api.deploy.hosts import CLOCK_EXPECTED, clock_offset, is_own, offset_text
from api.deploy.model import check_checkpoint
from api.monitor.verdict import CLOCK_TOLERANCE_S
from eplb.clock import Clock
from eplb.errors import CheckpointError, ConfigError, EplbError
from eplb.versions import CONTROLLER, RANKS, Announcement
from rebalance.build.places import holder_of
from telemetry.state.joining import check_versions, serving
from telemetry.state.store import StateStore


def check_all(deployment: Deployment, host: int, clock: Clock = time.time) -> Iterator[Finding]:
    """Run every check for one host of a deployment."""
    count = deployment.topology.num_ranks
    yield Finding(
        "configuration",
        f"{deployment.name}: {count} ranks on {len(deployment.hosts)} hosts, this is host {host}, "
        f"{deployment.hosts[host]}",
    )
    whose = "of the deployment" if deployment.secret.is_given else "this host's own (loopback)"
    yield Finding("secret", f"{whose}, fingerprint {deployment.secret.fingerprint}")
    yield from check_certificates(deployment, host)
    yield from check_ports(deployment, host)
    yield from check_places(deployment, host)
    yield check_state_folder(deployment.state_dir)
    weights, model = deployment.settings.model, deployment.model
    yield _refusal_of("checkpoint", lambda: check_checkpoint(weights, model))
    try:
        costs = costs_of(deployment)
    except EplbError as exc:
        yield as_finding("memory", exc)
    else:
        yield check_memory(costs, available_memory())
        if deployment.settings.topology.device == "cuda":
            from api.deploy.checks.gpus import check_gpu_host  # torch and CUDA

            yield from check_gpu_host(costs)
    yield from check_store(deployment, clock)


def ports_of(deployment: Deployment, host: int) -> Iterator[tuple[str, str, int]]:
    """Give what will listen on a host: its setting, address and port."""
    network, http = deployment.settings.network, deployment.settings.http
    address = deployment.hosts[host]
    if host == 0:
        yield "network.rendezvous_port", address, network.rendezvous_port
    if deployment.has_links:
        yield "network.host_cache_port", address, network.host_cache_port
        for local in range(deployment.settings.topology.ranks_per_node):
            yield "network.rank_port", address, network.rank_port + local
    if http.port and is_own(numeric_address(http.host)):
        yield "http.port", numeric_address(http.host), http.port
    if http.metrics_host and http.metrics_port:
        own = numeric_address(http.metrics_host, "http.metrics_host")
        if is_own(own):
            yield "http.metrics_port", own, http.metrics_port


def check_ports(deployment: Deployment, host: int) -> Iterator[Finding]:
    """Find ports that are in use, or that two settings share."""
    free, taken = [], dict[tuple[str, int], str]()
    for setting, address, port in ports_of(deployment, host):
        place = f"{port} of {address} ({setting})"
        if (address, port) in taken:
            other = taken[address, port]
            yield Finding("ports", f"{place} is also {other}", "another port for each")
            continue
        taken[address, port] = setting
        if refusal := port_refusal(address, port):
            yield Finding("ports", f"{place} cannot be used: {refusal}", "a free port")
        else:
            free.append(str(port))
    if free or not taken:
        yield Finding("ports", f"free: {', '.join(free) or 'none needed'}")


def port_refusal(address: str, port: int) -> str:
    """Return why a port cannot be listened on; "": it can."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        socket.create_server((address, port), family=family).close()
    except OSError as exc:
        return os.strerror(exc.errno) if exc.errno else str(exc)
    except OverflowError as exc:
        return str(exc)
    return ""


def check_places(deployment: Deployment, host: int) -> Iterator[Finding]:
    """Find ranks and a host cache of this deployment that run on this host already."""
    ranks = deployment.ranks_of(host)
    for rank in ranks:
        if (pid := holder_of(deployment.name, rank)) is not None:
            yield Finding("places", f"rank {rank} is run by process {pid}", "no process")
    with socket.socket(socket.AF_UNIX) as end:
        try:
            end.bind(deployment.host_cache_address(host).socket)
        except OSError:
            yield Finding("places", f"a process is the cache of host {host}", "no process")
            return
    yield Finding("places", f"ranks {ranks[0]}..{ranks[-1]} and the host cache are not running")


def check_state_folder(path: Path) -> Finding:
    """Find out whether journals and spools can be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f"check.{os.getpid()}.unfinished"
        probe.touch()
        probe.unlink()
    except OSError as exc:
        found = f"{path} cannot be written: {exc.strerror}"
        return Finding("state folder", found, "a folder of this user (deployment.state_dir)")
    return Finding("state folder", f"{path} can be written")


def check_memory(costs: Costs, available: int) -> Finding:
    """Compare what a host needs with what it has."""
    found = f"{amount(available)} of host memory are available, {amount(costs.host)} are needed"
    if available < costs.host:
        return Finding("memory", found, "more memory, or another host_cache.mode than full")
    return Finding("memory", found)


def check_store(deployment: Deployment, clock: Clock = time.time) -> Iterator[Finding]:
    """Find out whether the store answers, is of this deployment, and has this host's time."""
    try:
        opened = deployment.opened_store()
    except EplbError as exc:
        yield as_finding("store", exc)
        return
    with closing(opened) as store:
        try:
            versions = check_versions_here(store, clock)
            if not versions.is_ok:  # nothing else of the store can be relied on
                yield versions
                return
            check_belongs(store, deployment)
            yield from _check_same(store, deployment)
            committed = store.committed()
            # The event also shows that the store can be written.
            detail = {"host": socket.gethostname(), "process": os.getpid()}
            offset_s, error_s = clock_offset(store, "check", detail, clock)
        except EplbError as exc:
            yield as_finding("store", exc)
            return
    held = f"generation {committed.placement.generation}" if committed else "no placement yet"
    yield Finding("store", f"{deployment.store_shown} can be written, holds {held}")
    is_off = abs(offset_s) > CLOCK_TOLERANCE_S + error_s
    yield Finding("clock", offset_text(offset_s), CLOCK_EXPECTED if is_off else "")
    yield versions


def check_versions_here(store: StateStore, clock: Clock) -> Finding:
    """Compare this release with the processes of the deployment that serve."""
    own = Announcement(RANKS, "")
    try:
        # A controller meets all that serves, so that one wait is enough.
        check_versions(store, Announcement(CONTROLLER, ""), clock=clock)
        check_versions(store, own, wait_s=0.0, clock=clock)
    except ConfigError as exc:
        return as_finding("versions", exc)
    shown = "".join(f", {one.component} of {one.version} serve" for one in serving(store, clock()))
    return Finding("versions", f"this is {own.version}{shown or ', nothing serves'}")


def _check_same(store: StateStore, deployment: Deployment) -> Iterator[Finding]:
    try:
        check_same_checkpoint(store, deployment.checkpoint)
    except CheckpointError as exc:
        yield as_finding("checkpoint", exc)


def _refusal_of(component: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(component, check())
    except EplbError as exc:
        return as_finding(component, exc)
