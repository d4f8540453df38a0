"""``eplb demo`` as people run it: text and traces, switches, HTTP, Ctrl-C, and what it measured."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from eplb.core.placement import EMPTY
from telemetry import open_store
from telemetry.state.events import Event
from telemetry.state.live import Control
from telemetry.state.placements import CommittedPlacement
from telemetry.state.store import StateStore
from tests.support.demo import events_of
from tests.support.redis_servers import RedisProcess
from tests.support.repository import ROOT

TEXT = ("--text", str(ROOT / "LICENSE"), "--text", str(ROOT / "eplb"))
EPLB = Path(sys.executable).with_name("eplb")
MEASURED = [
    "ranks",
    "layers",
    "experts",
    "slots",
    "steps",
    "tokens_per_window",
    "imbalance_initial",
    "imbalance_final",
    "imbalance_series",
    "rebalances",
    "experts_moved",
    "bytes_by_source",
    "swap_pause_ms_p50",
    "swap_pause_ms_p99",
    "step_ms_p50",
    "reference_checks",
    "reference_max_error",
    "reference_failures",
    "samples_written",
    "samples_lost",
]

Summary = dict[str, Any]
StartDemo = Callable[..., Any]

pytestmark = pytest.mark.system


def plans(words: str, *, after: int = 0) -> Callable[[StateStore], list[Event]]:
    """Look for two plans whose reason has these words: the first may be older than a switch.

    Plans of an earlier run in the same store do not count.
    """

    def look(store: StateStore) -> list[Event]:
        since = max(after, events_of(store, "run")[-1].id)
        seen = [e for e in events_of(store, "plan", after=since) if words in e.detail["reason"]]
        return seen if len(seen) >= 2 else []

    return look


def committed(store: StateStore) -> CommittedPlacement:
    found = store.committed()
    assert found is not None, "a demo commits a placement before it serves"
    return found


def kept(folder: Path) -> list[CommittedPlacement]:
    """The history of placements that a demo leaves behind, newest first."""
    with closing(open_store(folder / "state" / "store.sqlite", "demo")) as store:
        return store.placements(limit=100_000)


def stop_moving(demo: Any) -> None:
    """Let an open migration end, and no other begin."""

    def observe(store: StateStore) -> int:
        store.set_control(Control(observe=True), reason="the test has seen enough")
        return events_of(store, "control")[-1].id

    switch = demo.sees("the switch", observe)
    demo.sees("plans that are not published", plans("", after=switch))
    demo.sees("no open migration", lambda store: store.published() is None)


def summary_after_interrupt(demo: Any) -> Summary:
    """Press Ctrl-C: a terminal sends it to every process of the demo."""
    os.killpg(demo.process.pid, signal.SIGINT)
    return summary_at_the_end(demo)


def summary_at_the_end(demo: Any) -> Summary:
    assert demo.ends() == 0, demo.output_text()
    assert demo.errors == ""
    summary: Summary = demo.summary()
    return summary


def hot_pairs(folder: Path) -> Path:
    """Record routes of which 7 of 10 go to two of eight experts: others every 16 windows."""
    rng = np.random.default_rng(5)
    ids = rng.integers(8, size=(2, 65_536, 2))
    is_hot = rng.random(ids.shape) < 0.6
    ids[is_hot] = (ids % 2 + np.arange(65_536)[:, None] // 16_384 * 2)[is_hot]
    ids[:, ::16] = -1  # tokens that were padding when they were recorded
    path = folder / "trace.npz"
    np.savez(path, expert_ids=ids.astype(np.int8), request_len=[1_000, 64_536])
    return path


def eplb(*words: str) -> None:
    subprocess.run([EPLB, *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def served(folder: Path, start_demo: StartDemo) -> Summary:
    """A demo on the text that every machine has, for one second and on until Ctrl-C."""
    demo = start_demo(folder, "--serve", seconds=1)
    demo.sees("a commit", lambda store: committed(store).placement.generation >= 1)
    stop_moving(demo)
    return summary_after_interrupt(demo)


def test_summary_has_everything_that_is_asked_of_it(served: Summary) -> None:
    assert not set(MEASURED) - served.keys()
    assert (served["ranks"], served["layers"], served["experts"], served["slots"]) == (4, 2, 8, 12)
    assert served["tokens_per_window"] == 1024
    assert served["samples_written"] >= served["ranks"] * len(served["imbalance_series"])


def test_demo_rebalances_and_serves_right_answers(served: Summary) -> None:
    assert served["rebalances"] >= 1
    assert len(served["rebalance_steps"]) == served["rebalances"]
    assert served["reference_checks"] == sum(served["reference_checks_by_phase"].values()) > 0
    assert (served["reference_failures"], served["samples_lost"]) == (0, 0)
    assert served["reference_max_error"] <= 1e-4
    assert served["swap_pause_ms_p99"] >= served["swap_pause_ms_p50"] > 0


def test_every_expert_that_moved_is_read_once_from_one_source(served: Summary) -> None:
    bytes_by_source = served["bytes_by_source"]

    moved = sum(bytes_by_source.get(source, 0) for source in ("same_rank", "peer", "host"))
    assert moved == served["experts_moved"] * served["expert_bytes"] > 0
    assert bytes_by_source.get("disk", 0) <= bytes_by_source["host"]


def test_windows_follow_one_another_without_a_gap(served: Summary) -> None:
    series = served["imbalance_series"]
    steps_per_window = 1024 // (4 * 64)

    assert [score["window"] for score in series] == list(range(len(series)))
    assert [score["last_step"] for score in series] == [
        steps_per_window * (window + 1) - 1 for window in range(len(series))
    ]
    assert served["steps"] >= series[-1]["last_step"] + 1


def test_demo_whose_store_is_redis_rebalances_and_loses_nothing(
    tmp_path: Path, start_demo: StartDemo
) -> None:
    with RedisProcess(tmp_path / "redis", {"requirepass": "open-sesame"}) as server:
        url = server.url.replace("//", "//:open-sesame@")
        demo = start_demo(tmp_path, "--store", url, "--serve", *TEXT)
        demo.wait_for_line(" ranks, ")
        with closing(open_store(url, "demo")) as store:
            demo.wait_for_line(" commit plan=2")
            lease = store.lease()
            metrics = demo.get("/metrics").text
            summary = summary_after_interrupt(demo)
            run = events_of(store, "run")[-1].detail["run"]
            stored = sum(store.sample_counts(run).values())
            released = store.lease()

    assert lease is not None
    assert (lease.of, released) == ("controller", None)
    assert 'eplb_store_errors_total{backend="redis",deployment="demo"} 0.0' in metrics
    assert summary["rebalances"] >= 2
    assert (summary["samples_written"], summary["samples_lost"]) == (stored, 0)
    assert (summary["reference_failures"], summary["controller_restarts"]) == (0, 0)
    assert not (demo.state_dir / "store.sqlite").exists()
    assert "open-sesame" not in demo.output_text()


@pytest.fixture(scope="module")
def resumed(served: Summary, folder: Path, start_demo: StartDemo) -> Summary:
    """The next demo in the same folder, by another policy, until its time is over.

    The last one was left observing, so this one observes too, and says why.
    """
    before = kept(folder)
    demo = start_demo(folder, "--resume", "--policy", "greedy", *TEXT, seconds=1)
    assert demo.ends() == 0, demo.output_text()
    (warning,) = demo.errors.splitlines()
    assert "live setting: observe is true (revision 2, " in warning
    assert "the test has seen enough), which wins over the setting false" in warning
    return demo.summary() | {"before": before, "after": kept(folder)}


def test_resumed_demo_starts_from_the_last_placement(resumed: Summary) -> None:
    last = resumed["before"][0].placement

    assert last.generation >= 1
    assert resumed["imbalance_series"][0]["generation"] == last.generation
    assert len(resumed["after"]) == len(resumed["before"]) + resumed["rebalances"]
    assert resumed["after"][resumed["rebalances"]].placement.hash == last.hash


def test_demo_ends_after_its_duration(resumed: Summary) -> None:
    assert resumed["policy"] == "greedy"
    assert (resumed["reference_failures"], resumed["samples_lost"]) == (0, 0)


@pytest.fixture(scope="module")
def switched(resumed: Summary, folder: Path, start_demo: StartDemo) -> dict[str, Any]:
    """A demo that starts afresh in the same folder, on recorded routes, with a spare on each rank.

    First it only observes; then movement is off, on for a while, and off again. Plans on one window
    chase chance, so most migrations need two transactions: several windows are half swapped.
    """
    trace = str(hot_pairs(folder))
    demo = start_demo(
        *(folder, "--observe", "--serve", "--trace", trace),
        movement=False,
        spare_slots=1,
        plan_windows=1,
    )
    path, off = str(demo.state_dir / "store.sqlite"), "not moved: movement is switched off"
    demo.sees("plans that move nothing", plans("not moved: observe only"))
    stop = demo.sees("the switch", lambda store: control(store, Control(movement=False)))
    demo.sees("plans before movement", plans(off, after=stop))
    asked = demo.post("/api/v1/rebalances", {"reason": "to see"})
    seen = {"asked": asked, "start": demo.sees("the start", committed)}
    seen |= {"moved before": demo.sees("reports", bytes_moved), "last": resumed["after"][0]}
    seen |= {"steps before": demo.sees("four windows", lambda store: steps_of_all(store, 16))}
    eplb("resume", "--store", path)
    first = seen["start"].placement.generation + 1
    demo.sees("a commit", lambda store: committed(store).placement.generation >= first)
    eplb("pause", "--store", path, "--reason", "a test")
    pause = demo.sees("the pause", lambda store: events_of(store, "control")[-1])
    demo.sees("plans after the pause", plans(off, after=pause.id))
    seen |= {"pause": pause, "paused": demo.sees("the placement", committed)}
    demo.sees("more plans", lambda store: len(plans(off, after=pause.id)(store)) >= 4)
    seen |= {"end": demo.sees("the placement", committed)}
    demo.process.terminate()  # as a container is stopped: only its first process hears of it
    summary = summary_at_the_end(demo)
    return seen | {"summary": summary, "told": demo.output_text(), "placements": kept(folder)}


def control(store: StateStore, wanted: Control) -> int:
    """Throw the switches; number of the event that tells of it."""
    store.set_control(wanted, reason="a test")
    return events_of(store, "control")[-1].id


def bytes_moved(store: StateStore) -> list[int]:
    """Of each rank, once all have reported."""
    run = events_of(store, "run")[-1].detail["run"]
    found = [sum(s.detail["bytes_by_source"].values()) for s in store.rank_states(run)]
    return found if len(found) == 4 else []


def steps_of_all(store: StateStore, least: int) -> int:
    """Steps that every rank is known to have begun, once there are so many."""
    run = events_of(store, "run")[-1].detail["run"]
    found = [state.step for state in store.rank_states(run)]
    return min(found) if len(found) == 4 and min(found) >= least else 0


def test_default_start_is_unbalanced_under_a_higher_generation(switched: dict[str, Any]) -> None:
    start, last = switched["start"], switched["last"]

    assert start.placement.generation == last.placement.generation + 1
    assert start.reason == "start of the demo: unbalanced, experts in order"
    of_ranks = [[0, 1, -1, -1], [2, 3, -1, -1], [4, 5, -1, -1], [6, 7, -1, -1]]
    assert start.placement.slot_to_expert[0].reshape(4, 4).tolist() == of_ranks


def test_no_weight_moves_while_it_observes_or_before_movement_is_switched_on(
    switched: dict[str, Any],
) -> None:
    # By steps, not by generation: until its last transaction a migration serves under its base's.
    series = switched["summary"]["imbalance_series"]
    before = [score for score in series if score["last_step"] < switched["steps before"]]

    assert switched["moved before"] == [0, 0, 0, 0]
    assert len(before) >= 4
    assert {score["generation"] for score in before} == {switched["start"].placement.generation}
    assert [score["measured"] for score in before] == [score["contiguous"] for score in before]
    assert median(score["measured"] for score in before) > 1.3
    assert not any(score["is_migrating"] for score in before)


def test_only_a_window_that_is_not_migrating_is_its_placement_s(switched: dict[str, Any]) -> None:
    generation = switched["start"].placement.generation
    series = switched["summary"]["imbalance_series"]
    ours = [score for score in series if score["generation"] == generation]

    assert all(s["is_migrating"] for s in ours if s["measured"] != s["contiguous"])


def test_resuming_lets_weights_move(switched: dict[str, Any]) -> None:
    assert switched["paused"].placement.generation > switched["start"].placement.generation
    assert switched["summary"]["rebalances"] >= 1


def test_pausing_stops_all_movement_and_stores_the_reason(switched: dict[str, Any]) -> None:
    assert switched["pause"].detail["reason"] == "a test"
    assert switched["end"].placement.hash == switched["paused"].placement.hash


def test_answers_stay_right_through_all_switches(switched: dict[str, Any]) -> None:
    summary = switched["summary"]

    assert summary["reference_checks"] > 0
    assert (summary["reference_failures"], summary["samples_lost"]) == (0, 0)


def test_spares_are_written_and_every_rank_keeps_one_in_every_placement(
    switched: dict[str, Any],
) -> None:
    summary = switched["summary"]
    ours = [one.placement for one in switched["placements"] if one.placement.num_slots == 12 + 4]

    assert summary["slots"] == 12 + 4
    moved = sum(summary["bytes_by_source"].get(name, 0) for name in ("same_rank", "peer", "host"))
    # More may have been staged than was swapped: the pause may come in mid-migration.
    assert moved >= summary["experts_moved"] * summary["expert_bytes"] > 0
    assert len(ours) >= 2
    for placement in ours:
        empty = placement.slot_to_expert == EMPTY
        assert (empty.reshape(len(empty), 4, 4).sum(axis=2) >= 1).all()


def test_demo_that_is_terminated_halts_its_ranks_and_sums_up(switched: dict[str, Any]) -> None:
    assert "interrupted: halting the ranks" in switched["told"]
    assert "every answer right" in switched["told"]


def test_rebalance_asked_for_over_http_is_a_dry_run(switched: dict[str, Any]) -> None:
    task = switched["asked"].json()

    assert switched["asked"].is_success, switched["asked"].text
    assert (task["state"], task["request"]["dry_run"]) == ("done", True)
    assert task["result"]["decision"] in ("MOVE", "RESPLIT", "KEEP")
    assert task["result"]["published"] is False
