"""Ranks with deliberate defects, which the explorer must find.

Each is one line of the real code made wrong, for as long as the context lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from eplb.migration.survivors import Survival
from rebalance import recovery
from rebalance.assembly import change, next_group
from rebalance.assembly.change import Change
from rebalance.assembly.next_group import NextGroup
from rebalance.protocol import phases
from rebalance.protocol.ballot import NO_PLAN, Ballot, Verdict
from rebalance.protocol.phases import RankPhase, Swap
from rebalance.protocol.voter import Voter
from rebalance.stage.mover import Mover, StagingRing
from rebalance.stage.stager import Stager
from rebalance.swap.swapper import Swapper, Voting
from runtime.streams import Completion
from telemetry.state.groups import GroupProposal

DONE = Completion(is_cuda=False)


@contextmanager
def replaced(where: Any, name: str, by: object) -> Iterator[None]:
    kept = getattr(where, name)
    setattr(where, name, by)
    try:
        yield
    finally:
        setattr(where, name, kept)


read_verdict, may_stage = phases.read_verdict, phases.may_stage
release, adopt, swap, read = StagingRing.release, Swapper.adopt, Swapper.swap, Voter.read


def on_its_own_flag(
    state: RankPhase, cast: Ballot, verdict: Verdict
) -> tuple[RankPhase, Swap | None]:
    """Swaps what it has itself prepared, one vote early."""
    return read_verdict(state, cast, replace(verdict, prepared=cast.prepared))


def deaf(state: RankPhase, cast: Ballot, verdict: Verdict) -> tuple[RankPhase, Swap | None]:
    """Drops a plan only at its own request."""
    own = cast.plan_id if cast.abort else NO_PLAN
    return read_verdict(state, cast, replace(verdict, unwanted_up_to=own))


def frees_when_ordered(ring: StagingRing, moves: Any, completion: Completion) -> None:
    """Uses a staging entry again while it is still copied from."""
    release(ring, moves, DONE)


def stages_at_once(state: RankPhase, reads_after: int) -> bool:
    """Waits for no earlier transaction of the plan."""
    return may_stage(state, 0)


def stages_unadopted(state: RankPhase, reads_after: int) -> bool:
    """Does not wait until every rank works on the plan."""
    return may_stage(replace(state, is_adopted=True), reads_after)


def applied_when_ordered(swapper: Swapper, order: Swap, step: int) -> None:
    """Says that a swap is applied when it is only ordered."""
    swap(swapper, order, step)
    swapper.last_swap = DONE


def adopts_early(swapper: Swapper, migration: Any) -> bool:
    """Adopts a plan while the last swap is still being copied."""
    last_swap, swapper.last_swap = swapper.last_swap, DONE
    try:
        return adopt(swapper, migration)
    finally:
        swapper.last_swap = last_swap


def skips_when_prepared(voter: Voter, step: int, *, swapped: int, must_finish: bool) -> Any:
    """Never waits for a late vote, though others may swap by it."""
    if voter.pending is not None:
        swapped = voter.pending[0].prepared
    return read(voter, step, swapped=swapped, must_finish=must_finish)


def never_drains(mover: Mover, shared: Any) -> Generator[Any, None, None]:
    """Frees what chunks of a dropped plan are still written to."""
    for lane in mover._stager._lanes.values():
        lane.clear()
    proofs = mover._stager._proofs
    for forgotten in (proofs._ordered, proofs._proofs, proofs._records._pending):
        forgotten.clear()
    mover._sources.host.release()
    yield from ()


def forgets_forward(state: RankPhase, record: Any) -> list[tuple[Ballot, Verdict]]:
    """After a death drops the plan, though others have swapped more of it."""
    cast = phases.ballot(state, step=0, membership=record.membership, halt=False)
    dropped = replace(cast, abort=True)
    return [(dropped, Verdict.decode(dropped.encode()))] if state.plan else []


MUTANTS: dict[str, Callable[[], Any]] = {
    "own flag": lambda: replaced(phases, "read_verdict", on_its_own_flag),
    "deaf": lambda: replaced(phases, "read_verdict", deaf),
    "ring freed when ordered": lambda: replaced(StagingRing, "release", frees_when_ordered),
    "reads_after ignored": lambda: replaced(phases, "may_stage", stages_at_once),
    "staged unadopted": lambda: replaced(phases, "may_stage", stages_unadopted),
    "digest not checked": lambda: replaced(Stager, "_reject", Stager._accept),
    "applied when ordered": lambda: replaced(Swapper, "swap", applied_when_ordered),
    "adopted early": lambda: replaced(Swapper, "adopt", adopts_early),
    "skipped when prepared": lambda: replaced(Voter, "read", skips_when_prepared),
    "not drained": lambda: replaced(Mover, "_settle", never_drains),
    "not rolled forward": lambda: replaced(phases, "missed_verdicts", forgets_forward),
}

# -- of survivors that serve on

survive, agree = change.survive, Change.agree


def keeps_dead_slots(placement: Any, topology: Any, dead: Any, **given: Any) -> Survival:
    """Routes on to the slots of dead ranks."""
    found = survive(placement, topology, dead, **given)
    return replace(found, target=placement.with_generation(found.target.generation))


def counts_its_own_steps(changing: Change) -> None:
    """Numbers its next pass without the others."""
    agree(changing)
    assert changing.rank.passes is not None, "it serves on"
    changing.step = changing.rank.passes.steps


def serves_unnamed(*given: Any) -> None:
    """Serves a placement that the store was never told."""


MUTANTS_OF_SURVIVORS: dict[str, Callable[[], Any]] = {
    "not refilled": lambda: replaced(change, "fill_bank", lambda *given, **named: {}),
    "dead slots kept": lambda: replaced(change, "survive", keeps_dead_slots),
    "steps not agreed": lambda: replaced(Change, "agree", counts_its_own_steps),
    "not committed": lambda: replaced(change, "commit_group", serves_unnamed),
    "a minority decides": lambda: replaced(recovery, "is_minority", lambda members, lost: False),
}

# -- of planned changes

next_members, apply_verdict = next_group.next_members, Voting.apply_verdict


@contextmanager
def leaves_with_experts() -> Iterator[None]:
    """Lets ranks leave before they are drained, and loads nothing for it."""

    def hurried(members: Any, wanted: Any, ready: Any, holding: Any, **given: Any) -> Any:
        return next_members(members, wanted, ready, frozenset(), **given)

    def unfilled(*given: Any, **named: Any) -> Survival:
        return replace(survive(*given, **named), refills=())

    with ExitStack() as stack:
        stack.enter_context(replaced(next_group, "next_members", hurried))
        stack.enter_context(replaced(change, "survive", unfilled))
        yield


def leaves_on_its_own_vote(voting: Voting, cast: Ballot, verdict: Verdict, step: int) -> None:
    """Leaves its group as soon as it is ready itself."""
    apply_verdict(voting, cast, replace(verdict, next_group=cast.next_group), step)


def standing_of_any_base(following: NextGroup) -> GroupProposal | None:
    """Takes part in a proposal that follows another group than its own."""
    rank = following._rank
    found = rank.store.proposed_group()
    return found if found and frozenset(found.members) != rank.members else None


MUTANTS_OF_PLANNED: dict[str, Callable[[], Any]] = {
    "left with experts": leaves_with_experts,
    "left on its own vote": lambda: replaced(Voting, "apply_verdict", leaves_on_its_own_vote),
    "proposal of another base": lambda: replaced(NextGroup, "_standing", standing_of_any_base),
}
