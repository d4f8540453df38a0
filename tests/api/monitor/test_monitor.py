"""The one reader behind every view: scores, marks, progress and words, by hand-sized numbers."""

import io
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from api.metrics.definitions import metrics_of
from api.monitor.monitor import KEPT_COMMITS, Monitor
from api.monitor.scores import heat_of
from api.monitor.state import Grade, Reading, Symptom
from api.monitor.verdict import unready
from api.terminal.live import LiveView, PlainLines, look_at
from api.terminal.picture import Look, in_time, in_units, render
from eplb import LoadSample, ModelShape, Pace, Placement, Topology, build_migration
from eplb.decision.pace import PaceChange, StepTimes
from eplb.errors import StoreError
from eplb.versions import CONTROLLER, HOST_CACHE, LAUNCHER, SERVICE, Announcement
from telemetry.state.events import ENGINE_PLANS
from telemetry.state.joining import HEARTBEAT_S, MISSED_BEATS
from telemetry.state.live import Control
from telemetry.state.memory import MemoryBackend
from telemetry.state.runs import RankState, RunInfo
from telemetry.state.store import StateStore
from tests.support import two_ranks
from tests.support.limits import NEVER_S
from tests.support.plan_events import plan_event
from tests.support.rank_reports import rank_report
from tests.support.readings import read
from tests.support.stores import MemoryStore
from tests.support.two_ranks import FIRST, SECOND, TOPOLOGY, begin_run

NOW = 1000.0


def a_run(store: StateStore, name: str = "a") -> None:
    begin_run(store, name, NOW, window_steps=2)


def sample(rank: int, window: int, tokens: list[int], placement: Placement = FIRST) -> LoadSample:
    return two_ranks.sample(rank, window, tokens, placement, at=NOW, steps=2)


def state(rank: int, *, plan_id: int = 0, phase: str = "idle", **more: Any) -> RankState:
    at_work = {"time": NOW, "step": 4, "generation": 1, "phase": phase, "plan_id": plan_id}
    return rank_report("a", rank, **at_work | more)


@pytest.fixture
def store() -> Iterator[StateStore]:
    """A run of two ranks, two complete windows, and a rebalance between them."""
    opened = MemoryStore("d", clock=lambda: NOW)
    a_run(opened)
    opened.commit(FIRST, expected=None, reason="start")
    opened.append([sample(0, 0, [60, 20]), sample(1, 0, [20, 0])])
    plan = plan_event("MOVE", "worth it", imbalance_before=1.6, imbalance_after=1.0, moves=2)
    opened.add_event("plan", plan)
    migration = build_migration(FIRST, SECOND, TOPOLOGY, plan_id=opened.next_plan_id())
    opened.publish(migration)
    opened.commit(SECOND, expected=1, plan_id=migration.plan_id, reason="drift")
    opened.append([sample(0, 1, [30, 20], SECOND), sample(1, 1, [30, 20], SECOND)])
    yield opened
    opened.close()


def seen_by(store: StateStore, now: float = NOW) -> Reading:
    return read(store, now)


def looked_at(store: StateStore) -> Look:
    return look_at(Monitor(store, clock=lambda: NOW))


def test_windows_are_scored_as_measured_and_as_if_experts_lay_in_order(store: StateStore) -> None:
    seen = seen_by(store)

    first, second = seen.series
    assert (first.measured, first.contiguous) == (1.6, 1.6)  # 80 of 100 on one rank: 80 / 50
    assert (second.measured, second.contiguous) == (1.0, 1.6)
    assert [score.is_migrating for score in seen.series] == [False, False]
    heat = heat_of(seen)
    assert heat.ranks == ((1.0, 1.0),)  # load over mean, of the latest window
    assert heat.experts[0] == pytest.approx([1.8, 0.6, 0.6])  # 60 over 100 / 3


