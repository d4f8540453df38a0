"""Live settings: two layers, revisions, and the kill switch over restarts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from eplb.errors import ConfigError, StaleRevision
from telemetry.state.live import Control, LiveChange, LiveState
from telemetry.state.store import StateStore
from tests.support.stores import StoreClock

STATIC = {"movement": True, "observe": False, "pay_back_s": 60.0, "plan_windows": 16}


def test_live_value_wins_over_the_static_one_until_it_is_removed(store: StateStore) -> None:
    store.set_static(STATIC, reason="start")

    changed = store.change_live({"pay_back_s": 300}, reason="less churn")

    assert store.live() == changed
    assert (changed.revision, changed.effective["pay_back_s"]) == (2, 300.0)
    assert changed.changes == {"pay_back_s": LiveChange(2, 1000.0, "less churn")}
    assert changed.effective["plan_windows"] == 16
    removed = store.change_live({"pay_back_s": None}, reason="as before")
    assert (removed.revision, removed.effective, removed.changes) == (3, STATIC, {})


def test_start_with_movement_on_leaves_a_kill_switch_off(store: StateStore) -> None:
    store.set_static(STATIC, reason="start")
    store.set_control(Control(movement=False), reason="incident 7")

    state = store.set_static(STATIC, reason="another start")

    assert store.control() == state.control == Control(movement=False)
    assert state.changes["movement"] == LiveChange(2, 1000.0, "incident 7")


def test_start_that_forbids_movement_ends_a_switch_that_allowed_it(store: StateStore) -> None:
    store.set_static(STATIC, reason="start")
    store.change_live({"movement": True, "observe": False, "max_moves": 3}, reason="resumed")

    state = store.set_static({"movement": False, "observe": True}, reason="another start")

    assert store.control() == Control(movement=False, observe=True)
    assert (state.live, list(state.changes)) == ({"max_moves": 3}, ["max_moves"])


def test_change_at_an_older_revision_is_refused_and_changes_nothing(store: StateStore) -> None:
    read = store.change_live({"policy": "greedy"}, expected=0, reason="try")
    store.change_live({"plan_windows": 4}, expected=read.revision, reason="faster")
    before, events = store.live(), store.events()

    with pytest.raises(StaleRevision, match=r"revision 1, .*revision 2"):
        store.change_live({"policy": "auto"}, expected=read.revision, reason="late")

    assert (store.live(), store.events()) == (before, events)


def test_changes_of_different_settings_at_once_are_all_kept(store: StateStore) -> None:
    changes: list[dict[str, Any]] = [{"movement": False}, {"observe": True}, {"pay_back_s": 5.0}]

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda one: store.change_live(one, reason="race"), changes))

    assert store.live().live == {"movement": False, "observe": True, "pay_back_s": 5.0}
    assert store.live().revision == 3


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, "no live setting"),
        ({"movement": 0}, "movement is 0, expected true or false"),
        ({"observe": "no", "max_moves": 3}, "observe is 'no', expected true or false"),
    ],
)
def test_unusable_live_value_is_refused_and_changes_nothing(
    store: StateStore, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        store.change_live(changes, reason="a slip")

    assert (store.live(), store.events()) == (LiveState(), [])


def test_changes_are_events_and_wake_readers(store: StateStore) -> None:
    before = store.version()

    store.change_live({"movement": False, "policy": "greedy"}, reason="incident 7")

    assert store.version() > before
    assert [(event.kind, event.detail) for event in store.events()] == [
        ("control", {"movement": False, "observe": False, "reason": "incident 7"}),
        ("settings", {"revision": 1, "live": {"policy": "greedy"}, "reason": "incident 7"}),
    ]


def test_pause_for_a_time_ends_by_the_clock_of_the_store(
    store: StateStore, store_clock: StoreClock
) -> None:
    store.set_static(STATIC, reason="start")
    store.change_live({"max_moves": 3}, reason="slow link")
    paused = store.change_live({"movement": False}, reason="change 4711", lasts_s=60.0)
    assert store.live() == paused
    assert paused.until == {"movement": 1060.0}

    store_clock.now = 1059.9
    assert store.expire_live() == paused
    store_clock.now = 1060.0
    resumed = store.expire_live()

    assert store.live() == resumed == store.expire_live()
    assert (resumed.control, resumed.until) == (Control(), {})
    assert resumed.live == {"max_moves": 3}
    found = [event.detail for event in store.events() if event.kind == "control"][1:]
    switches = {"observe": False, "reason": "change 4711"}
    assert found == [
        switches | {"movement": False, "until": 1060.0},
        switches | {"movement": True, "reason": "expired: change 4711"},
    ]


def test_pause_for_a_time_outlasts_a_start(store: StateStore) -> None:
    store.change_live({"movement": False}, reason="change 4711", lasts_s=60.0)

    state = store.set_static(STATIC, reason="another start")

    assert (state.control.movement, state.until) == (False, {"movement": 1060.0})


@pytest.mark.parametrize("movement", [True, False])
def test_later_change_of_the_switch_ends_the_expiry(
    store: StateStore, store_clock: StoreClock, movement: bool
) -> None:
    store.change_live({"movement": False}, reason="change 4711", lasts_s=60.0)
    later = store.change_live({"movement": movement}, reason="as asked")

    store_clock.now = 2000.0

    assert store.expire_live() == later
    assert later.control.movement is movement


@pytest.mark.parametrize("lasts_s", [0.0, -1.0, float("inf"), float("nan")])
def test_impossible_time_is_refused_and_changes_nothing(store: StateStore, lasts_s: float) -> None:
    with pytest.raises(ConfigError, match="more than 0 s"):
        store.change_live({"movement": False}, reason="a slip", lasts_s=lasts_s)

    assert (store.live(), store.events()) == (LiveState(), [])
