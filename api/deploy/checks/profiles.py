"""Checks of a profile beside the other profiles of its file: one model, and ports of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing

from api.deploy.checkpoint import check_same_checkpoint
from api.deploy.checks.finding import Finding, as_finding
from api.deploy.checks.host import ports_of
from api.deploy.deployment import Deployment
from api.deploy.secret import Secret
from eplb.core.model import ModelShape
from eplb.errors import ConfigError, EplbError
from eplb.migration.serialisation import model_from_dict


def check_profiles(
    mine: Deployment, host: int, others: Mapping[str, Callable[[Secret], Deployment]]
) -> Iterator[Finding]:
    """Compare a deployment with those of the other profiles of its file.

    Args:
        mine: the deployment that is checked.
        host: number of this host in it.
        others: by profile; each is made of its configuration here, with the secret of ``mine``, so
            that what is wrong with one is a finding and nothing of it is written.
    """
    for profile, resolve in others.items():
        try:
            other = resolve(mine.secret)
            clashes = list(_ports_of_both(mine, other, host))
            found = _served_by(other, mine)
        except EplbError as exc:
            yield as_finding(f"profile {profile}", exc)
            continue
        for clash in clashes:
            yield Finding(f"profile {profile}", clash, "another port for each profile of a host")
        about = f"{other.name}, {other.topology.num_ranks} ranks, {found}"
        yield Finding(f"profile {profile}", about)


def _ports_of_both(mine: Deployment, other: Deployment, host: int) -> Iterator[str]:
    """What both deployments would listen on at one host; loopback ports are of each host."""
    if mine.hosts[host] not in other.hosts:
        return
    own = {(address, port): setting for setting, address, port in ports_of(mine, host)}
    for setting, address, port in ports_of(other, other.hosts.index(mine.hosts[host])):
        if found := own.get((address, port)):
            yield f"{port} of {address} ({setting}) is also {found} of {mine.name}"


def _served_by(other: Deployment, mine: Deployment) -> str:
    """What a profile's deployment serves, if it has started.

    Raises:
        EplbError: another model or checkpoint than this host's, or the store cannot be read.
    """
    with closing(other.opened_store()) as store:
        run = store.current_run()
        check_same_checkpoint(store, mine.checkpoint)
        if run is None:
            return "not started yet"
        found, expected = model_from_dict(dict(run.model)), mine.model
        if _shape(found) != _shape(expected):
            raise ConfigError(
                f"deployment {other.name!r} serves {found.num_layers} MoE layers of "
                f"{found.num_experts} experts, top {found.top_k}, expected the model of "
                f"{mine.name!r}: {expected.num_layers} layers of {expected.num_experts} experts, "
                f"top {expected.top_k}"
            )
    return f"run {run.run} serves the same model"


def _shape(model: ModelShape) -> tuple[int, int, int]:
    return model.num_layers, model.num_experts, model.top_k