def test_commits_of_a_run_are_kept_up_to_a_number_the_latest(store: StateStore) -> None:
    for generation in range(3, KEPT_COMMITS + 8):
        placement = SECOND.with_generation(generation)
        store.commit(placement, expected=generation - 1, plan_id=generation, reason="drift")

    marks = seen_by(store).marks

    assert [mark.generation for mark in marks] == list(range(8, KEPT_COMMITS + 8))


def test_window_in_which_a_commit_falls_is_migrating(store: StateStore) -> None:
    third = SECOND.with_generation(3)
    before = [replace(sample(rank, 2, [30, 20], SECOND), last_step=4) for rank in (0, 1)]
    after = [replace(sample(rank, 2, [30, 20], third), first_step=5) for rank in (0, 1)]
    store.append([*before, *(replace(one, sequence=3) for one in after)])

    *_, last = seen_by(store).series

    assert (last.generation, last.is_complete, last.is_migrating) == (3, True, True)


def test_window_in_mid_migration_is_not_scored_as_its_base(
    store: StateStore,
) -> None:
    """Expert 2 comes to rank 0 by the first transaction; expert 1 to rank 1 by the last, at once
    with the commit.
    """
    half = Placement(np.array([[2, 1, 0, 2]]), num_experts=3, generation=2)
    last = Placement(np.array([[2, 1, 0, 1]]), num_experts=3, generation=3)
    for window, serving in enumerate((half, half, last), start=2):
        store.append([sample(0, window, [5, 20], serving), sample(1, window, [60, 15], serving)])

    scores = [(s.generation, s.is_migrating) for s in seen_by(store).series]

    assert scores == [(1, False), (2, False), (2, True), (2, True), (3, False)]


def test_window_is_scored_once_it_is_complete_or_stays_incomplete(store: StateStore) -> None:
    store.append([sample(0, 2, [1, 1], SECOND)])
    assert [score.index for score in seen_by(store).series] == [0, 1]

    store.append([sample(0, index, [1, 1], SECOND) for index in (3, 4)])
    seen = seen_by(store)
    assert [score.is_complete for score in seen.series] == [True, True, False]
    assert seen.state.last_score is not None
    assert seen.state.last_score.index == 1


def test_samples_that_do_not_fit_end_no_refresh(store: StateStore) -> None:
    good = sample(0, 2, [1, 1], SECOND)
    wrong = [replace(good, sequence=7, last_step=9), replace(good, sequence=8, time=NOW + 1e6)]
    store.append([*wrong, good, sample(1, 2, [1, 1], SECOND)])

    seen = seen_by(store)

    assert [score.index for score in seen.series] == [0, 1, 2]
    assert (seen.state.samples_stored, seen.state.sample_age_s) == (8, 0.0)


def test_windows_of_seconds_are_scored_like_those_of_steps() -> None:
    store = MemoryStore("d", clock=lambda: NOW)
    begin_run(store, "a", NOW, window_steps=2, window_seconds=10.0)
    for window in range(3):
        both = [sample(0, window, [60, 20]), sample(1, window, [20, 0])]
        store.append([replace(one, time=NOW - 25 + 10 * window) for one in both])

    first, second = seen_by(store).series

    assert (first.index, second.index) == (97, 98)  # seconds 970 to 990; the last may get more
    assert (first.measured, second.measured) == (1.6, 1.6)


def test_monitor_reads_each_sample_once(store: StateStore) -> None:
    monitor = Monitor(store, clock=lambda: NOW)
    monitor.refresh()
    store.append([sample(0, 2, [1, 1], SECOND), sample(1, 2, [1, 1], SECOND)])
    monitor.refresh()
    monitor.refresh()

    seen, state = monitor.reading(), monitor.reading().state
    assert [score.index for score in seen.series] == [0, 1, 2]
    assert (state.samples_stored, len(state.decisions), len(seen.marks)) == (6, 1, 1)


