"""History by wall-clock time: over runs, restarts of the reader, gaps, and pruned samples."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from api.monitor import KEPT_WINDOWS
from api.monitor import reader as readers
from api.monitor.history import KEPT_RECENT, MINUTE_S, RECENT_S, History
from api.monitor.monitor import Monitor
from api.monitor.reader import BackgroundReader
from api.monitor.state import Grade, WindowScore
from eplb import build_migration
from eplb.errors import StoreError
from telemetry import open_store
from telemetry.load.pruning import Keeper, Retention
from telemetry.state.runs import RunInfo
from telemetry.state.store import StateStore
from tests.support.plan_events import plan_event
from tests.support.stores import MemoryStore
from tests.support.two_ranks import FIRST, SECOND, TOPOLOGY, begin_run, sample

START = 120_000.0  # a whole minute


def serve(store: StateStore, run: str, windows: range, at: float, tokens: int = 60) -> None:
    """One window a second, of imbalance 1.6 with 60 tokens, of none with none."""
    received = [tokens, tokens // 3], [tokens // 3, 0]
    store.append(
        [
            sample(rank, window, load, run=run, at=at + window)
            for window in windows
            for rank, load in enumerate(received)
        ]
    )


def watched(store: StateStore, now: float) -> Monitor:
    monitor = Monitor(store, history=History(), clock=lambda: now)
    monitor.refresh()
    return monitor


def score(index: int, at: float, measured: float | None = 1.5) -> WindowScore:
    return WindowScore(index, index, index, measured, measured, 1, True, False, at)


def test_reader_that_starts_late_has_all_windows_of_all_runs_that_the_store_has() -> None:
    store = MemoryStore("d", clock=lambda: START)
    begin_run(store, "a", START)
    serve(store, "a", range(4 * KEPT_WINDOWS), START)
    begin_run(store, "b", START + 300)
    serve(store, "b", range(20), START + 300)

    points = watched(store, START + 330).points(START, START + 330, 2000)

    assert sum(point.windows for point in points) == 4 * KEPT_WINDOWS + 20
    assert {point.measured for point in points} == {1.6}
    assert [point.run for point in points] == ["a"] * 4 * KEPT_WINDOWS + ["b"] * 20


def test_gap_is_a_gap_and_a_restart_within_the_usual_time_is_none() -> None:
    store = MemoryStore("d", clock=lambda: START)
    begin_run(store, "a", START)
    serve(store, "a", range(10), START)  # until +9
    begin_run(store, "b", START + 10)
    serve(store, "b", range(10), START + 11)  # from +11: joined
    serve(store, "b", range(40, 50), START + 11)  # from +51: not

    points = watched(store, START + 61).points(START, START + 61, 200)

    assert [round(point.time - START) for point in points if not point.is_joined] == [0, 51]


def test_a_window_without_tokens_has_no_imbalance_and_leaves_others_theirs() -> None:
    store = MemoryStore("d", clock=lambda: START)
    begin_run(store, "a", START)
    serve(store, "a", range(10), START)
    serve(store, "a", range(10, 20), START, tokens=0)
    monitor = watched(store, START + 20)

    assert {point.measured for point in monitor.points(START, START + 9.5, 10)} == {1.6}
    assert {point.measured for point in monitor.points(START + 10, START + 20, 10)} == {None}


def test_minutes_whose_samples_were_pruned_come_from_roll_ups() -> None:
    store = MemoryStore("d", clock=lambda: START)
    begin_run(store, "a", START)
    serve(store, "a", range(300), START)
    Keeper(store, Retention(keep_samples_s=120.0)).turn(START + 300)

    points = watched(store, START + 300).points(START, START + 300, 2000)

    assert [round(point.time - START) for point in points][:4] == [60, 120, 180, 181]
    assert {point.measured for point in points} == {1.6}


def test_windows_of_more_than_an_hour_ago_are_means_of_a_minute_for_a_day() -> None:
    history = History()
    for index in range(60 * 30):
        history.note("a", score(index, START + 2 * index, 1.0 + index % 2))
    history.age(START + 7200)
    points = history.points(START, START + 7200, 2000)

    assert len(points) == 60
    assert sum(point.windows for point in points) == 60 * 30
    assert {point.measured for point in points} == {1.5}
    history.age(START + 24 * 3600 + 3600 + 10 * MINUTE_S)
    assert history.points(0.0, START + 7200, 2000) == []


def test_windows_beyond_the_bound_are_folded_beside_those_of_over_an_hour_ago() -> None:
    history = History()
    for index in range(KEPT_RECENT + 1000):  # 0.25 s each: 1,000 of them are over an hour old
        history.note("a", score(index, START + index * RECENT_S / KEPT_RECENT))
    for index in range(500):
        history.note("b", score(index, START + RECENT_S + (index + 0.5) * RECENT_S / KEPT_RECENT))
    history.age(START + RECENT_S + 1000 * RECENT_S / KEPT_RECENT)

    kept = history.points(START, START + 2 * RECENT_S, 10**7)
    assert sum(point.windows == 1 for point in kept) == KEPT_RECENT
    assert sum(point.windows for point in kept) == KEPT_RECENT + 1500


def test_roll_up_of_a_minute_of_which_windows_are_known_counts_once() -> None:
    history = History()
    history.note("a", score(0, START + 30))
    ends = START + MINUTE_S, START + 2 * MINUTE_S  # of a known minute, and of a new one
    history.note_minutes(("a", score(0, end, 1.2)) for end in ends)

    assert [point.measured for point in history.points(START, START + 300, 10)] == [1.5, 1.2]


def test_rebalance_has_its_cost_what_it_promised_and_what_it_gave() -> None:
    store = MemoryStore("d", clock=lambda: START)
    begin_run(store, "a", START)
    store.commit(FIRST, expected=None, reason="start")
    store.add_event("plan", plan_event("MOVE", "worth it (not moved: observe is on)"))
    figures = {"bytes": 7000, "imbalance_before": 1.6, "imbalance_after": 1.1}
    store.add_event("plan", plan_event("MOVE", "worth it", trigger="load", **figures))
    migration = build_migration(FIRST, SECOND, TOPOLOGY, plan_id=store.next_plan_id())
    store.publish(migration)
    monitor = watched(store, START)
    (is_open,) = monitor.reading().rebalances
    store.commit(SECOND, expected=1, plan_id=migration.plan_id, reason="served")
    store.add_event(
        "promise", {"generation": 2, "promised": 0.5, "given": 0.4, "record": [0.5, 0.4]}
    )
    store.change_live({"movement": False}, reason="maintenance")
    monitor.refresh()
    (ended,) = monitor.reading().rebalances

    assert (is_open.outcome, is_open.ended) == (None, None)
    assert (ended.outcome, ended.decision, ended.moves, ended.bytes) == (
        "committed",
        "MOVE",
        len(migration.moves),
        7000,
    )
    assert (ended.imbalance_before, ended.imbalance_after) == (1.6, 1.1)
    assert (ended.gain_promised, ended.gain_realised) == (0.5, 0.4)
    marks = monitor.history_marks(START - 1, START + 1)
    assert [mark.kind for mark in marks] == ["restart", "MOVE", "pause"]
    assert marks[-1].text == "maintenance"


class Heard(Monitor):
    """Tells when it was refreshed."""

    refreshed = threading.Semaphore(0)

    def refresh(self) -> None:
        super().refresh()
        self.refreshed.release()


def test_reader_keeps_history_while_nobody_asks(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store.sqlite", "d")
    begin_run(store, "a", START)
    monitor = Heard(store, history=History(), clock=lambda: START + 30)
    reader = BackgroundReader(monitor)
    reader.start()
    serve(store, "a", range(20), START)
    while not monitor.points(START, START + 30, 100):
        monitor.refreshed.acquire()
    reader.stop()
    store.close()

    assert len(monitor.points(START, START + 30, 2000)) == 20


class Failing(MemoryStore):
    """A store that can fail, as a full disk makes it."""

    is_broken = False

    def current_run(self) -> RunInfo | None:
        if self.is_broken:
            raise StoreError("disk I/O error")
        return super().current_run()


def test_store_that_fails_makes_the_verdict_blind_and_ends_no_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(readers, "PERIOD_S", 0.01)
    store = Failing("d")
    begin_run(store, "a")
    reader = BackgroundReader(Monitor(store, history=History()), clock=lambda: START)
    reader.start()
    reader.reading()
    store.is_broken = True
    while not (failed := reader.reading().state).unread:
        pass
    assert failed.verdict is Grade.BLIND
    assert "disk I/O error" in failed.reason

    store.is_broken = False
    while reader.reading().state.unread:
        pass
    reader.stop()
