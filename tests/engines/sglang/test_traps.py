"""What is easy to get wrong about SGLang 0.5.23, one test each, on the engine's own functions."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from eplb import DispatchRule, Placement, Topology, effective_shares
from rebalance.engines.common.start import EngineGroup
from rebalance.engines.sglang import engine
from rebalance.engines.sglang.entry import register
from rebalance.engines.sglang.replica_weights import (
    replica_lists,
    source_table,
    source_weights,
)
from tests.support.engines.ranks import EACH, NUM_EXPERTS, NUM_RANKS, NUM_SLOTS, on_ranks
from tests.support.engines.sglang_ranks import (
    ALL_LAYERS,
    ExpertLocationMetadata,
    HookRegistry,
    LazyValue,
    expert_location_dispatch,
    make_rank,
)

pytestmark = pytest.mark.slow
TOPOLOGY = Topology.uniform(1, NUM_RANKS, EACH)


def random_map(seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    rows = [random.permutation(np.arange(NUM_SLOTS) % NUM_EXPERTS) for _ in range(ALL_LAYERS)]
    return np.stack(rows)


def test_weights_in_a_lazy_value_are_found_by_their_rows() -> None:
    weights = {3: [torch.ones(1)], 1: [torch.zeros(1)]}
    model = SimpleNamespace(routed_experts_weights_of_layer=LazyValue(lambda: weights))

    with pytest.raises(KeyError):  # the trap: it is no mapping
        sorted(model.routed_experts_weights_of_layer)
    assert sorted(engine.expert_weights(model)) == [1, 3]


def installed(rank: int) -> dict[str, Any]:
    """The map that the plug-in's call makes, and the engine's call with a rank."""
    made = make_rank(rank, None)
    held, weights = random_map(3), random_weights()
    table = source_table(held, weights, NUM_EXPERTS, TOPOLOGY)
    lists = replica_lists(held, np.ones_like(held), NUM_EXPERTS)
    ours = engine.metadata_for(held, lists, table[:, :, rank].copy())
    theirs = ExpertLocationMetadata.init_by_mapping(None, torch.from_numpy(held), moe_ep_rank=rank)
    flat = ExpertLocationMetadata.init_by_mapping(None, torch.from_numpy(held))
    for one in vars(theirs):
        if isinstance(tensor := getattr(theirs, one), torch.Tensor):
            other = getattr(ours, one)
            assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape), one
    made.map.update(ours, list(range(ALL_LAYERS)))
    return {
        "ours": ours.logical_to_all_physical_map_num_valid.tolist(),
        "theirs": theirs.logical_to_all_physical_map_num_valid.tolist(),
        "engine's choice": flat.logical_to_rank_dispatch_physical_map.tolist(),
        "served": [made.choose(layer, np.ones(NUM_EXPERTS)).tolist() for layer in range(3)],
        "table": table.tolist(),
    }


def random_weights() -> np.ndarray:
    held = random_map(3)
    share = np.random.default_rng(4).uniform(0.1, 1.0, held.shape)
    return source_weights(held, share, NUM_RANKS)


@pytest.fixture(scope="module")
def found_maps() -> list[dict[str, Any]]:
    return on_ranks(installed)


def test_live_map_keeps_all_replicas_where_a_map_with_a_rank_collapses(
    found_maps: list[dict[str, Any]],
) -> None:
    counts = [np.bincount(row, minlength=NUM_EXPERTS).tolist() for row in random_map(3)]
    assert all(one["ours"] == counts for one in found_maps)
    assert all(one["theirs"] != counts for one in found_maps), "its call with a rank collapses"


def test_static_rule_as_booked_for_files_is_the_engines(found_maps: list[dict[str, Any]]) -> None:
    placement = Placement(random_map(3).astype(np.int32), NUM_EXPERTS)
    booked = effective_shares(placement, TOPOLOGY, DispatchRule.SGLANG_STATIC)
    real = np.zeros_like(booked)
    for one in found_maps:
        chosen = np.array(one["engine's choice"])  # [L, E]
        np.add.at(real, (np.arange(ALL_LAYERS)[:, None], chosen), 1 / NUM_RANKS)
    np.testing.assert_allclose(real, booked, atol=1e-12)


def test_static_rule_serves_the_slots_of_the_installed_table(
    found_maps: list[dict[str, Any]],
) -> None:
    table, held = np.array(found_maps[0]["table"]), random_map(3)
    used = np.zeros_like(held)
    for rank, one in enumerate(found_maps):
        for layer, slots in enumerate(one["served"]):
            experts = held[layer, np.array(slots)]
            assert (np.array(slots) == table[layer, experts, rank]).all()
    np.add.at(used, (np.arange(ALL_LAYERS)[:, None, None], table), 1)
    assert (used == random_weights()).all(), "a slot is used by as many ranks as it weighs"


def split(rank: int, a2a: str) -> tuple[list[int], list[int]]:
    """Slots that the engine chooses for one expert from a weighted list, over 4,096 rows."""
    made = make_rank(rank, None, ep_dispatch_algorithm="dynamic", moe_a2a_backend=a2a)
    held = np.tile(np.arange(NUM_SLOTS) % NUM_EXPERTS, (ALL_LAYERS, 1))
    weights = np.ones_like(held)
    weights[:, 0] = 3  # expert 0 is in slots 0 and 16
    made.map.update(
        engine.metadata_for(held, replica_lists(held, weights, NUM_EXPERTS), None),
        list(range(ALL_LAYERS)),
    )
    torch.manual_seed(rank)
    experts = torch.zeros((4096, 1), dtype=torch.int64)
    info = expert_location_dispatch.ExpertLocationDispatchInfo.init_new(1)
    chosen = expert_location_dispatch.topk_ids_logical_to_physical(experts, info)
    return chosen.flatten().tolist(), [0, 16]


def test_dynamic_rule_splits_by_repeated_ids() -> None:
    for chosen, _ in on_ranks(split, "deepep"):
        assert abs(Counter(chosen)[0] / 4096 - 0.75) < 4 * (0.75 * 0.25 / 4096) ** 0.5


def test_without_all_to_all_all_ranks_choose_the_same_replica() -> None:
    found = [chosen for chosen, _ in on_ranks(split, "none")]

    assert all(chosen == found[0] for chosen in found), "a rank's own choice corrupts the output"
    assert Counter(found[0]) == {0: 3072, 16: 1024}, "exact over consecutive rows"


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"moe_a2a_backend": "none"}, "without an all-to-all back end"),
        ({"expert_distribution_recorder_mode": "per_pass"}, "recorder-mode per_pass"),
        ({"is_ep_joiner": True}, "this process joins ranks that serve"),
    ],
)
def test_start_that_the_plugin_cannot_serve_is_refused(flags: dict[str, Any], reason: str) -> None:
    def work(rank: int) -> str:
        from sglang.srt.runtime_context import get_exec

        make_rank(rank, None)
        with get_exec().moe.override(**flags):
            return engine.refusal()

    assert all(reason in found for found in on_ranks(work))


def test_pipeline_stages_are_refused_because_of_the_ranks_of_the_updater() -> None:
    def work(rank: int) -> str:
        from sglang.srt.runtime_context import get_parallel

        make_rank(rank, None)
        with get_parallel().override(pp_size=2):
            return engine.refusal()

    assert all("--pp-size 2, expected 1" in found for found in on_ranks(work))


def test_replica_of_the_model_is_a_group_by_the_engines_number() -> None:
    def work(rank: int) -> list[Any]:
        from sglang.srt.runtime_context import get_parallel

        make_rank(rank, None)
        alone = engine.group()
        with get_parallel().override(dp_size=2, dp_rank=1):
            return [alone, engine.group()]

    assert on_ranks(work)[0] == [EngineGroup(), EngineGroup("dp1", "", ("dp0", "dp1"))]


def test_without_a_deployment_the_plugin_is_inert(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EPLB_CONFIG", raising=False)
    register()

    assert not HookRegistry._hooks
