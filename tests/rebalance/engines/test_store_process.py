"""The process of a rank at the store, without an engine: real processes and an SQLite file."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from api.monitor.monitor import Monitor
from eplb import ModelShape, Placement, Topology
from eplb.errors import PlacementError, StoreError
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from rebalance.engines.common.fsck.report import BEGUN, FAULT, PARTS, ROUND, report_of
from rebalance.engines.common.messages import (
    UNREAD,
    MapChange,
    MoveOutcome,
    Noted,
    PassWindow,
    PlanQuestion,
    SampleOrigin,
)
from rebalance.engines.common.plugin_settings import EngineSettings
from rebalance.engines.common.start import set_part
from rebalance.engines.common.store_link import StoreLink
from rebalance.engines.common.store_process import (
    MOST_SENT,
    MOST_WAITING,
    StoreProcess,
    why_engine_plans,
)
from rebalance.engines.common.tap import Counted
from telemetry import open_store
from telemetry.state.codec import from_json, to_json
from telemetry.state.runs import RunInfo
from telemetry.state.store import StateStore
from tests.support.limits import NEVER_S
from tests.support.plan_events import plan_event
from tests.support.redis_servers import RedisProcess, free_port
from tests.support.repository import ROOT

DEPLOYMENT = "prod"
HELD = np.array([[0, 1, 2, 0], [2, 1, 0, 1]], dtype=np.int64)
INFO = RunInfo(
    "vllm-1",
    0.0,
    model_to_dict(ModelShape((3, 4), 3, 1, 1, 1)),
    topology_to_dict(Topology.uniform(1, 2, 2)),
    8,
)


MOVE = from_json(to_json(plan_event("MOVE", "it pays", imbalance_before=1.4, moves=3)), "a plan")
KEEP = MOVE | {"decision": "KEEP", "imbalance_after": 1.4, "moves": 0, "reason": "it pays nothing"}


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:{tmp_path / 'store.sqlite'}"


@pytest.fixture
def process(url: str) -> Iterator[StoreProcess]:
    made = StoreProcess("vllm", SampleOrigin(DEPLOYMENT, url, 0, INFO))
    yield made
    made.close(NEVER_S)


def until(holds: Callable[[], Any]) -> None:
    while not holds():
        time.sleep(0.01)


def counted(step: int, copied: Any = None) -> Counted:
    tokens = torch.arange(8).reshape(2, 4) + step
    return Counted(tokens, copied, HELD, step, step, "decode", 7, 1.0)


class Copied:
    """An event of a device, for which nothing waits."""

    is_there = False

    def query(self) -> bool:
        return self.is_there

    def synchronize(self) -> None:
        assert self.is_there


def change(generation: int) -> MapChange:
    return MapChange(HELD.astype(np.int32), None, 3, generation, "test")


def steps_of(store: StateStore) -> list[int]:
    return [sample.first_step for _, sample in store.samples(INFO.run)]


def test_what_a_rank_hands_over_is_stored_when_its_process_ends(
    url: str, process: StoreProcess
) -> None:
    process.add(counted(0), np.array([False, True]), slice(2, 4))
    process.add(Counted(torch.ones(2, 3, dtype=torch.int64), None, None, 1, 1, "mixed", 7, 1.0))
    process.send(change(7))
    process.send(Noted("placement_fault", {"rank": 0}))

    assert process.close(NEVER_S)
    with closing(open_store(url, DEPLOYMENT)) as store:
        first, second = (sample for _, sample in store.samples(INFO.run))
        committed, run = store.committed(), store.current_run()
        (event,) = store.events_backwards(("placement_fault",))
    assert (first.tokens.tolist(), first.slot_to_expert.tolist()) == ([[6, 7]], [[0, 1]])
    assert second.slot_to_expert.tolist() == [[0, 1, 2]] * 2, "columns are experts"
    assert (first.sequence, second.sequence) == (0, 1)
    assert committed is not None
    assert committed.placement.generation == 7
    assert run is not None
    assert run == replace(INFO, time=run.time)  # by the store's clock
    assert event.detail["rank"] == 0


def test_sample_that_the_device_has_not_copied_waits_and_holds_nothing_up(
    url: str, process: StoreProcess
) -> None:
    copied = Copied()
    process.add(counted(0, copied))
    process.add(counted(1))
    copied.is_there = True

    assert process.close(NEVER_S)
    with closing(open_store(url, DEPLOYMENT)) as store:
        assert steps_of(store) == [0, 1]


def test_rank_of_an_engine_reports_itself_so_that_it_is_not_silent(
    url: str, process: StoreProcess
) -> None:
    process.add(counted(5))
    with closing(open_store(url, DEPLOYMENT)) as store:
        until(lambda: any(one.step == 5 for one in store.rank_states(INFO.run)))
        (found,) = store.rank_states(INFO.run)

    assert (found.rank, found.generation, found.sequence) == (0, 7, 1)
    assert found.report_every_s > 0


def test_part_that_is_off_is_reported_by_its_rank(url: str, process: StoreProcess) -> None:
    set_part("vllm", "mover", is_on=False)
    with closing(open_store(url, DEPLOYMENT)) as store:
        until(lambda: any("mover" in one.detail["off"] for one in store.events_backwards((PARTS,))))
        report = report_of(store)
    set_part("vllm", "mover", is_on=True)

    assert "off: mover" in report.parts[0]


def states_in(url: str) -> list[list[str]]:
    """Parts that were off by each event with the state of the rank, newest first."""
    with closing(open_store(url, DEPLOYMENT)) as store:
        return [list(event.detail["off"]) for event in store.events_backwards((PARTS,))]


def test_state_of_a_rank_that_ends_at_once_is_stored(url: str, process: StoreProcess) -> None:
    assert process.close(NEVER_S)

    assert len(states_in(url)) == 1
    assert "store" not in states_in(url)[0]


def test_part_that_goes_off_right_before_the_end_is_in_the_last_state(
    url: str, process: StoreProcess
) -> None:
    until(lambda: states_in(url))
    set_part("vllm", "mover", is_on=False)
    process.close_soon()
    process.close(NEVER_S)
    set_part("vllm", "mover", is_on=True)  # of this test's process

    assert ["mover" in off for off in states_in(url)] == [True, False]


def test_process_that_is_killed_is_started_again_and_gets_the_latest_map(
    url: str, process: StoreProcess
) -> None:
    with closing(open_store(url, DEPLOYMENT)) as store:
        process.send(change(7))
        until(lambda: store.committed() is not None)
        before = process.pid
        assert before is not None
        os.kill(before, signal.SIGSTOP)  # it reads nothing more
        process.send(change(8))
        os.kill(before, signal.SIGKILL)
        until(lambda: process.pid != before)
        process.add(counted(5))

        assert process.close(NEVER_S)
        committed = store.committed()
        assert committed is not None
        assert committed.placement.generation == 8
        assert steps_of(store) == [5]


def test_process_killed_while_samples_flow_loses_none(url: str, process: StoreProcess) -> None:
    with closing(open_store(url, DEPLOYMENT)) as store:
        until(store.current_run)
        victim = process.pid
        assert victim is not None
        for step in range(160):
            if step in (40, 80, 120):
                victim = process.pid
                assert victim is not None
                os.kill(victim, signal.SIGSTOP)  # what follows stays in its pipe
            process.add(counted(step))
            if step in (60, 100, 140):
                until(lambda: not process._waiting)
                os.kill(victim, signal.SIGKILL)
                until(lambda before=victim: process.pid != before)
        assert process.close(NEVER_S)
        samples = [sample for _, sample in store.samples(INFO.run)]

    expected = sum(int(counted(step).tokens.sum()) for step in range(160))
    assert sum(int(sample.tokens.sum()) for sample in samples) == expected
    assert process.num_dropped == 0


def test_event_of_a_rank_survives_the_process_that_had_it(url: str, process: StoreProcess) -> None:
    with closing(open_store(url, DEPLOYMENT)) as store:
        until(store.current_run)
        victim = process.pid
        assert victim is not None
        os.kill(victim, signal.SIGSTOP)
        process.note("placement_fault", {"text": "planted"})
        until(lambda: not process._waiting)
        os.kill(victim, signal.SIGKILL)

        until(lambda: list(store.events_backwards(("placement_fault",))))


def test_no_more_is_sent_than_the_process_can_keep_without_a_store(tmp_path: Path) -> None:
    port = free_port()
    origin = SampleOrigin(DEPLOYMENT, f"redis://127.0.0.1:{port}", 0, INFO)
    process = StoreProcess("vllm", origin)
    for step in range(2 * MOST_SENT):
        process.add(counted(step))
    until(lambda: len(process._sent) == MOST_SENT)
    server = RedisProcess(tmp_path / "redis", {"port": str(port)})
    until(lambda: not process._waiting)
    ended = process.close(NEVER_S)
    with closing(open_store(origin.store, DEPLOYMENT)) as store:
        steps = steps_of(store)
    server.kill()

    assert ended
    assert steps == list(range(2 * MOST_SENT))


def test_plan_of_an_engine_is_recorded_as_a_plan_of_a_controller(
    url: str, process: StoreProcess
) -> None:
    process.send(change(7))
    process.send(MoveOutcome(PlanQuestion("interval"), MOVE, is_begun=True))
    moved = replace(change(8), held=np.roll(HELD, 1, axis=1).astype(np.int32), reason="it pays")
    process.send(replace(moved, question=PlanQuestion("interval"), figures=MOVE))
    process.send(MoveOutcome(PlanQuestion("interval"), KEEP))

    assert process.close(NEVER_S)
    with closing(open_store(url, DEPLOYMENT)) as store:
        seen = Monitor(store).reading()
    (moving,) = seen.rebalances
    (mark,) = seen.marks
    assert [one.decision for one in seen.state.plans.decisions] == ["MOVE", "KEEP"]
    assert (moving.outcome, moving.moves, moving.trigger) == ("committed", 3, "interval")
    assert (moving.imbalance_before, moving.imbalance_after) == (1.4, 1.0)
    assert (moving.generation, moving.target_generation, moving.reason) == (7, 8, "it pays")
    assert (mark.generation, mark.plan_id) == (8, moving.plan_id)


def test_plan_that_never_served_is_aborted_and_its_task_fails(
    url: str, process: StoreProcess
) -> None:
    with closing(open_store(url, DEPLOYMENT)) as store:
        until(store.current_run)
        task = store.submit("rebalance", {"dry_run": False})
        until(lambda: process.questions)
        question = process.questions.popleft()
        process.send(MoveOutcome(question, MOVE, is_begun=True))
        process.send(MoveOutcome(question, error="it never served"))
        until(lambda: (now := store.task(task.id)) is not None and now.state == "failed")
        (moving,) = Monitor(store).reading().rebalances

    assert (moving.outcome, moving.end_reason) == ("aborted", "it never served")


def test_map_that_the_store_refuses_is_told_and_its_task_fails(
    url: str, process: StoreProcess
) -> None:
    with closing(open_store(url, DEPLOYMENT)) as store:
        until(store.current_run)
        store.commit(Placement(HELD.astype(np.int32), 3, 9), expected=None, reason="another start")
        task = store.submit("rebalance", {"dry_run": False})
        until(lambda: process.questions)
        question = process.questions.popleft()
        moved = replace(change(8), held=np.roll(HELD, 1, axis=1).astype(np.int32))
        process.send(replace(moved, question=question, figures=MOVE))
        until(lambda: (now := store.task(task.id)) is not None and now.state == "failed")
        ended = store.task(task.id)
        (event,) = store.events_backwards(("error",))

    assert ended is not None
    refusal = "the map that serves cannot be written: found generation 8 to commit, expected more"
    assert ended.result.error.startswith(refusal)
    assert str(event.detail["message"]).startswith(refusal)


def test_engine_plans_without_a_store_unless_a_person_has_paused(tmp_path: Path) -> None:
    port = free_port()
    server = RedisProcess(tmp_path / "redis", {"port": str(port)})
    made = StoreProcess("vllm", SampleOrigin(DEPLOYMENT, f"redis://127.0.0.1:{port}", 0, INFO))
    until(lambda: not made.why_kept)
    settings = EngineSettings(store_deadline_s=1e-6)
    with_a_store = why_engine_plans(made, 0, settings, is_so=True)
    server.kill()
    until(lambda: made.why_kept == UNREAD)
    without = why_engine_plans(made, 0, settings, is_so=False)
    soon = why_engine_plans(made, 0, EngineSettings(), is_so=False)
    still = why_engine_plans(made, 0, EngineSettings(), is_so=True)
    server.start()
    with closing(open_store(f"redis://127.0.0.1:{port}", DEPLOYMENT)) as store:
        until(lambda: not made.why_kept)
        store.set_control(replace(store.control(), movement=False), reason="test")
        until(lambda: made.why_kept)
    server.kill()
    until(lambda: made.why_kept == UNREAD)
    paused = why_engine_plans(made, 9, settings, is_so=True)
    made.close(NEVER_S)

    assert (with_a_store, soon, paused) == ("", "", "")
    assert "the deployment's store has not answered for" in without
    assert still


def test_engine_plans_after_some_failures_until_a_plan_is_made() -> None:
    settings = EngineSettings(failed_plans=3)
    before = [why_engine_plans(None, failed, settings, is_so=False) for failed in (0, 2, 3)]
    after = [why_engine_plans(None, failed, settings, is_so=True) for failed in (1, 0)]

    assert before == ["", "", "3 plans in a row failed"]
    assert after == ["1 plan in a row failed", ""]


def test_second_engine_with_one_file_leaves_the_run_until_the_first_ends(
    url: str, process: StoreProcess
) -> None:
    second = replace(INFO, run="vllm-2")
    with closing(open_store(url, DEPLOYMENT)) as store:
        until(store.current_run)
        others = [
            StoreProcess("vllm", SampleOrigin(DEPLOYMENT, url, rank, second)) for rank in (0, 1)
        ]
        others[1].add(counted(3))
        until(lambda: others[0].num_failures)
        while_it_runs = store.current_run(), list(store.samples(second.run))
        process.add(counted(0))
        assert process.close(NEVER_S)
        until(lambda: (run := store.current_run()) is not None and run.run == second.run)
        until(lambda: list(store.samples(second.run)))
        assert all(one.close(NEVER_S) for one in others)

    assert while_it_runs[0] is not None
    assert (while_it_runs[0].run, while_it_runs[1]) == (INFO.run, [])


def test_engine_that_shares_a_name_is_refused_with_the_way_out(url: str) -> None:
    identity = SampleOrigin(DEPLOYMENT, url, 0, replace(INFO, run="vllm-2"))
    link = StoreLink(identity, lambda reply: None)
    with closing(open_store(url, DEPLOYMENT)) as store:
        until(store.current_run)
        refused = StoreLink(replace(identity, info=INFO), lambda reply: None)
        with pytest.raises(StoreError, match=r"run vllm-2 of process .* EPLB_GROUP names each"):
            refused._begins(store)
    for one in (refused, link):
        one.close()


def test_second_engine_is_warned_about_once_while_the_first_runs(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    identity = SampleOrigin(DEPLOYMENT, url, 0, INFO)
    link = StoreLink(identity, lambda reply: None)
    with closing(open_store(url, DEPLOYMENT)) as store:
        until(store.current_run)
    second = replace(identity, info=replace(INFO, run="vllm-2"))
    refused = StoreLink(second, lambda reply: None)
    until(lambda: refused._num_failures >= 4)
    for one in (refused, link):
        one.close()

    (warning,) = [one for one in caplog.messages if "the store cannot be used" in one]
    assert "expected no other engine" in warning


@pytest.fixture
def stages(url: str) -> Iterator[list[StoreProcess]]:
    """Rank 0 of each of two pipeline stages."""
    names = ("prod/pp0", "prod/pp1")
    made = [
        StoreProcess(
            "vllm",
            SampleOrigin(
                name, url, 0, replace(INFO, run=f"vllm-{name}"), whole=DEPLOYMENT, groups=names
            ),
        )
        for name in names
    ]
    yield made
    for process in made:
        process.close(NEVER_S)


def test_groups_of_a_deployment_have_runs_of_their_own(
    url: str, stages: list[StoreProcess]
) -> None:
    for step, process in enumerate(stages):
        process.add(counted(step))
        assert process.close(NEVER_S)

    with closing(open_store(url, DEPLOYMENT)) as store:
        assert (store.groups(), store.current_run()) == (["prod/pp0", "prod/pp1"], None)
    for step, name in enumerate(("prod/pp0", "prod/pp1")):
        with closing(open_store(url, name)) as store:
            found = [sample.first_step for _, sample in store.samples(f"vllm-{name}")]
            assert found == [step]


def test_pause_of_a_deployment_holds_for_all_its_groups(
    url: str, stages: list[StoreProcess]
) -> None:
    with closing(open_store(url, DEPLOYMENT)) as store:
        until(lambda: not any(process.why_kept for process in stages))
        store.set_control(replace(store.control(), movement=False), reason="test")
        until(lambda: all("movement is switched off" in one.why_kept for one in stages))
        store.set_control(replace(store.control(), movement=True), reason="test")
        until(lambda: not any(process.why_kept for process in stages))


DIES = """
import os, signal, sys, time
from tests.rebalance.engines.test_store_process import DEPLOYMENT, INFO, counted
from rebalance.engines.common.fsck.report import PARTS
from rebalance.engines.common.start import set_part
from rebalance.engines.common.messages import SampleOrigin
from rebalance.engines.common.store_process import StoreProcess
process = StoreProcess("vllm", SampleOrigin(DEPLOYMENT, sys.argv[1], 1, INFO))
process.add(counted(3))
while process._waiting:
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_handed_over_survives_the_death_of_the_rank(url: str) -> None:
    with closing(open_store(url, DEPLOYMENT)) as store:
        store.begin_run(INFO)
        ended = subprocess.run([sys.executable, "-c", DIES, url], cwd=ROOT)

        assert ended.returncode == -signal.SIGKILL
        until(lambda: steps_of(store))


