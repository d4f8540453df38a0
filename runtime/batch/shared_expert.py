"""The shared expert as one more slot of every rank, whose tokens go where routed ones leave room.

    router -> split of the batch (``BatchSplit``) -> slot of the shared expert -> dispatch

Each token has one more pair, (slot, weight 1): that of the shared expert on its own rank, or on a
lighter one where its own is above the level (``runtime.batch.shared_rule``). The dispatch carries
K + 1 columns, to ``topology.widened(n)``. No exchange is added: the counts that the split gathered
say how many tokens each rank has.

Every rank holds the shared expert. Were the counts of two ranks to differ, the balance would
suffer, and not the output.

Shapes:  E experts, R ranks, each of which is a source of tokens, T tokens, K top-k.
"""

from __future__ import annotations

import numpy as np
import torch

from eplb.core.placement import EMPTY
from eplb.errors import ConfigError
from runtime.batch.shared_rule import LEAST, split_shared, token_units
from runtime.batch.split import BatchSplit
from runtime.routing import RoutingTable


class SharedSpread:
    """Chooses the slot of the shared expert for every token, by the split of the batch.

    Buffers have fixed addresses and shapes, for CUDA graphs.

    Args:
        table: this rank's, with an extra slot for the shared expert.
        split: this rank's, which has split each batch before.
        top_k: K.
        weight: work of a token of the shared expert, in tokens of a routed one: its intermediate
            size over theirs.
        least: tokens that a rank gives away, or none.

    Raises:
        ConfigError: the table has no extra slot, or sources are not the ranks.
    """

    def __init__(
        self,
        table: RoutingTable,
        split: BatchSplit,
        *,
        top_k: int,
        weight: float = 1.0,
        least: int = LEAST,
    ) -> None:
        slots = table.extra_slot(0)
        num_ranks, (num_sources, self._num_experts) = len(slots), split.gathered.shape
        if num_sources != num_ranks:
            raise ConfigError(
                f"found {num_sources} sources of tokens and {num_ranks} ranks, expected that each "
                "rank is a source: the shared expert's tokens have a home"
            )
        self._table, self._split = table, split
        self._top_k, self._weight, self._least = top_k, weight, least
        self._slot_of_rank = torch.from_numpy(slots.astype(np.int64)).to(table.slots.device)
        if table.slots.is_cuda:
            from runtime.batch.kernels import shared_expert

            self._kernels = shared_expert
            self.ranks = shared_expert.RankTokens.empty(num_ranks, table.slots.device)

    def append(
        self, layer: int, experts: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots and weights [T, K + 1], with the shared expert in the last column.

        Call it after ``BatchSplit.slots`` of the same batch. A token without any expert is padding
        and goes to no shared expert either.

        Args:
            layer: the MoE layer.
            experts: [T, K] ids.
            slots: [T, K] what the split has chosen.
            weights: [T, K].
        """
        if not experts.is_cuda:
            return self._on_host(layer, experts, slots, weights)
        split, kernels = self._split, self._kernels
        kernels.weigh_ranks(
            split.layer_split(layer),
            split.by_source(),
            split.batch.totals,
            split.batch.up_to,
            self.ranks,
            top_k=self._top_k,
        )
        shape = (len(experts), self._top_k + 1)
        out = slots.new_empty(shape), weights.new_empty(shape)
        kernels.append_shared(
            self.ranks,
            self._slot_of_rank,
            split.source,
            experts,
            slots,
            weights.contiguous(),
            out,
            num_experts=self._num_experts,
            token_units=token_units(self._weight),
            least=self._least,
        )
        return out

    def _on_host(
        self, layer: int, experts: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        source, named = self._split.source, self._table.split
        takes = (named["fixed"][layer] >= 0) | (named["fed_by"][layer] >= 0)
        tokens = -(-self._split.gathered.sum(dim=1) // self._top_k)
        shared = split_shared(
            self._split.batch.rank_load.numpy(),
            tokens.numpy(),
            takes.any(dim=1).numpy(),
            weight=self._weight,
            least=self._least,
        )
        is_real = ((experts >= 0) & (experts < self._num_experts)).any(dim=1)
        place = (torch.cumsum(is_real, 0) - 1).numpy()
        rank = torch.from_numpy(shared.targets(source, place, int(tokens[source])))
        slot = torch.where(is_real, self._slot_of_rank[rank], EMPTY)
        ones = weights.new_ones((len(weights), 1))
        return torch.cat([slots, slot[:, None]], dim=1), torch.cat([weights, ones], dim=1)
