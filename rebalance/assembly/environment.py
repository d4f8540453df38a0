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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from eplb.core.topology import Topology
from eplb.errors import ConfigError, EplbError, RankError, StoreError
from eplb.versions import RANKS, Announcement
from rebalance.agent import RankAgent
from rebalance.assembly.config import NetworkConfig
from rebalance.assembly.description import RANK_FILE_VARIABLE, DeploymentDescription
from rebalance.assembly.experts import RankPlace
from rebalance.assembly.group import (
    RankGroups,
    alone,
    interface_of,
    join_ranks,
    join_votes,
    own_ports,
)
from rebalance.assembly.meeting import Attendance, agree, meet
from rebalance.assembly.next_group import (
    NextGroup,
    NotChanged,
    await_exclusion,
    be_admitted,
    change_group,
)
from rebalance.assembly.places import (
    JOINS_VARIABLE,
    MEMBERS_VARIABLE,
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
from rebalance.assembly.survivors import Stages, serve_on
from rebalance.protocol import phases
from rebalance.recovery import let_go, recover
from rebalance.types import StepCounter
from runtime.counters import PassCounter, SlotCounter
from runtime.dispatch.all_to_all import AllToAllDispatcher
from runtime.experts import ExpertBank
from runtime.group import end_exchanges, gathered, gloo_listeners_closed, set_deadline
from runtime.routing import RoutingTable
from runtime.streams import Completion
from telemetry.state.joining import ANNOUNCED_WITHIN_S, check_versions
from telemetry.state.runs import GROUP_STAYS
from telemetry.state.store import StateStore

log = logging.getLogger(__name__)

# Within what `eplb launch` gives ranks after a signal: what waits longer is on disk, and is written
# by the next start.
FLUSH_DEADLINE_S = 10.0
JOINING = "joining"  # run of ranks that wait to be admitted


@dataclass
class EmbeddedRank:
    """A rank of a deployment inside a serving process."""

    built: BuiltRank
    place: RankPlace
    deployment: DeploymentDescription
    _claim: socket.socket  # open while this process has the rank's place
    _environ: Mapping[str, str]
    _passes: StepCounter | None
    has_left: bool = False  # as planned, so this process is to end, with status 0
    _dispatchers: list[AllToAllDispatcher] = field(default_factory=list)
    # To delete a broken group of NCCL would wait for its exchanges up to their deadline.
    _broken: list[dist.ProcessGroup] = field(default_factory=list)
    _next: NextGroup | None = None

    def __post_init__(self) -> None:
        refusal = self._refusal()
        self.agent.notes[GROUP_STAYS] = refusal
        if self.place.joins:
            if self.place.device.type != "cpu":
                refusal = "its group is of NCCL, expected ranks on CPUs, whose groups are of gloo"
            if refusal:
                raise ConfigError(f"rank {self.place.rank} cannot join the others: {refusal}")
            # Its first step ends at once, and ``survive`` waits for the others to admit it.
            self.agent.shared.update(phases.freeze, "it waits to be admitted")
            self.agent.voting.switch_at = 0
        elif not refusal:
            self._watch()

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
        """After ``BrokenGroup``: agree with the other ranks, and serve on if that is possible.

        The group may also have ended as planned, and a rank that joins waits here until the others
        admit it.

        Returns:
            Whether this process serves on, with another ``agent``, which is started. Else the rank
            has ended, and the process must: with status 0 if it ``has_left``. After a death a start
            of all ranks is right then: each loads its slots from the placement of the store.
        """
        rank, stages, members = self.place.rank, Stages(), self.agent.members
        joins, refusal = self.place.joins, self._refusal()
        why = refusal
        try:
            if made := self._go_on(stages, refusal):
                before: list[object] = [self.place.groups]
                self.built, self.place, step = made
                assert isinstance(self._passes, PassCounter), "or it does not serve on"
                self._passes.go_on(step)
                for dispatcher in self._dispatchers:
                    dispatcher.use(self.place.topology, self.place.groups.tokens)
                self._watch()
                self.agent.start()
                let_go(before)  # all ranks of the new group have left the one before
                report_run(rank, self.place.run, self._environ)
                report_ready(rank, self._environ)
                log.warning("rank %d serves in run %s: %s", rank, self.place.run, stages)
                return True
        except EplbError as exc:
            log.warning("rank %d: no recovery: %s", rank, exc)
            if joins:
                report_wait(rank, f"another start: {exc}", self._environ)
            why = refusal or str(exc)
        self.agent.close()  # an orderly leave: the others must not take it for a death
        if self.built.config.serve_on and not (joins or self.has_left):
            self._note_restart(members - self.agent.members | self.agent.dead() & members, why)
        self.built.close_journal()
        return False

    def _go_on(self, stages: Stages, refusal: str) -> tuple[BuiltRank, RankPlace, int] | None:
        """Serve in another group; None: this rank ends."""
        built, place, rank = self.built, self.place, self.place.rank
        if place.joins:
            made = be_admitted(built, place, self._attend, stages)
            self.has_left = made is None
            return made
        if refusal:
            log.info("rank %d does not serve on: %s", rank, refusal)
            recover(self.agent, built.store)
            return None
        assert isinstance(self._passes, PassCounter), "_refusal has refused another one"
        formed = None if self._next is None else self._next.take()
        steps = self._passes.steps
        if self.agent.changes_group:
            try:
                if formed is not None:
                    return change_group(built, place, formed, steps, stages)
                # Its votes were for a group without this rank, which may serve already.
                if await_exclusion(self.agent, built.store, place):
                    report_halt(rank, self._environ)
                    self.has_left = True
                    return None
            except NotChanged as exc:
                log.warning("rank %d: the group is not changed as planned: %s", rank, exc)
        if formed is not None:
            formed.close()
            void: list[object] = [formed]
            formed = None
            let_go(void)
        if place.device.type == "cuda":
            self._broken.append(place.groups.tokens)
            end_exchanges(place.groups.tokens, place.device)
        return serve_on(built, place, steps, stages)

    def _refusal(self) -> str:
        refusal = "" if self.built.config.serve_on else "agent.serve_on is off"
        if self.place.device.type == "cuda" and not self._dispatchers:
            refusal = refusal or (
                "tokens are not exchanged by the dispatcher of all_to_all(), expected it on GPUs: "
                "DeepEP's kernels wait for a dead rank"
            )
        if not isinstance(self._passes, PassCounter):
            refusal = refusal or "the engine numbers its passes itself, expected a PassCounter"
        return refusal

    def _watch(self) -> None:
        """Have this rank take part in planned changes of its group; ranks on GPUs have none."""
        if self.place.device.type != "cpu":
            return
        self._next = NextGroup(self.built, self.place, self._attend)
        self.agent.on_look = self._next.look

    def _attend(self, members: Sequence[int]) -> Attendance:
        return _attendance(self.deployment, self.place.rank, members)

    def _note_restart(self, lost: Collection[int], why: str) -> None:
        try:
            self.built.store.note_restart(self.place.run, sorted(lost), why)
        except StoreError as exc:
            log.warning(
                "rank %d: the reason of the restart is not stored: %s", self.place.rank, exc
            )


def build_rank_from_env(
    own_experts: OwnExperts | None = None,
    environ: Mapping[str, str] | None = None,
    passes: StepCounter | None = None,
) -> EmbeddedRank:
    """Build this process's rank up to the point where its agent can start; collective.

    Args:
        own_experts: for an engine that loads its own weights: gives the filled memory for the
            experts that the placement has on this rank. Without a checkpoint each is offered to the
            cache of the host. None: memory is reserved here, and filled from that cache.
        environ: None: the process environment.
        passes: counts the forward passes of this process; see ``build_rank``.

    Raises:
        ConfigError: the environment names no deployment or no rank of it, or does not fit it.
        StoreError: the store cannot be used, or has no placement to start from.
        RankError: a rank is missing, is there twice, has another configuration or secret, died or
            was late.
        MigrationError: experts cannot be loaded, or ranks hold different bytes of one.
    """
    environ = os.environ if environ is None else environ
    deployment = described_by(environ)
    rank, device = _rank_of(deployment, environ), _device_of(deployment, environ)
    host = int(deployment.topology.host_of_rank[rank])
    claim = claim_place(deployment.config.deployment, rank, deployment.hosts[host])
    joins, members = JOINS_VARIABLE in environ, _members(deployment, rank, environ)
    alive = np.isin(np.arange(deployment.topology.num_ranks), members)
    topology = replace(deployment.topology, alive=alive)
    try:
        groups = (
            alone(_network_of(deployment, rank))
            if joins
            else _joined(deployment, rank, members, device, environ)
        )
        store = deployment.opened_store()
        run = JOINING if joins else _begun_run(deployment, topology, store, rank, groups)
        if not joins:
            report_run(rank, run, environ)
        cache = deployment.host_caches[host]
        if own_experts is not None and deployment.checkpoint is None:
            cache = deployment.records or cache
        report_wait(rank, f"the cache of host {host}, and the first experts", environ)
        place = RankPlace(rank, run, topology, groups, device, cache, joins)
        experts = own_experts or deployment.schema
        built = build_rank(deployment.config, place, deployment.model, experts, store, passes)
        made = EmbeddedRank(built, place, deployment, claim, environ, passes)
    except BaseException as exc:
        claim.close()
        if isinstance(exc, EplbError):
            report_wait(rank, f"another start: {exc}", environ)
        raise
    if not joins:
        report_ready(rank, environ)
    built.agent.on_halt = partial(report_halt, rank, environ)
    return made


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


def _attendance(deployment: DeploymentDescription, rank: int, members: Sequence[int]) -> Attendance:
    own = deployment.hosts[int(deployment.topology.host_of_rank[rank])]
    summary = dict(deployment.summary())
    if len(members) < deployment.topology.num_ranks:
        summary["members"] = ", ".join(map(str, members))
    return Attendance(rank, members, own, deployment.join_key, summary)


def _network_of(deployment: DeploymentDescription, rank: int) -> NetworkConfig:
    """How a rank reaches the others: by the interface of its host's address, if none is set.

    gloo else takes the address of the host's name, which is 127.0.1.1 on Debian.
    """
    network = deployment.config.network
    if network.interface is not None:
        return network
    own = deployment.hosts[int(deployment.topology.host_of_rank[rank])]
    return replace(network, interface=interface_of(own))


def _joined(
    deployment: DeploymentDescription,
    rank: int,
    members: Sequence[int],
    device: torch.device,
    environ: Mapping[str, str],
) -> RankGroups:
    """Join the other ranks; beside the engine's group where it has formed one."""
    network = _network_of(deployment, rank)
    if device.type == "cuda" and network.interface is not None:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", network.interface)
    mine = _attendance(deployment, rank, members)
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
    tell(f"its connections to all ranks, {own_ports()} of their hosts")
    return join_ranks(network, store, members.index(rank), len(members), device)


def _begun_run(
    deployment: DeploymentDescription,
    topology: Topology,
    store: StateStore,
    rank: int,
    groups: RankGroups,
) -> str:
    """Have the lowest rank record this start under a new name, and give the name on every rank."""
    recorded = {"run": "", "refusal": ""}
    lowest = int(np.argmax(topology.alive))
    if rank == lowest:
        try:
            recorded["run"] = _begin(deployment, topology, store)
        except EplbError as exc:
            recorded["refusal"] = str(exc)[:500]
    try:
        first = gathered(recorded, groups.votes)[0]
    except RuntimeError as exc:
        raise RankError(f"rank {rank}: a rank died while the start was recorded: {exc}") from exc
    if first["refusal"]:
        raise RankError(
            f"rank {rank}: rank {lowest} could not record the start: {first['refusal']}"
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
