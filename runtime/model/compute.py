"""Expert computation of a rank for received rows, on a CPU or a GPU.

Shapes:  C slots of this rank, n rows, M places of a slot, H hidden, I intermediate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

from runtime.dispatch.all_to_all import Received
from runtime.experts import ExpertBank

if TYPE_CHECKING:
    from runtime.kernels.quantise import Quantised


SlotWeights = dict[str, torch.Tensor]  # tensors [slots, ...] by name, as a bank's schema has them


class Experts(Protocol):
    """Runs the experts of one layer on what a dispatch brought."""

    def run(self, layer: int, received: Received) -> torch.Tensor:
        """Results shaped as ``received.rows``; rows beyond a slot's count may hold anything."""


def swiglu(rows: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """silu(rows @ gate.T) * (rows @ up.T) @ down.T, with gate and up stacked on dim 0."""
    gate, up = (rows @ gate_up.T).chunk(2, dim=-1)
    return (F.silu(gate) * up) @ down.T


@dataclass(frozen=True)
class _RowsOfSlots:
    """Slots of one launch: rows of slot c are ``counts[c]`` from ``starts[c]`` on."""

    weights: SlotWeights
    rows: torch.Tensor  # [n, H]
    scales: torch.Tensor | None  # [n, H / 128] or [C, M, H / 128] of FP8 rows
    starts: torch.Tensor  # [C] int32
    counts: torch.Tensor  # [C] int32
    results: torch.Tensor  # [n, H], to be filled


class BankExperts(ABC):
    """Experts of a bank's slots."""

    def __init__(self, bank: ExpertBank) -> None:
        self._bank = bank

    def run(self, layer: int, received: Received) -> torch.Tensor:
        """Results shaped as ``received.rows``; rows of no slot may hold anything.

        Args:
            layer: the layer of the weights.
            received: grouped or padded rows of at least these slots.
        """
        rows, scales, counts = received.rows, received.scales, received.counts.to(torch.int32)
        is_padded, width = rows.dim() == 3, rows.shape[-1]
        dtype = rows.dtype if scales is None else torch.bfloat16
        results = torch.empty(rows.shape, dtype=dtype, device=rows.device)
        starts = (torch.cumsum(counts, 0) - counts).to(torch.int32)
        if is_padded:
            places = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
            starts = places * rows.shape[1]
        flat = rows.reshape(-1, width), scales, starts, counts, results.view(-1, width)
        self._run(_RowsOfSlots(self._bank.weights(layer), *flat))
        return results

    @abstractmethod
    def _run(self, slots: _RowsOfSlots) -> None:
        """Write the results of some slots, whose weights have one shape."""


class LoopExperts(BankExperts):
    """One slot after the other, in the bank's own dtype: plain, and good enough for a CPU."""

    def _run(self, slots: _RowsOfSlots) -> None:
        assert slots.scales is None, "FP8 rows for a loop: the dispatcher was configured otherwise"
        experts = zip(slots.weights["gate_up"], slots.weights["down"], strict=True)
        begin_and_count = zip(slots.starts.tolist(), slots.counts.tolist(), strict=True)
        for (start, count), expert in zip(begin_and_count, experts, strict=True):
            if count:
                part = slice(start, start + count)
                slots.results[part] = swiglu(slots.rows[part], *expert)


class GroupedExperts(BankExperts):
    """All slots in one grouped GEMM, in BF16 or in FP8 with 128 x 128 block scales.

    Counts stay on the device and shapes are fixed, so a CUDA graph can hold it.

    Args:
        bank: records of a schema ``swiglu`` in BF16, or ``swiglu_fp8``.
        usual_rows: rows that a busy slot usually has in a step: chooses between tiles for decode
            and for prefill in BF16, never a result. Tiles follow the rows of each slot within.
    """

    def __init__(self, bank: ExpertBank, *, usual_rows: int) -> None:
        super().__init__(bank)
        self._usual_rows = usual_rows
        self._is_fp8 = "gate_up_scale" in bank.weights(0)

    def _run(self, slots: _RowsOfSlots) -> None:
        return self._run_fp8(slots) if self._is_fp8 else self._run_bf16(slots)

    def _run_bf16(self, slots: _RowsOfSlots) -> None:
        # Imported here and below: the kernels need triton, which only GPU hosts have.
        from runtime.kernels.gemm import (
            BF16_DECODE,
            BF16_PREFILL,
            MOST_DECODE_ROWS,
            grouped_gemm,
        )
        from runtime.kernels.quantise import silu_times_up

        assert slots.scales is None, "FP8 rows for BF16: the dispatcher was configured otherwise"
        tiling = BF16_DECODE if self._usual_rows <= MOST_DECODE_ROWS else BF16_PREFILL
        rows, starts, counts = slots.rows, slots.starts, slots.counts

        def product(inputs: torch.Tensor, name: str, out: torch.Tensor) -> None:
            grouped_gemm(inputs, slots.weights[name], starts, counts, out, tiling=tiling)

        wide = slots.weights["gate_up"].shape[1]
        gate_up = rows.new_empty((len(rows), wide))
        product(rows, "gate_up", gate_up)
        gated = rows.new_empty((len(rows), wide // 2))
        silu_times_up(gate_up, starts, counts, gated)
        product(gated, "down", slots.results)

    def _run_fp8(self, slots: _RowsOfSlots) -> None:
        from runtime.kernels.gemm import grouped_gemm_fp8
        from runtime.kernels.quantise import Quantised, quantise_rows, silu_times_up_fp8

        rows, scales, starts, counts = slots.rows, slots.scales, slots.starts, slots.counts

        def product(inputs: Quantised, name: str, out: torch.Tensor) -> None:
            weights = Quantised(slots.weights[name], slots.weights[f"{name}_scale"])
            grouped_gemm_fp8(inputs, weights, starts, counts, out)

        given = _room_for_fp8(rows, rows.shape[1]) if scales is None else Quantised(rows, scales)
        if scales is None:
            quantise_rows(rows, given, starts=starts, counts=counts)
        wide = slots.weights["gate_up"].shape[1]
        gate_up = torch.empty((len(rows), wide), dtype=torch.bfloat16, device=rows.device)
        product(given, "gate_up", gate_up)
        gated = _room_for_fp8(rows, wide // 2)
        silu_times_up_fp8(gate_up, starts, counts, gated)
        product(gated, "down", slots.results)


def _room_for_fp8(rows: torch.Tensor, width: int) -> Quantised:
    from runtime.kernels.quantise import GROUP, Quantised

    values = torch.empty((len(rows), width), dtype=torch.float8_e4m3fn, device=rows.device)
    scales = torch.empty((len(rows), width // GROUP), dtype=torch.float32, device=rows.device)
    return Quantised(values, scales)
