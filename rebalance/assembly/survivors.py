"""How survivors of a death serve on in their processes, over the same memory.

    agree    recover: all survivors hold one placement, which the store has (rebalance/recovery.py)
    group    form groups without the dead ranks, through the state store
    map      find what survivors serve, alike on all (eplb/migration/survivors.py)
    refill   load the experts that no survivor holds from the host cache, and prove their bytes
    commit   placement and run in one change of the store: a membership is a run of its own
    serve    routing table, dispatcher and a new agent; the next step has one number on all

Tokens for an expert without a live replica wait: no survivor serves before the refill, so none is
dropped, and none is computed with wrong weights.

A survivor that dies before the group is formed, or does not come to form it, is left out: the
others agree again. What fails later ends all survivors; all ranks then start again from the store,
which has either placement. So a death between the group and the first pass costs a start of all
ranks. A host cache that is started again meanwhile is waited for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from eplb.clock import Clock, Deadline
from eplb.errors import MigrationError, PlacementError, RankError
from eplb.migration.recovery import Recovery, run_of
from eplb.migration.serialisation import topology_to_dict
from eplb.migration.survivors import Refill, Survival, survive
from rebalance.agent import RankAgent
from rebalance.assembly.experts import RankPlace
from rebalance.assembly.group import RankGroups
from rebalance.assembly.rank import BuiltRank
from rebalance.rank.parts import AgentSettings
from rebalance.rank.watcher import StoreLoss
from rebalance.recovery import NewGroups, StoreRendezvous, let_go, recover, rejoin
from rebalance.stage.share import RankSlots
from rebalance.types import Record
from rebalance.weights.cache.client import HostCacheClient, HostCacheEnded
from rebalance.weights.sources import HOST, WeightSources
from runtime.dispatch.all_to_all import first_sentence
from runtime.group import CPU, gathered, set_deadline
from telemetry.state.events import MEMBERSHIP
from telemetry.state.store import StateStore

GROUP_DEADLINE_S = 10.0  # for survivors to form their groups
CACHE_DEADLINE_S = 20.0  # for a host cache that is started again while survivors refill
CACHE_RETRY_S = 0.1
MAX_REFUSAL = 600  # characters

log = logging.getLogger(__name__)


class Stages:
    """Seconds of each stage, from the moment on at which a rank knows that its group is broken."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock, self._last = clock, clock()
        self.began = time.time()  # to be compared with other events
        self.seconds: dict[str, float] = {}

    def end(self, stage: str) -> None:
        """Note that a stage of ``SERVE_ON_STAGES`` has ended now; it may do so again."""
        now = self._clock()
        self.seconds[stage] = round(self.seconds.get(stage, 0.0) + now - self._last, 4)
        self._last = now

    def __str__(self) -> str:
        return ", ".join(f"{stage} {seconds:.3f} s" for stage, seconds in self.seconds.items())


def serve_on(
    built: BuiltRank, place: RankPlace, steps: int, stages: Stages
) -> tuple[BuiltRank, RankPlace, int]:
    """Form a group with the other survivors, and serve in it; each of them calls it.

    Args:
        built: this rank, whose group broke.
        place: where it runs.
        steps: forward passes that it has begun.
        stages: gets the seconds of each stage.

    Returns:
        The rank with an agent that is not started yet, its place in the new group, and the number
        of its next forward pass.

    Raises:
        RankError: a survivor is lost or excluded, or cannot serve on.
        PlacementError: the survivors have too few slots.
        MigrationError: an expert cannot be loaded.
        StoreError: the store cannot be used.
    """
    rank, config = place.rank, built.config
    record, groups = join_survivors(
        built.agent,
        built.store,
        rank,
        stages,
        host=config.host_of(rank),
        silence_s=config.silence_s,
        device=place.device,
    )
    try:
        return _in_group(built, place, record, groups, steps, stages)
    except BaseException:
        groups.votes.close(is_failure=True)  # the others must not wait for this rank
        raise