def test_samples_beyond_the_limit_are_dropped_and_counted(process: StoreProcess) -> None:
    copied = Copied()
    process.add(counted(0, copied))
    for step in range(1, MOST_WAITING + 3):
        process.add(counted(step))
    dropped = process.num_dropped
    copied.is_there = True

    assert dropped == 3


def test_nothing_may_move_while_the_switches_cannot_be_read(tmp_path: Path) -> None:
    port = free_port()
    server = RedisProcess(tmp_path / "redis", {"port": str(port)})
    server.kill()
    made = StoreProcess("vllm", SampleOrigin(DEPLOYMENT, f"redis://127.0.0.1:{port}", 0, INFO))
    at_the_start = made.why_kept
    until(lambda: made.num_failures)  # the process has tried, and has said so
    without_a_store = made.why_kept
    server.start()
    until(lambda: not made.why_kept)
    server.kill()
    until(lambda: made.why_kept)
    after_its_loss = made.why_kept
    server.start()
    until(lambda: not made.why_kept)
    assert made.pid is not None
    os.kill(made.pid, signal.SIGKILL)
    until(lambda: made.why_kept)
    made.close(NEVER_S)
    server.kill()

    assert {at_the_start, without_a_store, after_its_loss} == {UNREAD}


def test_untested_release_moves_nothing_until_all_ranks_have_checked(url: str) -> None:
    untried = "vllm 9.9 is newer than what was tested"
    made = StoreProcess("vllm", SampleOrigin(DEPLOYMENT, url, 0, INFO, untried=untried))

    def checked(rank: int, kind: str, detail: dict[str, Any]) -> None:
        store.add_event(kind, {"run": INFO.run, "rank": rank} | detail)

    with closing(open_store(url, DEPLOYMENT)) as store:
        until(lambda: "rank 0 does not check its slots: it has not begun" in made.why_kept)
        checked(0, BEGUN, {"reason": ""})
        until(lambda: "rank 0 has not looked at all its slots" in made.why_kept)
        checked(0, ROUND, {"rounds": 1})
        until(lambda: "rank 1 does not check its slots" in made.why_kept)
        checked(1, BEGUN, {"reason": ""})
        checked(
            1, FAULT, {"kind": "replicas", "row": 0, "slot": 3, "name": "w2", "text": "planted"}
        )
        checked(1, ROUND, {"rounds": 1})
        until(
            lambda: (
                made.why_kept
                == f"{untried}: the placement check has found a fault: rank 1: planted"
            )
        )
        assert made.close(NEVER_S)


