"""Weights that vLLM loads again serve at once, in vLLM's real balancer and by its own reload."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="run `make test-engines`: it has vllm 0.33.0 in .venv-vllm")

from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)

from tests.support.engines.ranks import (
    EACH,
    NUM_EXPERTS,
    NUM_LAYERS,
    NUM_RANKS,
    NUM_SLOTS,
    config_in,
    on_ranks,
    weights_of,
)
from tests.support.engines.vllm_ranks import make_rank

pytestmark = pytest.mark.slow
START = np.tile(np.arange(NUM_SLOTS) % NUM_EXPERTS, (NUM_LAYERS, 1))
TENSORS = ("weight", "scale")


def load_slot(param: torch.Tensor, record: torch.Tensor, slot: int) -> None:
    """What a parameter of vLLM has as its ``weight_loader``, for a slot of a layer."""
    param.data[slot].copy_(record)


def make_loadable(layers: list[Any]) -> None:
    """Let vLLM load layers again."""
    for layer in layers:
        for name in TENSORS:
            getattr(layer, name).weight_loader = load_slot
        record_metadata_for_reloading(layer)


def load_again(made: Any, *, added: int = 0, layers: Any = range(NUM_LAYERS)) -> None:
    """Load layers as vLLM's ``reload_weights`` does: by the map of the start.

    Args:
        made: this rank.
        added: to every number of the weights before.
        layers: the others have no weights in what is loaded.
    """
    module = torch.nn.ModuleList(made.model.moe_layers)
    initialize_layerwise_reload(module)
    for number in layers:
        layer = made.model.moe_layers[number]
        for slot, expert in enumerate(START[number, made.rank * EACH :][:EACH].tolist()):
            for name, record in zip(TENSORS, weights_of(number, expert), strict=True):
                tensor = getattr(layer, name)
                tensor.weight_loader(tensor, record + added, slot)
    finalize_layerwise_reload(module, SimpleNamespace(dtype=torch.float32))


def until_nothing_moves(made: Any) -> None:
    """Step until no transfer is under way; vLLM's ranks agree on it."""
    while made.model_state.rebalanced:
        made.state.expert_rearrangement_step = 0  # no further one follows at once
        made.steps()


def reloaded(rank: int, config: Path, is_async: bool, added: int, layers: range) -> dict[str, Any]:
    made = make_rank(rank, config, is_async=is_async, prepare=make_loadable)
    made.until_experts_move(START)
    made.until_maps(2)
    until_nothing_moves(made)
    before, generation = made.held.copy(), made.generation

    load_again(made, added=added, layers=layers)

    now = made.held.copy()
    if len(layers) == NUM_LAYERS or not added:
        made.check_weights(added)  # before any further pass
        made.until_maps(3, added=added)
    stopped = made.plugin.stopped
    result = made.result() | {"before": before, "now": now, "stopped": stopped}
    return result | {"generations": made.generation - generation}


@pytest.mark.parametrize("added", [0, 1], ids=["the same weights", "new weights"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_weights_that_are_loaded_again_serve_by_their_map_before_the_next_pass(
    is_async: bool, added: int, tmp_path: Path
) -> None:
    config = config_in(tmp_path, engine__records="off")

    results = on_ranks(reloaded, config, is_async, added, range(NUM_LAYERS))

    for one in results:
        assert (one["before"] != START).any()
        assert (one["now"] == START).all()
        assert one["generations"] >= 4  # the map of the start, and three of plans
        assert (one["stopped"], one["placement"]) == ("", 1.0)
        assert one["faults"] == [] or added


def test_layers_that_are_not_loaded_again_keep_their_map(tmp_path: Path) -> None:
    config = config_in(tmp_path, engine__records="off")

    results = on_ranks(reloaded, config, False, 0, range(1))

    for one in results:
        assert (one["now"][0] == START[0]).all()
        assert (one["now"][1:] == one["before"][1:]).all()
        assert one["faults"] == []
    assert len({one["generation"] for one in results}) == 1
    assert len(results) == NUM_RANKS
