"""What Prometheus scrapes, read with Prometheus' own parser: names, types, words and figures."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from api.app import create_app
from api.metrics import Exposition
from api.monitor import Monitor
from api.server import HttpService
from eplb import LoadSample, ModelShape, Placement, Topology, __version__, build_migration
from eplb.records import model_to_dict, topology_to_dict
from telemetry import open_store
from telemetry.memory import MemoryStore
from telemetry.store import Control, LoadStore, RankState, RunInfo

DEADLINE_S = 10.0
NOW = 1000.0
# Two ranks of two slots, two layers of three experts.
MODEL = ModelShape((0, 1), num_experts=3, top_k=1, hidden=2, intermediate=2)
TOPOLOGY = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2)
FIRST = Placement(np.array([[0, 1, 2, -1]] * 2), num_experts=3, generation=1)
SECOND = Placement(np.array([[0, 1, 0, 2]] * 2), num_experts=3, generation=2)
TYPES = {
    "eplb_build_info": "gauge",
    "eplb_progress_age_seconds": "gauge",
    "eplb_ranks_alive": "gauge",
    "eplb_ranks_frozen": "gauge",
    "eplb_paused": "gauge",
    "eplb_placement_version": "gauge",
    "eplb_placement_mismatch_ranks": "gauge",
    "eplb_balancedness": "gauge",
    "eplb_balancedness_predicted": "gauge",
    "eplb_rank_load_ratio_max": "gauge",
    "eplb_rebalance_phase": "gauge",
    "eplb_swap_pause_seconds": "gauge",
    "eplb_last_success_timestamp_seconds": "gauge",
    "eplb_mover_failures": "counter",
    "eplb_rebalances": "counter",
    "eplb_plans": "counter",
    "eplb_migrated_bytes": "counter",
    "eplb_migrated_experts": "counter",
    "eplb_digest_failures": "counter",
    "eplb_scrubbed_slots": "counter",
    "eplb_telemetry_samples": "counter",
}

Figures = dict[str, dict[tuple[str, ...], float]]


def a_busy_run(store: LoadStore) -> None:
    """One window, one decision, one rebalance, and two ranks that count what they do."""
    model, topology = model_to_dict(MODEL), topology_to_dict(TOPOLOGY)
    store.begin_run(RunInfo("a", NOW, model, topology, window_steps=2))
    store.commit(FIRST, expected=None, reason="start")
    for rank, tokens in enumerate(([[60, 20], [30, 20]], [[20, 0], [50, 0]])):
        held = FIRST.slot_to_expert[:, TOPOLOGY.slots_on(rank)]
        store.append([LoadSample("d", "a", rank, 0, NOW, 0, 1, "mixed", 1, held, np.array(tokens))])
    detail = {"decision": "MOVE", "policy": "auto", "imbalance_after": 1.25, "generation": 1}
    store.add_event("plan", detail)
    migration = build_migration(FIRST, SECOND, TOPOLOGY, plan_id=store.next_plan_id())
    store.publish(migration)
    store.commit(SECOND, expected=1, plan_id=migration.plan_id, reason="drift")
    ranks_report(store)


def ranks_report(store: LoadStore, **more: Any) -> None:
    detail = {
        "bytes_by_source": {"peer": 300, "host": 100, "rejected": 100},
        "experts_moved": 4,
        "swap_pauses_ms": [1.0, 3.0],
        "samples_lost": 1,
        "digest_failures": 1,
        "mover_failures": 1,
        "scrubbed": {"clean": 7, "damaged": 1, "repaired": 1, "lost": 0},
        "progress_age_s": 2.0,
    } | more
    store.report(RankState("a", 0, NOW, 9, 2, "idle", 0, 0, 1, detail))
    store.report(RankState("a", 1, NOW, 9, 1, "swap", 2, 0, 1, {"frozen": "a torn copy"}))


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    opened = MemoryStore("d", clock=lambda: NOW)
    a_busy_run(opened)
    yield opened
    opened.close()


def text_of(store: LoadStore, now: float = NOW + 1) -> str:
    """What a process that has just been started exposes."""
    return Exposition(store, Monitor(store, clock=lambda: now)).text().decode()


def figures_in(text: str) -> Figures:
    """Figures by name and by the values of their labels, in order, the deployment's left out."""
    found: Figures = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = sorted(set(sample.labels) - {"deployment"})
            values = tuple(sample.labels[label] for label in labels)
            found.setdefault(sample.name, {})[values] = sample.value
    return found


def test_every_metric_has_its_type_and_says_what_it_is(store: MemoryStore) -> None:
    families = {family.name: family for family in text_string_to_metric_families(text_of(store))}

    assert {name: family.type for name, family in families.items()} == TYPES
    for name, family in families.items():
        assert family.documentation.endswith("."), name
        assert family.samples, name
        assert {sample.labels["deployment"] for sample in family.samples} == {"d"}


def test_there_are_a_few_dozen_series_whatever_the_model(store: MemoryStore) -> None:
    families = text_string_to_metric_families(text_of(store))

    assert sum(len(family.samples) for family in families) <= 50