def test_untested_release_moves_experts_once_its_ranks_have_checked(url: str) -> None:
    made = StoreProcess("vllm", SampleOrigin(DEPLOYMENT, url, 0, INFO, untried="vllm 9.9 is newer"))
    with closing(open_store(url, DEPLOYMENT)) as store:
        until(lambda: "vllm 9.9 is newer" in made.why_kept)
        for rank in (0, 1):
            about = {"run": INFO.run, "rank": rank}
            store.add_event(BEGUN, about | {"reason": ""})
            store.add_event(ROUND, about | {"rounds": 1})
        until(lambda: not made.why_kept)
        store.set_control(replace(store.control(), observe=True), reason="test")
        until(lambda: made.why_kept == "the deployment is only observed")
        assert made.close(NEVER_S)


def test_task_becomes_a_question_and_ends_with_its_outcome(url: str, process: StoreProcess) -> None:
    with closing(open_store(url, DEPLOYMENT)) as store:
        until(store.current_run)
        task = store.submit("rebalance", {"dry_run": True})
        until(lambda: process.questions)
        question = process.questions.popleft()
        process.send(MoveOutcome(question, KEEP))
        until(lambda: (now := store.task(task.id)) is not None and now.state == "done")

        done = store.task(task.id)
        assert done is not None
        assert (question.task_id, question.is_dry) == (task.id, True)
        renamed = {"imbalance_before": "before", "imbalance_after": "after", "moves": "num_moves"}
        figures = {renamed.get(name, name): value for name, value in KEEP.items()}
        assert (figures["before"], figures["after"], figures["num_moves"]) == (1.4, 1.4, 0)
        assert done.result.detail == figures | {"dry_run": True}
        assert not list(store.events_backwards(("plan",))), "a dry run decides nothing"


