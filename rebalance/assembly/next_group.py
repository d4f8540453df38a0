"""Planned changes of the group: ranks join and leave in the processes that serve.

    propose   the lowest member: who is ready of those that should serve, and who holds nothing of
              those that should not                              (telemetry/state/groups.py)
    form      members and joiners, on threads beside serving: groups, proofs, digests, mapped slots
    vote      each says in its ballots that it is ready; all then leave the old group before one
              step, once no plan is open                                    (``GroupChanges``)
    switch    compare, commit placement and record in one change, serve with a new agent

A proposal that fails is made again, at growing pauses; after MAX_TRIES the operation that asked for
it has failed. A death before the switch makes the proposal void: the survivors agree as ever, and
the number of the proposal's base is no longer theirs. What fails before the commit leaves the old
ranks with one placement: they agree as after a death, and serve on without the joiners. What fails
after it ends all ranks, which start from the store.

A rank that joins is no member before the switch. It may load and compile as long as it needs.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from threading import Event, Lock, Thread
from traceback import clear_frames

import numpy as np
import torch
import torch.distributed as dist

from eplb.clock import Deadline
from eplb.core.placement import EMPTY
from eplb.errors import EplbError, MigrationError, PlacementError, RankError, StaleGeneration
from eplb.migration.membership import unwanted
from eplb.migration.recovery import NO_PLAN, Recovery, run_of
from eplb.migration.serialisation import topology_from_dict
from eplb.migration.survivors import Survival, survive
from rebalance.agent import RankAgent
from rebalance.assembly.experts import RankPlace
from rebalance.assembly.meeting import Attendance, agree
from rebalance.assembly.rank import BuiltRank, committed_placement
from rebalance.assembly.survivors import (
    Stages,
    agreed,
    commit_group,
    serve_in,
    set_deadlines,
    together,
)
from rebalance.recovery import RETRY_S, NewGroups, StoreRendezvous, let_go, rejoin
from rebalance.types import Record
from rebalance.weights.cache.client import HostCacheClient
from rebalance.weights.sources import HOST, MappedSlots, WeightSources, map_peers
from runtime.group import await_exchange, gathered
from runtime.memory import digest
from telemetry.state.events import REGROUPED
from telemetry.state.groups import GroupProposal, Joiner
from telemetry.state.joining import serving_ranks
from telemetry.state.store import StateStore

FORM_DEADLINE_S = 10.0  # for members and joiners to form their groups
OFFER_EVERY_S = 2.0  # a rank that waits repeats its offer
UNSERVED_S = 5.0  # for which no rank serves: those of a group that begins have not reported yet
GATHER_S = 2.0  # for which those that are ready wait for further ranks that should serve
AGAIN_S, MOST_AGAIN_S = 2.0, 30.0  # from a proposal that failed to the next: doubled each time
MAX_TRIES = 5  # to form a group, after which the operation that wants it has failed
PROPOSAL_S = 60.0  # after which a proposal that did not end is replaced
LEAVE_DEADLINE_S = 30.0  # for the others to serve without a rank that leaves

Attend = Callable[[Sequence[int]], Attendance]  # of this rank, by the ranks that meet

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Formed:
    """The groups of a proposal, in which nobody serves yet."""

    proposal: GroupProposal
    groups: NewGroups
    digests: torch.Tensor  # [L, E, 2] of every expert
    mapped: MappedSlots

    def close(self) -> None:
        """Give them up; their other ranks take this one for dead in them, and do so too."""
        self.groups.votes.close(is_failure=True)


class NotChanged(RankError):
    """A planned change failed before anything was changed."""


def next_members(
    members: frozenset[int],
    wanted: frozenset[int],
    ready: frozenset[int],
    holding: frozenset[int],
    *,
    gathers: bool,
) -> frozenset[int]:
    """The group that should follow one that serves; the same: none.

    Args:
        members: ranks that serve.
        wanted: ranks that should serve.
        ready: ranks that wait to be admitted.
        holding: ranks that hold an expert.
        gathers: whether those that are ready wait for the others that should serve.
    """
    joining = (ready & wanted) - members
    if gathers and wanted - members - joining:
        joining = frozenset()
    leaving = members - wanted
    if leaving & holding:  # they leave together, once the last of them is drained
        leaving = frozenset()
    left = members - leaving
    return (left or members) | joining


def pause_s(tries: int) -> float:
    """Seconds from a proposal that failed to the next, after so many of the same ranks."""
    return min(AGAIN_S * 2.0 ** max(0, tries - 1), MOST_AGAIN_S)


class NextGroup:
    """One member's part in a planned change, looked after by the thread that watches the store.

    Args:
        built: this rank.
        place: where it serves.
        attend: gives what it proves to the others.
    """

    def __init__(self, built: BuiltRank, place: RankPlace, attend: Attend) -> None:
        self._built, self._place, self._attend = built, place, attend
        self._is_over, self._taking = Event(), Lock()
        self._forming = Thread()
        self._formed: Formed | None = None
        self._seen = self._failed = 0  # ids of proposals
        self._why = "a rank did not come"  # the last one failed
        self._quiet_looks = 0
        self._ready, self._ready_since = frozenset[int](), 0.0

    def look(self) -> None:
        """Take part in a proposal; the lowest member makes one where it is due.

        Raises:
            StoreError: the store failed.
        """
        agent, voting = self._built.agent, self._built.agent.voting
        if self._is_over.is_set() or voting.switch_at is not None:
            return
        proposal, formed = self._standing(), self._formed
        if formed is not None and (dead := formed.groups.votes.dead()):
            self._failed, self._why = formed.proposal.id, f"rank {min(dead)} left the group"
        standing = proposal if proposal and proposal.id != self._failed else None
        if standing is None or voting.next_group not in (0, standing.id):
            voting.next_group = 0
        if formed is not None and (standing is None or standing.id != formed.proposal.id):
            self._give_up(formed)
        elif standing is not None and standing.id > self._seen and not self._forming.is_alive():
            self._seen = standing.id
            if self._place.rank not in standing.members:
                voting.next_group = standing.id
            else:
                self._forming = Thread(
                    target=self._form, args=(standing,), name="eplb-next-group", daemon=True
                )
                self._forming.start()
        if self._place.rank == min(agent.members):
            self._propose(standing)

    def _give_up(self, formed: Formed) -> None:
        """Leave groups that came to nothing, once no vote under way can still decide for them."""
        self._built.agent.voting.next_group = 0
        pending = self._built.agent.voter.pending
        self._quiet_looks = 0 if pending and pending[0].next_group else self._quiet_looks + 1
        if self._quiet_looks <= 1:  # a verdict may have been about to be applied
            return
        with self._taking:
            if not self._is_over.is_set():  # else the group was changed during this look
                self._formed, self._quiet_looks = None, 0
                formed.close()

    def take(self) -> Formed | None:
        """End this part; gives the groups that were formed."""
        with self._taking:
            self._is_over.set()
        self._built.agent.on_look = lambda: None  # else the old agent keeps the group
        if self._forming.ident is not None:
            # In vain where gloo waits for a rank: what is formed then is closed by the thread.
            self._forming.join(RETRY_S)
        return self._formed

    def _standing(self) -> GroupProposal | None:
        """The proposal that follows this rank's group, and changes it as is wanted now."""
        found, agent = self._built.store.proposed_group(), self._built.agent
        if found is None or (found.base, found.run) != (agent.membership, self._place.run):
            return None
        if frozenset(found.members) == agent.members:
            return None
        return None if unwanted(self._wanted(), agent.members, found.members) else found

    def _wanted(self) -> frozenset[int]:
        found = self._built.store.wanted_ranks()
        return frozenset(range(self._place.topology.num_ranks) if found is None else found)

    def _form(self, proposal: GroupProposal) -> None:
        def check() -> None:
            found = self._standing()
            if self._is_over.is_set() or found is None or found.id != proposal.id:
                raise RankError(f"proposal {proposal.id} of a group is void")

        slots = self._built.agent.parts.slots
        try:
            formed = form(self._built, self._place, self._attend, proposal, check, slots.digests)
        except EplbError as exc:
            log.warning("rank %d: proposal %d: %s", self._place.rank, proposal.id, exc)
            self._failed, self._why = proposal.id, str(exc)
            return
        self._formed = formed
        if self._is_over.is_set():
            formed.close()
        else:
            self._built.agent.voting.next_group = proposal.id

    def _propose(self, standing: GroupProposal | None) -> None:
        """Propose the next group, unless one that is still possible is being formed."""
        agent, store = self._built.agent, self._built.store
        now, members, placement = store.backend.now(), agent.members, agent.placement
        offers = {one.rank: one for one in store.joiners()}
        operation, wanted = store.membership_change(), self._wanted()
        ready = wanted & offers.keys() - members
        if ready != self._ready:
            self._ready, self._ready_since = ready, time.monotonic()
        gathers = time.monotonic() - self._ready_since < GATHER_S
        holds = (placement.slot_to_expert != EMPTY).any(axis=0)
        holding = frozenset(self._place.topology.rank_of_slot[holds].tolist())
        following = next_members(members, wanted, ready, holding, gathers=gathers)
        processes = {str(rank): offers[rank].process for rank in sorted(following - members)}
        latest, tries = store.proposed_group(), 0
        age_s = math.inf if latest is None else now - latest.time
        if latest is not None and latest.members == tuple(sorted(following)):
            is_new = operation is not None and operation.time > latest.time
            tries = 0 if is_new else latest.tries
        if standing is None:
            if following == members or age_s < pause_s(tries):
                return
        else:
            # One that forms groups repeats no offer; its death shows in the groups.
            joiners = frozenset(map(int, standing.joiners)) & offers.keys()
            is_possible = all(standing.has(rank, offers[rank].process) for rank in joiners)
            if is_possible and now - standing.time < PROPOSAL_S:
                return
            # Each process of a rank that comes and goes makes the proposal before impossible.
            if tries > 1 and age_s < pause_s(tries - 1):
                return
        changing = following ^ members
        if tries >= MAX_TRIES and operation is not None and operation.is_about(changing):
            why = f"{tries} times in a row ranks {sorted(following)} formed no group: {self._why}"
            store.end_membership_change(operation.id, "failed", why=why)
            return
        ended = [f"ranks {sorted(following - members)} join"] if following - members else []
        ended += [f"ranks {sorted(members - following)} leave"] if members - following else []
        reason = ", ".join(ended) or "the ranks stay"
        store.propose_group(
            GroupProposal(
                base=agent.membership,
                run=self._place.run,
                members=tuple(sorted(following)),
                joiners=processes,
                reason=reason,
                tries=tries + 1,
            )
        )