def test_another_run_has_its_own_windows_and_keeps_the_decisions(store: StateStore) -> None:
    monitor = Monitor(store, clock=lambda: NOW)
    monitor.refresh()
    a_run(store, "b")
    monitor.refresh()

    seen, state = monitor.reading(), monitor.reading().state
    assert (state.run, seen.series, seen.marks) == ("b", (), ())
    assert [one.decision for one in state.decisions] == ["MOVE"]
    assert (state.samples_stored, state.generation) == (0, 2)


def test_counters_are_summed_over_ranks_and_unknown_sources_are_shown(store: StateStore) -> None:
    store.report(state(0, bytes_by_source={"peer": 3, "rejected": 1}, experts_moved=2))
    store.report(state(1, bytes_by_source={"peer": 4, "host": 5}, samples_lost=1))

    seen = seen_by(store).state

    unused = dict.fromkeys(("same_rank", "disk"), 0)
    expected = unused | {"peer": 7, "host": 5, "rejected": 1}
    assert seen.bytes_by_source == expected
    assert (seen.experts_moved, seen.samples_lost) == (2, 1)


def open_migration(store: StateStore) -> int:
    third = Placement(np.array([[1, 0, 2, 1]]), num_experts=3, generation=3)
    plan_id = store.next_plan_id()
    store.publish(build_migration(SECOND, third, TOPOLOGY, plan_id=plan_id, pace=Pace()))
    return plan_id


def test_progress_is_that_of_the_rank_furthest_behind_or_of_experts_where_they_are_counted(
    store: StateStore,
) -> None:
    plan_id = open_migration(store)
    store.report(state(0, plan_id=plan_id, phase="swap", prepared=1))
    store.report(state(1, plan_id=plan_id, phase="stage", prepared=0))
    seen = seen_by(store).state
    assert seen.phase == "stage"
    assert seen.migration is not None
    assert (seen.migration.num_transactions, seen.migration.num_moves) == (1, 4)
    assert (seen.migration.staged_part, seen.migration.fraction) == (0.0, 0.0)

    for rank, staged in ((0, 2), (1, 1)):
        store.report(state(rank, plan_id=plan_id, phase="stage", staged=staged, to_stage=2))
    progress = seen_by(store).state.migration
    assert progress is not None
    assert (progress.staged_part, progress.fraction) == (0.75, 0.375)


def test_monitor_of_the_latest_samples_judges_as_one_of_all(store: StateStore) -> None:
    store.append([sample(0, 2, [0, 0], SECOND), sample(1, 2, [0, 0], SECOND)])  # no requests
    for rank in (0, 1):
        store.report(state(rank))

    every, latest = (Monitor(store, clock=lambda: NOW, latest=n).reading() for n in (None, 1))

    assert (len(every.series), len(latest.series)) == (3, 1)
    assert every.state.token_time is not None
    assert latest.state.token_time == every.state.token_time
    assert latest.state.samples_stored == every.state.samples_stored == 6
    assert (latest.state.verdict, latest.state.reason) == (every.state.verdict, every.state.reason)


JUDGED = PaceChange(1, 0.2, 0.05, 1.0, 0.5, "plan 1 made the p95 of step time +20.0%")


def test_pace_follows_the_latest_judgement_while_there_is_a_budget(store: StateStore) -> None:
    store.report(state(0, step_times=vars(StepTimes())))
    store.change_live({"step_time_budget": 0.05}, reason="a test")
    first = seen_by(store).state.pace
    store.add_event("pace", vars(JUDGED))
    store.add_event("pace", vars(replace(JUDGED, plan_id=2, part_before=0.5, part=0.625)))

    pace = seen_by(store).state.pace

    assert f"pace  0.625 of the deployment's own; {JUDGED.reason}" in printed(
        looked_at(store), 100, 30
    )
    assert (first.part, first.reason, first.latest) == (1.0, "no migration was judged yet", None)
    assert (pace.part, pace.reason, pace.changed) == (0.625, JUDGED.reason, NOW)
    assert pace.latest is not None
    assert (pace.latest.plan_id, pace.latest.part_before) == (2, 0.5)
    judged = seen_by(store).counts.by_label("pace_judgements")
    assert judged == {("raised",): 1, ("kept",): 0, ("halved",): 1}
    store.change_live({"step_time_budget": 0.0}, reason="a test")
    fixed = seen_by(store).state.pace
    assert (fixed.part, fixed.reason) == (1.0, "fixed: step_time_budget is 0")