def join_survivors(
    agent: RankAgent,
    store: StateStore,
    rank: int,
    stages: Stages,
    *,
    host: str | None = None,
    silence_s: float = 0.0,
    deadline_s: float = GROUP_DEADLINE_S,
    device: torch.device = CPU,
) -> tuple[Recovery, NewGroups]:
    """Agree with the other survivors and form their groups; without those that die meanwhile.

    Args:
        agent: of the broken group; it is not closed yet.
        store: in which they agree and meet.
        rank: this one.
        stages: gets the seconds.
        host: as for ``rejoin``.
        silence_s: as for ``rejoin``.
        deadline_s: for each group to be formed.
        device: as for ``rejoin``.

    Raises:
        RankError: there was no agreement, or twice no group of the same survivors.
    """
    tried = frozenset[int]()
    while True:  # ends: each turn but the first leaves a rank out
        record = recover(agent, store)
        stages.end("agree")

        def lost(record: Recovery = record) -> frozenset[int]:
            return agent.dead() & frozenset(record.survivors)

        def check() -> None:
            if dead := lost():
                raise RankError(f"rank {rank}: survivor {min(dead)} died")

        rendezvous = StoreRendezvous(store, record.membership, check, deadline_s)
        groups = None
        try:
            groups = rejoin(
                f"recovery-{record.membership}",
                record.survivors,
                rendezvous,
                rank,
                host=host,
                deadline_s=deadline_s,
                silence_s=silence_s,
                check=check,
                device=device,
            )
            # All are warm: one that stops before its first pass is known by its silence too.
            groups.votes.begin_beats()
            together(rank, groups, "formed")  # from here on nobody comes back to agree again
        except RankError as exc:
            if groups is not None:
                groups.votes.close(is_failure=True)
            # Who did not come does not report either. If all come again, a second try shows what is
            # wrong: that a link is cut is seen late where no beats are sent.
            if not lost() and tried == frozenset(record.survivors):
                raise
            tried = frozenset(record.survivors)
            log.warning("membership=%d rank=%d without a group: %s", record.membership, rank, exc)
        else:
            stages.end("group")
            return record, groups
        void: list[object] = [groups]
        groups = None
        let_go(void)


