"""The shared expert at home: computed while the results travel back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.simulator.local_dispatch import LocalDispatcher
from eplb.core.placement import Placement
from runtime.counters import SlotCounter
from runtime.dispatch.all_to_all import Pending, Received
from runtime.experts import ExpertBank, ExpertSchema
from runtime.model.compute import LoopExperts, swiglu
from runtime.model.moe import MoELayer
from runtime.routing import RoutingTable

NUM_EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 4, 2, 8, 16


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


class TravellingDispatcher(LocalDispatcher):
    """Notes how many products ran while results travelled."""

    def __init__(self, products: Products) -> None:
        super().__init__(NUM_EXPERTS, SlotCounter(1, NUM_EXPERTS))
        self._products, self.meanwhile = products, list[int]()

    def begin_combine(self, layer: int, results: torch.Tensor, received: Received) -> Pending:
        """Results arrive when they are asked for."""
        before = self._products.count

        def finish() -> torch.Tensor:
            self.meanwhile.append(self._products.count - before)
            return self.combine(layer, results, received)

        return Pending(finish)


def test_shared_expert_at_home_is_computed_while_results_travel_back() -> None:
    torch.manual_seed(0)
    bank = ExpertBank(ExpertSchema.swiglu(HIDDEN, INTERMEDIATE), 1, NUM_EXPERTS, num_staging=0)
    for tensor in bank.weights(0).values():
        tensor.normal_()
    table = RoutingTable(Placement(np.arange(NUM_EXPERTS)[None], NUM_EXPERTS), max_replicas=1)
    shared = torch.randn((2 * INTERMEDIATE, HIDDEN)), torch.randn((HIDDEN, INTERMEDIATE))
    tokens, weights = torch.randn((5, HIDDEN)), torch.rand((5, TOP_K))
    chosen = torch.tensor([[0, 1], [2, 0], [1, 0], [0, 2], [2, 1]])
    products = Products()
    dispatcher = TravellingDispatcher(products)
    without = MoELayer(0, TOP_K, LoopExperts(bank), table, LocalDispatcher(4, SlotCounter(1, 4)))
    layer = MoELayer(0, TOP_K, LoopExperts(bank), table, dispatcher, shared)

    with products:
        output = layer.forward(tokens, chosen, weights, salt=0)

    routed = without.forward(tokens, chosen, weights, salt=0)
    torch.testing.assert_close(output, routed + swiglu(tokens, *shared))
    assert dispatcher.meanwhile == [2]  # gate and up, down
