"""Where SGLang 0.5.23 has its experts, and how its ranks choose replicas."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rebalance.engines.common.fsck.check import Gather
from rebalance.engines.common.fsck.rank_check import check_choices
from rebalance.engines.common.fsck.report import Fault
from rebalance.engines.common.fsck.tensors import LayerTensors, owners_of, tensors_of

log = logging.getLogger(__name__)


class SglangView:
    """The experts of a model; layers are all hidden layers, as in the engine's map."""

    def __init__(self, model: Any, rank: int, num_ranks: int) -> None:
        self._model, self.rank, self.num_ranks = model, rank, num_ranks
        moved = model.routed_experts_weights_of_layer
        self._owners = {row: owners_of(model, tensors) for row, tensors in moved.items()}

    @property
    def _map(self) -> Any:
        from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

        return get_global_expert_location_metadata()

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self._map.num_logical_experts)

    @property
    def rows(self) -> Sequence[int]:
        """Layers with routed experts."""
        return sorted(self._owners)

    def tensors(self, row: int) -> LayerTensors:
        """Return the tensors of a layer."""
        moved = self._model.routed_experts_weights_of_layer[row]
        return tensors_of(moved, self._model, self._owners[row], self.rank, self.num_ranks)

    def held(self, row: int) -> NDArray[np.int64]:
        """Return [S] experts by slot."""
        found: NDArray[np.int64] = self._map.physical_to_logical_map_cpu[row].numpy()
        return found

    def choose(self) -> tuple[NDArray[np.int64], dict[int, NDArray[np.int64]]]:
        """Experts [N, 1] of some tokens, and in each layer the slots that this rank chooses."""
        from sglang.srt.eplb.expert_location_dispatch import (
            ExpertLocationDispatchInfo,
            topk_ids_logical_to_physical,
        )

        device = self._map.physical_to_logical_map.device
        experts = torch.arange(2 * self.num_experts, device=device)[:, None] % self.num_experts
        # Requests draw from the same generator: its state is given back.
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            chosen = {
                row: topk_ids_logical_to_physical(experts, ExpertLocationDispatchInfo.init_new(row))
                for row in self.rows
            }
        slots = {row: found.cpu().numpy().astype(np.int64) for row, found in chosen.items()}
        return experts.cpu().numpy(), slots

    def check_choices(self, gather: Gather) -> list[Fault]:
        """Compare what all ranks choose for the same tokens; collective, whatever fails here."""
        from sglang.srt.runtime_context import get_exec

        try:
            experts, own = self.choose()
        except Exception as exc:
            experts, own = np.zeros((0, 1), dtype=np.int64), {}
            log.warning("choices of replicas cannot be checked: %s: %s", type(exc).__name__, exc)
        message = [[row, slots.tolist()] for row, slots in own.items()]
        by_rank = [
            {int(row): np.array(slots, dtype=np.int64) for row, slots in found}
            for found in gather(message)
        ]
        is_shared = get_exec().moe.moe_a2a_backend == "none"
        rows = [row for row in self.rows if all(row in found for found in by_rank)]
        return [
            fault
            for row in rows
            for fault in check_choices(
                row, experts, [found[row] for found in by_rank], self.held(row), is_shared=is_shared
            )
        ]
