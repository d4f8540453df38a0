"""The controller over the shipped fake store: windows in, decisions and migrations out."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from eplb import plan
from eplb.core.cost import CostModel
from eplb.core.load import LoadSample
from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.measure import imbalance
from eplb.migration.build import Pace
from eplb.migration.candidates import Candidates
from eplb.settings.tree import applied
from rebalance.controller.loop import Controller
from telemetry.state.live import Control
from telemetry.state.runs import RANK_STATES
from tests.support.controlled_deployment import (
    EVEN,
    SETTINGS,
    SKEWED,
    START,
    TOPOLOGY,
    WINDOW_STEPS,
    Clock,
    Deployment,
    decisions,
    events,
    worked_off,
)
from tests.support.rank_reports import rank_report
from tests.support.stores import MemoryStore

REVERSED = SKEWED[::-1]


def windows_planned(deployment: Deployment) -> list[int]:
    return [event.detail["window"] for event in events(deployment.store, "plan")]


# -- decisions


def test_skewed_window_is_answered_with_a_better_placement(deployment: Deployment) -> None:
    deployment.serve(SKEWED)

    deployment.controller().turn()

    migration = deployment.published()
    assert (migration.base.hash, migration.target.generation) == (START.hash, 1)
    before, after = (
        float(imbalance(np.array([SKEWED]), placement, TOPOLOGY)[0])
        for placement in (START, migration.target)
    )
    assert before == pytest.approx(1.6)
    assert after < 1.1
    event = deployment.last_plan()
    assert event["reason"].startswith("imbalance 1.600 -> 1.0")
    assert (event["decision"], event["generation"], event["window"]) == ("MOVE", 0, 0)


def test_before_it_decides_it_names_what_a_host_would_need(deployment: Deployment) -> None:
    store, two_hosts = deployment.store, Topology.uniform(2, 1, slots_per_rank=3)
    deployment = Deployment(store, "two hosts", topology=two_hosts)
    controller = deployment.controller()
    deployment.decide_on(controller, EVEN)
    assert store.candidates() == Candidates(((), ()))

    store.set_control(Control(observe=True), reason="look first")
    deployment.decide_on(controller, SKEWED)

    assert store.published() is None
    assert store.candidates() == Candidates(((), ((0, 0),)))  # expert 0, for the host of rank 1
    version = store.version()
    deployment.decide_on(controller, SKEWED)
    assert store.candidates() == Candidates(((), ((0, 0),)))
    planned = windows_planned(deployment).count(2)
    assert store.version() == version + planned, "what is no news wakes nobody"


def test_next_plan_empties_the_spares_that_survivors_refilled_into(deployment: Deployment) -> None:
    full = Placement(np.array([[0, 1, 2, 3, EMPTY, EMPTY]]), num_experts=4, generation=1)
    deployment.store.commit(full, expected=0, reason="survivors refilled, then a rank joined")
    deployment.serve(SKEWED)

    deployment.controller(pace=Pace(mode="flip", spare_slots=1)).turn()

    target = deployment.published().target
    assert (target.slot_to_expert == EMPTY).reshape(2, 3).sum(axis=1).tolist() == [1, 1]


def test_placement_without_spares_is_an_error(deployment: Deployment) -> None:
    deployment.serve(SKEWED)

    deployment.controller(pace=Pace(mode="flip", spare_slots=2)).turn()

    (event,) = events(deployment.store, "error")
    assert "rank 0 has fewer than 2" in event.detail["message"]
    assert deployment.store.published() is None


def test_controller_without_run_samples_or_placement_decides_nothing() -> None:
    store = MemoryStore("test", clock=Clock())
    controller = Controller(store, SETTINGS, clock=Clock(), monotonic=Clock())

    controller.turn()
    deployment = Deployment(store)
    controller.turn()
    store.append([deployment.sample(rank, START, START.slot_share) for rank in (0, 1)])
    controller.turn()

    assert [event.kind for event in store.events()] == ["run", "lease"]


def test_keep_has_a_reason_and_is_recorded_periodically(deployment: Deployment) -> None:
    controller = deployment.controller(keep_every_windows=3)
    for _ in range(7):
        deployment.decide_on(controller, EVEN)
        controller.turn()

    assert windows_planned(deployment) == [0, 3, 6]
    for event in events(deployment.store, "plan"):
        assert event.detail["decision"] == "KEEP"
        assert "imbalance 1.000" in event.detail["reason"]
    assert deployment.store.published() is None


def test_idle_window_moves_nothing(deployment: Deployment) -> None:
    deployment.serve([0, 0, 0, 0])

    deployment.controller().turn()

    assert decisions(deployment.store) == ["KEEP"]


def test_plan_after_idle_windows_serves_busy_ones_as_one_on_the_sum(
    deployment: Deployment,
) -> None:
    idle = [1, 1, 2, 6]  # of other experts than those that are busy
    deployment.serve(idle, windows=14)
    deployment.serve(SKEWED, windows=2)
    deployment.controller().turn()

    total = np.array([14 * np.array(idle) + 2 * np.array(SKEWED)])
    on_windows, on_sum = (
        float(imbalance(np.array([SKEWED]), placement, TOPOLOGY)[0])
        for placement in (deployment.published().target, plan(total, TOPOLOGY).target)
    )
    assert on_windows < on_sum + 0.005


def test_plan_after_a_load_came_back_uses_both_loads(deployment: Deployment) -> None:
    for load, windows in ((SKEWED, 8), (REVERSED, 6), (SKEWED, 2)):
        deployment.serve(load, windows=windows)

    deployment.controller(stage="observe", plan_windows=16).turn()

    # Half of the 16 are of the load that is back, two of them new; the other load has six in all.
    assert deployment.last_plan()["windows"] == 8 + 6


def test_plan_after_a_load_change_uses_the_new_load_only(deployment: Deployment) -> None:
    controller = deployment.controller()
    deployment.decide_on(controller, SKEWED)
    deployment.swap()
    deployment.decide_on(controller, SKEWED, windows=6)

    deployment.decide_on(controller, REVERSED)
    moved = deployment.swap()
    deployment.decide_on(controller, REVERSED, windows=3)

    # A mean of more windows, some of them of the old load, would have asked for another move.
    assert [event.detail["windows"] for event in events(deployment.store, "plan")] == [1, 7, 1, 4]
    assert decisions(deployment.store) == ["MOVE", "KEEP", "MOVE", "KEEP"]
    assert moved.base.generation == 1
    assert imbalance(np.array([REVERSED]), moved.target, TOPOLOGY).max() < 1.05


def test_time_that_a_plan_takes_is_told_by_the_controller_s_clock(deployment: Deployment) -> None:
    seconds = itertools.count()
    deployment.serve(SKEWED)

    Controller(deployment.store, SETTINGS, monotonic=lambda: float(next(seconds))).turn()

    assert deployment.last_plan()["plan_seconds"] == 1.0


@pytest.mark.parametrize(
    ("control", "why"),
    [
        (Control(observe=True), "observe only"),
        (Control(movement=False), "movement is switched off"),
    ],
)
def test_plan_without_movement_is_an_event_and_made_again_once_movement_is_on(
    deployment: Deployment, control: Control, why: str
) -> None:
    controller = deployment.controller()
    deployment.store.set_control(control, reason="test")
    deployment.serve(SKEWED)

    controller.turn()

    event = deployment.last_plan()
    assert event["decision"] == "MOVE"
    assert event["reason"].endswith(f"(not moved: {why})")
    assert deployment.store.published() is None
    deployment.store.set_control(Control(), reason="go")
    deployment.decide_on(controller, SKEWED)
    assert deployment.published().base.generation == 0


# -- others at the same store


class Interrupted(MemoryStore):
    """A store in which something else happens between a controller's decision and its publish."""

    meanwhile: Callable[[], object] = int

    def next_plan_id(self) -> int:
        meanwhile, self.meanwhile = self.meanwhile, int
        meanwhile()
        return super().next_plan_id()


