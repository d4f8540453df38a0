"""How survivors of a death serve on in their processes, over the same memory.

    agree    recover: all survivors hold one placement, which the store has (rebalance/recovery.py)
    group    form groups without the dead ranks, through the state store
    map      find what survivors serve, alike on all (eplb/migration/survivors.py)
    refill   load the experts that no survivor holds from the host cache, and prove their bytes
    commit   placement and run in one change of the store: a membership is a run of its own
    serve    routing table, dispatcher and group; the next step has one number on all

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from eplb.clock import Clock, Deadline
from eplb.core.placement import Placement
from eplb.errors import MigrationError, PlacementError, RankError, StoreError
from eplb.migration.recovery import Recovery, run_of
from eplb.migration.serialisation import topology_to_dict
from eplb.migration.survivors import Refill, Survival, survive
from rebalance.assembly.config import RankConfig
from rebalance.rank.group import Group
from rebalance.rank.rank import Rank
from rebalance.rank.watcher import StoreLoss
from rebalance.recovery import StoreRendezvous, let_go, recover, rejoin
from rebalance.types import Record
from rebalance.weights.cache.client import HostCacheEnded
from rebalance.weights.sources import HOST, WeightSources
from runtime.counters import PassCounter
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


def serve_on(rank: Rank, stages: Stages) -> None:
    """Enter a group with the other survivors of a broken one; each of them calls it.

    Args:
        rank: whose group broke; its threads in the new one are not started yet.
        stages: gets the seconds of each stage.

    Raises:
        RankError: a survivor is lost or excluded, or cannot serve on.
        PlacementError: the survivors have too few slots.
        MigrationError: an expert cannot be loaded.
        StoreError: the store cannot be used.
    """
    record, group = join_survivors(rank, stages)
    try:
        _enter(rank, record, group, stages)
    except BaseException:
        group.votes.close(is_failure=True)  # the others must not wait for this rank
        raise


def join_survivors(
    rank: Rank, stages: Stages, *, deadline_s: float = GROUP_DEADLINE_S
) -> tuple[Recovery, Group]:
    """Agree with the other survivors and form their group; without those that die meanwhile.

    Args:
        rank: of the broken group, which it has not left yet.
        stages: gets the seconds.
        deadline_s: for each group to be formed.

    Raises:
        RankError: there was no agreement, or twice no group of the same survivors.
    """
    tried = frozenset[int]()
    while True:  # ends: each turn but the first leaves a rank out
        record = recover(rank, rank.store)
        stages.end("agree")

        def find_lost(record: Recovery = record) -> frozenset[int]:
            return rank.dead() & frozenset(record.survivors)

        def check() -> None:
            if dead := find_lost():
                raise RankError(f"rank {rank.number}: survivor {min(dead)} died")

        rendezvous = StoreRendezvous(rank.store, record.membership, check, deadline_s)
        group = None
        try:
            group = rejoin(
                f"recovery-{record.membership}",
                rank.group,
                record.survivors,
                rendezvous,
                run=record.run,
                config=rank.config,
            )
            # All are warm: one that stops before its first pass is known by its silence too.
            group.votes.begin_beats()
            group.gather("formed")  # from here on nobody comes back to agree again
        except RankError as exc:
            if group is not None:
                group.votes.close(is_failure=True)
            # Who did not come does not report either. If all come again, a second try shows what is
            # wrong: that a link is cut is seen late where no beats are sent.
            if not find_lost() and tried == frozenset(record.survivors):
                raise
            tried = frozenset(record.survivors)
            log.warning(
                "membership=%d rank=%d without a group: %s", record.membership, rank.number, exc
            )
        else:
            stages.end("group")
            return record, group
        void: list[object] = [group]
        group = None
        let_go(void)


def _enter(rank: Rank, record: Recovery, group: Group, stages: Stages) -> None:
    # The mover's thread has ended afterwards: staging and host cache are the new group's.
    rank.leave()
    set_deadlines(group, rank.config)
    placement, is_first = rank.placement, rank.number == record.survivors[0]
    dead = sorted(set(rank.group.members) - set(record.survivors))
    refusal, survival = "", Survival(rank.topology, placement, ())
    try:
        survival = survive(placement, rank.topology, dead)
        stages.end("map")
        refill(rank, survival.refills_of(rank.number), group.raise_if_dead)
        stages.end("refill")
    except PlacementError as exc:
        slots_per_rank = -(-placement.num_experts // len(record.survivors))
        refusal = f"{exc}, expected topology.slots_per_rank = {slots_per_rank} or more"
    except MigrationError as exc:
        refusal = f"{exc}, expected its host cache to load it, or a replica on another rank"
    step = agree_on_start(rank, group, survival.target.hash, refusal)
    num_refills = len(survival.refills)
    if is_first:
        words = f"{record.reason}; {len(record.survivors)} ranks serve on, membership "
        words += f"{record.membership}, {num_refills} experts loaded"
        commit_group(rank.store, survival, record, words)
    group.gather("")
    stages.end("commit")
    detail = {"refills": num_refills, "refill_bytes": num_refills * rank.bank.schema.record_bytes}

    def report() -> None:
        stages.end("first pass")
        if is_first:
            report_group(rank, record, stages, MEMBERSHIP, detail)

    serve_in(rank, group, survival.target, rank.sources, step, report)
    stages.end("serve")


def set_deadlines(group: Group, config: RankConfig) -> None:
    """Give a new group the deadlines of one that ranks start with."""
    network = config.network
    group.set_deadlines(
        config.vote_deadline_s, max(network.join_deadline_s, network.fill_deadline_s)
    )


def serve_in(
    rank: Rank,
    group: Group,
    target: Placement,
    sources: WeightSources,
    step: int,
    on_first_pass: Callable[[], None],
) -> None:
    """Enter a group after another one, by a placement that the store has.

    Args:
        rank: which has left the group before.
        group: the next one.
        target: the placement that serves in it.
        sources: where experts come from.
        step: number of the next forward pass.
        on_first_pass: called once that is over.
    """
    rank.table.load(target, range(target.num_layers))
    rank.counter.drain()  # of passes that were broken off
    loss = StoreLoss(rank.store, group.run)
    rank.enter(group, target, sources, loss=loss, step=step, on_first_pass=on_first_pass)
    assert isinstance(rank.passes, PassCounter), "a rank with another counter does not serve on"
    rank.passes.go_on(step)


def report_group(
    rank: Rank, record: Recovery, stages: Stages, kind: str, detail: Mapping[str, Any]
) -> None:
    """Write the event of a group that serves."""
    facts = {
        "membership": record.membership,
        "run": rank.group.run,
        "generation": rank.placement.generation,
        "reason": record.reason,
        "survivors": list(record.survivors),
        "broke_at": stages.began,
        "seconds": stages.seconds,
    }
    rank.watcher.report_event(kind, facts | dict(detail))


def refill(rank: Rank, refills: Sequence[Refill], check: Callable[[], None]) -> None:
    """Load experts that no survivor holds into this rank's live slots, which nothing reads now.

    A host cache that has ended is waited for, each time for CACHE_DEADLINE_S.

    Args:
        rank: whose host has the records.
        refills: what to load.
        check: called before a request is repeated.

    Raises:
        MigrationError: the host has no record of one, or its bytes are wrong.
    """
    slots, host, bank = rank.slots, rank.sources.host, rank.bank
    deadline_s, size = rank.config.network.fill_deadline_s, max(1, host.room)

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


def agree_on_start(rank: Rank, group: Group, target: str, refusal: str) -> int:
    """Compare what all ranks of a new group will serve; gives the number of the next forward pass.

    Args:
        rank: this one.
        group: the new one.
        target: hash of the placement; "": the rank joins, and takes that of the others.
        refusal: why this rank cannot serve; "": it can.

    Raises:
        RankError: ranks would serve different placements or weights, or one cannot serve.
    """
    assert rank.passes is not None, "a rank whose engine numbers its passes does not serve on"
    mine = {"hash": target, "steps": rank.passes.steps, "refusal": refusal[:MAX_REFUSAL]}
    mine["weights"] = rank.shared.state.weights_version
    answers = group.gather(mine)
    if refusals := [f"rank {at}: {one['refusal']}" for at, one in answers if one["refusal"]]:
        raise RankError(f"the ranks cannot serve on: {refusals[0]}")
    if len(hashes := {str(one["hash"]) for _, one in answers} - {""}) > 1:
        raise RankError(
            f"rank {group.rank}: ranks would serve placements {sorted(hashes)}, expected one"
        )
    if len(versions := {int(one["weights"]) for _, one in answers}) > 1:
        raise RankError(
            f"rank {group.rank}: ranks would serve weights of versions {sorted(versions)}, "
            "expected one"
        )
    # A pass that was broken off is run again under the next number: who had not begun it follows.
    return max(int(one["steps"]) for _, one in answers)


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


def committed_placement(store: StateStore) -> Placement:
    """The placement that ranks start from.

    Raises:
        StoreError: there is none.
    """
    committed = store.committed()
    if committed is None:
        raise StoreError(
            f"the store holds no committed placement of deployment {store.deployment!r}, "
            "expected one to start from"
        )
    return committed.placement
