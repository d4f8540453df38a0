"""Builds a rank from its environment, as ``eplb launch`` and torchrun set it.

    rank = build_rank_from_env()        # EPLB_RANK_FILE, RANK, WORLD_SIZE, LOCAL_RANK, MASTER_*
    ...                                 # the engine makes its model over rank.bank, rank.table
    rank.agent.start()
    while rank.agent.step(number, "decode"):
        ...

Every rank calls it. An engine that has formed its default group keeps it; else the group is formed
here, once all ranks have met (``rebalance/assembly/meeting.py``).
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from eplb.errors import ConfigError, EplbError, RankError
from eplb.versions import RANKS, Announcement
from rebalance.agent import RankAgent
from rebalance.assembly.description import RANK_FILE_VARIABLE, DeploymentDescription
from rebalance.assembly.experts import RankPlace
from rebalance.assembly.group import RankGroups, interface_of, join_ranks, join_votes
from rebalance.assembly.meeting import Attendance, agree, meet
from rebalance.assembly.places import (
    claim_place,
    report_halt,
    report_ready,
    report_run,
    report_wait,
)
from rebalance.assembly.rank import (
    BuiltRank,
    OwnExperts,
    build_rank,
    new_run_name,
    record_start,
)
from rebalance.assembly.survivors import Stages, refusal_to_serve_on, serve_on
from rebalance.recovery import recover
from rebalance.types import StepCounter
from runtime.counters import PassCounter, SlotCounter
from runtime.dispatch.all_to_all import AllToAllDispatcher
from runtime.experts import ExpertBank
from runtime.group import end_exchanges, gathered, gloo_listeners_closed, set_deadline
from runtime.routing import RoutingTable
from runtime.streams import Completion
from telemetry.state.joining import ANNOUNCED_WITHIN_S, check_versions
from telemetry.state.store import StateStore

log = logging.getLogger(__name__)

# Within what `eplb launch` gives ranks after a signal: what waits longer is on disk, and is written
# by the next start.
FLUSH_DEADLINE_S = 10.0


@dataclass
class EmbeddedRank:
    """A rank of a deployment inside a serving process."""

    built: BuiltRank
    place: RankPlace
    deployment: DeploymentDescription
    _claim: socket.socket  # open while this process has the rank's place
    _environ: Mapping[str, str]
    _passes: StepCounter | None
    _dispatchers: list[AllToAllDispatcher] = field(default_factory=list)
    # Broken groups: to delete one would wait for its exchanges up to their deadline.
    _broken: list[RankGroups] = field(default_factory=list)

    @property
    def agent(self) -> RankAgent:
        """Call its ``step`` before each forward pass."""
        return self.built.agent

    @property
    def bank(self) -> ExpertBank:
        """The live slots, which the model's kernels read."""
        return self.built.bank

    @property
    def table(self) -> RoutingTable:
        """Chooses the slot of each routed token."""
        return self.built.table

    @property
    def counter(self) -> SlotCounter:
        """Counts what each slot of this rank receives."""
        return self.built.counter

    def all_to_all(self) -> AllToAllDispatcher:
        """Make the plain dispatcher, over the group of the ranks; it ends at a peer's death."""
        groups, rank = self.place.groups, self.place.rank
        made = AllToAllDispatcher(self.place.topology, groups.tokens, rank, self.counter)
        if self.place.device.type == "cpu":
            set_deadline(groups.tokens, self.deployment.config.vote_deadline_s)
            made.wait = lambda exchange: self.agent.wait_for_exchange(exchange)
        else:
            made.wait = self._wait_for_kernel
        self._dispatchers.append(made)
        return made

    def _wait_for_kernel(self, exchange: dist.Work) -> None:
        """Wait for an exchange of NCCL, whose own wait with a deadline would end the group."""
        exchange.wait()  # of the stream, not of the host
        self.agent.wait(Completion(is_cuda=True))

    def close(self) -> None:
        """End the rank after its last step, and write what it still has to report.

        Raises:
            RankError: the store did not take it in time. All ranks have ended at one step all the
                same, and nothing of this rank is left open.
        """
        try:
            self.built.close(FLUSH_DEADLINE_S)
        finally:
            self.built.store.close()
            self._claim.close()

    def survive(self) -> bool:
        """After ``BrokenGroup``: agree with the other survivors, and serve on if that is possible.

        Returns:
            Whether this process serves on, with another ``agent``, which is started. Else the rank
            has ended, and the process must. A start of all ranks is right then: each loads its
            slots from the placement of the store.
        """
        rank, stages = self.place.rank, Stages()
        refusal = refusal_to_serve_on(self.place, self.built)
        if self.place.device.type == "cuda" and not self._dispatchers:
            refusal = refusal or "tokens are not exchanged by all_to_all(): DeepEP ends with a rank"
        if not isinstance(self._passes, PassCounter):
            refusal = refusal or "the engine numbers its passes itself, expected a PassCounter"
        try:
            if refusal:
                log.info("rank %d does not serve on: %s", rank, refusal)
                recover(self.agent, self.built.store)
            else:
                assert isinstance(self._passes, PassCounter), "looked at above"
                self._broken.append(self.place.groups)
                if self.place.device.type == "cuda":
                    end_exchanges(self.place.groups.tokens, self.place.device)
                steps = self._passes.steps
                self.built, self.place, step = serve_on(self.built, self.place, steps, stages)
                self._passes.go_on(step)
                for dispatcher in self._dispatchers:
                    dispatcher.use(self.place.topology, self.place.groups.tokens)
                self.agent.start()
                report_run(rank, self.place.run, self._environ)
                return True
        except EplbError as exc:
            log.warning("rank %d: no recovery: %s", rank, exc)
        self.agent.close()  # an orderly leave: the others must not take it for a death
        self.built.close_journal()
        return False