def test_plan_overtaken_by_a_commit_is_withdrawn_and_replanned(clock: Clock) -> None:
    store = Interrupted("test", clock=clock)
    store.commit(START, expected=None, reason="start")
    deployment = Deployment(store, clock=clock)
    deployment.serve(SKEWED)
    controller = deployment.controller()
    elsewhere = START.with_generation(5)
    store.meanwhile = lambda: store.commit(elsewhere, expected=0, reason="from elsewhere")

    controller.turn()
    assert store.published() is None
    deployment.decide_on(controller, SKEWED)

    assert deployment.published().base.generation == 5


# -- live settings


def test_live_pay_back_time_applies_from_the_next_turn(deployment: Deployment) -> None:
    controller = deployment.controller(cost=CostModel(pay_back_s=0.01))
    deployment.decide_on(controller, SKEWED)
    assert "448 us in 2.5 ms, costs 100 ms" in deployment.last_plan()["reason"]

    deployment.store.change_live({"pay_back_s": 60.0}, reason="longer")
    deployment.decide_on(controller, SKEWED)

    assert decisions(deployment.store) == ["KEEP", "MOVE"]
    assert "in 30 s" in deployment.last_plan()["reason"]  # half of it: the load is two windows old


def test_removed_live_value_gives_way_to_the_static_one(deployment: Deployment) -> None:
    deployment.store.change_live({"pay_back_s": 0.01, "policy": "greedy"}, reason="try")
    controller = deployment.controller()
    deployment.decide_on(controller, SKEWED)

    deployment.store.change_live({"pay_back_s": None}, reason="as before")
    deployment.decide_on(controller, SKEWED)

    assert decisions(deployment.store) == ["KEEP", "MOVE"]
    assert [one.detail["policy"] for one in events(deployment.store, "plan")] == ["greedy"] * 2


