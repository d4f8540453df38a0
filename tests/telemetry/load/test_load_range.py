"""Load over a range of time: windows of samples, roll-ups, runs."""

from __future__ import annotations

import numpy as np
import pytest

from eplb import LoadSample, ModelShape, Topology
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from telemetry.load.load_range import load_rows
from telemetry.load.pruning import Keeper, Retention
from telemetry.state.runs import RunInfo
from telemetry.state.store import StateStore
from tests.support.stores import MemoryStore

MODEL = ModelShape((0,), num_experts=3, top_k=1, hidden=2, intermediate=2)
TOPOLOGY = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2)
HELD = np.array([[0, 1, 2, 0]])
START = 720_000.0  # a full hour


def sample(
    rank: int, window: int, time: float, run: str = "a", phase: str = "decode"
) -> LoadSample:
    held = HELD[:, TOPOLOGY.slots_on(rank)]
    steps = 10 * window, 10 * window + 9
    tokens = np.array([[5 + rank, window]])
    return LoadSample("d", run, rank, window, time, *steps, phase, 1, held, tokens)


@pytest.fixture
def store() -> StateStore:
    opened = MemoryStore("d")
    begin(opened, "a", START)
    return opened


def begin(store: StateStore, run: str, time: float) -> None:
    shapes = model_to_dict(MODEL), topology_to_dict(TOPOLOGY)
    store.begin_run(RunInfo(run, time, *shapes, window_steps=10))


def fill(store: StateStore, windows: range, every_s: float, run: str = "a") -> None:
    """Write windows of both ranks, the second rank half a second after the first."""
    at = [(rank, one) for one in windows for rank in (0, 1)]
    store.append([sample(rank, one, START + every_s * one + 0.5 * rank, run) for rank, one in at])


def test_windows_of_a_range_have_the_samples_taken_in_it(store: StateStore) -> None:
    fill(store, range(40), every_s=5.0)

    rows = list(load_rows(store, START + 50, START + 100))

    assert [row.first_step for row in rows] == [10 * window for window in range(10, 20)]
    assert [row.time for row in rows[:2]] == [START + 50.5, START + 55.5]
    assert rows[0].tokens.tolist() == [[5 + 10, 10, 6]]
    assert rows[0].received.tolist() == [[15, 16]]
    assert {(row.seconds, row.missing_ranks, row.generation) for row in rows} == {(0, 0, 1)}


def test_sample_that_arrived_late_counts_in_its_window(store: StateStore) -> None:
    fill(store, range(1, 40), every_s=1.0)
    store.append([sample(0, 0, START), sample(1, 0, START + 0.5)])

    rows = list(load_rows(store, START, START + 60))

    assert [row.first_step // 10 for row in rows] == list(range(40))
    assert {row.missing_ranks for row in rows} == {0}


def test_window_at_the_edge_of_a_range_states_the_missing_rank(store: StateStore) -> None:
    fill(store, range(4), every_s=5.0)

    rows = list(load_rows(store, START + 5.2, START + 60))

    assert [(row.first_step, row.missing_ranks) for row in rows] == [(10, 1), (20, 0), (30, 0)]


def test_pruned_samples_are_given_as_rollups_and_none_twice(store: StateStore) -> None:
    fill(store, range(72), every_s=5.0)
    Keeper(store, Retention(keep_samples_s=60, keep_minutes_s=3600)).turn(START + 360)

    rows = list(load_rows(store, START, START + 3600))

    assert [row.seconds for row in rows] == [60] * 5 + [0] * 12
    assert [row.time for row in rows[:6]] == [START + 60 * n for n in range(1, 6)] + [START + 300.5]
    assert sum(row.received.sum() for row in rows) == 72 * 11 + 2 * sum(range(72))


def test_rollups_of_an_hour_stand_for_their_minutes(store: StateStore) -> None:
    fill(store, range(72), every_s=50.0)
    Keeper(store, Retention(keep_samples_s=60, keep_minutes_s=60)).turn(START + 7200)
    store.add_rollups(store.rollups(60))

    rows = list(load_rows(store, START, START + 7200))

    assert [(row.seconds, row.missing_ranks) for row in rows] == [(3600, 0)]
    assert rows[0].received.sum() == 72 * 11 + 2 * sum(range(72))
    assert list(load_rows(store, START + 1, START + 7200)) == []


def test_windows_of_two_runs_follow_one_another(store: StateStore) -> None:
    begin(store, "b", START + 30)
    fill(store, range(6), every_s=5.0)
    fill(store, range(6, 12), every_s=5.0, run="b")
    store.append([sample(0, 6, START + 40)])

    rows = list(load_rows(store, START, START + 100))

    assert [row.run for row in rows] == ["a"] * 6 + ["b"] * 6


def test_range_of_one_phase_has_no_other_tokens(store: StateStore) -> None:
    fill(store, range(3), every_s=5.0)
    store.append([sample(rank, 9, START + 20, phase="prefill") for rank in (0, 1)])

    (row,) = load_rows(store, START, START + 60, "prefill")

    assert (row.phase, row.first_step) == ("prefill", 90)
