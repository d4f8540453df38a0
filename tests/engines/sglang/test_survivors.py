"""Elastic ranks of SGLang: the map after a death, which each rank computes in the engine's call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.engines.gauge import value_of
from tests.support.engines.ranks import (
    EACH,
    NUM_EXPERTS,
    NUM_RANKS,
    NUM_SLOTS,
    config_in,
    on_ranks,
)
from tests.support.engines.sglang_ranks import ALL_LAYERS, ExpertLocationMetadata, make_rank

pytestmark = pytest.mark.slow
DEAD = 1
ELASTIC = {
    "elastic_ep_backend": "mooncake",
    "eplb_algorithm": "elasticity_aware",
    "ep_dispatch_algorithm": "dynamic",
}


def with_a_death(rank: int, config: Path | None, returns: bool = False) -> dict[str, Any]:
    """The map that serves, and the engine's next one while a rank is not active."""
    from sglang.srt.elastic_ep.elastic_ep import ElasticEPStateManager

    made = make_rank(rank, config, **ELASTIC)
    state = ElasticEPStateManager._build_state(ep_size=NUM_RANKS, device="cpu")
    state.effective_ep_size = NUM_RANKS
    ElasticEPStateManager._instance = state
    counts = torch.from_numpy(np.random.default_rng(5).integers(1, 900, (ALL_LAYERS, NUM_EXPERTS)))
    whole = ExpertLocationMetadata.init_by_eplb(None, counts)
    if returns:
        state.reset()
    state.active_ranks[DEAD] = 0
    found = ExpertLocationMetadata.init_by_eplb(None, counts)
    return {
        "held": made.held.tolist(),
        "whole": whole.physical_to_logical_map.tolist(),
        "map": found.physical_to_logical_map.tolist(),
        "lists": found.logical_to_all_physical_map.tolist(),
        "gauge": value_of("sglang", "plugin"),
    }


@pytest.fixture(scope="module")
def engines_own() -> list[dict[str, Any]]:
    return on_ranks(with_a_death, None)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(with_a_death, config_in(tmp_path_factory.mktemp("elastic")))


def changed(found: dict[str, Any]) -> int:
    """Slots of active ranks that hold another expert than before."""
    differs = np.array(found["map"]) != np.array(found["held"])
    differs[:, DEAD * EACH : (DEAD + 1) * EACH] = False
    return int(differs.sum())


def test_all_ranks_compute_one_map_that_names_no_slot_of_the_dead_rank(
    ours: list[dict[str, Any]],
) -> None:
    assert all(one["map"] == ours[0]["map"] and one["lists"] == ours[0]["lists"] for one in ours)
    held, lists = np.array(ours[0]["map"]), np.array(ours[0]["lists"])
    of_dead = range(DEAD * EACH, (DEAD + 1) * EACH)
    assert not np.isin(lists, of_dead).any()
    for row, slots in zip(held, lists, strict=True):
        for expert, of_expert in enumerate(slots):
            used = of_expert[of_expert >= 0]
            assert used.size, f"expert {expert} has no slot"
            assert (row[used] == expert).all(), f"expert {expert} has the slot of another"


def test_survivors_keep_what_they_hold_where_the_engine_loads_nearly_all_again(
    ours: list[dict[str, Any]], engines_own: list[dict[str, Any]]
) -> None:
    num_live = ALL_LAYERS * (NUM_SLOTS - EACH)

    assert changed(engines_own[0]) > num_live / 2
    assert changed(ours[0]) < num_live / 2


def test_engine_plans_itself_while_all_ranks_are_active_and_the_plug_in_counts_as_off(
    ours: list[dict[str, Any]], engines_own: list[dict[str, Any]]
) -> None:
    assert ours[0]["whole"] == engines_own[0]["whole"]
    assert ours[0]["gauge"] == 0


def test_engine_s_own_map_serves_once_a_rank_has_returned(
    tmp_path: Path, engines_own: list[dict[str, Any]]
) -> None:
    found = on_ranks(with_a_death, config_in(tmp_path), True)

    assert found[0]["map"] == engines_own[0]["map"]