def test_restarted_controller_takes_live_values_from_the_store(deployment: Deployment) -> None:
    deployment.store.change_live({"max_moves": 1}, reason="slow link")
    deployment.serve(SKEWED)

    deployment.controller().turn()

    assert len(deployment.published().moves) == 1


def test_pause_for_a_time_holds_plans_back_until_it_expires(deployment: Deployment) -> None:
    controller = deployment.controller()
    deployment.store.change_live({"movement": False}, reason="change 4711", lasts_s=60.0)
    deployment.decide_on(controller, SKEWED)
    assert deployment.store.published() is None

    deployment.clock.now += 60.0
    deployment.decide_on(controller, SKEWED)

    assert deployment.published().plan_id == 1
    assert "change 4711" in events(deployment.store, "control")[-1].detail["reason"]


def test_unusable_live_value_leaves_the_settings_and_is_an_error(deployment: Deployment) -> None:
    deployment.store.change_live({"policy": "magic"}, reason="a slip")
    deployment.serve(SKEWED)

    deployment.controller().turn()

    assert deployment.published().plan_id == 1
    (error,) = events(deployment.store, "error")
    assert error.detail["where"] == "settings"
    assert "'magic'" in error.detail["message"]


def test_live_values_change_the_controller_and_its_parts_by_name() -> None:
    values: dict[str, Any] = {
        "policy": "greedy",
        "pay_back_s": 7.0,
        "max_moves": 5,
        "min_domains": 2,
        "interval_s": 60.0,
        "stage": "propose",
    }

    found = applied(SETTINGS, values | {"movement": False, "a_removed_setting": 3})

    named = vars(found) | vars(found.cost) | vars(found.budget)
    named |= vars(found.request) | vars(found.triggers)
    assert {name: named[name] for name in values} == values
    assert applied(SETTINGS, {"max_moves": 0}).budget.max_moves is None
    assert applied(SETTINGS, {"movement": False}) == SETTINGS


# -- what ends an open migration


@pytest.mark.parametrize(("live", "deadline_s"), [({}, 30.0), ({"migration_deadline_s": 5.0}, 5.0)])
def test_overdue_migration_is_withdrawn(
    deployment: Deployment, live: dict[str, Any], deadline_s: float
) -> None:
    deployment.serve(SKEWED)
    controller = deployment.controller()
    controller.turn()
    controller.turn()
    if live:
        deployment.store.change_live(live, reason="faster")

    deployment.clock.now += deadline_s
    controller.turn()
    assert deployment.published().plan_id == 1
    deployment.clock.now += 0.1
    controller.turn()

    assert deployment.store.published() is None
    (abort,) = events(deployment.store, "abort")
    assert f"in {deadline_s:g} s" in abort.detail["reason"]