def test_pace_of_ranks_that_report_no_times_is_fixed(store: StateStore) -> None:
    store.report(state(0))
    store.change_live({"step_time_budget": 0.05}, reason="a test")
    store.add_event("pace", vars(JUDGED))

    pace = seen_by(store).state.pace

    assert (pace.part, pace.reason) == (1.0, "fixed: no rank reports times of its steps")


@pytest.mark.parametrize(
    ("now", "details", "why"),
    [
        (NOW + 1, [{}, {"progress_age_s": 1.0}], "None"),
        (NOW, [{}], "silent ranks: 1, .* 2 within 10 s"),
        (NOW + 5, [{}, {"progress_age_s": 27.5}], "32.5 s, .* 30 s: rank 1, the step"),
        (NOW, [{}, {"progress_age_s": 31, "progress_of": "mover: pulling"}], "rank 1, mover: pull"),
        (NOW, [{}, {"frozen": "torn copy"}], "rank 1 .*torn"),
    ],
)
def test_readiness_is_judged_by_what_ranks_report(
    store: StateStore, now: float, details: list[dict[str, Any]], why: str
) -> None:
    for rank, detail in enumerate(details):
        store.report(state(rank, **detail))

    assert re.search(why, str(unready(seen_by(store, now))))


def test_thread_with_the_least_progress_is_that_of_its_rank(store: StateStore) -> None:
    store.report(
        state(0, progress_age_s=31.0, progress_of="mover: pulling", progress_thread="mover")
    )
    store.report(
        state(1, progress_age_s=40.0, progress_of="step: dispatch", progress_thread="step")
    )

    found = seen_by(store).state

    assert (found.progress_of, found.progress_thread) == ("rank 1, step: dispatch", "step")


HERE = "gpu7:4242:9f31c2aa-8812345-5be012"


@pytest.mark.parametrize(
    ("component", "name", "shown"),
    [
        (HOST_CACHE, "0", "the host cache of host 0"),
        (LAUNCHER, "0", "the launcher of host 0"),
        (CONTROLLER, HERE, "the controller, process 4242 on host gpu7"),
        (SERVICE, HERE, "the service, process 4242 on host gpu7"),
    ],
)
def test_process_without_a_heartbeat_degrades_the_deployment_that_serves_on(
    store: StateStore, component: str, name: str, shown: str
) -> None:
    silent_after_s = MISSED_BEATS * HEARTBEAT_S
    late = NOW + silent_after_s + 1
    for rank in (0, 1):
        store.report(state(rank, time=NOW + silent_after_s))
    mine = Announcement(component, name, every_s=HEARTBEAT_S)
    for one in (mine, Announcement(HOST_CACHE, "7", every_s=HEARTBEAT_S)):
        store.announce(one)  # the topology of the run has one host

    def down(now: float) -> list[Symptom]:
        return [one for one in seen_by(store, now).findings if one.kind == "process-down"]

    assert down(NOW + silent_after_s) == []
    (found,) = down(late)
    assert (found.subject, found.grade, found.is_ready) == (shown, Grade.DEGRADED, True)
    assert found.text.startswith(f"no report from {shown} for 16.0 s: ")
    assert found.since == NOW
    up = {one.name: one.figures for one in metrics_of(seen_by(store, late), drift=None, backend="")}
    assert up["eplb_process_up"] == {(component.replace(" ", "_"),): 0.0}
    store.retire(mine)
    assert down(late) == []


