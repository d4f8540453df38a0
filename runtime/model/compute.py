"""Expert computation of a rank for received rows, on a CPU or a GPU.

A rank's slots are those of its bank, and after them one for each shared expert that its layers
spread (``runtime/shared_spread.py``). Weights of the latter are no part of the bank: they never
move, and may be of another intermediate size.

Shapes:  C slots of this rank, n rows, M places of a slot, H hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    """One slot after the other, in the bank's own dtype: plain, and good enough for a CPU.

    Args:
        bank: the routed experts.
        shared: by layer, weights of the slots after the bank's.
    """

    def __init__(self, bank: ExpertBank, *, shared: Sequence[SlotWeights] = ()) -> None:
        self._bank, self._shared = bank, shared

    def run(
        self,
        layer: int,
        received: Received,
        *,
        first_slot: int = 0,
        results: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Results of grouped or padded rows."""
        rows, is_padded = received.rows, received.rows.dim() == 3
        results = torch.zeros_like(rows) if results is None else results
        sets = _weight_sets(self._bank, self._shared, layer, first_slot)
        weights = [
            (gate_up, down)
            for tensors, _ in sets
            for gate_up, down in zip(tensors["gate_up"], tensors["down"], strict=True)
        ]
        counts = received.counts.tolist()
        start = sum(counts[:first_slot])
        for slot, of_slot in enumerate(weights, first_slot):
            count = counts[slot]
            if count:
                part = (slot, slice(0, count)) if is_padded else slice(start, start + count)
                results[part] = swiglu(rows[part], *of_slot)
                start += count
        return results


class GroupedExperts:
    """All slots of the bank in one grouped GEMM, in BF16 or in FP8 with 128 x 128 block scales.

    Counts stay on the device and shapes are fixed, so a CUDA graph can hold it.

    Args:
        bank: of a schema ``swiglu`` in BF16, or ``swiglu_fp8``.
        usual_rows: rows that a busy slot usually has in a step: chooses between tiles for decode
            and for prefill in BF16, never a result. Tiles follow the rows of each slot within.
        shared: by layer, weights of the slots after the bank's, of the bank's types. They are
            launches of their own.
    """

    def __init__(
        self, bank: ExpertBank, *, usual_rows: int, shared: Sequence[SlotWeights] = ()
    ) -> None:
        self._bank, self._usual_rows, self._shared = bank, usual_rows, shared
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
        rows, scales, counts = received.rows, received.scales, received.counts.to(torch.int32)
        is_padded, width = rows.dim() == 3, rows.shape[-1]
        if results is None:
            dtype = torch.bfloat16 if scales is not None else rows.dtype
            results = torch.empty(rows.shape, dtype=dtype, device=rows.device)
        starts = (torch.cumsum(counts, 0) - counts).to(torch.int32)
        if is_padded:
            places = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
            starts = places * rows.shape[1]
        run = self._run_fp8 if self._is_fp8 else self._run_bf16
        for tensors, slots in _weight_sets(self._bank, self._shared, layer, first_slot):
            here = slots if is_padded else slice(None)  # slots that these rows and scales are of
            run(
                tensors,
                rows[here].reshape(-1, width),
                None if scales is None else scales[here],
                (starts[: len(counts[slots])] if is_padded else starts[slots], counts[slots]),
                results[here].view(-1, width),
            )
        return results

    def _run_bf16(
        self,
        tensors: SlotWeights,
        rows: torch.Tensor,
        scales: torch.Tensor | None,
        slots: tuple[torch.Tensor, torch.Tensor],
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
        tiling = BF16_DECODE if self._usual_rows <= MOST_DECODE_ROWS else BF16_PREFILL
        gate_up = rows.new_empty((len(rows), tensors["gate_up"].shape[1]))
        grouped_gemm(rows, tensors["gate_up"], *slots, gate_up, tiling=tiling)
        gated = rows.new_empty((len(rows), gate_up.shape[1] // 2))
        silu_times_up(gate_up, *slots, gated)
        grouped_gemm(gated, tensors["down"], *slots, results, tiling=tiling)

    def _run_fp8(
        self,
        tensors: SlotWeights,
        rows: torch.Tensor,
        scales: torch.Tensor | None,
        slots: tuple[torch.Tensor, torch.Tensor],
        results: torch.Tensor,
    ) -> None:
        from runtime.kernels.gemm import grouped_gemm_fp8
        from runtime.kernels.quantise import Quantised, quantise_rows, silu_times_up_fp8

        starts, counts = slots
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


def _weight_sets(
    bank: ExpertBank, shared: Sequence[SlotWeights], layer: int, first_slot: int
) -> Iterator[tuple[SlotWeights, slice]]:
    """Weights of a layer, and the slots of the rank that have them."""
    end = first_slot + bank.num_slots
    yield bank.weights(layer), slice(first_slot, end)
    if shared:
        yield shared[layer], slice(end, end + len(shared[layer]["down"]))


def _room_for_fp8(rows: torch.Tensor, width: int) -> Quantised:
    from runtime.kernels.quantise import GROUP, Quantised

    values = torch.empty((len(rows), width), dtype=torch.float8_e4m3fn, device=rows.device)
    scales = torch.empty((len(rows), width // GROUP), dtype=torch.float32, device=rows.device)
    return Quantised(values, scales)