def report_weights(deployment: Deployment, *versions: int) -> None:
    for rank, version in enumerate(versions):
        deployment.store.report(rank_report(deployment.run, rank, weights_version=version))


def test_plan_is_made_for_the_weights_that_serve(deployment: Deployment) -> None:
    report_weights(deployment, 2, 2)
    deployment.serve(SKEWED)
    controller = deployment.controller()
    controller.turn()
    assert deployment.published().weights_version == 2

    report_weights(deployment, 3, 3)
    controller.turn()

    assert deployment.store.published() is None
    (event,) = events(deployment.store, "reject")
    assert "version 2, found version 3" in event.detail["reason"]


@pytest.mark.parametrize("versions", [None, (0, 1)], ids=["not reported", "different"])
def test_nothing_is_published_unless_all_ranks_serve_the_same_weights(
    deployment: Deployment, versions: tuple[int, int] | None
) -> None:
    store = deployment.store
    if versions is None:
        store.begin_run(replace(store.runs()[0], run="run-2"))
        deployment.run = "run-2"
    else:
        report_weights(deployment, *versions)
    deployment.serve(SKEWED)

    deployment.controller().turn()

    assert decisions(store) == ["MOVE"]
    assert store.published() is None


def test_new_run_starts_the_windows_over(deployment: Deployment) -> None:
    controller = deployment.controller()
    deployment.decide_on(controller, EVEN, windows=3)

    second = Deployment(deployment.store, "run-2")
    controller.turn()
    assert windows_planned(deployment) == [2]  # nothing known of the new run yet
    second.serve(SKEWED)
    controller.turn()

    assert windows_planned(deployment) == [2, 0]
    assert second.published().base.generation == 0


def test_samples_older_than_an_hour_are_rolled_up_once_a_minute(deployment: Deployment) -> None:
    controller = deployment.controller()
    deployment.serve(EVEN, windows=16)  # taken at 0, 4, 8, .. 60 s, by two ranks

    def turn_at(now: float) -> int:
        deployment.clock.now = now
        controller.turn()
        return len(deployment.store.samples("run-1"))

    # Whole minutes alone: the one that ends at 60 s is an hour old at 3660 s.
    assert [turn_at(now) for now in (1060.0, 3659.0, 3718.0, 3719.0)] == [32, 32, 32, 2]
    (minute,) = deployment.store.rollups(60)
    assert (minute.num_samples, minute.tokens.sum()) == (30, 15 * sum(EVEN))
    assert deployment.store.sample_counts("run-1") == {0: 16, 1: 16}


# -- what cannot be planned on


def test_bad_sample_is_reported_and_excluded_also_by_the_next_controller(
    deployment: Deployment,
) -> None:
    bad = deployment.sample(0, START, START.slot_share, sequence=99, last_step=WINDOW_STEPS)
    deployment.store.append([bad])
    deployment.serve(SKEWED)

    deployment.controller().turn()
    deployment.controller().turn()

    assert deployment.published().base.generation == 0
    told = events(deployment.store, "error")[0].detail
    assert told["where"] == "load"
    assert "sample 99 of rank 0 covers steps 0..4" in told["message"]


def test_records_that_cannot_be_read_are_reported_once(deployment: Deployment) -> None:
    deployment.serve(SKEWED)
    run = deployment.store.current_run()
    assert run is not None
    table = RANK_STATES.of(run.run).table
    deployment.store.backend.put(table, 9, "nonsense")
    controller = deployment.controller()
    for _ in range(3):
        controller.turn()

    told = [event.detail["message"] for event in events(deployment.store, "error")]
    assert told == [
        f"records of the store are damaged, or of an unknown version: 1 in {table.name}"
    ]