def test_heartbeat_of_a_process_that_is_back_counts_with_the_next_reading() -> None:
    at = NOW
    backend = MemoryBackend("d", clock=lambda: at)
    monitor = Monitor(StateStore(backend), clock=lambda: at)
    begin_run(monitor.store, "a", NOW, window_steps=2)
    mine = Announcement(HOST_CACHE, "0", every_s=HEARTBEAT_S)
    monitor.store.announce(mine)

    def is_down(now: float) -> bool:
        nonlocal at
        at = now
        monitor.refresh()
        return any(one.kind == "process-down" for one in monitor.reading().findings)

    assert not is_down(NOW + MISSED_BEATS * HEARTBEAT_S)
    assert is_down(at + 0.1)
    monitor.store.announce(mine)
    assert not is_down(at + 0.1)


class Failing(StateStore):
    """A store that can be told to answer nothing."""

    fails = False

    def current_run(self) -> RunInfo | None:
        if self.fails:
            raise StoreError("told to fail")
        return super().current_run()


def test_ranks_not_heard_since_an_outage_are_neither_silent_nor_serving(
    store: StateStore,
) -> None:
    failing, now = Failing(store.backend), NOW
    for rank in (0, 1):
        store.report(state(rank))
    store.announce(Announcement(HOST_CACHE, "0", every_s=HEARTBEAT_S))
    monitor = Monitor(failing, clock=lambda: now)

    def kinds(at: float) -> set[str]:
        nonlocal now
        now = at
        monitor.refresh()
        return {one.kind for one in monitor.reading().findings} - {"no-leader"}

    assert kinds(NOW + 1) == set()
    failing.fails, now = True, NOW + 30
    with pytest.raises(StoreError):
        monitor.refresh()
    failing.fails = False
    assert kinds(NOW + 60) == {"store-unread"}
    assert monitor.reading().state.verdict is Grade.BLIND
    store.report(state(1, time=NOW + 65))
    assert kinds(NOW + 70) == {"store-unread"}
    assert monitor.reading().state.verdict is Grade.DEGRADED
    assert kinds(NOW + 71) == {"rank-silent"}
    assert kinds(NOW + 76) == {"rank-silent", "process-down"}


def test_rank_that_the_others_serve_on_without_is_gone_and_not_silent() -> None:
    store = MemoryStore("d", clock=lambda: NOW)
    survivors = replace(TOPOLOGY, alive=np.array([True, False]))
    begin_run(store, "a", NOW, topology=survivors, window_steps=2)
    store.report(state(0))

    seen = seen_by(store)

    (gone,) = [one for one in seen.findings if "rank" in one.kind]
    assert (gone.kind, gone.ranks, gone.is_ready) == ("rank-gone", (1,), True)
    assert gone.text.startswith("1 of 2 ranks serve on, without rank 1")
    assert (seen.state.silent_ranks, seen.state.ranks[1].phase) == ((), "gone")


def test_picture_shows_open_operation_and_no_load_of_a_rank_that_is_gone() -> None:
    store = MemoryStore("d", clock=lambda: NOW)
    survivors = replace(TOPOLOGY, alive=np.array([True, False]))
    begin_run(store, "a", NOW, topology=survivors, window_steps=2)
    store.report(state(0))
    store.append([sample(0, 0, [60, 20])])
    change: dict[str, Any] = {"asked": {}, "alive": (True, False), "reason": "r", "by": "b"}
    store.change_membership("shrink", (0,), **change)
    store.change_membership("grow", (0, 1), within_s=120, **change)

    shown = printed(looked_at(store), 80, 24)

    assert "ranks 1 of 1" in shown, "a rank that has not joined is not expected to report"
    assert re.search(r"^ operation grow  waiting  fails in 2 min ", shown, re.MULTILINE)
    assert re.search(r"^ +\d+ +1\.00 +- *$", shown, re.MULTILINE)


