"""Builds a rank from its environment, as ``eplb launch`` and torchrun set it.

    rank = build_rank_from_env()        # EPLB_RANK_FILE, RANK, WORLD_SIZE, LOCAL_RANK, MASTER_*
    ...                                 # the engine makes its model over rank.bank, rank.table
    rank.start()
    while rank.step(number, "decode"):
        ...

Every rank calls it. An engine that has formed its default group keeps it; else the group is formed
here, once all ranks have met (``rebalance/assembly/meeting.py``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from eplb.core.topology import Topology
from eplb.errors import ConfigError, EplbError, RankError
from eplb.versions import RANKS, Announcement
from rebalance.assembly.config import RankConfig
from rebalance.assembly.description import RANK_FILE_VARIABLE, DeploymentDescription
from rebalance.assembly.facts import exchange_facts
from rebalance.assembly.group import (
    interface_of,
    join_ranks,
    join_votes,
    own_ports,
    wait_alone,
)
from rebalance.assembly.meeting import meet
from rebalance.assembly.places import (
    JOINS_VARIABLE,
    MEMBERS_VARIABLE,
    claim_place,
    report_halt,
    report_ready,
    report_run,
    report_wait,
)
from rebalance.assembly.process import RankProcess, attendance
from rebalance.assembly.rank import OwnExperts, build_rank, new_run_name, record_start
from rebalance.rank.group import Group
from rebalance.rank.rank import Rank
from rebalance.types import StepCounter
from runtime.group import gathered, gloo_listeners_closed
from telemetry.state.joining import ANNOUNCED_WITHIN_S, check_versions
from telemetry.state.store import StateStore


def build_rank_from_env(
    own_experts: OwnExperts | None = None,
    environ: Mapping[str, str] | None = None,
    passes: StepCounter | None = None,
) -> Rank:
    """Build this process's rank up to the point where it can start; collective.

    Args:
        own_experts: for an engine that loads its own weights: gives the filled memory for the
            experts that the placement has on this rank. Without a checkpoint each is offered to the
            cache of the host. None: memory is reserved here, and filled from that cache.
        environ: None: the process environment.
        passes: counts the forward passes of this process; see ``Rank.passes``.

    Raises:
        ConfigError: the environment names no deployment or no rank of it, or does not fit it.
        StoreError: the store cannot be used, or has no placement to start from.
        RankError: a rank is missing, is there twice, has another configuration or secret, died or
            was late.
        MigrationError: experts cannot be loaded, or ranks hold different bytes of one.
    """
    environ = os.environ if environ is None else environ
    deployment = described_by(environ)
    number, device = _rank_of(deployment, environ), _device_of(deployment, environ)
    host = int(deployment.topology.host_of_rank[number])
    claim = claim_place(deployment.config.deployment, number, deployment.hosts[host])
    joins, members = JOINS_VARIABLE in environ, _members(deployment, number, environ)
    alive = np.isin(np.arange(deployment.topology.num_ranks), members)
    topology = replace(deployment.topology, alive=alive)
    try:
        config = _config_of(deployment, number)
        group = (
            wait_alone(config, number, topology)
            if joins
            else _join(deployment, config, number, topology, device, environ)
        )
        store = deployment.opened_store()
        if not joins:
            group = replace(group, run=_begin_run(deployment, store, group))
            report_run(number, group.run, environ)
        cache = deployment.host_caches[host]
        if own_experts is not None and deployment.checkpoint is None:
            cache = deployment.records or cache
        report_wait(number, f"the cache of host {host}, and the first experts", environ)
        experts = own_experts or deployment.schema
        rank = build_rank(deployment.config, group, cache, deployment.model, experts, store)
        rank.passes = passes
        rank.process = RankProcess(rank, deployment, claim, environ)
    except BaseException as exc:
        claim.close()
        if isinstance(exc, EplbError):
            report_wait(number, f"another start: {exc}", environ)
        raise
    if not joins:
        report_ready(number, environ)
    rank.on_halt = partial(report_halt, number, environ)
    return rank


def described_by(environ: Mapping[str, str]) -> DeploymentDescription:
    """Read the deployment that an environment names.

    Raises:
        ConfigError: it names none, or a file that cannot be used.
    """
    if RANK_FILE_VARIABLE not in environ:
        raise ConfigError(
            f"{RANK_FILE_VARIABLE} is not set, expected the file that eplb launch writes: start "
            "this program with `eplb launch -- ...`"
        )
    return DeploymentDescription.read(Path(environ[RANK_FILE_VARIABLE]))


def _rank_of(deployment: DeploymentDescription, environ: Mapping[str, str]) -> int:
    num_ranks = deployment.topology.num_ranks
    if dist.is_initialized():
        rank, found = dist.get_rank(), dist.get_world_size()
    else:
        rank, found = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if found != num_ranks or not 0 <= rank < num_ranks:
        raise ConfigError(
            f"rank {rank} of {found} ranks, expected one of the {num_ranks} ranks of deployment "
            f"{deployment.config.deployment!r} (topology.nodes x topology.ranks_per_node)"
        )
    return rank


def _device_of(deployment: DeploymentDescription, environ: Mapping[str, str]) -> torch.device:
    if deployment.device == "cpu":
        return torch.device("cpu")
    local, found = _number(environ, "LOCAL_RANK"), torch.cuda.device_count()
    if local >= found:
        raise ConfigError(f"LOCAL_RANK is {local} and {found} GPUs are visible, expected one each")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isdecimal():
        raise ConfigError(f"{name} is {text!r}, expected a number, as torchrun and eplb launch set")
    return int(text)


def _members(deployment: DeploymentDescription, rank: int, environ: Mapping[str, str]) -> list[int]:
    """The ranks that start together; of one that joins, itself alone."""
    if JOINS_VARIABLE in environ:
        return [rank]
    text = environ.get(MEMBERS_VARIABLE)
    if text is None:
        return list(range(deployment.topology.num_ranks))
    return [int(one) for one in text.split(",")]


def _config_of(deployment: DeploymentDescription, rank: int) -> RankConfig:
    """How a rank reaches the others: by the interface of its host's address, if none is set.

    gloo else takes the address of the host's name, which is 127.0.1.1 on Debian.
    """
    config = deployment.config
    if config.network.interface is not None:
        return config
    own = deployment.hosts[int(deployment.topology.host_of_rank[rank])]
    return replace(config, network=replace(config.network, interface=interface_of(own)))


def _join(
    deployment: DeploymentDescription,
    config: RankConfig,
    rank: int,
    topology: Topology,
    device: torch.device,
    environ: Mapping[str, str],
) -> Group:
    """Join the other ranks; beside the engine's group where it has formed one."""
    network = config.network
    if device.type == "cuda" and network.interface is not None:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", network.interface)
    mine = attendance(deployment, rank, np.flatnonzero(topology.alive).tolist())
    if dist.is_initialized():
        group = join_votes(config, topology, device=device)
        control = group.control
        assert control is not None, "it was formed with one"
        exchange_facts(mine, lambda _, message: gathered(message, control))
        return group
    tell = partial(report_wait, rank, environ=environ)
    if device.type == "cuda":  # NCCL connects to the rendezvous again later
        store = meet(mine, environ, network.join_deadline_s, tell)
    else:
        with gloo_listeners_closed():  # all ranks are connected to it: strangers come too late
            store = meet(mine, environ, network.join_deadline_s, tell)
    tell(f"its connections to all ranks, {own_ports()} of their hosts")
    return join_ranks(config, store, rank, topology, device)


