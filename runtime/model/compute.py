"""Expert computation of a rank for received rows, on a CPU or a GPU.

Shapes:  C slots of this rank, n rows, M places of a slot, H hidden, I intermediate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

from runtime.dispatch.all_to_all import Received
from runtime.experts import ExpertBank

if TYPE_CHECKING:
    from runtime.kernels.quantise import Quantised


class Experts(Protocol):
    """Runs the experts of one layer on what a dispatch brought."""

    def run(self, layer: int, received: Received) -> torch.Tensor:
        """Results shaped as ``received.rows``; rows beyond a slot's count may hold anything."""


class PartExperts(Experts, Protocol):
    """Experts of some of the slots that a dispatch brought rows for."""

    def run(
        self,
        layer: int,
        received: Received,
        *,
        first_slot: int = 0,
        results: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Results shaped as ``received.rows``, of the rows of these slots.

        Args:
            layer: of their weights.
            received: rows of at least these slots.
            first_slot: of those received: the first of these.
            results: to be filled, in place of a new tensor.
        """


def swiglu(rows: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """silu(rows @ gate.T) * (rows @ up.T) @ down.T, with gate and up stacked on dim 0."""
    gate, up = (rows @ gate_up.T).chunk(2, dim=-1)
    return (F.silu(gate) * up) @ down.T


class LoopExperts:
    """One slot after the other, in the bank's own dtype: plain, and good enough for a CPU."""

    def __init__(self, bank: ExpertBank) -> None:
        self._bank = bank

    def run(
        self,
        layer: int,
        received: Received,
        *,
        first_slot: int = 0,
        results: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Results of grouped or padded rows."""
        tensors = self._bank.weights(layer)
        rows, is_padded = received.rows, received.rows.dim() == 3
        results = torch.zeros_like(rows) if results is None else results
        counts = received.counts.tolist()
        start = sum(counts[:first_slot])
        for slot, count in enumerate(counts[first_slot : first_slot + self._bank.num_slots]):
            if count:
                place = (first_slot + slot, slice(0, count))
                part = place if is_padded else slice(start, start + count)
                weights = tensors["gate_up"][slot], tensors["down"][slot]
                results[part] = swiglu(rows[part], *weights)
                start += count
        return results


class GroupedExperts:
    """All slots in one grouped GEMM, in BF16 or in FP8 with 128 x 128 block scales.

    Counts stay on the device and shapes are fixed, so a CUDA graph can hold it.

    Args:
        bank: of a schema ``swiglu`` in BF16, or ``swiglu_fp8``.
        usual_rows: rows that a busy slot usually has in a step: chooses between tiles for decode
            and for prefill in BF16, never a result. Tiles follow the rows of each slot within.
    """

    def __init__(self, bank: ExpertBank, *, usual_rows: int) -> None:
        self._bank, self._usual_rows = bank, usual_rows
        self._is_fp8 = "gate_up_scale" in bank.weights(0)

    def run(
        self,
        layer: int,
        received: Received,
        *,
        first_slot: int = 0,
        results: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Results of grouped or padded rows."""
        rows, counts = received.rows, received.counts.to(torch.int32)
        if rows.dim() == 3:
            places = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
            starts = places * rows.shape[1]
        else:
            starts = (torch.cumsum(counts, 0) - counts).to(torch.int32)
        mine = slice(first_slot, first_slot + self._bank.num_slots)
        flat = rows.reshape(-1, rows.shape[-1])
        if results is None:
            results = torch.empty(rows.shape, dtype=torch.bfloat16, device=rows.device)
        run = self._run_fp8 if self._is_fp8 else self._run_bf16
        run(layer, flat, received.scales, starts[mine], counts[mine], results.view(flat.shape))
        return results

    def _run_bf16(
        self,
        layer: int,
        rows: torch.Tensor,
        scales: torch.Tensor | None,
        starts: torch.Tensor,
        counts: torch.Tensor,
        results: torch.Tensor,
    ) -> None:
        # Imported here and below: the kernels need triton, which only GPU hosts have.
        from runtime.kernels.gemm import (
            BF16_DECODE,
            BF16_PREFILL,
            MOST_DECODE_ROWS,
            grouped_gemm,
        )
        from runtime.kernels.quantise import silu_times_up

        assert scales is None, "FP8 rows for a BF16 bank: the dispatcher was configured otherwise"
        tensors = self._bank.weights(layer)
        tiling = BF16_DECODE if self._usual_rows <= MOST_DECODE_ROWS else BF16_PREFILL
        gate_up = rows.new_empty((len(rows), tensors["gate_up"].shape[1]))
        grouped_gemm(rows, tensors["gate_up"], starts, counts, gate_up, tiling=tiling)
        gated = rows.new_empty((len(rows), gate_up.shape[1] // 2))
        silu_times_up(gate_up, starts, counts, gated)
        grouped_gemm(gated, tensors["down"], starts, counts, results, tiling=tiling)

    def _run_fp8(
        self,
        layer: int,
        rows: torch.Tensor,
        scales: torch.Tensor | None,
        starts: torch.Tensor,
        counts: torch.Tensor,
        results: torch.Tensor,
    ) -> None:
        from runtime.kernels.gemm import grouped_gemm_fp8
        from runtime.kernels.quantise import Quantised, quantise_rows, silu_times_up_fp8

        tensors = self._bank.weights(layer)
        num_rows, hidden = rows.shape
        given = Quantised(rows, scales) if scales is not None else _room_for_fp8(rows, hidden)
        if scales is None:
            quantise_rows(rows, given, starts=starts, counts=counts)
        up_weights = Quantised(tensors["gate_up"], tensors["gate_up_scale"])
        wide = up_weights.values.shape[1]
        gate_up = torch.empty((num_rows, wide), dtype=torch.bfloat16, device=rows.device)
        grouped_gemm_fp8(given, up_weights, starts, counts, gate_up)
        gated = _room_for_fp8(rows, wide // 2)
        silu_times_up_fp8(gate_up, starts, counts, gated)
        down_weights = Quantised(tensors["down"], tensors["down_scale"])
        grouped_gemm_fp8(gated, down_weights, starts, counts, results)


def _room_for_fp8(rows: torch.Tensor, width: int) -> Quantised:
    from runtime.kernels.quantise import GROUP, Quantised

    values = torch.empty((len(rows), width), dtype=torch.float8_e4m3fn, device=rows.device)
    scales = torch.empty((len(rows), width // GROUP), dtype=torch.float32, device=rows.device)
    return Quantised(values, scales)
