"""Planned changes of the group: ranks join and leave in the processes that serve.

    propose   the lowest member: who is ready of those that should serve, and who holds nothing of
              those that should not                              (telemetry/state/groups.py)
    form      members and joiners, on threads beside serving: groups, proofs, digests, mapped slots
    vote      each says in its ballots that it is ready; all then leave the old group before one
              step, once no plan is open                                    (``GroupChanges``)
    switch    compare, commit placement and record in one change, enter the new group

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

import torch
import torch.distributed as dist

from eplb.clock import Deadline
from eplb.core.placement import EMPTY
from eplb.errors import EplbError, MigrationError, PlacementError, RankError, StaleGeneration
from eplb.migration.membership import unwanted
from eplb.migration.recovery import NO_PLAN, Recovery, run_of
from eplb.migration.serialisation import topology_from_dict
from eplb.migration.survivors import Survival, survive
from rebalance.assembly.meeting import Attendance, agree
from rebalance.assembly.survivors import (
    Stages,
    agree_on_start,
    commit_group,
    committed_placement,
    report_group,
    serve_in,
    set_deadlines,
)
from rebalance.rank.group import Group
from rebalance.rank.rank import Rank
from rebalance.recovery import RETRY_S, StoreRendezvous, let_go, rejoin
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
    """The group of a proposal, in which nobody serves yet."""

    proposal: GroupProposal
    group: Group
    digests: torch.Tensor  # [L, E, 2] of every expert
    mapped: MappedSlots

    def close(self) -> None:
        """Give it up; its other ranks take this one for dead in it, and do so too."""
        self.group.votes.close(is_failure=True)


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
        rank: the member.
        attend: gives what it proves to the others.
    """

    def __init__(self, rank: Rank, attend: Attend) -> None:
        self._rank, self._attend = rank, attend
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
        rank, voting = self._rank, self._rank.voting
        if self._is_over.is_set() or voting.switch_at is not None:
            return
        proposal, formed = self._standing(), self._formed
        if formed is not None and (dead := formed.group.votes.dead()):
            self._failed, self._why = formed.proposal.id, f"rank {min(dead)} left the group"
        standing = proposal if proposal and proposal.id != self._failed else None
        if standing is None or voting.next_group not in (0, standing.id):
            voting.next_group = 0
        if formed is not None and (standing is None or standing.id != formed.proposal.id):
            self._give_up(formed)
        elif standing is not None and standing.id > self._seen and not self._forming.is_alive():
            self._seen = standing.id
            if rank.number not in standing.members:
                voting.next_group = standing.id
            else:
                self._forming = Thread(
                    target=self._form, args=(standing,), name="eplb-next-group", daemon=True
                )
                self._forming.start()
        if rank.number == min(rank.members):
            self._propose(standing)

    def _give_up(self, formed: Formed) -> None:
        """Leave groups that came to nothing, once no vote under way can still decide for them."""
        self._rank.voting.next_group = 0
        pending = self._rank.voter.pending
        self._quiet_looks = 0 if pending and pending[0].next_group else self._quiet_looks + 1
        if self._quiet_looks <= 1:  # a verdict may have been about to be applied
            return
        with self._taking:
            if not self._is_over.is_set():  # else the group was changed during this look
                self._formed, self._quiet_looks = None, 0
                formed.close()

    def take(self) -> Formed | None:
        """End this part; gives the group that was formed."""
        with self._taking:
            self._is_over.set()
        self._rank.on_look = lambda: None  # else the rank keeps the group
        if self._forming.ident is not None:
            # In vain where gloo waits for a rank: what is formed then is closed by the thread.
            self._forming.join(RETRY_S)
        # Whoever takes it lets it go: to delete a group may take as long as its exchanges.
        taken, self._formed = self._formed, None
        return taken

    def _standing(self) -> GroupProposal | None:
        """The proposal that follows this rank's group, and changes it as is wanted now."""
        proposal, rank = self._rank.store.proposed_group(), self._rank
        mine = rank.membership, rank.group.run
        if proposal is None or (proposal.base, proposal.run) != mine:
            return None
        if frozenset(proposal.members) == rank.members:
            return None
        return None if unwanted(self._read_wanted(), rank.members, proposal.members) else proposal

    def _read_wanted(self) -> frozenset[int]:
        wanted = self._rank.store.wanted_ranks()
        return frozenset(range(self._rank.topology.num_ranks) if wanted is None else wanted)

    def _form(self, proposal: GroupProposal) -> None:
        def check() -> None:
            found = self._standing()
            if self._is_over.is_set() or found is None or found.id != proposal.id:
                raise RankError(f"proposal {proposal.id} of a group is void")

        try:
            formed = form(self._rank, self._attend, proposal, check)
        except EplbError as exc:
            log.warning("rank %d: proposal %d: %s", self._rank.number, proposal.id, exc)
            self._failed, self._why = proposal.id, str(exc)
            return
        with self._taking:
            if not self._is_over.is_set():
                self._formed, self._rank.voting.next_group = formed, proposal.id
                return
        formed.close()

    def _propose(self, standing: GroupProposal | None) -> None:
        """Propose the next group, unless one that is still possible is being formed."""
        rank, store = self._rank, self._rank.store
        now, members, placement = store.backend.now(), rank.members, rank.placement
        offers = {one.rank: one for one in store.joiners()}
        operation, wanted = store.membership_change(), self._read_wanted()
        ready = wanted & offers.keys() - members
        if ready != self._ready:
            self._ready, self._ready_since = ready, time.monotonic()
        gathers = time.monotonic() - self._ready_since < GATHER_S
        holds = (placement.slot_to_expert != EMPTY).any(axis=0)
        holding = frozenset(rank.topology.rank_of_slot[holds].tolist())
        following = next_members(members, wanted, ready, holding, gathers=gathers)
        processes = {str(one): offers[one].process for one in sorted(following - members)}
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
            is_possible = all(standing.has(one, offers[one].process) for one in joiners)
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
                base=rank.membership,
                run=rank.group.run,
                members=tuple(sorted(following)),
                joiners=processes,
                reason=reason,
                tries=tries + 1,
            )
        )


