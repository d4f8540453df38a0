"""Decode steps as one captured CUDA graph, replayed while experts are swapped under it.

A graph holds addresses. Live slots, routing table, counters and the input buffers never move, and
swaps and shares are copies into them between replays, so nothing is ever captured again.

Shapes:  B sequences, N positions, L MoE layers.
"""

from __future__ import annotations

import torch

from eplb.errors import ConfigError
from runtime.model.moe import Forward, MoEStack
from runtime.streams import new_stream

WARM_UP_STEPS = 3  # kernels are compiled and buffers made before the capture, not in it


class CapturedStack:
    """A model stack whose forward pass is one graph launch."""

    def __init__(
        self,
        stack: MoEStack,
        *,
        shape: tuple[int, int],
        num_layers: int,
        device: torch.device,
    ) -> None:
        # The graph holds addresses, not references: without this one, weights that only the stack
        # knew would be freed, and replays would read whatever came to lie there.
        self._stack = stack
        self._ids = torch.zeros(shape, dtype=torch.int64, device=device)
        self._seeds = torch.zeros(num_layers, dtype=torch.int64, device=device)
        self._layer_seeds = torch.arange(num_layers) * 0x9E3779B1  # one draw a layer, none alike
        stream = new_stream(device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_STEPS):
                self._run()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._answer = self._run()
        self.num_captures = 1

    def forward(
        self, token_ids: torch.Tensor, *, salt: int, forced: torch.Tensor | None = None
    ) -> Forward:
        """Replay one step on token ids [B, N]. The answer is overwritten by the next step.

        Raises:
            ConfigError: ``forced`` is given; a captured step routes by its own router.
        """
        if forced is not None:
            raise ConfigError("a captured step takes no recorded routes, expected an eager one")
        self._ids.copy_(token_ids, non_blocking=True)
        # Pinned: a copy from pageable memory may wait for the stream, where a kernel may be waiting
        # for a dead peer. The allocator keeps it until the copy is done.
        self._seeds.copy_((self._layer_seeds + salt).pin_memory(), non_blocking=True)
        self._graph.replay()
        return self._answer

    def _run(self) -> Forward:
        return self._stack.forward(self._ids, salt=self._seeds)