def form(
    built: BuiltRank,
    place: RankPlace,
    attend: Attend,
    proposal: GroupProposal,
    check: Callable[[], None],
    digests: torch.Tensor | None,
) -> Formed:
    """Form the groups of a proposal, and prove that their ranks belong together; collective.

    Args:
        built: this rank.
        place: where it runs.
        attend: gives what it proves.
        proposal: names it.
        check: called while others are waited for; what it raises ends the wait. A member that
            hangs, and is not dead, is waited for until the proposal is void.
        digests: [L, E, 2] that serve; None: this rank joins, and compares them with its host's.

    Raises:
        NotChanged: a rank did not come.
        RankError: a rank has another configuration, secret or weights.
        MigrationError: the host of this rank has other bytes of an expert.
        StoreError: the store failed.
    """
    rank, bank, config = place.rank, built.bank, built.config
    rendezvous = StoreRendezvous(built.store, proposal.membership, check, FORM_DEADLINE_S)
    try:
        groups = rejoin(
            f"proposal-{proposal.id}",
            proposal.members,
            rendezvous,
            rank,
            host=config.host_of(rank),
            deadline_s=FORM_DEADLINE_S,
            silence_s=config.silence_s,
            check=check,
        )
    except RankError as exc:
        raise NotChanged(str(exc)) from exc
    try:
        set_deadlines(groups, built)
        agree(attend(proposal.members), lambda _, mine: gathered(mine, groups.control, check))
        version = built.agent.shared.state.weights_version
        answers = gathered({"handle": bank.handle, "weights": version}, groups.control, check)
        if len(versions := {one["weights"] for one in answers}) > 1:
            raise RankError(
                f"rank {rank}: ranks have weights of versions {sorted(versions)}, expected one"
            )
        alive = np.isin(np.arange(place.topology.num_ranks), proposal.members)
        topology = replace(place.topology, alive=alive)
        handles = dict(zip(proposal.members, (str(one["handle"]) for one in answers), strict=True))
        mapped = MappedSlots(rank, bank, map_peers(rank, topology, bank, handles.__getitem__))
        shape = (built.model.num_layers, built.model.num_experts, 2)
        highest = torch.full(shape, torch.iinfo(torch.int64).max)
        table = highest if digests is None else digests.clone()
        await_exchange(groups.control.allreduce([table], dist.ReduceOp.MIN), check)
        if digests is None:
            host = built.agent.parts.links.sources.host
            prove_weights(host, table, bank.schema.record_bytes, config.network.fill_deadline_s)
        gathered("formed", groups.control, check)
    except BaseException as exc:
        groups.votes.close(is_failure=True)
        clear_frames(exc.__traceback__)  # which refer to the groups
        void: list[object] = [groups]
        del groups
        let_go(void)
        if isinstance(exc, RuntimeError) and not isinstance(exc, EplbError):
            raise NotChanged(f"rank {rank}: a rank of the next group died: {exc}") from exc
        raise
    return Formed(proposal, groups, table if digests is None else digests, mapped)


