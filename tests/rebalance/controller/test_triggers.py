"""Each trigger of a plan as the controller sees it: one decision event, and what is recorded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from eplb.core.cost import CostModel
from eplb.core.load import Phase
from eplb.core.placement import EMPTY, Placement
from eplb.core.problem import Budget
from eplb.decision.alternatives import ENOUGH
from eplb.decision.triggers import TriggerRules
from eplb.declared import declared_fields
from tests.support.controlled_deployment import (
    SETTINGS,
    SKEWED,
    START,
    Clock,
    Deployment,
    events,
)
from tests.support.stores import MemoryStore

RARELY_S = 1e6
REVERSED = SKEWED[::-1]


class Watched:
    """A controller under trigger rules, and the decisions that it noted since the last look."""

    def __init__(self, clock: Clock, **rules: Any) -> None:
        self.clock, store = clock, MemoryStore("test", clock=clock)
        store.commit(START, expected=None, reason="start")
        self.deployment, self.store = Deployment(store, clock=clock), store
        self._seen = 0
        self.begin(**rules)

    def begin(self, **rules: Any) -> None:
        """Have a new controller at work."""
        rules_of_all = TriggerRules(**rules)
        self.controller = self.deployment.controller(triggers=rules_of_all)

    def decided(self) -> list[dict[str, Any]]:
        """Turn twice, as the controller is woken for other things; return the new decisions."""
        for _ in range(2):
            self.controller.turn()
        found = [one for one in events(self.store, "plan") if one.id > self._seen]
        self._seen = max((one.id for one in found), default=self._seen)
        return [dict(one.detail) for one in found]

    def serve(self, load: list[int], windows: int = 1, phase: Phase = "mixed") -> list[str]:
        """Serve windows one after the other; return the triggers of the decisions after each."""
        found = []
        for _ in range(windows):
            self.deployment.serve(load, phase=phase)
            found += [one["trigger"] for one in self.decided()]
        return found


def settle(watched: Watched) -> None:
    """Serve the first window, and commit what its plan asks for."""
    assert watched.serve(SKEWED) == ["first"]
    watched.deployment.swap()


# -- one event for each


def test_first_window_and_then_the_interval_are_triggers(clock: Clock) -> None:
    watched = Watched(clock, interval_s=60.0)
    settle(watched)

    clock.now += 59
    assert watched.serve(SKEWED) == []
    clock.now += 1
    assert watched.serve(SKEWED) == ["interval"]
    assert watched.serve(SKEWED) == []


def test_imbalance_above_the_limit_is_a_trigger_until_it_is_armed_again(clock: Clock) -> None:
    watched = Watched(clock, start_imbalance=1.4, rearm_imbalance=1.2)
    # No commit arms it again, and so few tokens show no change of load: it may be chance.
    watched.store.change_live({"stage": "observe"}, reason="a test")
    even, skewed = [3, 3, 3, 3], [7, 3, 1, 1]
    assert watched.serve(even, windows=2) == ["first"]

    assert watched.serve(skewed) == ["imbalance"]
    assert watched.serve(skewed, windows=2) == []  # hysteresis
    assert watched.serve(even) == []
    assert watched.serve(skewed) == ["imbalance"]


@pytest.mark.parametrize("plan_windows", [1, 16])
def test_each_sudden_change_is_one_trigger_however_few_windows_are_planned_on(
    clock: Clock, plan_windows: int
) -> None:
    watched = Watched(clock, interval_s=RARELY_S)
    watched.store.change_live({"plan_windows": plan_windows, "stage": "observe"}, reason="a test")
    assert watched.serve(SKEWED, windows=6) == ["first"]

    assert watched.serve(REVERSED, windows=8) == ["change"]
    assert watched.serve(SKEWED, windows=8) == ["change"]


def test_other_ranks_are_a_trigger_despite_the_cool_down(clock: Clock) -> None:
    watched = Watched(clock, interval_s=RARELY_S, cool_down_s=RARELY_S)
    settle(watched)

    again = Deployment(watched.store, "run-2")
    again.serve(SKEWED)

    assert [one["trigger"] for one in watched.decided()] == ["membership"]


def test_cool_down_after_a_commit_keeps_the_load_from_starting_a_plan(clock: Clock) -> None:
    watched = Watched(clock, cool_down_s=30.0)
    watched.serve(SKEWED)
    watched.deployment.swap()

    clock.now += 29
    assert watched.serve(REVERSED, windows=5) == []
    clock.now += 1
    assert watched.serve(REVERSED) == ["load"]


def test_request_is_a_trigger_with_its_task_as_actor(clock: Clock) -> None:
    watched = Watched(clock, interval_s=RARELY_S)
    watched.deployment.serve(SKEWED)
    watched.store.set_control(replace(watched.store.control(), observe=True), reason="look")
    watched.decided()
    watched.store.set_control(replace(watched.store.control(), observe=False), reason="go")
    task = watched.store.submit("rebalance", {"dry_run": False})

    (event,) = watched.decided()

    assert (event["trigger"], event["actor"]) == ("request", f"task {task.id}")


# -- the interval in tokens


def test_decode_does_not_count_beside_prefill(clock: Clock) -> None:
    watched = Watched(clock, interval_tokens=100_000)
    watched.serve(SKEWED, phase="prefill")
    watched.deployment.swap()

    assert watched.serve(SKEWED, windows=4, phase="decode") == []
    assert watched.serve(SKEWED, windows=2, phase="prefill") == ["interval"]


def test_decode_counts_where_ranks_do_nothing_else(clock: Clock) -> None:
    watched = Watched(clock)
    watched.begin(interval_tokens=100_000)
    assert watched.serve(SKEWED, phase="decode") == ["first"]
    watched.deployment.swap()

    assert watched.serve(SKEWED, windows=2, phase="decode") == ["interval"]


# -- what is recorded

# Expert 0 is on both ranks. Even shares make 1.3 of the first load, and 3:1 makes 1.0.
REPLICATED = Placement(np.array([[0, 1, EMPTY, 2, 3, 0]]), num_experts=4)
FOR_SHARES = [60_000, 5_000, 17_500, 17_500]
AGAINST_SHARES = [60_000, 35_000, 2_500, 2_500]


@pytest.fixture
def split_again(clock: Clock) -> Watched:
    """A deployment whose generation 1 has other shares than generation 0, and the same slots."""
    watched = Watched(clock, interval_s=RARELY_S)
    watched.store.commit(REPLICATED.with_generation(1), expected=0, reason="a test")
    watched.deployment.serve(FOR_SHARES)
    assert [one["decision"] for one in watched.decided()] == ["RESPLIT"]
    assert not watched.deployment.swap().moves
    # The planner answers none of what follows, so that the plan is judged as it is.
    watched.store.change_live({"pay_back_s": 0.0}, reason="a test")
    return watched


def test_realised_gain_of_a_resplit_is_recorded(split_again: Watched) -> None:
    split_again.serve(FOR_SHARES, windows=ENOUGH + 1)

    (promise,) = events(split_again.store, "promise")
    assert promise.detail["generation"] == 2
    assert promise.detail["given"] == pytest.approx(0.3, abs=0.02)


def test_resplit_that_made_its_windows_worse_is_taken_back(split_again: Watched) -> None:
    split_again.store.change_live({"rollback_loss": 0.2}, reason="a test")

    split_again.serve(AGAINST_SHARES, windows=ENOUGH)

    (promise,) = events(split_again.store, "promise")
    assert promise.detail["given"] == pytest.approx(-0.3, abs=0.02)
    back = split_again.deployment.swap()
    assert np.allclose(back.target.slot_share, REPLICATED.slot_share)
    split_again.serve(AGAINST_SHARES, windows=ENOUGH + 1)
    assert len(events(split_again.store, "promise")) == 1, "the way back promises nothing"


def test_new_leader_judges_a_move_and_the_resplit_that_followed(clock: Clock) -> None:
    watched = Watched(clock)
    watched.serve(SKEWED)
    watched.deployment.swap()
    watched.store.change_live({"bytes_per_s": 1.0, "plan_windows": 1}, reason="only shares")
    watched.serve([45_000, 5_000, 25_000, 25_000])
    assert not watched.deployment.swap().moves

    watched.store.change_live({"pay_back_s": 0.0}, reason="a test")
    watched.begin()
    watched.serve(SKEWED, windows=ENOUGH + 2)

    found = [
        (one.detail["generation"], one.detail["given"]) for one in events(watched.store, "promise")
    ]
    assert [generation for generation, _ in found] == [1, 2]
    assert found[0][1] == pytest.approx(0.6, abs=0.05)
    assert found[1][1] < 0


def test_decision_has_before_prediction_cost_and_what_was_asked(clock: Clock) -> None:
    watched = Watched(clock)
    watched.store.change_live({"min_domains": 2, "pay_back_s": 90.0}, reason="a test")
    watched.deployment.serve(SKEWED)

    (event,) = watched.decided()

    assert event["imbalance_before"] == pytest.approx(1.6)
    assert 1.0 <= event["imbalance_after"] < 1.6
    assert event["expected_gain"] > 0
    assert event["cost_s"] > 0
    assert (event["trigger"], event["actor"], event["stage"]) == ("load", "controller", "all")
    asked = event["asked"]
    names = {*vars(SETTINGS.request), *declared_fields(Budget), *declared_fields(CostModel)}
    assert set(asked) == names | {"num_uncovered", "uncovered"}
    assert asked["uncovered"] == [[0, 0], [0, 1], [0, 2], [0, 3]], "there is one host"
    assert (asked["min_domains"], asked["pay_back_s"], asked["objective"]) == (2, 90.0, "auto")


@pytest.mark.parametrize("is_other_leader", [False, True])
def test_realised_gain_follows_the_decision_once_whoever_leads(
    clock: Clock, is_other_leader: bool
) -> None:
    watched = Watched(clock, interval_s=RARELY_S)
    watched.deployment.serve(SKEWED)
    (decision,) = watched.decided()
    watched.deployment.swap()
    if is_other_leader:
        watched.begin(interval_s=RARELY_S)

    watched.serve(SKEWED, windows=ENOUGH + 1)
    watched.begin(interval_s=RARELY_S)  # does not judge what was judged
    watched.serve(SKEWED, windows=ENOUGH + 1)

    (promise,) = events(watched.store, "promise")
    assert promise.detail["generation"] == decision["target_generation"]
    promised = decision["imbalance_before"] - decision["imbalance_after"]
    assert promise.detail["promised"] == pytest.approx(promised, abs=1e-4)
    assert promise.detail["given"] == pytest.approx(promised, abs=0.05)
