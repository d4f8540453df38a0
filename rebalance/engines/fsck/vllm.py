"""Where vLLM 0.33 has its experts: it moves ``expert_weights``, and modules own further tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rebalance.engines.fsck.tensors import LayerTensors, owners_of, tensors_of


class VllmView:
    """The experts of one model of vLLM's ``EplbState``.

    Args:
        model_state: an ``EplbModelState``.
        rank: in the group that balances.
        num_ranks: of that group.
    """

    def __init__(self, model_state: Any, rank: int, num_ranks: int) -> None:
        self._state, self.rank, self.num_ranks = model_state, rank, num_ranks
        self._moved = [list(tensors) for tensors in model_state.model.expert_weights]
        self._owners = [
            owners_of(layer, tensors)
            for layer, tensors in zip(model_state.model.moe_layers, self._moved, strict=True)
        ]

    @property
    def rows(self) -> Sequence[int]:
        """MoE layers in order."""
        return range(len(self._moved))

    def tensors(self, row: int) -> LayerTensors:
        """Return the tensors of a layer."""
        layer = self._state.model.moe_layers[row]
        return tensors_of(self._moved[row], layer, self._owners[row], self.rank, self.num_ranks)

    def held(self, row: int) -> NDArray[np.int64]:
        """Return [S] experts by slot."""
        held = getattr(self._state, "physical_to_logical_map_cpu", None)
        if held is None:
            held = self._state.physical_to_logical_map.cpu()
        found: NDArray[np.int64] = held[row].numpy().astype(np.int64)
        return found
