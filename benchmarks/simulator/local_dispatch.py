"""A dispatcher of one rank that holds all slots, for layers that a CUDA graph holds."""

from __future__ import annotations

import torch

from runtime.counters import SlotCounter
from runtime.dispatch.all_to_all import Received

FP8 = torch.float8_e4m3fn


class LocalDispatcher:
    """All slots are here: rows are gathered by slot, and nothing leaves the device.

    Shapes follow those of the tokens alone, so that a CUDA graph can hold it. Padding is not
    supported.
    """

    def __init__(self, num_slots: int, counter: SlotCounter, *, use_fp8: bool = False) -> None:
        self._num_slots, self._counter, self._use_fp8 = num_slots, counter, use_fp8

    def dispatch(
        self, layer: int, tokens: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor
    ) -> Received:
        """One row for each (token, k) pair, sorted by slot."""
        flat = slots.flatten()
        order = torch.argsort(flat.to(torch.int32), stable=True)
        counts = torch.zeros(self._num_slots, dtype=torch.int32, device=flat.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
        self._counter.add(layer, counts)
        sources, place = order // slots.shape[1], torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        ticket = (place, weights)
        if not self._use_fp8:
            return Received(tokens[sources], counts, ticket)
        from runtime.kernels.quantise import GROUP, Quantised, quantise_rows

        groups = tokens.shape[1] // GROUP
        sent = Quantised(
            torch.empty_like(tokens, dtype=FP8),
            torch.empty((len(tokens), groups), dtype=torch.float32, device=tokens.device),
        )
        quantise_rows(tokens, sent)
        rows = sent.values.view(torch.uint8)[sources].view(FP8)
        return Received(rows, counts, ticket, sent.scales[sources])

    def combine(self, layer: int, results: torch.Tensor, received: Received) -> torch.Tensor:
        """Weighted sums where the tokens came from."""
        place, weights = received.ticket
        pairs = results[place].view(*weights.shape, results.shape[1])
        return torch.bmm(weights.to(results.dtype)[:, None, :], pairs).squeeze(1)
