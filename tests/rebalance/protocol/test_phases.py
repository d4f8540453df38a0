"""The phase machine: every pair of phases, every verdict, and what must never follow from one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eplb.errors import RankError
from rebalance.protocol import phases
from rebalance.protocol.ballot import Ballot, Verdict
from rebalance.protocol.phases import NEXT, Phase, PlanRef, RankPhase, Swap

PLAN = PlanRef(
    plan_id=5, plan_hash=77, base_generation=3, num_transactions=2, transactions_per_commit=1
)
IDLE = RankPhase(generation=3)


def cast(state: RankPhase, step: int = 10, *, halt: bool = False) -> Ballot:
    return phases.ballot(state, step=step, membership=0, halt=halt)


def verdict_of(*ballots: Ballot) -> Verdict:
    return Verdict.decode(
        [min(column) for column in zip(*(b.encode() for b in ballots), strict=True)]
    )


def read(state: RankPhase, *others: RankPhase) -> tuple[RankPhase, Swap | None]:
    mine = cast(state)
    return phases.read_verdict(state, mine, verdict_of(mine, *(cast(other) for other in others)))


def working(prepared: int = 0, swapped: int = 0, *, is_adopted: bool = True) -> RankPhase:
    state = phases.preloaded(phases.see_plan(IDLE, PLAN), PLAN.plan_id)
    if is_adopted:
        state, _ = read(state, state)
    for number in range(prepared):
        state = phases.staged(state, PLAN.plan_id, number + 1)
        if number < swapped:
            state, order = read(state, state)
            assert order == Swap(number, number + 1)
            state = phases.finish_swap(phases.completed(state, PLAN.plan_id, number + 1))
    return state


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("other", Phase)
def test_only_the_table_s_moves_are_possible(phase: Phase, other: Phase) -> None:
    state = replace(IDLE, phase=phase)
    if other is phase:
        assert phases.transition(state, other) is state
    elif other in NEXT[phase]:
        assert phases.transition(state, other).phase is other
    else:
        with pytest.raises(AssertionError, match=f"{phase.value} cannot become {other.value}"):
            phases.transition(state, other)


def test_plan_runs_through_all_phases_on_agreeing_ranks() -> None:
    state = phases.see_plan(IDLE, PLAN)
    assert state.phase is Phase.PRELOAD
    state, order = read(state, state)
    assert (state.is_adopted, state.phase, order) == (True, Phase.PRELOAD, None)
    state = phases.preloaded(state, 5)
    assert state.phase is Phase.STAGE
    state = phases.staged(state, 5, 1)
    assert state.phase is Phase.SWAP
    state, order = read(state, state)
    assert order == Swap(0, 1)
    state = phases.finish_swap(phases.completed(state, 5, 1))
    assert state.phase is Phase.STAGE
    state = phases.staged(state, 5, 2)
    state, order = read(state, state)
    assert order == Swap(1, 2)
    state = phases.finish_swap(phases.completed(state, 5, 2))

    assert (state.phase, state.generation, state.plan) == (Phase.IDLE, 4, None)


def test_abort_request_of_one_rank_drops_the_plan_on_all() -> None:
    unwilling = phases.want_abort(working(), 5, "no room")
    unaware = IDLE

    for state, others in ((unwilling, unaware), (working(), unwilling), (unaware, unwilling)):
        after, order = read(state, others)
        assert order is None
        assert after.phase in (Phase.ABORTED, Phase.IDLE)
        after = phases.aborted(after) if after.phase is Phase.ABORTED else after
        assert phases.see_plan(after, PLAN) is after
        assert phases.see_plan(after, replace(PLAN, plan_id=6)).phase is Phase.PRELOAD


def test_abort_of_an_older_plan_does_not_affect_a_newer_one() -> None:
    # Plan 5 is withdrawn before this rank has seen it, and plan 6 published while they vote.
    mine = cast(IDLE)
    verdict = verdict_of(mine, cast(phases.want_abort(working(), 5, "it was withdrawn")))
    on_the_next = phases.see_plan(IDLE, replace(PLAN, plan_id=6))

    after, order = phases.read_verdict(on_the_next, mine, verdict)

    assert order is None
    assert (after.phase, after.plan, after.refused_up_to) == (Phase.PRELOAD, on_the_next.plan, 5)


def test_ranks_at_different_steps_stop_with_an_error() -> None:
    mine = cast(IDLE, step=10)

    with pytest.raises(RankError, match="at different steps, this one voted at step 10"):
        phases.read_verdict(IDLE, mine, verdict_of(mine, cast(IDLE, step=12)))


def test_late_updates_of_a_dropped_plan_change_nothing() -> None:
    unwilling = phases.want_abort(working(), 5, "no room")
    dropped, _ = read(unwilling, IDLE)

    assert phases.staged(dropped, 5, 1) is dropped
    assert phases.preloaded(dropped, 5) is dropped
    assert phases.want_abort(dropped, 5, "again") is dropped


def test_plan_for_another_generation_is_not_begun() -> None:
    assert phases.see_plan(IDLE, replace(PLAN, base_generation=2)) is IDLE


def test_plan_for_other_weights_is_not_begun() -> None:
    assert phases.see_plan(IDLE, replace(PLAN, weights_version=1)) is IDLE

    reloaded = replace(IDLE, weights_version=1)
    assert phases.see_plan(reloaded, PLAN) is reloaded
    assert phases.see_plan(reloaded, replace(PLAN, weights_version=1)).phase is Phase.PRELOAD


def test_ranks_that_serve_different_weights_freeze() -> None:
    reloaded = replace(working(), weights_version=1)

    after, order = read(working(), reloaded)

    assert order is None
    assert "disagree on the weights version" in after.frozen_reason
