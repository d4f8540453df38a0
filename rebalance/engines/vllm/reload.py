"""A layer whose weights vLLM loads again serves by the map that they are loaded by.

vLLM's loader puts every expert where the map of the start has it, whatever map serves (vLLM issue
55228). ``reload_weights`` and each engine of a weight update end in one function of vLLM, on every
rank alike; there the layers that were loaded get the map of the start back. Nothing is exchanged:
with data parallelism, ranks load again one after the other, between passes that they make together.

While vLLM's asynchronous transfer is under way, a layer that it has in hand would be copied over
the new weights. Then the maps stay, and the slots are repaired at the next rebalance.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from rebalance.engines.vllm.conform import experts_of
from rebalance.engines.vllm.decisions import MapDecision, ServedMap

log = logging.getLogger(__name__)


def find_loaded(models: Iterable[ServedMap], loaded: Any) -> dict[ServedMap, list[int]]:
    """Find the layers that vLLM has loaded again, before it ends the loading.

    Args:
        models: of this process.
        loaded: the module that vLLM loads, with all modules in it.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    def is_loaded(experts: Any) -> bool:
        info = get_layerwise_info(experts)
        return not info.can_load() or info.load_numel > 0  # complete, or completed at the end

    modules = set(loaded.modules())
    layers = {
        served: [
            number
            for number, layer in enumerate(served.model.moe_layers)
            if experts_of(layer) in modules and is_loaded(experts_of(layer))
        ]
        for served in models
    }
    return {served: numbers for served, numbers in layers.items() if numbers}


def serve_start(served: ServedMap, layers: Iterable[int]) -> None:
    """Have layers that were loaded again serve by the map of the start."""
    from vllm.distributed.eplb import eplb_state

    model_state, start = served.model_state, served.start
    moved = [layer for layer in layers if not np.array_equal(served.held[layer], start[layer])]
    if not moved:
        return
    if model_state.rebalanced:
        log.warning(
            "weights were loaded again while experts move: slots of %d layers have the experts of "
            "the start's map, and are repaired at the next rebalance",
            len(moved),
        )
        return
    served.latest = MapDecision(start, np.zeros_like(start), served.num_experts, is_planned=False)
    for layer in moved:
        row = torch.from_numpy(start[layer].copy())
        eplb_state._commit_eplb_maps_for_layer(model_state, row, layer)
    log.warning("weights of %d layers were loaded again, by the start's map: it serves", len(moved))