def prove_weights(
    host: HostCacheClient, digests: torch.Tensor, record_bytes: int, deadline_s: float
) -> None:
    """Compare the first and the last record of this rank's host with what serves.

    Raises:
        MigrationError: the host has other bytes.
    """
    num_layers, num_experts, _ = digests.shape
    records: list[Record] = sorted({(0, 0), (num_layers - 1, num_experts - 1)})
    into = torch.empty(record_bytes, dtype=torch.uint8)
    host.lease(records, deadline_s=deadline_s)
    try:
        for layer, expert in records:
            host.pull((layer, expert), HOST, 0, into).wait()
            found, expected = digest(into), tuple(digests[layer, expert].tolist())
            if found != expected:
                raise MigrationError(
                    f"layer {layer} expert {expert} has digest {found} on the host of this rank, "
                    f"expected {expected} as in the ranks that serve: it has other weights"
                )
    finally:
        host.release(records)


def change_group(
    built: BuiltRank, place: RankPlace, formed: Formed, steps: int, stages: Stages
) -> tuple[BuiltRank, RankPlace, int]:
    """Leave the old group for the one that was formed; each of its ranks calls this.

    Returns:
        As ``serve_on``.

    Raises:
        NotChanged: nothing was changed, and the old group may agree.
        EplbError: as ``serve_on``.
    """
    try:
        return _changed(built, place, formed, steps, stages)
    except BaseException:
        formed.close()  # the others must not wait for this rank
        raise