def test_rejected_samples_are_reported_at_most_once_a_minute(deployment: Deployment) -> None:
    store, controller = deployment.store, deployment.controller()

    def malformed(sequence: int) -> LoadSample:
        share = START.slot_share
        return deployment.sample(0, START, share, sequence=sequence, last_step=9)

    def told_at(now: float, *samples: LoadSample) -> list[dict[str, int]]:
        deployment.clock.now = now
        store.append(samples)
        controller.turn()
        return [event.detail["samples"] for event in events(store, "error")]

    deployment.serve(EVEN)
    assert told_at(1000.0) == []
    assert [told["malformed"] for told in told_at(1001.0, malformed(90))] == [1]
    assert [told["malformed"] for told in told_at(1060.9, malformed(91), malformed(92))] == [1]
    told = told_at(1061.0, replace(malformed(93), time=5000.0))

    assert [(one["malformed"], one["future"], one["accepted"]) for one in told] == [
        (1, 0, 2),
        (3, 1, 2),
    ]
    message = events(store, "error")[-1].detail["message"]
    assert message.startswith("1 future: sample 93 of rank 0")
    assert "; 2 malformed: sample 92 of rank 0" in message


def test_late_and_repeated_samples_are_reported_without_an_error(deployment: Deployment) -> None:
    deployment.clock.now = 5000.0
    deployment.next_window = 300  # more than are held
    deployment.serve(EVEN, windows=256)
    deployment.next_window = 0
    deployment.serve(EVEN)

    deployment.controller().turn()

    (told,) = events(deployment.store, "samples")
    assert (told.detail["samples"]["late"], told.detail["samples"]["accepted"]) == (2, 512)
    assert events(deployment.store, "error") == []


def test_windows_are_of_seconds_if_the_run_has_window_seconds(deployment: Deployment) -> None:
    timed = Deployment(deployment.store, "run-2", window_seconds=4.0)  # each sample is of 4 s
    timed.serve(SKEWED, windows=3)

    timed.controller().turn()

    assert windows_planned(timed) == [1], "the last window may still get samples"
    assert timed.published().base.generation == 0


def test_load_without_a_plan_is_one_event_and_the_controller_continues(
    deployment: Deployment,
) -> None:
    elsewhere = Placement(np.array([[0, 1, 2, 3]]), num_experts=4, generation=1)
    deployment.serve(SKEWED)
    deployment.store.commit(elsewhere, expected=0, reason="of another topology")
    controller = deployment.controller()

    controller.turn()
    controller.turn()

    (told,) = events(deployment.store, "error")
    assert told.detail["where"] == "plan"
    assert "4 slots" in told.detail["message"]
    assert deployment.store.published() is None


# -- tasks


def test_rebalance_is_a_dry_run_by_default(deployment: Deployment) -> None:
    deployment.store.set_control(Control(observe=True), reason="only look")
    deployment.serve(SKEWED)

    task = worked_off(deployment)

    assert (task.state, task.result.detail["decision"]) == ("done", "MOVE")
    assert (task.result.detail["dry_run"], task.result.plan_id) == (True, 0)
    assert task.result.detail["before"] == pytest.approx(1.6)
    assert task.result.detail["num_moves"] > 0
    assert deployment.store.published() is None


def test_real_rebalance_publishes_once(deployment: Deployment) -> None:
    deployment.serve(SKEWED)

    task = worked_off(deployment, dry_run=False, policy="greedy")

    assert (task.state, task.result.detail["policy"]) == ("done", "greedy")
    assert task.result.plan_id == 1
    assert len(events(deployment.store, "publish")) == 1


def test_rebalance_that_does_not_pay_off_returns_the_decision(deployment: Deployment) -> None:
    deployment.serve(EVEN)

    task = worked_off(deployment, dry_run=False)

    assert (task.state, task.result.detail["decision"]) == ("done", "KEEP")
    assert task.result.plan_id == 0


def test_controller_explains_its_plan_and_moves_nothing(deployment: Deployment) -> None:
    deployment.store.set_control(Control(observe=True), reason="only look")
    deployment.serve(SKEWED)

    task = worked_off(deployment, "explain", layer=0, expert=0)

    assert (task.state, task.result.detail["decision"]) == ("done", "MOVE")
    assert (task.result.detail["part_of_load"], task.result.detail["place"]) == (0.6, 1)
    assert "60.0%" in task.result.detail["sentences"][0]
    assert deployment.store.published() is None


def test_task_of_a_dead_controller_fails_with_a_reason(deployment: Deployment) -> None:
    task = deployment.store.submit("rebalance", {})
    deployment.store.claim()

    deployment.controller().turn()

    ended = deployment.task(task.id)
    assert (ended.state, ended.result.plan_id) == ("failed", 0)
    assert ended.result.error
