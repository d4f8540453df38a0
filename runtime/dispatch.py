"""Tokens to the ranks that hold their experts, and results back.

``AllToAllDispatcher`` is the plain one: two exchanges over torch.distributed, gloo on CPUs and NCCL
on GPUs. Every faster dispatcher must agree with it.

Shapes:  T tokens of this rank, K top-k, H hidden, R ranks, C slots of this rank, n rows received.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from eplb.errors import RankError
from eplb.topology import Topology


@dataclass(frozen=True)
class Received:
    """What one dispatch brought to this rank, and what combine needs to send results back."""

    rows: torch.Tensor  # [n, H] grouped by local slot, in slot order
    counts: torch.Tensor  # [C] rows of each local slot
    order: torch.Tensor  # [n] arrival position of each row
    sent: torch.Tensor  # [T * K] position in the send buffer of each (token, k) pair; -1 padding
    sent_split: list[int]  # [R] rows sent to each rank
    received_split: list[int]  # [R] rows received from each rank


class Dispatcher(Protocol):
    """The seam behind which DeepEP and other transports stand."""

    @property
    def steps(self) -> int:
        """Forward passes begun so far: the clock that all ranks share."""

    def dispatch(self, layer: int, tokens: torch.Tensor, slots: torch.Tensor) -> Received:
        """Send tokens [T, H] to slots [T, K] (negative: nowhere), and receive this rank's rows."""

    def combine(self, layer: int, results: torch.Tensor, received: Received) -> torch.Tensor:
        """Send results [n, H] back where their rows came from: [T * K, H], 0 for padding."""


class AllToAllDispatcher:
    """Counts first, then rows, each by ``all_to_all_single``.

    It counts its own steps: a dispatch of layer 0 begins one. An engine's hook may be missed (a
    dummy batch, a profiling run); the collective cannot be, on any rank.
    """

    def __init__(self, topology: Topology, group: dist.ProcessGroup, rank: int) -> None:
        self._group, self._rank = group, rank
        self._num_ranks = topology.num_ranks
        self._num_slots = topology.num_slots
        self._first_slot = topology.first_slot.tolist()
        self._slots_of_rank = topology.slots_of_rank.tolist()
        self._steps = 0

    @property
    def steps(self) -> int:
        """Forward passes begun so far."""
        return self._steps

    def dispatch(self, layer: int, tokens: torch.Tensor, slots: torch.Tensor) -> Received:
        """Send tokens [T, H] to slots [T, K] (negative: nowhere), and receive this rank's rows.

        Raises:
            RankError: a peer died or missed the group's deadline.
        """
        if layer == 0:
            self._steps += 1
        flat = slots.flatten()
        real = flat >= 0
        # Stable sort by slot: rows for one rank are one run, and inside it grouped by slot.
        by_slot = torch.argsort(torch.where(real, flat, self._num_slots), stable=True)
        by_slot = by_slot[: int(real.sum())]
        sent_counts = torch.bincount(flat[by_slot], minlength=self._num_slots)
        received_counts = self._exchange_counts(layer, sent_counts)  # [R, C]
        sent_split = [int(part.sum()) for part in torch.split(sent_counts, self._slots_of_rank)]
        received_split = received_counts.sum(dim=1).tolist()
        num_tokens_k = slots.shape[1]
        arrived = self._exchange(
            layer, tokens[by_slot // num_tokens_k], received_split, sent_split, "dispatch"
        )
        slot_of_row = torch.arange(received_counts.shape[1]).repeat(self._num_ranks)
        order = torch.argsort(slot_of_row.repeat_interleave(received_counts.flatten()), stable=True)
        sent = torch.full_like(flat, -1)
        sent[by_slot] = torch.arange(len(by_slot))
        counts = received_counts.sum(dim=0)
        return Received(arrived[order], counts, order, sent, sent_split, received_split)

    def combine(self, layer: int, results: torch.Tensor, received: Received) -> torch.Tensor:
        """Send results [n, H] back where their rows came from: [T * K, H], 0 for padding.

        Raises:
            RankError: a peer died or missed the group's deadline.
        """
        in_arrival_order = torch.empty_like(results)
        in_arrival_order[received.order] = results
        back = self._exchange(
            layer, in_arrival_order, received.sent_split, received.received_split, "combine"
        )
        per_pair = back.new_zeros((len(received.sent), results.shape[1]))
        real = received.sent >= 0
        per_pair[real] = back[received.sent[real]]
        return per_pair

    def _exchange_counts(self, layer: int, counts: torch.Tensor) -> torch.Tensor:
        mine = self._slots_of_rank[self._rank]
        received = counts.new_empty(self._num_ranks * mine)
        splits = [mine] * self._num_ranks
        self._all_to_all(layer, received, counts, splits, self._slots_of_rank, "counts")
        return received.view(self._num_ranks, mine)

    def _exchange(
        self, layer: int, rows: torch.Tensor, in_split: list[int], out_split: list[int], what: str
    ) -> torch.Tensor:
        arrived = rows.new_empty((sum(in_split), rows.shape[1]))
        self._all_to_all(layer, arrived, rows.contiguous(), in_split, out_split, what)
        return arrived

    def _all_to_all(
        self,
        layer: int,
        output: torch.Tensor,
        given: torch.Tensor,
        in_split: list[int],
        out_split: list[int],
        what: str,
    ) -> None:
        try:
            dist.all_to_all_single(output, given, in_split, out_split, group=self._group)
        except RuntimeError as exc:
            raise RankError(
                f"rank {self._rank}: the {what} exchange of layer {layer} in step {self._steps} "
                f"failed, a peer is dead or late: {exc}"
            ) from exc
