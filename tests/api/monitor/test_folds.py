"""Each fold of the monitor alone: what it is told, and the part of the state that it makes."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import pytest

from api.monitor.counts import rank_tally
from api.monitor.document import ORDER, StateDocument, document_of, state_in
from api.monitor.history import History
from api.monitor.journal import EventFeed
from api.monitor.load import LoadFold
from api.monitor.place import StoreFold
from api.monitor.plans import PlanFold
from api.monitor.processes import ProcessFold
from api.monitor.ranks import RankFold
from api.processes.supervision import ProcessState, SupervisionView
from eplb.errors import HistoryError
from eplb.versions import HOST_CACHE, Announcement
from telemetry.state.events import COMPILE, FAILED, Compiling, Failure
from telemetry.state.live import LiveState
from telemetry.state.runs import EXPERT_TIMES, LEAST_SILENCE_S
from telemetry.state.store import StateStore
from tests.support.plan_events import plan_event
from tests.support.rank_reports import rank_report
from tests.support.readings import read
from tests.support.stores import MemoryStore
from tests.support.two_ranks import FIRST, MODEL, TOPOLOGY, begin_run, serve

NOW = 1000.0


def a_store() -> StateStore:
    return MemoryStore("d", clock=lambda: NOW)


def test_journal_gives_each_event_once_and_counts_one_without_its_fields() -> None:
    store = a_store()
    store.add_event(FAILED, Failure("here", "first"))
    journal = EventFeed(store)
    assert [one.kind for one in journal.news()] == [FAILED]

    store.add_event(FAILED, {"where": "here"})
    (damaged,) = journal.news()

    assert (damaged.fact, damaged.detail) == (None, {"where": "here"})
    assert list(journal.news()) == []
    assert len(journal.latest) == 2
    assert store.backend.unreadable.counts() == {("event", "damaged"): 1}


def test_ranks_whose_steps_are_seen_once_are_not_known_to_advance() -> None:
    store, fold = a_store(), RankFold()
    begin_run(store, at=NOW)
    store.report(rank_report("a", 0, time=NOW, step=7))
    fold.read(store)
    fold.read_reports(store, "a", NOW)
    first = fold.progress(NOW + 3, answered_s=60.0)
    store.report(rank_report("a", 0, time=NOW, step=8))
    fold.read_reports(store, "a", NOW + 4)

    group = fold.state(TOPOLOGY, None, LiveState(), None, NOW + 4, 60.0)

    assert (first.step_age_s, fold.progress(NOW + 6, answered_s=60.0).step_age_s) == (None, 2.0)
    assert (group.step, group.silent_ranks, len(group.members)) == (8, (1,), 2)


def test_store_that_was_full_counts_as_full_until_somebody_wrote_again(tmp_path: Path) -> None:
    fold = StoreFold(tmp_path)
    fold.look_for_room("no space", [rank_report("a", 0, time=NOW)], NOW)
    still = fold.state("d", NOW + 1)
    fold.look_for_room("", [rank_report("a", 0, time=NOW - 1)], NOW + 2)
    silent = fold.state("d", NOW + 2)
    fold.look_for_room("", [rank_report("a", 0, time=NOW + 3)], NOW + 3)

    assert (still.store_full, silent.store_full) == ("no space", "no space")
    assert (fold.state("d", NOW + 3).store_full, fold.answered_s(NOW + 3)) == ("", 3.0)
    assert fold.state("d", NOW + LEAST_SILENCE_S).free_bytes is not None


def test_commit_without_a_generation_is_passed_over_by_plans() -> None:
    store, fold = a_store(), PlanFold(None)
    store.add_event("commit", {"generation": None, "plan_id": 3, "reason": "damaged"})
    store.add_event("commit", {"generation": 4, "plan_id": 4, "reason": "whole"})

    for event in EventFeed(store).news():
        fold.note(event)

    assert [mark.generation for mark in fold.marks({})] == [4]


def test_times_of_experts_that_cannot_be_read_hide_nothing_else_of_plans() -> None:
    damaged = rank_report("a", 0, time=NOW, **{EXPERT_TIMES: 3})

    state = PlanFold(None).state([damaged], LiveState(), None)

    assert (state.phase, state.generation) == ("idle", None)
    assert state.expert_curve == PlanFold(None).state([], LiveState(), None).expert_curve


def test_look_at_earlier_runs_that_fails_and_is_made_again_counts_them_once() -> None:
    store = a_store()
    begin_run(store, at=NOW)
    store.report(rank_report("a", 0, time=NOW, experts_moved=5))
    fold = LoadFold(store, History(), None)
    first = store.current_run()
    assert first is not None
    fold.follow(first, 1.0, store.backend.now)
    store.begin_run(replace(first, run="b", topology={}))
    latest = store.current_run()
    assert latest is not None

    for _ in range(3):
        with pytest.raises(HistoryError):
            fold.follow(latest, 1.0, store.backend.now)

    assert fold.earlier["experts_moved",] == 5
    assert fold.earlier == rank_tally(store.rank_states("a")) + Counter({("samples_stored",): 0})


def test_plans_name_the_compiling_leader_and_no_other_holder() -> None:
    store, fold = a_store(), PlanFold(None)
    store.commit(FIRST, expected=None, reason="start")
    store.add_event("plan", plan_event("MOVE", "worth it"))
    store.add_event(COMPILE, Compiling("one", "begun"))
    for event in store.events():
        fold.note(event)
    fold.read(store)

    found = fold.state([], LiveState(), MODEL)

    assert (found.generation, found.phase, found.migration) == (1, "idle", None)
    assert [one.decision for one in found.decisions] == ["MOVE"]
    assert fold.compiling("'one'", NOW + 4).startswith("the controller has been compiling kernels")
    assert fold.compiling("'another'", NOW + 4) == ""


def test_process_is_down_by_heartbeats_missed_while_the_store_answered() -> None:
    store, fold = a_store(), ProcessFold()
    store.announce(Announcement(HOST_CACHE, "0", every_s=2.0))
    fold.read(store, NOW)

    def state_at(now: float, answered_s: float) -> ProcessState:
        found = fold.state(SupervisionView(), TOPOLOGY, "", now, answered_s)
        (view,) = found.supervision.processes
        return view.state

    assert state_at(NOW + 1, 600.0) is ProcessState.RUNNING
    assert state_at(NOW + 600, 1.0) is ProcessState.RUNNING  # nobody could report before
    assert state_at(NOW + 600, 600.0) is ProcessState.DOWN


def test_load_of_a_run_is_scored_and_its_newest_token_known() -> None:
    store, fold = a_store(), LoadFold(a_store(), None, None)
    begin_run(store, at=NOW - 10)
    store.commit(FIRST, expected=None, reason="start")
    for window in range(3):
        serve(store, window, at=NOW - 9 + window)
    fold = LoadFold(store, None, None)
    assert (fold.start().run, fold.windows(4), fold.received()) == (None, [], None)
    info = store.current_run()
    assert info is not None
    fold.follow(info, 0.0, lambda: NOW)
    fold.read(0.0)

    found = fold.state(fold.series, rank_tally([])[("samples_lost",)], 0.5, NOW)

    assert (fold.start().run, fold.start().num_slots) == ("a", 4)
    assert found.last_score is not None
    assert (found.last_score.measured, found.token_age_s, found.samples_stored) == (1.6, 7.0, 6)


def test_document_of_a_state_has_each_field_once_in_the_recorded_order() -> None:
    store = a_store()
    begin_run(store, at=NOW)
    state = read(store, NOW).state

    document = document_of(state)

    assert tuple(field.name for field in fields(StateDocument)) == ORDER
    assert (ORDER[:2], ORDER[-2:]) == (("verdict", "reason"), ("free_bytes", "audit_waiting"))
    parts = [getattr(state, field.name) for field in fields(state)][3:]
    assert sorted(name for part in parts for name in vars(part)) == sorted(ORDER[3:])
    assert state_in(document) == state
