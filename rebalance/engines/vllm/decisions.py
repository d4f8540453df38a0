"""What the policy decided last: read where maps are committed and where weights move.

vLLM passes the map alone from its policy to the commit, one layer at a time in its asynchronous
mode. The shares of the map are kept here and found again by the layer's row: a row that is not the
decided one, for whatever reason, gets vLLM's own even lists.

Shapes:  L MoE layers, E experts, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rebalance.engines.common.replica_weights import shares_of
from rebalance.engines.vllm.replica_lists import Ints, RepeatedLists, repeated_lists


@dataclass(frozen=True, eq=False)
class Decision:
    """A map for all layers, and how often each slot stands in the list of its expert.

    The lists are made here, on the policy's thread, and not at a commit between two passes.
    """

    before: Ints  # [L, S] the map that it was made from
    held: Ints  # [L, S] the map that it asks for
    repeats: Ints  # [L, S]; 0: vLLM's own list
    num_experts: int
    lists: RepeatedLists = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lists", repeated_lists(self.held, self.repeats))

    def shares(self) -> NDArray[np.float64]:
        """[L, S] the part of its expert's rows that each slot gets."""
        return shares_of(self.held, np.maximum(self.repeats, 1))


class Decisions:
    """The latest decision for each shape of model; used by the step and the policy's thread."""

    def __init__(self) -> None:
        self._latest: dict[tuple[int, int, int], Decision] = {}

    def add(self, decision: Decision) -> None:
        """Replace the decision of the models of this shape."""
        self._latest[(*decision.held.shape, decision.num_experts)] = decision

    def of_map(self, held: Ints, num_experts: int) -> Decision | None:
        """Return the decision for a whole map [L, S], if it asks for that map."""
        found = self._latest.get((*held.shape, num_experts))
        return found if found is not None and np.array_equal(found.held, held) else None

    def of_layer(self, row: Ints, layer: int, num_layers: int, num_experts: int) -> Decision | None:
        """Return the decision that asks for this row [S] of a layer, if there is one."""
        found = self._latest.get((num_layers, len(row), num_experts))
        return found if found is not None and np.array_equal(found.held[layer], row) else None

    def keeps_layer(self, before: Ints, layer: int, num_layers: int, num_experts: int) -> bool:
        """Whether the latest decision was made from this row [S] and keeps it.

        Alike on all ranks, because the decision is.
        """
        found = self._latest.get((num_layers, len(before), num_experts))
        return (
            found is not None
            and np.array_equal(found.before[layer], before)
            and np.array_equal(found.held[layer], before)
        )