def test_task_of_a_killed_process_is_asked_again_and_its_second_outcome_ignored(
    url: str, process: StoreProcess
) -> None:
    with closing(open_store(url, DEPLOYMENT)) as store:
        until(store.current_run)
        task = store.submit("rebalance", {"dry_run": True})
        until(lambda: process.questions)
        asked, before = process.questions.popleft(), process.pid
        assert before is not None
        os.kill(before, signal.SIGKILL)
        until(lambda: process.questions)
        asked_again = process.questions.popleft()
        for question in (asked, asked_again):
            process.send(MoveOutcome(question, KEEP))
        until(lambda: (now := store.task(task.id)) is not None and now.state == "done")
        following = store.submit("rebalance", {"dry_run": True})
        until(lambda: process.questions)
        process.send(MoveOutcome(process.questions.popleft(), KEEP))
        until(lambda: (now := store.task(following.id)) is not None and now.state == "done")

    assert (asked.task_id, asked_again.task_id) == (task.id, task.id)


def test_task_that_an_engine_cannot_do_fails_with_the_reason(
    url: str, process: StoreProcess
) -> None:
    with closing(open_store(url, DEPLOYMENT)) as store:
        until(store.current_run)
        task = store.submit("rebalance", {"policy": "greedy"})
        until(lambda: (now := store.task(task.id)) is not None and now.state == "failed")

        failed = store.task(task.id)
        assert failed is not None
        assert "'greedy', expected 'auto'" in failed.result.error
        assert not process.questions