def _changed(
    built: BuiltRank, place: RankPlace, formed: Formed, steps: int, stages: Stages
) -> tuple[BuiltRank, RankPlace, int]:
    old, rank, proposal = built.agent, place.rank, formed.proposal
    groups, members = formed.groups, place.topology.alive
    joiners = sorted(map(int, proposal.joiners))
    left = sorted(set(np.flatnonzero(members).tolist()) - set(proposal.members))
    survival, refusal, generation = None, "", 0
    if not place.joins:
        try:
            survival = _planned(old, place, left, joiners)
            generation = old.placement.generation
        except PlacementError as exc:
            refusal = str(exc)
    stages.end("map")
    try:
        target = survival.target.hash if survival is not None else ""
        # Weights may have been updated since the groups were formed.
        step = agreed(rank, groups, target, refusal, steps, old.shared.state.weights_version)
    except RankError as exc:
        raise NotChanged(str(exc)) from exc
    stages.end("agree")
    old.watcher.close()  # writes the commits that wait, and ends the mover's thread
    record = Recovery(
        membership=proposal.membership,
        run=proposal.run,
        survivors=proposal.members,
        generation=generation,
        plan_id=NO_PLAN,
        applied=0,
        reason=proposal.reason,
        time=proposal.time,
    )
    is_first = rank == min(set(proposal.members) - set(joiners))
    if is_first:
        assert survival is not None, "it is a member"
        try:
            commit_group(built.store, survival, record, proposal.reason, is_planned=True)
        except StaleGeneration as exc:  # nothing is written: the old group may go on
            refusal = str(exc)
    if refusals := [str(why) for _, why in together(rank, groups, refusal) if why]:
        raise NotChanged(refusals[0])
    old.close()
    stages.end("commit")
    if survival is None:
        survival = _committed(built.store, record)
    slots = replace(old.parts.slots, digests=formed.digests)
    sources = WeightSources(formed.mapped, old.parts.links.sources.host)
    event = (REGROUPED, {"joined": joiners, "left": left}) if is_first else None
    place = replace(place, joins=False)
    return serve_in(built, place, record, groups, survival, slots, sources, step, stages, event)


