"""What a store accepts, of starts, samples, events, tasks, deaths and versions; in memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from eplb.core.load import LoadSample
from eplb.errors import ConfigError, HistoryError, StaleGeneration, StoreError
from eplb.migration.recovery import Recovery
from eplb.versions import CONTROLLER, Announcement
from telemetry.state import runs
from telemetry.state.runs import RunInfo
from telemetry.state.store import StateStore
from telemetry.state.tasks import TaskResult
from tests.support.stores import kinds, make_sample

RUN = RunInfo("run-1", 5.0, {"layer_ids": [3, 4]}, {"alive": [True, False]}, 10)


def test_start_is_recorded_once_and_another_of_its_name_is_refused(store: StateStore) -> None:
    store.begin_run(RUN)
    store.begin_run(RUN)

    with pytest.raises(StoreError, match=r"'run-1'.*5\.0.*6\.0"):
        store.begin_run(replace(RUN, time=6.0))
    assert store.runs() == [RUN]
    assert [event.detail for event in store.events()] == [{"run": "run-1", "window_steps": 10}]


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (make_sample(0, 1, deployment="other"), ConfigError, "'other'.*'demo'"),
        (make_sample(0, 1, time=float("nan")), HistoryError, "sample 1 of rank 0"),
        (make_sample(0, 1, time=float("inf")), HistoryError, "sample 1 of rank 0"),
    ],
)
def test_sample_of_another_deployment_or_no_time_is_refused_with_its_batch(
    store: StateStore, wrong: LoadSample, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        store.append([make_sample(0, 0), wrong])

    assert store.sample_counts("run-1") == {}


@pytest.mark.parametrize("value", [np.int64(1), float("nan"), object()])
def test_details_that_json_cannot_hold_are_refused_and_change_nothing(
    store: StateStore, value: object
) -> None:
    with pytest.raises(StoreError):
        store.add_event("note", {"value": value})

    assert (store.events(), store.version()) == ([], 0)


def test_events_of_a_kind_are_read_backwards(store: StateStore) -> None:
    for n in range(5):
        store.add_event("odd" if n % 2 else "even", {"n": n})

    assert [event.detail["n"] for event in store.events_backwards({"odd"})] == [3, 1]


def test_task_ends_once_in_a_final_state_and_its_end_is_an_event(store: StateStore) -> None:
    task = store.submit("rebalance", {})

    with pytest.raises(StoreError, match="'running'"):
        store.finish(task.id, "running", TaskResult())
    store.finish(task.id, "failed", TaskResult("no load yet"))
    with pytest.raises(StoreError, match="failed"):
        store.finish(task.id, "done", TaskResult())
    end = {"task": 1, "kind": "rebalance", "state": "failed", "reason": "no load yet"}
    assert store.events()[-1].detail == end


# -- after a death


def make_record(membership: int, **changes: Any) -> Recovery:
    fields: dict[str, Any] = {
        "run": "run-1",
        "survivors": (0, 2),
        "generation": 5,
        "plan_id": 7,
        "applied": 1,
        "reason": "rank 1 died",
        "time": 9.5,
    }
    return Recovery(membership, **(fields | changes))


def test_first_recovery_record_of_a_death_wins_and_is_an_event(store: StateStore) -> None:
    first = make_record(1)

    assert store.recover(first, expected_membership=0) == first
    assert store.recover(make_record(1, applied=0), expected_membership=0) == first

    assert store.recovery() == first
    assert kinds(store) == ["recovery"]
    assert store.events()[0].detail == vars(first) | {"survivors": [0, 2]}


def test_later_group_has_its_own_recovery_record(store: StateStore) -> None:
    store.recover(make_record(1), expected_membership=0)
    later = make_record(3, run="run-2")

    assert store.recover(later, expected_membership=2) == later
    for membership, expected in ((1, 0), (3, 2)):
        with pytest.raises(StaleGeneration, match="membership 3"):
            store.recover(make_record(membership), expected_membership=expected)
    with pytest.raises(StoreError, match="membership 4 cannot follow membership 4"):
        store.recover(make_record(4), expected_membership=4)
    assert store.recovery() == later


def test_oldest_announcement_of_a_component_makes_room(
    store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "KEPT_ANNOUNCEMENTS", 2)
    store.begin_run(RUN)
    for name in "cde":
        store.announce(Announcement(CONTROLLER, name))

    found = {(one.component, one.name) for one in store.announced()}
    assert found == {("ranks", "run-1"), ("controller", "d"), ("controller", "e")}
