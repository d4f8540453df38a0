"""Imbalance with a drained rank: the same in snapshot, history, roll-ups and metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing

import numpy as np
import pytest

from api.metrics.exposition import metric_families
from api.monitor.history import History
from api.monitor.monitor import Monitor
from api.monitor.reader import BackgroundReader
from api.monitor.scores import heat_of, minute_scores
from eplb import ModelShape, Placement, Topology
from telemetry.load.pruning import Keeper, Retention
from telemetry.state.store import StateStore
from tests.support.stores import MemoryStore
from tests.support.two_ranks import begin_run, serve

NOW = 1200.0
MODEL = ModelShape((0,), num_experts=2, top_k=1, hidden=2, intermediate=2)
TOPOLOGY = Topology.uniform(num_nodes=1, ranks_per_node=3, slots_per_rank=1)
WIDE = Placement(np.array([[0, 1, 0]]), num_experts=2, generation=1)
DRAINED = Placement(np.array([[0, 1, -1]]), num_experts=2, generation=2)


def report(store: StateStore, window: int, serving: Placement, tokens: Sequence[int]) -> None:
    received = [[count] for count in tokens]
    serve(store, window, received, placement=serving, topology=TOPOLOGY, at=NOW + window)


@pytest.fixture
def store() -> Iterator[StateStore]:
    with closing(MemoryStore("d", clock=lambda: NOW)) as opened:
        begin_run(opened, "a", NOW, model=MODEL, topology=TOPOLOGY)
        opened.commit(WIDE, expected=None, reason="start")
        opened.commit(DRAINED, expected=1, reason="drain 2")
        yield opened


def monitor_of(store: StateStore) -> Monitor:
    monitor = Monitor(store, history=History(), clock=lambda: NOW + 1)
    monitor.refresh()
    return monitor


def test_drained_rank_is_out_of_the_mean_everywhere(store: StateStore) -> None:
    report(store, 0, DRAINED, (30, 30, 0))
    monitor = monitor_of(store)
    seen = monitor.reading()

    assert seen.state.load.last_score is not None
    assert (seen.state.load.last_score.measured, seen.state.load.last_score.contiguous) == (
        1.0,
        1.0,
    )
    assert heat_of(seen).ranks == ((1.0, 1.0, 0.0),)
    assert [point.measured for point in monitor.points(0, NOW + 9, 10)] == [1.0]
    families = {one.name: one for one in metric_families(BackgroundReader(monitor))}
    for name, value in (("eplb_balancedness", 1.0), ("eplb_rank_load_ratio_max", 1.0)):
        assert {one.value for one in families[name].samples} == {value}, name


def test_rank_that_holds_experts_and_gets_no_token_counts(store: StateStore) -> None:
    report(store, 0, WIDE, (30, 30, 0))

    score = monitor_of(store).reading().state.load.last_score
    assert score is not None
    assert score.measured == 1.5


def test_rank_that_is_drained_within_a_window_counts_in_it(store: StateStore) -> None:
    """A window of both generations, in which the rank got nothing from its last step on."""
    report(store, 0, WIDE, (20, 20, 20))
    report(store, 1, DRAINED, (30, 30, 0))

    found = [one.measured for one in monitor_of(store).reading().series]
    assert found == [1.0, 1.0]


def test_drained_rank_is_out_of_the_mean_of_a_rolled_up_minute(store: StateStore) -> None:
    report(store, 0, DRAINED, (30, 30, 0))
    Keeper(store, Retention(keep_samples_s=60.0)).turn(NOW + 600)

    ((_, minute),) = minute_scores(store, store.runs(), 0.0)
    assert (minute.measured, minute.contiguous) == (1.0, 1.0)