def _planned(
    old: RankAgent, place: RankPlace, left: Sequence[int], joiners: Sequence[int]
) -> Survival:
    survival = survive(old.placement, place.topology, left, joined=joiners)
    if survival.refills:
        raise PlacementError(
            f"{len(survival.refills)} experts are on ranks {list(left)} alone, expected none there"
        )
    return survival


def _committed(store: StateStore, record: Recovery) -> Survival:
    """What the members of a new group have committed, for a rank that joins them."""
    run = store.current_run()
    expected = run_of(record.run, record.membership)
    if run is None or run.run != expected:
        raise RankError(
            f"the store has run {run.run if run else None!r}, expected {expected!r} as committed"
        )
    return Survival(topology_from_dict(dict(run.topology)), committed_placement(store), ())


def be_admitted(
    built: BuiltRank, place: RankPlace, attend: Attend, stages: Stages
) -> tuple[BuiltRank, RankPlace, int] | None:
    """Offer this rank to those that serve, until they admit it; None: it is to end.

    Raises:
        RankError: it is refused, or no rank serves.
        MigrationError: its host has other weights.
        StoreError: the store failed.
    """
    rank, store = place.rank, built.store
    mine = Joiner(rank, attend(()).host, secrets.token_hex(8))
    seen, offer = 0, Deadline.after(0.0, time.monotonic)
    unserved = Deadline.after(UNSERVED_S, time.monotonic)
    try:
        while not built.agent.voting.wants_halt:
            version = store.version()
            if offer.has_passed:
                wanted = store.wanted_ranks()
                if wanted is not None and rank not in wanted:
                    log.info("rank %d is not wanted any more", rank)
                    return None
                if serving_ranks(store, store.backend.now()):
                    unserved = Deadline.after(UNSERVED_S, time.monotonic)
                elif unserved.has_passed:
                    raise RankError(f"rank {rank} cannot join: found no rank that serves")
                store.offer_to_join(mine)
                offer = Deadline.after(OFFER_EVERY_S, time.monotonic)
            proposal = store.proposed_group()
            if proposal is None or proposal.id <= seen or not proposal.has(rank, mine.process):
                store.wait(version, offer.left_s)
                continue
            seen = proposal.id
            made = _admission(built, place, attend, proposal, stages)
            if made is not None:
                return made
    finally:
        store.withdraw_offer(mine)
    return None


def _admission(
    built: BuiltRank, place: RankPlace, attend: Attend, proposal: GroupProposal, stages: Stages
) -> tuple[BuiltRank, RankPlace, int] | None:
    """Join by one proposal; None: it came to nothing."""

    def check() -> None:
        found = built.store.proposed_group()
        if found is None or found.id != proposal.id or built.agent.voting.wants_halt:
            raise NotChanged(f"proposal {proposal.id} of a group is void")

    formed: Formed | None = None
    try:
        formed = form(built, place, attend, proposal, check, None)
        stages.end("group")
        return change_group(built, place, formed, 0, stages)
    except NotChanged as exc:
        log.warning("rank %d: proposal %d: %s", place.rank, proposal.id, exc)
    void: list[object] = [formed]
    formed = None
    let_go(void)
    return None


def await_exclusion(agent: RankAgent, store: StateStore, place: RankPlace) -> bool:
    """Wait until the others serve without this rank, which leaves; False: they do not.

    Raises:
        StoreError: the store failed.
    """
    deadline = Deadline.after(LEAVE_DEADLINE_S, time.monotonic)
    while not deadline.has_passed:
        version, record = store.version(), store.recovery()
        if record is not None and record.membership > agent.membership:
            return place.rank not in record.survivors
        if store.survivor_reports(place.run, agent.membership):
            return False
        store.wait(version, RETRY_S)
    return False
