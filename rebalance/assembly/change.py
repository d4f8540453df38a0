"""How ranks become a group: the one list of steps, at a start, a death, a join and a leave.

    members   who they are                          a start: all that are named    environment.py
                                                    a death: the survivors         survivors.py
                                                    a join, a leave: a proposal    next_group.py
    form      their process groups                                                 group.py
    compare   configuration, topology, secret and weights are alike on all         facts.py
    plan      what they serve: a pure function, alike on all     eplb/migration/survivors.py
    fill      experts that no member holds, into slots that nothing reads yet      experts.py
    prove     one table of digests, and that a rank which joins can load those bytes
    commit    all can serve, and would serve the same: then the store names their placement, run
              and record in one change
    serve     routing table, digests, sources and group; the next pass has one number on all

What a caller adds is who the members are, and from where experts come:

              start                       death                       join, leave
    fill      all slots                   what the dead held alone    nothing: leavers are drained
    prove     digests of filled slots     what was filled             the whole table, on threads
                                                                      beside serving
    commit    nothing: the run is on      placement and run; the      placement, run and record
              record, the placement is    record is there since the
              the store's                 survivors have agreed

Before the commit the store is told addresses, reports and proposals; at a death also the record of
the survivors, with what they roll forward of an open plan, and at a start its run. These keep out
what ranks of an older group still write, and name nothing that the members do not serve already.
A step of a join or a leave that fails before the commit leaves the ranks as they were
(``NotChanged``); after a death, and after the commit, all ranks start from the store.

A start has another order, as its rank is made by then: compare, form, fill, prove. Those that join
prove each other on threads before they plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from eplb.clock import Clock
from eplb.core.placement import EMPTY, Placement
from eplb.errors import MigrationError, PlacementError, RankError, StaleGeneration, StoreError
from eplb.migration.recovery import Recovery, run_of
from eplb.migration.serialisation import topology_from_dict, topology_to_dict
from eplb.migration.survivors import Survival, survive
from rebalance.assembly.experts import fill_bank, prove_weights
from rebalance.assembly.facts import Attendance, compare_facts, exchange_facts
from rebalance.rank.group import Group
from rebalance.rank.rank import Rank
from rebalance.rank.watcher import StoreLoss
from rebalance.stage.digest_table import agree_on_digests
from rebalance.weights.sources import MappedSlots, WeightSources, map_peers
from runtime.counters import PassCounter
from runtime.group import gathered
from telemetry.state.store import StateStore

MAX_REFUSAL = 600  # characters


class NotChanged(RankError):
    """A change of the group failed before anything was changed."""


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


class Change:
    """One rank's part in becoming a group with others: the steps, in their order.

    Args:
        rank: which. It is in the group before; at its start in none.
        group: that was formed.
        record: of the group that follows another one; None at a start.
        joined: members that serve nothing yet.
        is_recorded: whether the store has the record already.
        stages: gets the seconds.
    """

    def __init__(
        self,
        rank: Rank,
        group: Group,
        record: Recovery | None = None,
        *,
        joined: Collection[int] = (),
        is_recorded: bool = True,
        stages: Stages | None = None,
    ) -> None:
        self.rank, self.group, self.record = rank, group, record
        self.joined, self.is_recorded = frozenset(joined), is_recorded
        self.stages = stages or Stages()
        self.survival: Survival | None = None  # what is served; None: what the others commit
        self.digests = rank.slots.digests  # [L, E, 2] of every expert
        self.sources: WeightSources | None = None  # None: those of the group before
        self.step = 0  # number of the next forward pass
        self._refusal = ""  # why this rank cannot serve

    @property
    def left(self) -> list[int]:
        """Members of the group before that are not in this one."""
        return sorted(set(self.rank.group.members) - set(self.group.members))

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that writes what all have agreed on."""
        return self.rank.number == min(set(self.group.members) - self.joined)

    def close(self) -> None:
        """Give it up; its other ranks take this one for dead in it, and do so too."""
        self.group.votes.close(is_failure=True)

    def compare(self, mine: Attendance, check: Callable[[], None]) -> dict[int, str]:
        """Prove that the members belong together; gives how to reach the slots of each.

        Args:
            mine: what this rank shows.
            check: called while others are waited for; what it raises ends the wait.

        Raises:
            RankError: a rank has another configuration, secret or weights.
            RuntimeError: a rank died.
        """
        rank, control = self.rank, self.group.control
        assert control is not None, "it was formed with one"
        told = exchange_facts(
            mine,
            lambda _, message: gathered(message, control, check),
            {"weights": rank.weights_version, "handle": rank.bank.handle},
        )
        return {at: str(one["handle"]) for at, one in told.items()}

    def plan(self) -> None:
        """Find what the members serve."""
        rank = self.rank
        if rank.is_alone:
            return
        placement = rank.placement
        try:
            self.survival = survive(placement, rank.topology, self.left, joined=sorted(self.joined))
        except PlacementError as exc:
            slots = -(-placement.num_experts // len(self.group.members))
            self.refuse(f"{exc}, expected topology.slots_per_rank = {slots} or more")
        else:
            self.stages.end("map")

    def fill(self) -> None:
        """Load the experts that no member holds into this rank's live slots.

        Tokens for them wait: nobody serves before the commit.

        Raises:
            RankError: a member died meanwhile.
        """
        rank, bank = self.rank, self.rank.bank
        refills = self.survival.refills_of(rank.number) if self.survival else []
        held = np.full((bank.num_layers, bank.num_slots), EMPTY)
        for one in refills:
            held[one.layer, one.slot - rank.slots.first_slot] = one.expert
        if refills:
            # The mover's thread has ended afterwards: staging and host cache are the new group's.
            rank.watcher.close()
            host, deadline_s = rank.sources.host, rank.config.network.fill_deadline_s
            with suppress(MigrationError):  # a cache that has ended has no leases either
                host.release()  # what a migration that was broken off had leased
            try:
                fill_bank(
                    bank,
                    held.tolist(),
                    host,
                    deadline_s=deadline_s,
                    digests=self.digests,
                    check=self.group.raise_if_dead,
                )
            except MigrationError as exc:
                self.refuse(
                    f"{exc}, expected its host cache to load it, or a replica on another rank"
                )
        self.stages.end("refill")

    def refuse(self, why: str) -> None:
        """Tell the others, when all agree, that this rank cannot serve; the first reason counts."""
        self._refusal = self._refusal or why[:MAX_REFUSAL]

    def prove(self, known: torch.Tensor, check: Callable[[], None] | None = None) -> None:
        """Agree on the digests of all experts; a rank that joins can load their bytes.

        Args:
            known: [L, E, 2] those that this rank knows.
            check: as for ``compare``.

        Raises:
            MigrationError: ranks know different bytes of one expert, or the host of this one does.
            BrokenGroup: a rank died or missed the deadline.
        """
        rank, deadline_s = self.rank, self.rank.config.network.fill_deadline_s
        agreed = agree_on_digests(known, self.group.votes, deadline_s=deadline_s, check=check)
        # A member keeps its own table: an update of the weights before the commit changes that one.
        if self.record is None or rank.is_alone:
            self.digests = agreed
        if rank.is_alone:
            host, size = rank.sources.host, rank.bank.schema.record_bytes
            prove_weights(host, self.digests, size, deadline_s)

    def map_slots(self, handles: Mapping[int, str]) -> None:
        """Read the slots of the members on this host from now on.

        Raises:
            MigrationError: the memory of one cannot be attached.
        """
        rank, bank = self.rank, self.rank.bank
        peers = map_peers(rank.number, self.group.topology, bank, handles.__getitem__)
        mapped = MappedSlots(rank.number, bank, peers)
        self.sources = WeightSources(mapped, rank.sources.host)

    def meet(self, check: Callable[[], None]) -> None:
        """Wait until every member has come so far.

        Raises:
            RuntimeError: a rank died.
        """
        assert self.group.control is not None, "it was formed with one"
        gathered("formed", self.group.control, check)

    def agree(self) -> None:
        """Compare what the members would serve, and number the next forward pass.

        Raises:
            NotChanged: they would serve different placements or weights, one cannot serve, or died.
        """
        rank, target = self.rank, self.survival.target if self.survival else None
        mine = {
            "placement": target.hash if target is not None else "",
            "weights": rank.weights_version,  # they may have been updated since it was formed
            "steps": rank.passes.steps if rank.passes is not None else 0,
            "refusal": self._refusal,
        }
        try:
            told = dict(self.group.gather(mine))
            compare_facts(self.group.rank, told)
        except RankError as exc:
            raise NotChanged(str(exc)) from exc
        # A pass that was broken off is run again under the next number: who had not begun it
        # follows.
        self.step = max(int(one["steps"]) for one in told.values())
        self.stages.end("agree")

    def commit(self, reason: str) -> None:
        """Have the store name what the members serve: all of it or nothing.

        Args:
            reason: for the history.

        Raises:
            NotChanged: nothing was written.
            RankError: a rank died; it may have been written.
            StoreError: the store failed.
        """
        rank, record, refusal = self.rank, self.record, ""
        assert record is not None, "a start commits nothing"
        self.agree()
        rank.watcher.close()  # writes the commits that wait, and ends the mover's thread
        if self.is_first:
            assert self.survival is not None, "it is a member"
            record = replace(record, generation=rank.placement.generation)
            try:
                commit_group(rank.store, self.survival, record, reason, self.is_recorded)
            except (StaleGeneration, RankError) as exc:  # nothing is written
                refusal = str(exc)
        if refusals := [str(why) for _, why in self.group.gather(refusal) if why]:
            raise NotChanged(refusals[0])
        if self.survival is None:
            self.survival = _read_committed(rank.store, self.group.run)
        self.stages.end("commit")

    def serve(self, kind: str, detail: Mapping[str, Any]) -> None:
        """Leave the group before for this one.

        Args:
            kind: of the event that says so, once the first pass is over.
            detail: of the event.
        """
        rank, record, survival = self.rank, self.record, self.survival
        assert survival is not None, "it was committed"
        assert record is not None, "it follows another group"
        facts = {
            "membership": record.membership,
            "run": self.group.run,
            "generation": survival.target.generation,
            "reason": record.reason,
            "survivors": list(record.survivors),
            "broke_at": self.stages.began,
            "seconds": self.stages.seconds,
        }
        stages, is_first = self.stages, self.is_first

        def report() -> None:
            stages.end("first pass")
            if is_first:
                rank.watcher.report_event(kind, facts | dict(detail))

        rank.leave()
        group = replace(self.group, topology=survival.topology)
        loss = StoreLoss(rank.store, group.run)
        self.enter(group, survival.target, self.sources or rank.sources, loss, report)
        self.stages.end("serve")

    def enter(
        self,
        group: Group,
        target: Placement,
        sources: WeightSources,
        loss: StoreLoss | None,
        on_first_pass: Callable[[], None] = lambda: None,
    ) -> None:
        """Have the rank be a member, with one number of the next pass on all."""
        rank = self.rank
        rank.slots = replace(rank.slots, digests=self.digests)
        rank.table.load(target, range(target.num_layers))
        rank.counter.drain()  # of passes that were broken off
        rank.enter(group, target, sources, loss=loss, step=self.step, on_first_pass=on_first_pass)
        if isinstance(rank.passes, PassCounter):
            rank.passes.go_on(self.step)


def commit_group(
    store: StateStore, survival: Survival, record: Recovery, reason: str, is_recorded: bool
) -> None:
    """Have the store name what a new group serves, its run, and its record, in one change.

    Args:
        store: of the deployment.
        survival: what is served.
        record: of the group.
        reason: for the history.
        is_recorded: whether the store has the record already.

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
        membership=record.membership - (not is_recorded),
        reason=reason,
        run=replace(
            info,
            run=run_of(record.run, record.membership),
            time=store.backend.now(),
            topology=topology_to_dict(survival.topology),
        ),
        next_group=None if is_recorded else record,
    )


def _read_committed(store: StateStore, run: str) -> Survival:
    """What the members of a new group have committed, for a rank that joins them."""
    info = store.current_run()
    if info is None or info.run != run:
        raise RankError(
            f"the store has run {info.run if info else None!r}, expected {run!r} as committed"
        )
    return Survival(topology_from_dict(dict(info.topology)), committed_placement(store), ())


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
