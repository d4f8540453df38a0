"""Tokens received per slot, counted where they arrive; and forward passes.

Counting at the receiver is free (the dispatcher knows how much it received, and DeepEP's kernel
adds it up by itself), never counts padding, and needs no collective: each rank reports what it held
and what it got.

A pass is one call of the whole model: two micro-batches in flight, speculative tokens and dummy
batches are part of the pass that runs them. So passes are counted where the model is called, never
in a dispatch, which a pass may do twice.

Shapes:  L MoE layers, C slots of this rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.hooks import RemovableHandle

from runtime.streams import Completion

WRAP = 2**32  # the device counts in 32 bits, modulo this; hosts read differences


class Cut:
    """The counters as they stood at one point of the compute stream."""

    def __init__(self, received: torch.Tensor, before: NDArray[np.int64] | Cut) -> None:
        self._before = before
        self._counts: NDArray[np.int64] | None = None
        self._snapshot = torch.empty(
            received.shape, dtype=received.dtype, pin_memory=received.is_cuda
        )
        self._snapshot.copy_(received, non_blocking=True)
        self.arrival = Completion(is_cuda=received.is_cuda)  # when the figures are on the host

    def is_ready(self) -> bool:
        """Return whether the figures have arrived; on a CPU they always have."""
        return self.arrival.is_complete()

    def tokens(self) -> NDArray[np.int64]:
        """[L, C] received between the cut before and this one. Waits until they have arrived."""
        before = self._before.counts() if isinstance(self._before, Cut) else self._before
        self._before = before  # drops the chain of older cuts
        received: NDArray[np.int64] = (self.counts() - before) % WRAP
        return received

    def counts(self) -> NDArray[np.int64]:
        """[L, C] the counters themselves, modulo WRAP."""
        if self._counts is None:
            self.arrival.wait()
            self._counts = self._snapshot.numpy().astype(np.int64)
        return self._counts


class SlotCounter:
    """Tokens that each of this rank's slots received, counted on the device and never reset.

    32 bits, because that is what DeepEP's kernels add to; a slot that gets 4,096 tokens a step
    wraps after 7 hours at 20 steps a second, which differences modulo 2**32 do not notice.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        device: str | torch.device = "cpu",
    ) -> None:
        self.received = torch.zeros((num_layers, num_slots), dtype=torch.int32, device=device)
        self._last: NDArray[np.int64] | Cut = np.zeros((num_layers, num_slots), dtype=np.int64)

    def row(self, layer: int) -> torch.Tensor:
        """Counters [C] of a layer, for a kernel that adds to them."""
        return self.received[layer]

    def add(self, layer: int, received: torch.Tensor) -> None:
        """Count tokens [C] received by the layer's slots in this step."""
        self.received[layer] += received

    def cut(self) -> Cut:
        """Mark this point of the compute stream. Stops nothing; read the figures later."""
        self._last = Cut(self.received, self._last)
        return self._last

    def drain(self) -> NDArray[np.int64]:
        """Return the counts [L, C] since the last cut."""
        return self.cut().tokens()


class PassCounter:
    """Forward passes begun by this process, for engines that do not number them."""

    def __init__(self) -> None:
        self._begun = 0

    @property
    def steps(self) -> int:
        """Passes begun so far: the number of the next one, from 0 on."""
        return self._begun

    def begin(self) -> int:
        """Count the pass that begins now, and return its number."""
        self._begun += 1
        return self._begun - 1

    def go_on(self, number: int) -> None:
        """Give the next pass this number, on which the survivors of a death have agreed."""
        self._begun = number

    def watch(self, model: torch.nn.Module) -> RemovableHandle:
        """Count every call of ``model``, the outermost module of the engine.

        Returns:
            A handle whose ``remove`` ends it.
        """

        def before(*_: Any) -> None:
            self.begin()

        return model.register_forward_pre_hook(before)