class Planner:
    """Moves to the map of the latest window, shifted by the terms' figure; named in an identity."""

    def __init__(self, terms: dict[str, Any]) -> None:
        self._shift, self._held = terms["shift"], HELD[:0]

    def add(self, window: PassWindow) -> None:
        self._held = window.held

    def plan(self) -> tuple[bytes, dict[str, Any]] | None:
        if not len(self._held):
            return None
        if self._shift < 0:
            raise PlacementError("planted")
        record = np.roll(self._held, self._shift, axis=1).tobytes() if self._shift else b""
        return record, MOVE if record else KEEP


@pytest.fixture
def planning(url: str) -> Iterator[Callable[[int], StoreProcess]]:
    """Start a process with a planner, which plans in it."""
    made = []

    def start(shift: int) -> StoreProcess:
        planner = f"{Planner.__module__}:{Planner.__name__}"
        identity = SampleOrigin(DEPLOYMENT, url, 0, INFO, planner=planner, terms={"shift": shift})
        made.append(StoreProcess("sglang", identity))
        return made[-1]

    yield start
    for process in made:
        process.close(NEVER_S)


def test_planner_answers_a_question_once_it_has_a_window(
    planning: Callable[[int], StoreProcess],
) -> None:
    process = planning(1)
    process.ask(PlanQuestion("interval"))
    process.add_window(counted(0), np.zeros_like(HELD))
    until(lambda: process.ready)

    assert process.ready is not None
    assert process.ready.record.tobytes() == np.roll(HELD, 1, axis=1).tobytes()
    assert not process.is_asked