def _begin_run(deployment: DeploymentDescription, store: StateStore, group: Group) -> str:
    """Have the lowest rank record this start under a new name, and give the name on every rank."""
    recorded = {"run": "", "refusal": ""}
    lowest = group.members[0]
    if group.rank == lowest:
        try:
            recorded["run"] = _begin(deployment, group.topology, store)
        except EplbError as exc:
            recorded["refusal"] = str(exc)[:500]
    assert group.control is not None, "it was formed with one"
    try:
        first = gathered(recorded, group.control)[0]
    except RuntimeError as exc:
        raise RankError(
            f"rank {group.rank}: a rank died while the start was recorded: {exc}"
        ) from exc
    if first["refusal"]:
        raise RankError(
            f"rank {group.rank}: rank {lowest} could not record the start: {first['refusal']}"
        )
    return str(first["run"])


def _begin(deployment: DeploymentDescription, topology: Topology, store: StateStore) -> str:
    """Record a start of all ranks under a new name."""
    run = new_run_name()
    # The other ranks wait for this one, for as long as ranks may take to join.
    wait_s = min(ANNOUNCED_WITHIN_S, deployment.config.network.join_deadline_s / 2)
    check_versions(store, Announcement(RANKS, run), wait_s=wait_s)
    model = replace(deployment.model, expert_bytes=deployment.schema.record_bytes)
    windows = deployment.window_steps, deployment.window_seconds
    record_start(store, run, model, topology, windows)
    return run