@pytest.mark.parametrize(
    ("wanted", "members", "phase"),
    [((0,), (0,), "retired"), ((0, 1), (0,), "joining"), ((0,), (0, 1), "silent")],
)
def test_rank_that_does_not_serve_by_order_is_not_called_silent_or_gone(
    wanted: tuple[int, ...], members: tuple[int, ...], phase: str
) -> None:
    store = MemoryStore("d", clock=lambda: NOW)
    alive = replace(TOPOLOGY, alive=np.isin([0, 1], members))
    begin_run(store, "a", NOW, topology=alive, window_steps=2)
    store.report(state(0))
    asked: dict[str, Any] = {"asked": {}, "reason": "night", "by": "alice"}
    if phase == "joining":
        store.change_membership("op-0", [0], alive=[True, False], **asked)
    store.change_membership("op-1", wanted, alive=alive.alive.tolist(), **asked)

    seen = seen_by(store)

    found = [one.kind for one in seen.findings if "rank" in one.kind]
    assert found == (["rank-silent"] if phase == "silent" else [])  # it has not left yet
    assert seen.state.ranks[1].phase == phase
    assert seen.state.membership is not None
    assert (seen.state.membership.members, seen.state.membership.wanted) == (members, wanted)
    is_open = "operation op-1 on the ranks" in seen.state.reason
    assert is_open == (wanted != members)


def test_before_the_first_run_every_view_reports_that_there_is_none() -> None:
    seen = seen_by(MemoryStore("d"))

    assert (seen.state.run, seen.state.generation, seen.state.ranks) == (None, None, ())
    assert unready(seen) is not None
    assert "No run has begun" in printed(looked_at(MemoryStore("d")), 80, 24)


def printed(seen: Look, width: int, height: int) -> str:
    console = Console(file=io.StringIO(), width=width, height=height, record=True)
    console.print(render(seen, width, height))
    return console.export_text()


@pytest.mark.parametrize(("width", "height"), [(100, 30), (80, 24)])
def test_picture_fits_and_shows_load_marks_and_reasons(
    store: StateStore, width: int, height: int
) -> None:
    store.set_control(Control(movement=False), reason="test")
    text = printed(looked_at(store), width, height)

    lines = text.splitlines()
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    for shown in ("generation 2", "movement OFF", "1.00   1.00", "▲2", "worth it", "silent: 0, 1"):
        assert shown in text


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (80, [["step", "ms", "12.3", "104"], ["wait", "ms", "7.0", "-"]]),
        (16, [["step", "58.1", "ms;", "…"]]),
    ],
)
def test_picture_shows_time_of_steps_and_wait_of_each_rank(
    store: StateStore, width: int, shown: list[list[str]]
) -> None:
    store.report(state(0, step_ms=12.3, wait_ms=7.0))
    store.report(state(1, step_ms=103.9))

    lines = printed(looked_at(store), width, 30).splitlines()

    assert [line.split() for line in lines if line.strip().startswith(("step ", "wait "))] == shown


@pytest.mark.parametrize(("width", "height"), [(100, 30), (80, 24)])
def test_picture_shows_the_latest_anomalies_that_are_not_in_its_first_line(
    store: StateStore, width: int, height: int
) -> None:
    for number in range(4):
        store.add_event("error", {"where": "ranks", "message": f"rank {number} was killed"})
    store.report(state(0, frozen="a torn copy"))
    store.acquire_lease("one", 60.0)
    lines = printed(looked_at(store), width, height).splitlines()

    assert len(lines) <= height
    assert "silent ranks: 1" in lines[0]
    found = [line.split(maxsplit=2) for line in lines if " now " in line or " ago " in line]
    assert found[0][:2] == ["now", "warning"]
    assert "a torn copy" in found[0][2]
    assert found[1][2].endswith("rank 3 was killed")
    assert len(found) == 2