def test_task_is_planned_for_and_ends_with_the_map_of_its_plan(
    url: str, planning: Callable[[int], StoreProcess]
) -> None:
    process = planning(1)
    process.add_window(counted(0), np.zeros_like(HELD))
    with closing(open_store(url, DEPLOYMENT)) as store:
        until(store.current_run)
        task = store.submit("rebalance", {"dry_run": False})
        until(lambda: process.ready)
        assert process.ready is not None
        process.send(replace(change(7), question=process.ready.question, figures=MOVE))
        until(lambda: (now := store.task(task.id)) is not None and now.state == "done")

        committed = store.committed()
        assert committed is not None
        assert committed.placement.generation == 7
        offer = next(store.events_backwards(("publish",))).detail
        ended = store.task(task.id)
        assert ended is not None
        assert committed.plan_id == offer["plan_id"] == ended.result.plan_id
    assert not process.questions, "the rank is asked nothing"


@pytest.mark.parametrize(("shift", "state"), [(0, "done"), (-1, "failed")])
def test_task_without_a_plan_ends_with_the_reason(
    shift: int, state: str, url: str, planning: Callable[[int], StoreProcess]
) -> None:
    process = planning(shift)
    process.add_window(counted(0), np.zeros_like(HELD))
    with closing(open_store(url, DEPLOYMENT)) as store:
        until(store.current_run)
        task = store.submit("rebalance", {"dry_run": False})
        until(lambda: (now := store.task(task.id)) is not None and now.state == state)

        ended = store.task(task.id)
        assert ended is not None
        assert ("PlacementError: planted" in ended.result.error) == (shift < 0)
    assert process.ready is None


