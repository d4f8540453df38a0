"""The plug-in in four ranks of an engine's real balancer: maps, weights, lists and samples."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from api.monitor.monitor import Monitor
from telemetry import open_store
from tests.support.engines.installed import engine
from tests.support.engines.ranks import (
    NAME,
    NUM_EXPERTS,
    NUM_RANKS,
    config_in,
    look_in_every_pass,
    on_ranks,
    settings_in,
)

pytestmark = pytest.mark.slow


def rebalances(rank: int, config: Path, way: str) -> dict[str, Any]:
    look_in_every_pass()
    started_by, times = engine.WAYS[way]
    made = engine.make_rank(rank, config, **started_by)
    with_lists = 0
    for _ in range(times):
        made.until_maps(1)
        with_lists += made.weighs_replicas
    made.visit_all()
    return made.result() | {"with lists": with_lists}


@pytest.mark.parametrize("way", engine.WAYS)
def test_weights_match_maps_on_every_rank_over_rebalances(way: str, tmp_path: Path) -> None:
    config = config_in(tmp_path)
    found = on_ranks(rebalances, config, way)

    first = found[0]
    print(way, first["passes"], "passes")
    assert all((one["map"], one["lists"]) == (first["map"], first["lists"]) for one in found)
    assert [one["faults"] for one in found] == [[]] * NUM_RANKS
    assert [one["placement"] for one in found] == [1.0] * NUM_RANKS
    assert all(one["looked"] > 0 for one in found), "slots were looked at between passes"
    store = open_store(settings_in(config).deployment.store, NAME)
    with closing(store):
        committed, run = store.committed(), store.current_run()
        assert committed is not None
        assert run is not None
        samples = [sample for _, sample in store.samples(run.run)]
        plans = [event.detail for event in store.events_backwards(("plan",))]
        ended = {one.plan_id: one for one in Monitor(store).reading().rebalances}
    assert not any(re.search(r"inf|[0-9]e[+-]", plan["reason"]) for plan in plans)
    assert sum(plan["moves"] for plan in plans if plan["decision"] == "MOVE") > 0
    assert ended[committed.plan_id].outcome == "committed"
    assert ended[committed.plan_id].imbalance_before is not None
    held = np.array(first["map"])
    assert committed.placement.generation == first["generation"]
    if way != "async":  # then some layers of the next map may serve
        assert committed.placement.slot_to_expert.tolist() == held[engine.MOE].tolist()
    if engine.WAYS[way][1] == 100:  # a single plan may have even shares
        assert (first["with lists"] > 10) == (way != "static"), "lists weigh by repeats"
    assert {sample.rank for sample in samples} == set(range(NUM_RANKS))
    assert {sample.tokens.shape[0] for sample in samples} == {len(engine.MOE)}
    assert {sample.phase for sample in samples} == {"decode"}
    dense = np.delete(held, engine.MOE, axis=0)
    assert (dense == np.arange(held.shape[1]) % NUM_EXPERTS).all(), "dense layers stay"
