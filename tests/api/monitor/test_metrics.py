"""What Prometheus scrapes, read with Prometheus' own parser: names, types, words and figures."""

from __future__ import annotations

import re
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, get_args

import httpx
import numpy as np
import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from api.app import create_app
from api.http.service import AdminService
from api.metrics.definitions import Level, ServiceFigures
from api.metrics.exposition import metric_families, metrics_text
from api.monitor import reader as readers
from api.monitor.history import History
from api.monitor.monitor import Monitor
from api.monitor.reader import BackgroundReader
from api.operations import watching
from api.operations.table import answer_in_process
from api.processes.supervision import ProcessState, ProcessView, SupervisionView
from eplb import LoadSample, ModelShape, Placement, Topology, __version__, build_migration
from eplb.decision.pace import PaceChange, StepTimes
from eplb.decision.triggers import ACTS
from eplb.errors import StoreError
from telemetry import open_store
from telemetry.state.events import Outage
from telemetry.state.live import Control
from telemetry.state.memory import MemoryBackend
from telemetry.state.store import StateStore
from tests.support import two_ranks
from tests.support.http import client_of
from tests.support.plan_events import plan_event
from tests.support.rank_reports import rank_report
from tests.support.repository import ROOT
from tests.support.stores import MemoryStore
from tests.support.two_ranks import TOPOLOGY, begin_run

NUM_SERIES = 135  # of any deployment, unless more are asked for
NOW = 1000.0
# Two ranks of two slots, two layers of three experts.
MODEL = ModelShape((0, 1), num_experts=3, top_k=1, hidden=2, intermediate=2)
FIRST = Placement(np.array([[0, 1, 2, -1]] * 2), num_experts=3, generation=1)
SECOND = Placement(np.array([[0, 1, 0, 2]] * 2), num_experts=3, generation=2)
OUTCOMES = ("repeated", "late", "future", "stale", "malformed", "unreadable")
EXCLUDED = {(outcome,): 0 for outcome in OUTCOMES}

Figures = dict[str, dict[tuple[str, ...], float]]


def a_busy_run(store: StateStore) -> None:
    """Two windows, a decision and a rebalance between them, and two ranks that count."""
    begin_run(store, "a", NOW, model=MODEL, window_steps=2)
    store.commit(FIRST, expected=None, reason="start")
    serve(store, FIRST, 0, [[60, 20], [30, 20]], [[20, 0], [50, 0]])
    how = {"window": 0, "windows": 1, "trigger": "load", "plan_seconds": 0.02}
    store.add_event("plan", plan_event("MOVE", imbalance_after=1.25, **how))
    migration = build_migration(FIRST, SECOND, TOPOLOGY, plan_id=store.next_plan_id())
    store.publish(migration)
    store.commit(SECOND, expected=1, plan_id=migration.plan_id, reason="drift")
    serve(store, SECOND, 1, [[60, 20], [30, 20]], [[0, 20], [0, 50]])
    ranks_report(store)


def serve(store: StateStore, placement: Placement, window: int, *received: list[list[int]]) -> None:
    """Both ranks report a window: [L, C] tokens for each, in the slots of ``placement``."""
    two_ranks.serve(store, window, received, placement=placement, at=NOW - 4, steps=2)


def ranks_report(store: StateStore, **more: Any) -> None:
    detail = {
        "bytes_by_source": {
            "peer": 300,
            "host": 100,
            "disk": 42,
            "rejected": 100,
        },
        "experts_moved": 4,
        "swap_pauses_ms": [1.0, 3.0],
        "samples_lost": 1,
        "digest_failures": 1,
        "mover_failures": 1,
        "store_errors": 2,
        "scrubbed": {"clean": 7, "damaged": 1, "repaired": 1, "lost": 0},
        "progress_age_s": 2.0,
    } | more
    now = {"time": NOW, "step": 9}
    store.report(rank_report("a", 0, generation=2, **now | detail))
    swapping = {"generation": 1, "phase": "swap", "plan_id": 2, "frozen": "a torn copy"}
    store.report(rank_report("a", 1, **now | swapping))


@pytest.fixture
def store() -> Iterator[StateStore]:
    opened = MemoryStore("d", clock=lambda: NOW)
    a_busy_run(opened)
    yield opened
    opened.close()


def shown_of(monitor: Monitor, *more: Any) -> Callable[[], Iterator[Any]]:
    return partial(metric_families, BackgroundReader(monitor), *more)