def test_times_and_bytes_are_written_with_the_largest_unit_that_fits() -> None:
    found = [in_time(s) for s in (-1, 0, 59, 60, 3599, 7200, 3 * 86_400)]
    assert found == ["0 s", "0 s", "59 s", "1 min", "60 min", "2 h", "3 d"]
    assert [in_units(n) for n in (0, 999, 1000, 2_500_000)] == ["0 B", "999 B", "1.0 kB", "2.5 MB"]


def test_many_layers_and_ranks_are_cut_to_the_height() -> None:
    model = ModelShape(tuple(range(58)), num_experts=64, top_k=1, hidden=2, intermediate=2)
    topology = Topology.uniform(num_nodes=4, ranks_per_node=8, slots_per_rank=2)
    store = MemoryStore("d", clock=lambda: NOW)
    begin_run(store, "a", NOW, model=model, topology=topology)
    held = Placement(np.tile(np.arange(64), (58, 1)), num_experts=64, generation=1)
    ones = [np.ones((58, 2), dtype=np.int64)] * 32
    two_ranks.serve(store, 0, ones, placement=held, topology=topology, at=NOW)

    lines = printed(looked_at(store), 80, 24).splitlines()

    assert len(lines) <= 24
    assert any("more layers" in line for line in lines)


def test_plain_lines_print_each_event_once(store: StateStore) -> None:
    lines, seen = PlainLines(), looked_at(store)

    assert list(lines.new(seen)) == [
        "run a: 2 ranks, 1 layer x 3 experts in 4 slots",
        "generation=1 window=0 steps=0..1 imbalance=1.600 unbalanced=1.600",
        "generation=2 window=1 steps=2..3 imbalance=1.000 unbalanced=1.600",
        'generation=1 commit plan=0 reason="start"',
        'generation=1 decision=MOVE reason="worth it"',
        'generation=2 commit plan=1 reason="drift"',
    ]
    assert list(lines.new(seen)) == []


@pytest.mark.parametrize(
    ("terminal", "shown"),
    [
        ({}, ["window=1 steps=2..3 imbalance=1.000"]),  # plain lines where there is no terminal
        ({"force_terminal": True}, ["worth it", "\x1b[?1049l"]),  # leaves the alternate screen
    ],
)
def test_view_is_drawn_on_a_terminal_alone_and_gives_it_back(
    store: StateStore, terminal: dict[str, bool], shown: list[str]
) -> None:
    out = io.StringIO()
    console = Console(file=out, width=100, height=30, **terminal)
    with LiveView(partial(look_at, Monitor(store)), console=console):
        pass

    assert [text for text in shown if text not in out.getvalue()] == []


def test_view_whose_next_look_fails_shows_why_and_looks_again(store: StateStore) -> None:
    out, looks = io.StringIO(), iter([looked_at(store), StoreError("disk I/O error")])
    failed = threading.Event()

    def look() -> Look:
        found = next(looks, None)
        if isinstance(found, Look):
            return found
        failed.set()
        raise found or StoreError("still")

    with LiveView(look, console=Console(file=out, width=100, height=30, force_terminal=True)):
        assert failed.wait(NEVER_S)

    assert "blind" in out.getvalue()
    assert "disk I/O error" in out.getvalue()


def test_engine_that_plans_itself_is_shown_until_its_plugin_does_or_a_new_run(
    store: StateStore,
) -> None:
    def reasons(reason: str | None) -> str:
        if reason is None:
            a_run(store, "b")
        else:
            store.add_event(ENGINE_PLANS, {"run": "a", "rank": 0, "reason": reason})
        return read(store, now=NOW).state.engine_plans

    told = [reasons(reason) for reason in ("3 plans failed", "", "no store", None)]

    assert told == ["3 plans failed", "", "no store", ""]