def form(rank: Rank, attend: Attend, proposal: GroupProposal, check: Callable[[], None]) -> Formed:
    """Form the group of a proposal, and prove that its ranks belong together; collective.

    Args:
        rank: this one, which serves, or waits to be admitted and compares the digests of those
            that serve with its host's.
        attend: gives what it proves.
        proposal: names the group.
        check: called while others are waited for; what it raises ends the wait. A member that
            hangs, and is not dead, is waited for until the proposal is void.

    Raises:
        NotChanged: a rank did not come.
        RankError: a rank has another configuration, secret or weights.
        MigrationError: the host of this rank has other bytes of an expert.
        StoreError: the store failed.
    """
    bank, config, own = rank.bank, rank.config, rank.slots.digests
    rendezvous = StoreRendezvous(rank.store, proposal.membership, check, FORM_DEADLINE_S)
    try:
        group = rejoin(
            f"proposal-{proposal.id}",
            rank.group,
            proposal.members,
            rendezvous,
            run=proposal.run,
            config=config,
        )
    except RankError as exc:
        raise NotChanged(str(exc)) from exc
    try:
        control = group.control
        assert control is not None, "it was formed with one"
        set_deadlines(group, config)
        agree(attend(proposal.members), lambda _, mine: gathered(mine, control, check))
        version = rank.shared.state.weights_version
        answers = gathered({"handle": bank.handle, "weights": version}, control, check)
        if len(versions := {one["weights"] for one in answers}) > 1:
            raise RankError(
                f"rank {rank.number}: ranks have weights of versions {sorted(versions)}, "
                "expected one"
            )
        handles = dict(zip(proposal.members, (str(one["handle"]) for one in answers), strict=True))
        peers = map_peers(rank.number, group.topology, bank, handles.__getitem__)
        mapped = MappedSlots(rank.number, bank, peers)
        joins = rank.group.is_waiting
        table = torch.full_like(own, torch.iinfo(torch.int64).max) if joins else own.clone()
        await_exchange(control.allreduce([table], dist.ReduceOp.MIN), check)
        if joins:
            host = rank.sources.host
            prove_weights(host, table, bank.schema.record_bytes, config.network.fill_deadline_s)
        gathered("formed", control, check)
    except BaseException as exc:
        group.votes.close(is_failure=True)
        clear_frames(exc.__traceback__)  # which refer to the group
        void: list[object] = [group]
        del group, control
        let_go(void)
        if isinstance(exc, RuntimeError) and not isinstance(exc, EplbError):
            raise NotChanged(f"rank {rank.number}: a rank of the next group died: {exc}") from exc
        raise
    return Formed(proposal, group, table if joins else own, mapped)


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


def change_group(rank: Rank, formed: Formed, stages: Stages) -> None:
    """Leave the old group for the one that was formed; each of its ranks calls this.

    Raises:
        NotChanged: nothing was changed, and the old group may agree.
        EplbError: as ``serve_on``.
    """
    try:
        _change(rank, formed, stages)
    except BaseException:
        formed.close()  # the others must not wait for this rank
        raise