def text_of(store: StateStore, now: float = NOW + 1, level: Level = "default") -> str:
    """What a process that has just been started exposes."""
    monitor = Monitor(store, history=History(), clock=lambda: now)
    return metrics_text([shown_of(monitor, level)])[0].decode()


def view_of(age_s: float, state: ProcessState, restarts: int) -> ProcessView:
    """A host cache process as its supervisor shows it."""
    return ProcessView("a host cache", "host_cache", state, age_s, False, restarts, "")


def figures_in(text: str) -> Figures:
    """Figures by name and by the values of their labels, in order, the deployment's left out."""
    found: Figures = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = sorted(set(sample.labels) - {"deployment"})
            values = tuple(sample.labels[label] for label in labels)
            found.setdefault(sample.name, {})[values] = sample.value
    return found


def documented_kinds() -> dict[str, set[str]]:
    """Kinds in the row of each metric, as the page of the metrics has them."""
    rows = re.findall(r"^\| (`eplb_[^|]*)\|([^|]*)", (ROOT / "docs/rest.md").read_text(), re.M)
    kinds = {"gauge", "counter", "histogram"}
    return {
        name: kinds & set(re.findall(r"\w+", text))
        for names, text in rows
        for name in re.findall(r"eplb_\w+", names)
    }


def test_every_metric_has_a_help_text_and_the_kind_that_its_page_names(store: StateStore) -> None:
    seen = SupervisionView((view_of(0.5, ProcessState.RUNNING, 1),))
    monitor = Monitor(
        store, clock=lambda: NOW + 1, supervision=lambda: seen, folder=Path(__file__).parent
    )
    store.add_event("pace", vars(PaceChange(1, 0.2, 0.05, 1.0, 0.5, "slow")))
    store.acquire_lease("one", 60.0)
    store.report(rank_report("a", 0, step_ms=20.0, swap_pauses_ms=[1.0]))
    text = metrics_text([shown_of(monitor, "rank", ServiceFigures(0, 0, 0))])[0].decode()
    families = list(text_string_to_metric_families(text))

    kinds = {one.name + "_total" * (one.type == "counter"): one.type for one in families}
    documented = documented_kinds()
    assert kinds.keys() == documented.keys()
    assert [name for name, kind in kinds.items() if kind not in documented[name]] == []
    for family in families:
        assert family.documentation.endswith("."), family.name
        assert family.samples, family.name
        assert {sample.labels["deployment"] for sample in family.samples} == {"d"}


def test_slowest_rank_is_the_one_that_waits_least(store: StateStore) -> None:
    for rank, wait_ms in enumerate((15.0, 1.0)):
        store.report(rank_report("a", rank, step_ms=20.0, wait_ms=wait_ms))

    found = text_of(store)

    assert 'eplb_step_seconds{agg="median",deployment="d",time="step"} 0.02' in found
    assert 'eplb_step_seconds{agg="max",deployment="d",time="own"} 0.019' in found
    assert 'eplb_step_seconds{agg="median",deployment="d",time="own"} 0.012' in found


def num_series(text: str) -> int:
    families = text_string_to_metric_families(text)
    return sum(len(family.samples) for family in families)


def test_pace_and_slowdown_are_those_of_the_latest_judgement(store: StateStore) -> None:
    before = figures_in(text_of(store))
    store.report(rank_report("a", 0, step_times=vars(StepTimes())))
    store.change_live({"step_time_budget": 0.05}, reason="a test")
    store.add_event("pace", vars(PaceChange(1, 0.2, 0.05, 1.0, 0.5, "slow")))
    found = figures_in(text_of(store))

    assert before["eplb_pace_part"] == {(): 1.0}
    assert "eplb_migration_slowdown" not in before
    assert found["eplb_pace_part"] == {(): 0.5}
    assert found["eplb_migration_slowdown"] == {(): 0.2}
    judged = {("halved",): 1, ("kept",): 0, ("raised",): 0}
    assert found["eplb_pace_judgements_total"] == judged


def test_time_of_survivors_until_their_first_pass_is_counted_by_stage(store: StateStore) -> None:
    before = figures_in(text_of(store))
    for seconds in ({"agree": 0.25, "first pass": 0.5}, {"agree": 0.5}):
        store.add_event("membership", {"membership": 1, "survivors": [0], "seconds": seconds})
    found = figures_in(text_of(store))

    assert before["eplb_serve_on_total"] == {(): 0}
    assert found["eplb_serve_on_total"] == {(): 2}
    stages = found["eplb_serve_on_seconds_total"]
    assert (stages["agree",], stages["first pass",], stages["group",]) == (0.75, 0.5, 0.0)


