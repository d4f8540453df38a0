"""What every LoadStore promises, run over each of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from eplb.core.load import LoadSample
from eplb.core.placement import Placement
from eplb.errors import StaleGeneration, StoreError
from eplb.migration.candidates import Candidates
from eplb.migration.recovery import Recovery, SurvivorReport
from eplb.versions import CONTROLLER, PROTOCOL, Announcement
from telemetry.store import Control, LoadStore, RankState, RunInfo, TaskResult, events_backwards
from telemetry.stores import deciding_store

TIMEOUT_S = 20.0


def make_sample(rank: int, sequence: int, **changes: Any) -> LoadSample:
    fields: dict[str, Any] = {
        "deployment": "demo",
        "run": "run-1",
        "time": float(sequence),
        "first_step": sequence,
        "last_step": sequence,
        "phase": "decode",
        "generation": 1,
        "slot_to_expert": [[0, 1]],
        "tokens": [[rank, sequence]],
    }
    return LoadSample(rank=rank, sequence=sequence, **(fields | changes))


def make_run(run: str, **changes: Any) -> RunInfo:
    fields: dict[str, Any] = {
        "time": 5.0,
        "model": {"layer_ids": [3, 4]},
        "topology": {"alive": [True, False]},
        "window_steps": 10,
    }
    return RunInfo(run, **(fields | changes))


def make_placement(generation: int) -> Placement:
    return Placement(np.array([[0, 1, 0, 2]]), num_experts=3, generation=generation)


def kinds(store: LoadStore) -> list[str]:
    return [event.kind for event in store.events()]


# -- runs and ranks


def test_latest_run_is_the_current_one(store: LoadStore) -> None:
    assert store.current_run() is None
    assert store.runs() == []

    store.begin_run(make_run("run-1"))
    store.begin_run(make_run("run-2", window_steps=20, window_seconds=2.5))

    assert store.current_run() == make_run("run-2", window_steps=20, window_seconds=2.5)
    assert store.runs() == [
        make_run("run-1"),
        make_run("run-2", window_steps=20, window_seconds=2.5),
    ]
    assert kinds(store) == ["run", "run"]
    assert store.events()[0].detail == {"run": "run-1", "window_steps": 10}


def test_same_start_twice_is_one_start(store: LoadStore) -> None:
    store.begin_run(make_run("run-1"))
    store.begin_run(make_run("run-1"))

    assert kinds(store) == ["run"]


def test_another_start_under_a_known_name_is_refused(store: LoadStore) -> None:
    store.begin_run(make_run("run-1"))

    with pytest.raises(StoreError, match=r"'run-1' is recorded as started at 5\.0.*at 6\.0"):
        store.begin_run(make_run("run-1", time=6.0))


def test_rank_state_replaces_the_one_before(store: LoadStore) -> None:
    def state(rank: int, step: int, run: str = "run-1") -> RankState:
        return RankState(
            run, rank, 9.5, step, 2, "swap", 4, 1, 30, 3, 1, "torn", detail={"bytes": {"peer": 7}}
        )

    for rank, step in ((1, 5), (0, 6), (1, 7)):
        store.report(state(rank, step))
    store.report(state(0, 8, run="run-2"))

    assert store.rank_states("run-1") == [state(0, 6), state(1, 7)]
    assert store.rank_states("run-3") == []


# -- events, tasks, switches


def test_events_are_read_past_an_id(store: LoadStore) -> None:
    ids = [store.add_event("note", {"n": n, "nested": {"list": [1, 2.5]}}) for n in range(3)]

    assert ids == sorted(set(ids))
    found = store.events(after=ids[0], limit=1)
    assert [(event.id, event.kind) for event in found] == [(ids[1], "note")]
    assert found[0].detail == {"n": 1, "nested": {"list": [1, 2.5]}}
    assert found[0].time == 1000.0


def test_events_are_read_backwards_in_pages(store: LoadStore) -> None:
    ids = [store.add_event("odd" if n % 2 else "even", {"n": n}) for n in range(5)]

    assert [event.id for event in store.latest_events()] == ids[::-1]
    assert [event.id for event in store.latest_events(before=ids[3], limit=2)] == ids[2:0:-1]
    assert store.latest_events(before=ids[0]) == []
    assert [event.detail["n"] for event in events_backwards(store, {"odd"})] == [3, 1]


@pytest.mark.parametrize("value", [np.int64(1), float("nan"), object()])
def test_details_that_json_cannot_hold_are_refused_and_change_nothing(
    store: LoadStore, value: object
) -> None:
    with pytest.raises(StoreError, match="details cannot be stored"):
        store.add_event("note", {"value": value})

    assert store.events() == []
    assert store.version() == 0


def test_task_is_claimed_by_one_and_ends_with_a_result(store: LoadStore) -> None:
    assert store.claim() is None
    first = store.submit("rebalance", {"dry_run": True})
    second = store.submit("rebalance", {"dry_run": False})
    assert (first.state, first.request) == ("queued", {"dry_run": True})

    with ThreadPoolExecutor(4) as pool:
        claimed = [task for task in pool.map(lambda _: store.claim(), range(4)) if task]
    store.finish(first.id, "done", TaskResult(plan_id=4, detail={"moves": 3}))

    assert sorted(task.id for task in claimed) == [first.id, second.id]
    ended, running = store.task(first.id), store.task(second.id)
    assert ended is not None
    assert (ended.state, ended.result) == ("done", TaskResult("", 4, {"moves": 3}))
    assert running is not None
    assert (running.state, running.result) == ("running", TaskResult())
    assert store.task(99) is None
    assert store.events()[-1].detail == {"task": first.id, "kind": "rebalance", "state": "done"}


def test_tasks_that_were_claimed_and_not_ended_are_running(store: LoadStore) -> None:
    first, second, third = (store.submit("rebalance", {"n": n}) for n in range(3))
    for _ in range(2):
        store.claim()
    assert [task.id for task in store.tasks("running")] == [first.id, second.id]

    store.finish(first.id, "failed", TaskResult("abandoned"))

    assert [(task.id, task.state, task.request) for task in store.tasks("running")] == [
        (second.id, "running", {"n": 1})
    ]
    found = store.task(third.id)
    assert found is not None
    assert found.state == "queued"


def test_tasks_are_listed_by_state_in_pages_oldest_first(store: LoadStore) -> None:
    ids = [store.submit("rebalance", {"n": n}).id for n in range(6)]
    for _ in range(4):
        store.claim()
    for task_id, state in zip(ids, ("done", "failed", "done"), strict=False):
        store.finish(task_id, state, TaskResult())  # type: ignore[arg-type]

    found = {
        state: [task.id for task in store.tasks(state)]
        for state in ("queued", "running", "done", "failed")
    }

    assert found == {
        "queued": ids[4:],
        "running": ids[3:4],
        "done": [ids[0], ids[2]],
        "failed": ids[1:2],
    }
    assert [task.id for task in store.tasks("queued", limit=1)] == ids[4:5]
    assert [task.id for task in store.tasks("queued", after=ids[4])] == ids[5:]
    assert store.tasks("done", after=ids[2]) == []


def test_task_cannot_end_twice_or_in_a_passing_state(store: LoadStore) -> None:
    task = store.submit("rebalance", {})

    with pytest.raises(StoreError, match="cannot end as 'running'"):
        store.finish(task.id, "running", TaskResult())
    store.finish(task.id, "failed", TaskResult("no load yet"))
    with pytest.raises(StoreError, match="it is failed already"):
        store.finish(task.id, "done", TaskResult())
    with pytest.raises(StoreError, match="there is no such task"):
        store.finish(99, "done", TaskResult())


def test_switches_start_as_movement_on_and_are_kept(store: LoadStore) -> None:
    assert store.control() == Control(movement=True, observe=False)

    store.set_control(Control(movement=False), reason="incident 7")

    assert store.control() == Control(movement=False)
    detail = {"movement": False, "observe": False, "reason": "incident 7"}
    assert store.events()[-1].detail == detail


def test_latest_candidates_are_kept_and_are_no_event(store: LoadStore) -> None:
    assert store.candidates() == Candidates()

    store.suggest(Candidates((((0, 3),), ())))
    store.suggest(Candidates((((0, 3), (1, 2)), ((0, 0),))))

    assert store.candidates() == Candidates((((0, 3), (1, 2)), ((0, 0),)))
    assert store.events() == []


# -- after a death


def make_words(rank: int, **changes: Any) -> SurvivorReport:
    fields: dict[str, Any] = {
        "run": "run-1",
        "membership": 0,
        "generation": 4,
        "weights_version": 2,
        "plan_id": 7,
        "plan_hash": 2**61,
        "swapped": 1,
        "prepared": 2,
        "closed_plan_id": 6,
        "closed_applied": 3,
        "dead": (1, 5),
        "time": 9.5,
    }
    return SurvivorReport(rank=rank, **(fields | changes))


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


def test_survivor_reports_are_read_by_run_and_membership(store: LoadStore) -> None:
    for words in (make_words(2), make_words(0), make_words(2, swapped=2)):
        store.add_survivor_report(words)
    store.add_survivor_report(make_words(1, membership=3))
    store.add_survivor_report(make_words(1, run="run-2"))

    assert store.survivor_reports("run-1", 0) == [make_words(0), make_words(2, swapped=2)]
    assert store.survivor_reports("run-1", 3) == [make_words(1, membership=3)]
    assert store.survivor_reports("run-3", 0) == []


def test_first_recovery_record_of_a_death_wins(store: LoadStore) -> None:
    assert store.recovery() is None
    first, second = make_record(1), make_record(1, survivors=(0,), applied=0)

    assert store.recover(first, expected_membership=0) == first
    assert store.recover(second, expected_membership=0) == first

    assert store.recovery() == first
    assert kinds(store) == ["recovery"]
    assert store.events()[0].detail == vars(first) | {"survivors": [0, 2]}


def test_one_of_concurrent_recovery_records_wins(store: LoadStore) -> None:
    records = [make_record(1, applied=number) for number in range(8)]

    with ThreadPoolExecutor(8) as pool:
        stand = list(pool.map(lambda one: store.recover(one, expected_membership=0), records))

    assert len(set(stand)) == 1
    assert store.recovery() == stand[0]
    assert kinds(store) == ["recovery"]


def test_later_group_has_its_own_recovery_record(store: LoadStore) -> None:
    store.recover(make_record(1), expected_membership=0)
    later = make_record(3, run="run-2")

    assert store.recover(later, expected_membership=2) == later
    assert store.recovery() == later
    with pytest.raises(StaleGeneration, match=r"follows membership 0, found membership 3 of run"):
        store.recover(make_record(1), expected_membership=0)
    with pytest.raises(StaleGeneration, match=r"of run 'run-1'.*found membership 3 of run 'run-2'"):
        store.recover(make_record(3), expected_membership=2)


def test_record_that_does_not_follow_its_group_is_refused(store: LoadStore) -> None:
    with pytest.raises(StoreError, match="membership 2 cannot follow membership 2"):
        store.recover(make_record(2), expected_membership=2)

    assert store.recovery() is None


# -- waiting


CHANGES: list[Callable[[LoadStore], object]] = [
    lambda store: store.begin_run(make_run("run-1")),
    lambda store: store.commit(make_placement(1), expected=None, reason="first"),
    lambda store: store.add_event("note", {}),
    lambda store: store.submit("rebalance", {}),
    lambda store: store.set_control(Control(), reason="test"),
    lambda store: store.suggest(Candidates((((0, 3),),))),
    lambda store: store.add_survivor_report(make_words(0)),
    lambda store: store.recover(make_record(1), expected_membership=0),
]


@pytest.mark.parametrize("change", CHANGES)
def test_change_wakes_a_waiting_thread(
    store: LoadStore, change: Callable[[LoadStore], object]
) -> None:
    before = store.version()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.wait, before, TIMEOUT_S)
        change(store)

        assert waiting.result(TIMEOUT_S) > before


def test_samples_and_rank_states_end_no_wait(store: LoadStore) -> None:
    before = store.version()

    store.append([make_sample(0, 0)])
    store.report(RankState("run-1", 0, 0.0, 1, 1, "idle", 0, 0, 1, 0))

    assert store.version() == before
    assert store.wait(before, timeout_s=0.05) == before


def test_close_ends_a_wait_and_later_calls_are_errors(store: LoadStore) -> None:
    failed = threading.Event()

    def wait() -> None:
        with pytest.raises(StoreError, match="closed"):
            store.wait(store.version(), TIMEOUT_S)
        failed.set()

    thread = threading.Thread(target=wait)
    thread.start()
    store.close()
    store.close()

    assert failed.wait(TIMEOUT_S)
    thread.join(TIMEOUT_S)
    with pytest.raises(StoreError, match="closed"):
        store.add_event("note", {})


# -- versions


def test_start_of_ranks_announces_the_version_of_the_program(store: LoadStore) -> None:
    store.begin_run(make_run("a"))
    store.begin_run(make_run("b"))

    found = [(one.component, one.name, one.protocol) for one in store.announced()]
    assert sorted(found) == [("ranks", "a", PROTOCOL), ("ranks", "b", PROTOCOL)]


def test_announcement_of_the_same_process_replaces_the_earlier_one(store: LoadStore) -> None:
    for protocol in (4, 5):
        store.announce(Announcement(CONTROLLER, "c", "0.5.0", protocol, 4))

    (found,) = store.announced()
    assert (found.name, found.protocol, found.oldest) == ("c", 5, 4)


def test_oldest_announcement_of_a_component_makes_room(
    store: LoadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deciding_store, "KEPT_ANNOUNCEMENTS", 2)
    store.begin_run(make_run("a"))
    for name in "cde":
        store.announce(Announcement(CONTROLLER, name))

    found = {(one.component, one.name) for one in store.announced()}
    assert found == {("ranks", "a"), ("controller", "d"), ("controller", "e")}
