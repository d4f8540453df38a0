"""The shared expert as one more slot of every rank, whose tokens go where routed ones leave room.

    router -> split of the batch (``BatchSplit``) -> slot of the shared expert -> dispatch

Each token has one more pair, (slot, weight 1): that of the shared expert on its own rank, or on a
lighter one where its own is above the level. The dispatch carries K + 1 columns, to
``topology.widened(n)``. No exchange is added: the counts that the split gathered say how many
tokens each rank has.

Every rank holds the shared expert. Were the counts of two ranks to differ, the balance would
suffer, and not the output.

Once a batch's routed tokens are split among ranks, the tokens of the shared expert can go wherever
there is room, and the least load of the busiest rank (the level) has a closed form: the mean of all
tokens, or the most routed tokens of a rank where that is more. No token moves beyond what this
level needs. All figures of the rule are whole numbers, so that every rank and device decides alike;
``runtime/batch/kernels/shared_expert.py`` repeats its arithmetic on a GPU.

Shapes:  E experts, R ranks, each of which is a source of tokens, T tokens, K top-k.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from eplb.core.placement import EMPTY
from eplb.errors import ConfigError
from runtime.batch.split import BatchSplit
from runtime.routing import RoutingTable

UNIT = 64  # load of a routed token; a shared token's is a whole number near UNIT times its weight
# Tokens that a rank gives away at least. Below a tile of the experts' product its time is flat.
LEAST = 64
FILLS = 4  # passes of the waterfill of the ranks that take; each drops those above the level

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class SharedSplit:
    """Where the tokens of the shared expert go, by their places.

    The first tokens of each source stay. The others of all sources, source by source, are one line,
    of which each rank takes a run.
    """

    kept: Ints  # [R] tokens of each source that stay at home
    start: Ints  # [R] place in the line of the first token that a source gives away
    up_to: Ints  # [R] place in the line up to which a rank takes tokens

    @property
    def taken(self) -> Ints:
        """[R] tokens that a rank takes from others."""
        return np.diff(self.up_to, prepend=0)

    def targets(self, source: int, place: Ints, num_tokens: int) -> Ints:
        """Ranks of a source's tokens by their places 0, 1, ... among its tokens.

        Places from ``num_tokens`` on, of which the split did not know, stay at home.
        """
        moves = (place >= self.kept[source]) & (place < num_tokens)
        in_line = place - self.kept[source] + self.start[source]
        return np.where(moves, np.searchsorted(self.up_to, in_line, side="right"), source)


def split_shared(
    rank_load: NDArray[np.floating],
    tokens: NDArray[np.integer],
    takes: NDArray[np.bool_],
    *,
    weight: float = 1.0,
    least: int = LEAST,
) -> SharedSplit:
    """Divide the tokens of the shared expert among ranks.

    Args:
        rank_load: [R] routed tokens of each rank.
        tokens: [R] tokens of each source, a rank's own.
        takes: [R] whether a rank serves. Another, such as a drained one, keeps its own tokens and
            takes none.
        weight: work of a token of the shared expert, in routed tokens.
        least: tokens that a rank gives away, or none.
    """
    token = token_units(weight)
    load = np.floor(rank_load.astype(np.float32) + np.float32(0.5)).astype(np.int64) * UNIT
    own = tokens.astype(np.int64)
    total = load + token * own
    mean = -(-total[takes].sum() // max(1, takes.sum()))
    level = max(mean, load[takes].max(initial=0))
    given = np.where(takes, np.maximum(total - level, 0) // token, 0)
    given[given < least] = 0
    moved = given.sum()

    is_below = takes & (total < level)
    is_used, fill = is_below, level
    for _ in range(FILLS):
        fill = -(-(moved * token + total[is_used].sum()) // max(1, is_used.sum()))
        is_used = is_below & (total < fill)
    room = np.cumsum(np.where(is_used, fill - total, 0))
    return SharedSplit(own - given, np.cumsum(given) - given, moved * room // max(1, room[-1]))


def token_units(weight: float) -> int:
    """Load of a shared token in units."""
    return max(1, round(weight * UNIT))


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