def test_series_by_layer_and_rank_need_a_metrics_level(store: StateStore) -> None:
    big = MemoryStore("d", clock=lambda: NOW)
    a_run_of(big, num_layers=5, num_experts=8, num_ranks=4)
    few, by_layer, by_rank = (num_series(text_of(big, level=level)) for level in get_args(Level))

    assert max(few, num_series(text_of(store))) <= NUM_SERIES  # whatever the model
    assert by_layer == few + 5
    assert by_rank == few + 5 + 5 * 4


def a_run_of(store: StateStore, num_layers: int, num_experts: int, num_ranks: int) -> None:
    """One window of a larger model, whose rank r received r + 1 tokens in each of its slots."""
    layers = tuple(range(num_layers))
    model = ModelShape(layers, num_experts=num_experts, top_k=1, hidden=2, intermediate=2)
    slots = num_experts // num_ranks
    topology = Topology.uniform(num_nodes=1, ranks_per_node=num_ranks, slots_per_rank=slots)
    begin_run(store, "a", NOW, model=model, topology=topology, window_steps=2)
    held = np.tile(np.arange(num_experts, dtype=np.int32), (num_layers, 1))
    given: dict[str, Any] = {"placement": Placement(held, num_experts, 1), "topology": topology}
    received = [np.full((num_layers, slots), rank + 1) for rank in range(num_ranks)]
    two_ranks.serve(store, 0, received, at=NOW, steps=2, phase="decode", **given)


def test_figures_are_those_of_the_run(store: StateStore) -> None:
    found = figures_in(text_of(store))

    # Rank loads are 80 and 20, then 50 and 50: busiest over mean is 1.6, then 1.
    by_agg = {"mean": (1 / 1.6 + 1) / 2, "worst_layer": 1 / 1.6, "critical_path": 1 / 1.3}
    by_agg["p95"] = 1 / 1.57  # 95 % of the way from 1 to 1.6
    even = {(agg, "mixed"): value for agg, value in by_agg.items()}
    assert found["eplb_balancedness"] == pytest.approx(even)
    assert found["eplb_rank_load_ratio_max"] == {(): 1.6}
    assert found["eplb_balancedness_predicted"] == {(): 0.8}
    assert found["eplb_build_info"] == {(__version__,): 1}
    assert found["eplb_progress_age_seconds"] == {(): 3.0}
    assert found["eplb_ranks_alive"] == {(): 2}
    assert found["eplb_ranks_frozen"] == {(): 1}
    assert found["eplb_placement_version"] == {(): 2}
    assert found["eplb_placement_mismatch_ranks"] == {(): 1}
    assert found["eplb_telemetry_lag_seconds"] == {(): 5}
    assert found["eplb_layers_pending"] == {(): 0}
    assert found["eplb_paused"] == {(): 0}
    assert found["eplb_last_success_timestamp_seconds"] == {(): NOW}
    assert found["eplb_swap_pause_seconds"] == pytest.approx(
        {("p50",): 0.002, ("p99",): 0.00298, ("max",): 0.003}
    )


def test_counters_are_those_of_the_run(store: StateStore) -> None:
    found = figures_in(text_of(store))

    # Each trigger has its series from the start, so that its first migration is an increase.
    outcomes = ("committed", "aborted", "rejected")
    none_ended = {(outcome, trigger): 0 for outcome in outcomes for trigger in ACTS}
    assert set(ACTS) > {"change", "imbalance", "interval", "membership", "request", "rollback"}
    assert found["eplb_rebalances_total"] == none_ended | {("committed", "load"): 1}
    assert found["eplb_plans_total"] == {("MOVE", "auto"): 1}
    links = {"same_rank": 0, "intra": 300, "host": 100, "disk": 42}
    assert found["eplb_migrated_bytes_total"] == {(name,): n for name, n in links.items()}
    assert found["eplb_migrated_experts_total"] == {(): 4}
    assert found["eplb_digest_failures_total"] == {(): 1}
    assert found["eplb_mover_failures_total"] == {(): 1}
    scrubbed = {("clean",): 7, ("damaged",): 1, ("repaired",): 1, ("lost",): 0}
    assert found["eplb_scrubbed_slots_total"] == scrubbed
    assert found["eplb_telemetry_samples_total"] == {("stored",): 4, ("dropped",): 1} | EXCLUDED
    assert found["eplb_telemetry_dropped_total"] == {(): 1}
    assert found["eplb_store_errors_total"] == {("memory",): 2}
    assert set(found["eplb_anomalies_total"].values()) == {0}


