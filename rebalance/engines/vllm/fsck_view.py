"""Where vLLM 0.33 has its experts: it moves ``expert_weights``, and modules own further tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rebalance.engines.common.fsck.tensors import LayerTensors, owners_of, tensors_of


class VllmView:
    """The experts of one model of vLLM's ``EplbState``.

    Args:
        model: with the tensors that vLLM moves, ``expert_weights``, and their ``moe_layers``.
        served: [L, S] experts by slot, which commits keep current: vLLM's own map is on the device,
            and a step does not wait for it.
        rank: in the group that balances.
        num_ranks: of that group.
    """

    def __init__(self, model: Any, served: NDArray[np.int64], rank: int, num_ranks: int) -> None:
        self._model, self._served, self.rank, self.num_ranks = model, served, rank, num_ranks
        pairs = zip(model.moe_layers, model.expert_weights, strict=True)
        self._owners = [owners_of(layer, list(tensors)) for layer, tensors in pairs]

    @property
    def rows(self) -> Sequence[int]:
        """MoE layers in order."""
        return range(len(self._owners))

    def tensors(self, row: int) -> LayerTensors:
        """Return the tensors of a layer."""
        layer, moved = self._model.moe_layers[row], list(self._model.expert_weights[row])
        return tensors_of(moved, layer, self._owners[row], self.rank, self.num_ranks)

    def held(self, row: int) -> NDArray[np.int64]:
        """Return [S] experts by slot."""
        found: NDArray[np.int64] = self._served[row]
        return found
