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


def test_verdict_reads_both_ends_of_what_must_agree() -> None:
    ballot = cast(IDLE)

    verdict = verdict_of(ballot, replace(ballot, generation=4), replace(ballot, plan_id=9))

    assert (verdict.step, verdict.generation, verdict.newest_plan_id) == (10, None, 9)


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


def test_nothing_swaps_until_the_slowest_rank_has_prepared() -> None:
    ahead, behind = working(prepared=1), working(prepared=0)

    assert read(ahead, behind)[1] is None
    assert read(behind, ahead)[1] is None


def test_no_more_than_the_frozen_pace_swaps_at_once() -> None:
    both_ready = working(prepared=2)

    assert read(both_ready, both_ready)[1] == Swap(0, 1)


def test_ranks_on_different_plans_swap_nothing_and_keep_their_plans() -> None:
    mine, other = working(prepared=1), phases.see_plan(IDLE, replace(PLAN, plan_hash=78))

    state, order = read(mine, other)

    assert order is None
    assert state == mine


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


def test_abort_request_drops_its_plan_and_no_newer_one() -> None:
    # Plan 5 is withdrawn and plan 6 published before every rank has seen plan 5.
    old = phases.want_abort(working(), 5, "it was withdrawn")
    newer = replace(PLAN, plan_id=6, plan_hash=78)
    new = phases.see_plan(IDLE, newer)

    after, order = read(new, old, new)
    assert (after, order) == (replace(new, refused_up_to=5), None)
    dropped, _ = read(old, new, new)
    assert phases.see_plan(phases.aborted(dropped), newer).plan == newer


def test_abort_of_an_older_plan_does_not_affect_a_newer_one() -> None:
    # Plan 5 is withdrawn before this rank has seen it, and plan 6 published while they vote.
    mine = cast(IDLE)
    verdict = verdict_of(mine, cast(phases.want_abort(working(), 5, "it was withdrawn")))
    on_the_next = phases.see_plan(IDLE, replace(PLAN, plan_id=6))

    after, order = phases.read_verdict(on_the_next, mine, verdict)

    assert order is None
    assert (after.phase, after.plan, after.refused_up_to) == (Phase.PRELOAD, on_the_next.plan, 5)


def test_disagreement_drops_a_plan_received_since_the_vote() -> None:
    mine = cast(IDLE)
    verdict = verdict_of(mine, cast(replace(IDLE, generation=4)))
    on_the_next = phases.see_plan(IDLE, PLAN)

    after, _ = phases.read_verdict(on_the_next, mine, verdict)

    assert (after.phase, after.plan) == (Phase.PRELOAD, PLAN)
    assert cast(after).abort  # no rank but this one has to have it: the next vote drops it on all


def test_swapped_part_of_a_dropped_plan_is_a_new_generation() -> None:
    half = phases.want_abort(working(prepared=1, swapped=1), 5, "disk gone")

    dropped, _ = read(half, working(prepared=1, swapped=1))

    assert (dropped.phase, dropped.generation, dropped.abort_reason) == (
        Phase.ABORTED,
        4,
        "disk gone",
    )
    assert phases.aborted(dropped).phase is Phase.IDLE


def test_abort_request_does_not_stop_a_swap_that_was_voted() -> None:
    # It was cast as prepared; the wish came after, and only the next verdict can carry it.
    ready = working(prepared=1)
    mine = cast(ready)
    regretting = phases.want_abort(ready, 5, "too late")

    _, order = phases.read_verdict(regretting, mine, verdict_of(mine, mine))

    assert order == Swap(0, 1)


def test_disagreement_on_the_generation_freezes_every_rank() -> None:
    ahead = replace(working(), generation=4)

    for state, other in ((working(), ahead), (ahead, working())):
        after, order = read(state, other)
        assert order is None
        assert "disagree on the generation" in after.frozen_reason
        idle = phases.aborted(after)
        assert (
            phases.see_plan(idle, replace(PLAN, plan_id=6, base_generation=idle.generation)) is idle
        )


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


def test_staging_waits_for_adoption_by_all_ranks_and_for_preload() -> None:
    assert not phases.may_stage(IDLE, 0)
    assert not phases.may_stage(working(is_adopted=False), 0)
    waiting, _ = read(phases.see_plan(IDLE, PLAN), phases.see_plan(IDLE, PLAN))
    assert not phases.may_stage(waiting, 0)

    assert phases.may_stage(phases.preloaded(waiting, 5), 0)
    assert not phases.may_stage(phases.want_abort(working(), 5, "no room"), 0)
    dropped, _ = read(phases.want_abort(working(), 5, "no room"), working())
    assert not phases.may_stage(dropped, 0)


def test_read_of_a_swapped_slot_waits_for_the_slowest_rank() -> None:
    done = working(prepared=1, swapped=1)
    ordered = replace(done, applied=0)  # its device is still at it

    assert not phases.may_stage(done, 1)  # complete here, but no verdict says so of the others
    assert not phases.may_stage(read(done, ordered)[0], 1)
    seen, _ = read(done, done)
    assert seen.applied_everywhere == 1
    assert phases.may_stage(seen, 1)
    assert not phases.may_stage(seen, 2)


def test_nothing_of_an_earlier_plan_counts_as_applied() -> None:
    done, _ = read(working(prepared=1, swapped=1), working(prepared=1, swapped=1))
    done = phases.staged(done, 5, 2)
    done, _ = read(done, done)
    done = phases.finish_swap(phases.completed(done, 5, 2))

    assert (done.plan, done.applied_everywhere) == (None, 0)


def test_halt_reaches_all_ranks() -> None:
    assert verdict_of(cast(IDLE), cast(IDLE, halt=True)).halt
    assert not verdict_of(cast(IDLE), cast(IDLE)).halt
