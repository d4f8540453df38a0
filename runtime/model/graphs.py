"""Decode steps as one captured CUDA graph, replayed while experts are swapped under it.

A graph holds addresses. Live slots, routing table, counters and the input buffers never move, and
swaps and shares are copies into them between replays, so nothing is ever captured again.

Shapes:  M micro-batches of a step, B sequences, N positions, L MoE layers.
"""

from __future__ import annotations

from typing import Literal

import torch

from eplb.errors import ConfigError
from runtime.model.moe import Forward, MoEStack
from runtime.streams import new_stream

WARM_UP_STEPS = 3  # kernels are compiled and buffers made before the capture, not in it


class CapturedStack:
    """A model stack whose forward pass is one graph launch.

    With ``micro_batches`` = 2 a step is ``MoEStack.forward_two``, which needs a dispatcher whose
    transfers a graph can hold: the hooks of DeepEP's low-latency mode are launches like all others.
    """

    def __init__(
        self,
        stack: MoEStack,
        *,
        shape: tuple[int, int],
        num_layers: int,
        device: torch.device,
        micro_batches: Literal[1, 2] = 1,
    ) -> None:
        # The graph holds addresses, not references: without this one, weights that only the stack
        # knew would be freed, and replays would read whatever came to lie there.
        self._stack = stack
        self._ids = torch.zeros((micro_batches, *shape), dtype=torch.int64, device=device)
        self._seeds = torch.zeros((micro_batches, num_layers), dtype=torch.int64, device=device)
        self._layer_seeds = torch.arange(num_layers) * 0x9E3779B1  # one draw a layer, none alike
        stream = new_stream(device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_STEPS):
                self._run()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._answers = self._run()
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
        (answer,) = self._replay((token_ids,), (salt,))
        return answer

    def forward_two(
        self, first: torch.Tensor, second: torch.Tensor, *, salts: tuple[int, int]
    ) -> tuple[Forward, Forward]:
        """Replay one step of two micro-batches [B, N]; its answers are overwritten by the next.

        Raises:
            ConfigError: the captured step is of one batch.
        """
        a, b = self._replay((first, second), salts)
        return a, b

    def _run(self) -> tuple[Forward, ...]:
        if len(self._ids) == 1:
            return (self._stack.forward(self._ids[0], salt=self._seeds[0]),)
        salts = (self._seeds[0], self._seeds[1])
        return self._stack.forward_two(self._ids[0], self._ids[1], salts=salts)

    def _replay(
        self, token_ids: tuple[torch.Tensor, ...], salts: tuple[int, ...]
    ) -> tuple[Forward, ...]:
        if len(token_ids) != len(self._ids):
            raise ConfigError(
                f"found {len(token_ids)} micro-batches in a step, "
                f"expected {len(self._ids)}, as it was captured"
            )
        for buffer, ids in zip(self._ids, token_ids, strict=True):
            buffer.copy_(ids, non_blocking=True)
        seeds = torch.stack([self._layer_seeds + salt for salt in salts])
        # Pinned: a copy from pageable memory may wait for the stream, where a kernel may be waiting
        # for a dead peer. The allocator keeps it until the copy is done.
        self._seeds.copy_(seeds.pin_memory(), non_blocking=True)
        self._graph.replay()
        return self._answers