def test_figures_are_those_of_the_run(store: MemoryStore) -> None:
    found = figures_in(text_of(store))

    # Rank loads are 80 and 20, then 50 and 50: busiest over mean is 1.6, then 1.
    assert found["eplb_balancedness"] == pytest.approx(
        {("mean",): (1 / 1.6 + 1) / 2, ("worst_layer",): 1 / 1.6, ("critical_path",): 1 / 1.3}
    )
    assert found["eplb_rank_load_ratio_max"] == {(): 1.6}
    assert found["eplb_balancedness_predicted"] == {(): 0.8}
    assert found["eplb_build_info"] == {(__version__,): 1}
    assert found["eplb_progress_age_seconds"] == {(): 3.0}
    assert found["eplb_ranks_alive"] == {(): 2}
    assert found["eplb_ranks_frozen"] == {(): 1}
    assert found["eplb_placement_version"] == {(): 2}
    assert found["eplb_placement_mismatch_ranks"] == {(): 1}
    assert found["eplb_paused"] == {(): 0}
    assert found["eplb_last_success_timestamp_seconds"] == {(): NOW}
    assert found["eplb_swap_pause_seconds"] == pytest.approx(
        {("p50",): 0.002, ("p99",): 0.00298, ("max",): 0.003}
    )


def test_counters_are_those_of_the_run(store: MemoryStore) -> None:
    found = figures_in(text_of(store))

    outcomes = {("committed",): 1, ("aborted",): 0, ("rejected",): 0}
    assert found["eplb_rebalances_total"] == outcomes
    assert found["eplb_plans_total"] == {("MOVE", "auto"): 1}
    sources = {"same_rank": 0, "peer": 300, "host": 100, "other_host": 0, "disk": 0}
    assert found["eplb_migrated_bytes_total"] == {(name,): n for name, n in sources.items()}
    assert found["eplb_migrated_experts_total"] == {(): 4}
    assert found["eplb_digest_failures_total"] == {(): 1}
    assert found["eplb_mover_failures_total"] == {(): 1}
    scrubbed = {("clean",): 7, ("damaged",): 1, ("repaired",): 1, ("lost",): 0}
    assert found["eplb_scrubbed_slots_total"] == scrubbed
    assert found["eplb_telemetry_samples_total"] == {("stored",): 2, ("lost",): 1}


def test_one_phase_is_marked_that_of_the_slowest_rank(store: MemoryStore) -> None:
    phases = figures_in(text_of(store))["eplb_rebalance_phase"]

    assert phases == {
        ("idle",): 0,
        ("preload",): 0,
        ("stage",): 0,
        ("swap",): 1,
        ("aborted",): 0,
    }


def test_a_pause_is_seen(store: MemoryStore) -> None:
    store.set_control(Control(movement=False), reason="test")

    assert figures_in(text_of(store))["eplb_paused"] == {(): 1}


def test_what_is_not_known_yet_has_no_series_and_no_made_up_figure() -> None:
    found = figures_in(text_of(MemoryStore("d")))

    assert "eplb_progress_age_seconds" not in found
    assert "eplb_balancedness" not in found
    assert "eplb_placement_version" not in found
    assert found["eplb_ranks_alive"] == {(): 0}


def test_no_counter_falls_when_the_process_that_shows_it_is_started_again(tmp_path: Path) -> None:
    with_file = open_store(f"sqlite:///{tmp_path / 'load.db'}", "d")
    a_busy_run(with_file)
    before = figures_in(text_of(with_file))
    with_file.close()

    opened = open_store(f"sqlite:///{tmp_path / 'load.db'}", "d")
    opened.prune(before_time=NOW + 1)  # samples are forgotten, what was counted is not
    for number in range(600):  # more than any view keeps
        opened.add_event("plan", {"decision": "KEEP", "policy": "auto", "generation": number})
    after = figures_in(text_of(opened))
    opened.close()

    counters = [name for name in before if name.endswith("_total")]
    assert counters
    for name in counters:
        for labels, figure in before[name].items():
            assert after[name][labels] >= figure, (name, labels)
    assert after["eplb_plans_total"] == {("MOVE", "auto"): 1, ("KEEP", "auto"): 600}
    assert after["eplb_telemetry_samples_total"][("stored",)] == 2


def test_the_counters_of_another_run_are_its_own(store: MemoryStore) -> None:
    model, topology = model_to_dict(MODEL), topology_to_dict(TOPOLOGY)
    store.begin_run(RunInfo("b", NOW, model, topology, window_steps=2))

    found = figures_in(text_of(store))

    assert set(found["eplb_rebalances_total"].values()) == {0}
    assert found["eplb_telemetry_samples_total"] == {("stored",): 0, ("lost",): 0}


def test_metrics_are_served_over_http_and_the_global_registry_knows_nothing_of_them(
    store: MemoryStore,
) -> None:
    service = HttpService(create_app(store))
    service.start()
    try:
        answer = httpx.get(f"{service.url}/metrics", timeout=DEADLINE_S)
    finally:
        service.stop()

    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    found = figures_in(answer.text)
    assert found["eplb_migrated_experts_total"] == {(): 4}
    assert found["eplb_progress_age_seconds"][()] >= time.time() - NOW - DEADLINE_S
    assert not [family.name for family in REGISTRY.collect() if family.name.startswith("eplb")]