def _change(rank: Rank, formed: Formed, stages: Stages) -> None:
    proposal, group = formed.proposal, formed.group
    joiners = sorted(map(int, proposal.joiners))
    left = sorted(set(rank.group.members) - set(proposal.members))
    survival, refusal, generation = None, "", 0
    if not rank.group.is_waiting:
        try:
            survival = _plan_change(rank, left, joiners)
            generation = rank.placement.generation
        except PlacementError as exc:
            refusal = str(exc)
    stages.end("map")
    try:
        target = survival.target.hash if survival is not None else ""
        # Weights may have been updated since the group was formed.
        step = agree_on_start(rank, group, target, refusal)
    except RankError as exc:
        raise NotChanged(str(exc)) from exc
    stages.end("agree")
    rank.watcher.close()  # writes the commits that wait, and ends the mover's thread
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
    is_first = rank.number == min(set(proposal.members) - set(joiners))
    if is_first:
        assert survival is not None, "it is a member"
        try:
            commit_group(rank.store, survival, record, proposal.reason, is_planned=True)
        except StaleGeneration as exc:  # nothing is written: the old group may go on
            refusal = str(exc)
    if refusals := [str(why) for _, why in group.gather(refusal) if why]:
        raise NotChanged(refusals[0])
    rank.leave()
    stages.end("commit")
    if survival is None:
        survival = _read_committed(rank.store, record)
    rank.slots = replace(rank.slots, digests=formed.digests)

    def report() -> None:
        stages.end("first pass")
        if is_first:
            report_group(rank, record, stages, REGROUPED, {"joined": joiners, "left": left})

    sources = WeightSources(formed.mapped, rank.sources.host)
    serve_in(
        rank, replace(group, topology=survival.topology), survival.target, sources, step, report
    )
    stages.end("serve")


def _plan_change(rank: Rank, left: Sequence[int], joiners: Sequence[int]) -> Survival:
    survival = survive(rank.placement, rank.topology, left, joined=joiners)
    if survival.refills:
        raise PlacementError(
            f"{len(survival.refills)} experts are on ranks {list(left)} alone, expected none there"
        )
    return survival


def _read_committed(store: StateStore, record: Recovery) -> Survival:
    """What the members of a new group have committed, for a rank that joins them."""
    run = store.current_run()
    expected = run_of(record.run, record.membership)
    if run is None or run.run != expected:
        raise RankError(
            f"the store has run {run.run if run else None!r}, expected {expected!r} as committed"
        )
    return Survival(topology_from_dict(dict(run.topology)), committed_placement(store), ())


def be_admitted(rank: Rank, attend: Attend, stages: Stages) -> bool:
    """Offer this rank to those that serve, until they admit it; False: it is to end.

    Raises:
        RankError: it is refused, or no rank serves.
        MigrationError: its host has other weights.
        StoreError: the store failed.
    """
    number, store = rank.number, rank.store
    mine = Joiner(number, attend(()).host, secrets.token_hex(8))
    seen, offer = 0, Deadline.after(0.0, time.monotonic)
    unserved = Deadline.after(UNSERVED_S, time.monotonic)
    try:
        while not rank.wants_halt:
            version = store.version()
            if offer.has_passed:
                wanted = store.wanted_ranks()
                if wanted is not None and number not in wanted:
                    log.info("rank %d is not wanted any more", number)
                    return False
                if serving_ranks(store, store.backend.now()):
                    unserved = Deadline.after(UNSERVED_S, time.monotonic)
                elif unserved.has_passed:
                    raise RankError(f"rank {number} cannot join: found no rank that serves")
                store.offer_to_join(mine)
                offer = Deadline.after(OFFER_EVERY_S, time.monotonic)
            proposal = store.proposed_group()
            if proposal is None or proposal.id <= seen or not proposal.has(number, mine.process):
                store.wait(version, offer.left_s)
                continue
            seen = proposal.id
            if _joins_by(proposal, rank, attend, stages):
                return True
    finally:
        store.withdraw_offer(mine)
    return False


def _joins_by(proposal: GroupProposal, rank: Rank, attend: Attend, stages: Stages) -> bool:
    """Join by one proposal; False: it came to nothing."""

    def check() -> None:
        standing = rank.store.proposed_group()
        if standing is None or standing.id != proposal.id or rank.wants_halt:
            raise NotChanged(f"proposal {proposal.id} of a group is void")

    formed: Formed | None = None
    try:
        formed = form(rank, attend, proposal, check)
        stages.end("group")
        change_group(rank, formed, stages)
        return True
    except NotChanged as exc:
        log.warning("rank %d: proposal %d: %s", rank.number, proposal.id, exc)
    void: list[object] = [formed]
    formed = None
    let_go(void)
    return False


def await_exclusion(rank: Rank) -> bool:
    """Wait until the others serve without this rank, which leaves; False: they do not.

    Raises:
        StoreError: the store failed.
    """
    store, deadline = rank.store, Deadline.after(LEAVE_DEADLINE_S, time.monotonic)
    while not deadline.has_passed:
        version, record = store.version(), store.recovery()
        if record is not None and record.membership > rank.membership:
            return rank.number not in record.survivors
        if store.survivor_reports(rank.group.run, rank.membership):
            return False
        store.wait(version, RETRY_S)
    return False