def build_rank_from_env(
    own_experts: OwnExperts | None = None,
    environ: Mapping[str, str] = os.environ,
    passes: StepCounter | None = None,
) -> EmbeddedRank:
    """Build this process's rank up to the point where its agent can start; collective.

    Args:
        own_experts: for an engine that loads its own weights: gives the filled memory for the
            experts that the placement has on this rank. None: memory is reserved here, and filled
            from the cache of the rank's host.
        environ: the process environment.
        passes: counts the forward passes of this process; see ``build_rank``.

    Raises:
        ConfigError: the environment names no deployment or no rank of it, or does not fit it.
        StoreError: the store cannot be used, or has no placement to start from.
        RankError: a rank is missing, is there twice, has another configuration or secret, died or
            was late.
        MigrationError: experts cannot be loaded, or ranks hold different bytes of one.
    """
    deployment = described_by(environ)
    rank, device = _rank_of(deployment, environ), _device_of(deployment, environ)
    host = int(deployment.topology.host_of_rank[rank])
    claim = claim_place(deployment.config.deployment, rank, deployment.hosts[host])
    try:
        groups = _joined(deployment, rank, device, environ)
        store = deployment.opened_store()
        run = _begun_run(deployment, store, rank, groups)
        report_run(rank, run, environ)
        cache = deployment.host_caches[host]
        report_wait(rank, f"the cache of host {host}, and the first experts", environ)
        place = RankPlace(rank, run, deployment.topology, groups, device, cache)
        experts = own_experts or deployment.schema
        built = build_rank(deployment.config, place, deployment.model, experts, store, passes)
    except BaseException as exc:
        claim.close()
        if isinstance(exc, EplbError):
            report_wait(rank, f"another start: {exc}", environ)
        raise
    report_ready(rank, environ)
    built.agent.on_halt = partial(report_halt, rank, environ)
    return EmbeddedRank(built, place, deployment, claim, environ, passes)


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


def _joined(
    deployment: DeploymentDescription,
    rank: int,
    device: torch.device,
    environ: Mapping[str, str],
) -> RankGroups:
    """Join the other ranks; beside the engine's group where it has formed one."""
    own = deployment.hosts[int(deployment.topology.host_of_rank[rank])]
    network = deployment.config.network
    if network.interface is None:
        network = replace(network, interface=interface_of(own))
    if device.type == "cuda" and network.interface is not None:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", network.interface)
    num_ranks = deployment.topology.num_ranks
    mine = Attendance(rank, num_ranks, own, deployment.join_key, deployment.summary())
    if dist.is_initialized():
        groups = join_votes(network)
        agree(mine, lambda _, message: gathered(message, groups.votes))
        return groups
    tell = partial(report_wait, rank, environ=environ)
    if device.type == "cuda":  # NCCL connects to the rendezvous again later
        store = meet(mine, environ, network.join_deadline_s, tell)
    else:
        with gloo_listeners_closed():  # all ranks are connected to it: strangers come too late
            store = meet(mine, environ, network.join_deadline_s, tell)
    return join_ranks(network, store, rank, num_ranks, device)


def _begun_run(
    deployment: DeploymentDescription, store: StateStore, rank: int, groups: RankGroups
) -> str:
    """Have rank 0 record this start under a new name, and give the name on every rank."""
    said = {"run": "", "refusal": ""}
    if rank == 0:
        try:
            said["run"] = _begin(deployment, store)
        except EplbError as exc:
            said["refusal"] = str(exc)[:500]
    try:
        first = gathered(said, groups.votes)[0]
    except RuntimeError as exc:
        raise RankError(f"rank {rank}: a rank died while the start was recorded: {exc}") from exc
    if first["refusal"]:
        raise RankError(f"rank {rank}: rank 0 could not record the start: {first['refusal']}")
    return str(first["run"])


def _begin(deployment: DeploymentDescription, store: StateStore) -> str:
    """Record a start of all ranks under a new name."""
    run = new_run_name()
    # The other ranks wait for this one, for as long as ranks may take to join.
    wait_s = min(ANNOUNCED_WITHIN_S, deployment.config.network.join_deadline_s / 2)
    check_versions(store, Announcement(RANKS, run), wait_s=wait_s)
    model = replace(deployment.model, expert_bytes=deployment.schema.record_bytes)
    windows = deployment.window_steps, deployment.window_seconds
    record_start(store, run, model, deployment.topology, windows)
    return run