def test_samples_that_the_controller_excluded_or_that_do_not_fit_are_counted(
    store: StateStore,
) -> None:
    for late, malformed in ((1, 0), (2, 3)):
        counts = {"accepted": 9, "late": late, "malformed": malformed}
        store.add_event("samples", {"samples": counts})
    one_layer = np.array([[0, 1, 2]]), np.array([[1, 2, 3]])  # the model has two
    store.append([LoadSample("d", "a", 0, 9, NOW, 4, 5, "mixed", 2, *one_layer)])
    found = figures_in(text_of(store))

    wrong = {("late",): 2, ("malformed",): 3}  # as last reported
    counted = {("stored",): 5, ("dropped",): 1} | EXCLUDED | wrong
    assert found["eplb_telemetry_samples_total"] == counted
    assert found["eplb_telemetry_lag_seconds"] == {(): 5}  # that of the samples that fit


def test_open_migration_and_a_pause_are_shown(store: StateStore) -> None:
    third = Placement(FIRST.slot_to_expert, num_experts=3, generation=3)
    store.publish(build_migration(SECOND, third, TOPOLOGY, plan_id=store.next_plan_id()))
    store.set_control(Control(movement=False), reason="test")
    found = figures_in(text_of(store))

    assert (found["eplb_layers_pending"], found["eplb_paused"]) == ({(): 2}, {(): 1})


def test_drift_is_measured_from_the_load_that_was_planned_on(store: StateStore) -> None:
    before = figures_in(text_of(store))["eplb_drift_score"]
    serve(store, SECOND, 2, [[0, 900], [50, 50]], [[0, 0], [0, 0]])
    after = figures_in(text_of(store))["eplb_drift_score"]

    assert before[("all",)] < 0.1
    assert after[("worst_layer",)] > after[("all",)] > 0.3
    answer = answer_in_process(AdminService(store), watching.drift)
    shown = answer.generation, answer.overall, max(answer.layers)
    assert shown == (2, after[("all",)], after[("worst_layer",)])


def test_anomalies_are_counted_by_type(store: StateStore) -> None:
    for where in ("load", "load", "plan", "a place without a name"):
        store.add_event("error", {"where": where, "message": "test"})
    found = figures_in(text_of(store))["eplb_anomalies_total"]

    none = {("rank_death",): 0, ("store_lost",): 0}
    assert found == {("load",): 2, ("plan",): 1, ("other",): 1} | none


def test_processes_of_a_kind_are_shown_by_the_one_that_is_furthest_behind(
    store: StateStore,
) -> None:
    both = view_of(0.5, ProcessState.RUNNING, 1), view_of(7.0, ProcessState.DEGRADED, 2)
    seen = SupervisionView(both)
    for start, end in ((NOW, NOW + 8.0), (NOW + 50.0, NOW + 92.0)):
        store.add_outage(Outage(start, end, end - start, "rank 1 died"))
    monitor = Monitor(store, clock=lambda: NOW, supervision=lambda: seen)
    found = figures_in(metrics_text([shown_of(monitor)])[0].decode())

    assert found["eplb_process_report_age_seconds"] == {("host_cache",): 7.0}
    assert found["eplb_process_up"] == {("host_cache",): 0}
    assert found["eplb_process_restarts_total"] == {("host_cache",): 3}
    assert found["eplb_unserved_seconds_total"] == {(): 50.0}


def test_unknown_figure_has_no_series() -> None:
    found = figures_in(text_of(MemoryStore("d")))

    assert "eplb_progress_age_seconds" not in found
    assert "eplb_balancedness" not in found
    assert "eplb_placement_version" not in found
    assert found["eplb_ranks_alive"] == {(): 0}


def no_counter_fell(before: Figures, after: Figures) -> None:
    counters = [name for name in before if name.endswith("_total")]
    assert counters
    for name in counters:
        for labels, figure in before[name].items():
            assert after[name][labels] >= figure, (name, labels)


def test_no_counter_falls_when_the_process_that_shows_it_is_started_again(tmp_path: Path) -> None:
    with closing(open_store(f"sqlite:///{tmp_path / 'load.db'}", "d")) as with_file:
        a_busy_run(with_file)
        before = figures_in(text_of(with_file))

    with closing(open_store(f"sqlite:///{tmp_path / 'load.db'}", "d")) as opened:
        opened.prune(before_time=NOW + 1)  # samples are forgotten, what was counted is not
        for number in range(600):  # more than any view keeps
            opened.add_event("plan", plan_event(generation=number))
        after = figures_in(text_of(opened))

    no_counter_fell(before, after)
    assert after["eplb_plans_total"] == {("MOVE", "auto"): 1, ("KEEP", "auto"): 600}
    assert after["eplb_telemetry_samples_total"][("stored",)] == 4