def test_plan_that_a_switch_keeps_is_recorded(
    url: str, planning: Callable[[int], StoreProcess]
) -> None:
    process = planning(1)
    with closing(open_store(url, DEPLOYMENT)) as store:
        until(lambda: store.current_run() and not process.why_kept)
        store.set_control(replace(store.control(), observe=True), reason="test")
        until(lambda: process.why_kept)
        process.ask(PlanQuestion("interval"))
        process.add_window(counted(0), np.zeros_like(HELD))
        until(lambda: list(store.events_backwards(("plan",))))
        (event,) = store.events_backwards(("plan",))
        published = list(store.events_backwards(("publish",)))

    assert (event.detail["decision"], event.detail["moves"]) == ("MOVE", 3)
    assert event.detail["reason"] == "it pays (not moved: the deployment is only observed)"
    assert not published


@pytest.mark.parametrize(("shift", "figures"), [(0, KEEP), (1, MOVE)])
def test_each_decision_of_the_planner_is_logged(
    shift: int, figures: dict[str, Any], url: str, caplog: pytest.LogCaptureFixture
) -> None:
    planner = f"{Planner.__module__}:{Planner.__name__}"
    identity = SampleOrigin(DEPLOYMENT, url, 0, INFO, planner=planner, terms={"shift": shift})
    with caplog.at_level(logging.INFO):
        link = StoreLink(identity, lambda reply: None)
        link.take(PassWindow(np.ones_like(HELD), HELD, np.zeros_like(HELD)))
        link.take(PlanQuestion("interval"))
        until(lambda: [one for one in caplog.messages if one.startswith("decision=")])
        link.close()

    (line,) = [one for one in caplog.messages if one.startswith("decision=")]
    words = "decision={decision} reason={reason!r} moved={moves} seconds=".format(**figures)
    assert line.startswith(words)


def test_planner_that_cannot_be_loaded_is_reported(url: str) -> None:
    identity = SampleOrigin(DEPLOYMENT, url, 0, INFO, planner="rebalance.engines:Nothing")
    process = StoreProcess("sglang", identity)
    process.ask(PlanQuestion("interval"))
    with closing(open_store(url, DEPLOYMENT)) as store:
        until(lambda: process.num_failed_plans == 1)
        process.ask(PlanQuestion("interval"))
        until(lambda: process.num_failed_plans == 2)
        assert process.close(NEVER_S)
        (event,) = store.events_backwards(("error",))  # of two failures with the same words
    assert event.detail["where"] == "plan"
    assert "Nothing" in str(event.detail["message"])


def test_killed_planner_is_asked_again_with_the_next_window(
    planning: Callable[[int], StoreProcess],
) -> None:
    process = planning(1)
    process.ask(PlanQuestion("interval"))
    until(lambda: process.pid)
    before = process.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    until(lambda: process.pid != before and not process.is_asked)
    process.add_window(counted(0), np.zeros_like(HELD))
    process.ask(PlanQuestion("interval"))

    until(lambda: process.ready)
