"""What a rank computes for the rows it received: its slots' experts, on a CPU or a GPU.

Shapes:  C slots of this rank, n rows, M places of a slot, H hidden, I intermediate.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from runtime.dispatch import Received
from runtime.experts import ExpertBank


class Experts(Protocol):
    """Runs the experts of one layer on what a dispatch brought."""

    def run(self, layer: int, received: Received) -> torch.Tensor:
        """Results shaped as ``received.rows``; rows beyond a slot's count may hold anything."""


def swiglu(rows: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """silu(rows @ gate.T) * (rows @ up.T) @ down.T, with gate and up stacked on dim 0."""
    gate, up = (rows @ gate_up.T).chunk(2, dim=-1)
    return (F.silu(gate) * up) @ down.T


class LoopExperts:
    """One slot after the other, in the bank's own dtype: plain, and good enough for a CPU."""

    def __init__(self, bank: ExpertBank) -> None:
        self._bank = bank

    def run(self, layer: int, received: Received) -> torch.Tensor:
        """Results of grouped or padded rows."""
        tensors = self._bank.weights(layer)
        rows, is_padded = received.rows, received.rows.dim() == 3
        results = torch.zeros_like(rows)
        start = 0
        for slot, count in enumerate(received.counts.tolist()):
            if count:
                part = (slot, slice(0, count)) if is_padded else slice(start, start + count)
                weights = tensors["gate_up"][slot], tensors["down"][slot]
                results[part] = swiglu(rows[part], *weights)
                start += count
        return results


class GroupedExperts:
    """All slots in one grouped GEMM, in BF16 or in FP8 with 128 x 128 block scales.

    Counts stay on the device and shapes are fixed, so a CUDA graph can hold it.
    """

    def __init__(self, bank: ExpertBank) -> None:
        # Imported here: the kernels need triton, which only GPU hosts have.
        from runtime.kernels import gemm, quantise

        self._gemm, self._quantise, self._bank = gemm, quantise, bank
        self._is_fp8 = "gate_up_scale" in bank.weights(0)

    def run(self, layer: int, received: Received) -> torch.Tensor:
        """Results of grouped or padded rows."""
        raise NotImplementedError