def _in_group(
    built: BuiltRank,
    place: RankPlace,
    record: Recovery,
    groups: NewGroups,
    steps: int,
    stages: Stages,
) -> tuple[BuiltRank, RankPlace, int]:
    old, slots = built.agent, built.agent.parts.slots
    # The mover's thread has ended afterwards: staging and host cache are the new agent's.
    old.close()
    set_deadlines(groups, built)
    topology, links = place.topology, old.parts.links
    dead = sorted(set(np.flatnonzero(topology.alive).tolist()) - set(record.survivors))
    refusal, survival = "", Survival(topology, old.placement, ())
    try:
        survival = survive(old.placement, topology, dead)
        stages.end("map")
        refills = survival.refills_of(place.rank)
        check = partial(raise_if_dead, place.rank, groups)
        refill(slots, links.sources.host, refills, built.config.network.fill_deadline_s, check)
        stages.end("refill")
    except PlacementError as exc:
        slots_per_rank = -(-old.placement.num_experts // len(record.survivors))
        refusal = f"{exc}, expected topology.slots_per_rank = {slots_per_rank} or more"
    except MigrationError as exc:
        refusal = f"{exc}, expected its host cache to load it, or a replica on another rank"
    version = old.shared.state.weights_version
    step = agreed(place.rank, groups, survival.target.hash, refusal, steps, version)
    is_first = place.rank == record.survivors[0]
    if is_first:
        words = f"{record.reason}; {len(record.survivors)} ranks serve on, membership "
        words += f"{record.membership}, {len(survival.refills)} experts loaded"
        commit_group(built.store, survival, record, words)
    together(place.rank, groups, "")
    stages.end("commit")
    num_refills = len(survival.refills)
    refill_bytes = num_refills * slots.bank.schema.record_bytes
    detail = {"refills": num_refills, "refill_bytes": refill_bytes}
    event = (MEMBERSHIP, detail) if is_first else None
    return serve_in(
        built, place, record, groups, survival, slots, links.sources, step, stages, event
    )


def set_deadlines(groups: NewGroups, built: BuiltRank) -> None:
    """Give new groups the deadlines of those that ranks start with."""
    network = built.config.network
    if built.place.device.type == "cpu":
        set_deadline(groups.tokens, built.config.vote_deadline_s)
    set_deadline(groups.control, max(network.join_deadline_s, network.fill_deadline_s))


def serve_in(
    built: BuiltRank,
    place: RankPlace,
    record: Recovery,
    groups: NewGroups,
    survival: Survival,
    slots: RankSlots,
    sources: WeightSources,
    step: int,
    stages: Stages,
    event: tuple[str, dict[str, Any]] | None,
) -> tuple[BuiltRank, RankPlace, int]:
    """Make what serves in a new group: routing table, agent and place.

    Args:
        built: this rank; its agent is closed.
        place: where it ran.
        record: of the new group.
        groups: the same.
        survival: its topology, and the placement that it serves, which the store has.
        slots: this rank's.
        sources: where experts come from.
        step: number of the next forward pass.
        stages: gets the seconds.
        event: kind and further facts of the event that this rank writes; None: another one does.
    """
    old, run = built.agent, run_of(record.run, record.membership)
    target, slots = survival.target, replace(slots, topology=survival.topology)
    built.table.load(target, range(target.num_layers))
    built.counter.drain()  # of passes that were broken off
    settings = AgentSettings(built.config, run, slots.topology, record.membership)
    links = old.parts.links
    links = replace(
        links,
        votes=groups.votes,
        sources=sources,
        loss=StoreLoss(built.store, run),
        serves=groups.votes.begin_beats,
    )
    agent = RankAgent(settings, slots, built.counter, links, target)

    def report() -> None:
        stages.end("first pass")
        if event is not None:
            detail = {
                "membership": record.membership,
                "run": run,
                "generation": target.generation,
                "reason": record.reason,
                "survivors": list(record.survivors),
                "broke_at": stages.began,
                "seconds": stages.seconds,
            }
            agent.watcher.report_event(event[0], detail | event[1])

    agent.go_on_from(old, step, report)
    stages.end("serve")
    groups_now = RankGroups(groups.tokens, groups.control)
    now = replace(place, run=run, topology=slots.topology, groups=groups_now)
    return replace(built, agent=agent, place=now), now, step


def refill(
    slots: RankSlots,
    host: HostCacheClient,
    refills: Sequence[Refill],
    deadline_s: float,
    check: Callable[[], None],
) -> None:
    """Load experts that no survivor holds into this rank's live slots, which nothing reads now.

    Args:
        slots: of this rank.
        host: which has the records; for one that has ended the next is waited for, each time for
            CACHE_DEADLINE_S.
        refills: what to load.
        deadline_s: of each request.
        check: called before a request is repeated.

    Raises:
        MigrationError: the host has no record of one, or its bytes are wrong.
    """
    bank, size = slots.bank, max(1, host.room)

    def lease(records: Sequence[Record]) -> None:
        patience: Deadline | None = None
        while True:
            try:
                host.lease(records, deadline_s=deadline_s)
                return
            except HostCacheEnded as exc:
                patience = patience or Deadline.after(CACHE_DEADLINE_S, time.monotonic)
                if patience.has_passed:
                    raise MigrationError(f"{exc}, for {CACHE_DEADLINE_S:g} s") from exc
                log.info("rank %d waits for its host cache: %s", slots.rank, exc)
            check()
            time.sleep(CACHE_RETRY_S)  # a cache sends no notification when it is there again

    with suppress(MigrationError):  # a cache that has ended has no leases either
        host.release()  # what a migration that was broken off had leased
    for first in range(0, len(refills), size):
        batch = refills[first : first + size]
        records = [(one.layer, one.expert) for one in batch]
        lease(records)
        for one, record in zip(batch, records, strict=True):
            slot, expected = one.slot - slots.first_slot, slots.digests[record].tolist()
            live = bank.live(one.layer, slot)
            host.pull(record, HOST, 0, live).wait()
            if list(bank.digest(one.layer, slot)) != expected:
                host.reload(record, deadline_s=deadline_s)
                host.pull(record, HOST, 0, live).wait()
            if list(bank.digest(one.layer, slot)) != expected:
                raise MigrationError(
                    f"layer {one.layer} slot {slot}: digest mismatch after loading expert "
                    f"{one.expert}"
                )
        with suppress(MigrationError):
            host.release(records)


def agreed(
    rank: int, groups: NewGroups, target: str, refusal: str, steps: int, weights_version: int
) -> int:
    """Compare what all ranks of a new group will serve; gives the number of the next forward pass.

    Args:
        rank: this one.
        groups: the new ones.
        target: hash of the placement; "": the rank joins, and takes that of the others.
        refusal: why this rank cannot serve; "": it can.
        steps: forward passes that it has begun.
        weights_version: that it holds.

    Raises:
        RankError: ranks would serve different placements or weights, or one cannot serve.
    """
    mine = {"hash": target, "steps": steps, "refusal": refusal[:MAX_REFUSAL]}
    mine["weights"] = weights_version
    answers = together(rank, groups, mine)
    if refusals := [f"rank {at}: {one['refusal']}" for at, one in answers if one["refusal"]]:
        raise RankError(f"the ranks cannot serve on: {refusals[0]}")
    if len(hashes := {str(one["hash"]) for _, one in answers} - {""}) > 1:
        raise RankError(f"rank {rank}: ranks would serve placements {sorted(hashes)}, expected one")
    if len(versions := {int(one["weights"]) for _, one in answers}) > 1:
        raise RankError(
            f"rank {rank}: ranks would serve weights of versions {sorted(versions)}, expected one"
        )
    # A pass that was broken off is run again under the next number: who had not begun it follows.
    return max(int(one["steps"]) for _, one in answers)


def together(rank: int, groups: NewGroups, mine: Any) -> list[tuple[int, Any]]:
    """Every rank's message, with its number in the deployment."""
    check = partial(raise_if_dead, rank, groups)
    try:
        return list(zip(groups.members, gathered(mine, groups.control, check), strict=True))
    except RuntimeError as exc:
        why = first_sentence(exc)
        raise RankError(f"rank {rank}: a rank died before all served on: {why}") from exc


def raise_if_dead(rank: int, groups: NewGroups) -> None:
    """Wait for a new group no longer once a rank of it is dead.

    Raises:
        RankError: a rank is.
    """
    if dead := groups.votes.dead():
        raise RankError(f"rank {rank}: rank {min(dead)} died before all served on")


def commit_group(
    store: StateStore,
    survival: Survival,
    record: Recovery,
    reason: str,
    *,
    is_planned: bool = False,
) -> None:
    """Have the store name what a new group serves, and its run, in one change.

    Args:
        store: of the deployment.
        survival: what is served.
        record: of the group.
        reason: for the history.
        is_planned: whether the record itself is written in this change too.

    Raises:
        RankError: the run before is not on record.
        StoreError: the store failed, or another group is recorded.
    """
    info = next((one for one in store.runs() if one.run == record.run), None)
    if info is None:
        raise RankError(
            f"the store holds no record of run {record.run!r}, expected that of the ranks"
        )
    store.commit(
        survival.target,
        expected=record.generation,
        membership=record.membership - is_planned,
        reason=reason,
        run=replace(
            info,
            run=run_of(record.run, record.membership),
            time=store.backend.now(),
            topology=topology_to_dict(survival.topology),
        ),
        next_group=record if is_planned else None,
    )