def test_no_counter_falls_when_the_ranks_start_again(store: StateStore) -> None:
    monitor = Monitor(store, history=History(), clock=lambda: NOW + 1)
    watching = shown_of(monitor)
    store.add_event("error", {"where": "load", "message": "m", "samples": {"late": 3}})
    before = figures_in(metrics_text([watching])[0].decode())
    begin_run(store, "b", NOW, model=MODEL, window_steps=2)
    store.report(rank_report("b", 0, time=NOW, experts_moved=1, bytes_by_source={"peer": 5}))

    # One process has seen the first run, the other was started after it.
    for after in (figures_in(metrics_text([watching])[0].decode()), figures_in(text_of(store))):
        no_counter_fell(before, after)
        assert after["eplb_migrated_experts_total"][()] == 4 + 1
        assert after["eplb_migrated_bytes_total"]["intra",] == 300 + 5
        assert after["eplb_telemetry_samples_total"]["late",] == 3
        assert after["eplb_telemetry_samples_total"]["stored",] == 4


class Unsure(MemoryBackend):
    """A store that fails, or does not answer until it is let."""

    def __init__(self, deployment: str) -> None:
        super().__init__(deployment, clock=lambda: NOW)
        self.fails, self.answers = False, threading.Event()
        self.answers.set()

    @contextmanager
    def _read(self) -> Iterator[sqlite3.Connection]:
        self.answers.wait()
        if self.fails:
            raise StoreError("does not answer")
        with super()._read() as connection:
            yield connection


@pytest.fixture
def unsure() -> Iterator[Unsure]:
    backend = Unsure("d")
    a_busy_run(StateStore(backend))
    yield backend
    backend.answers.set()


def scraped(client: httpx.Client, is_it: Callable[[Figures], bool]) -> Figures:
    """The figures of the first scrape of that kind."""
    while True:
        answer = client.get("/metrics")
        assert answer.status_code == 200
        if is_it(found := figures_in(answer.text)):
            return found


def is_blind(found: Figures) -> bool:
    return found["eplb_verdict"]["blind",] == 1


@pytest.mark.parametrize("hangs", [False, True])
def test_metrics_and_the_page_s_state_answer_while_the_store_does_not(
    unsure: Unsure, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(2):
        StateStore(unsure).report(rank_report("a", rank, time=NOW, generation=2, step=9))
    with client_of(create_app(StateStore(unsure), is_watching=True)) as client:
        before = scraped(client, lambda found: "eplb_ranks_alive" in found)
        monkeypatch.setattr(readers, "UNREAD_S", 0.05)
        unsure.fails = not hangs
        if hangs:
            unsure.answers.clear()
        found = scraped(client, is_blind)
        state = client.get("/api/v1/state").json()
        unsure.answers.set()

    no_counter_fell(before, found)
    assert found["eplb_ranks_alive"] == before["eplb_ranks_alive"]
    assert state["verdict"] == "blind"
    assert state["reason"].startswith("the store has not been read for ")
    assert state["step"] == 9  # what is known


@pytest.mark.parametrize("hangs", [False, True])
def test_service_that_starts_without_the_store_is_blind_and_shows_no_counter_of_it(
    unsure: Unsure, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "UNREAD_S", 0.05)
    app = create_app(StateStore(unsure), is_watching=True)
    unsure.fails = not hangs
    if hangs:
        unsure.answers.clear()
    with client_of(app) as client:
        found = scraped(client, is_blind)
        state = client.get("/api/v1/state").json()
        unsure.answers.set()

    shown = {"eplb_verdict", "eplb_build_info", "eplb_event_streams"}
    assert {name for name in found if not name.startswith("eplb_event_streams")} <= shown
    assert (state["verdict"], state["run"]) == ("blind", None)
    assert [one.split(" for ")[0] for one in state["problems"]] == ["the store has not been read"]


def test_metrics_are_served_and_the_global_registry_gains_none(store: StateStore) -> None:
    before = [family.name for family in REGISTRY.collect()]  # a gauge of engines may be there
    with client_of(create_app(store, metrics_level="layer")) as client:
        answer = client.get("/metrics")

    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    found = figures_in(answer.text)
    assert found["eplb_migrated_experts_total"] == {(): 4}
    assert set(found["eplb_layer_balancedness"]) == {("0",), ("1",)}
    assert [family.name for family in REGISTRY.collect()] == before
