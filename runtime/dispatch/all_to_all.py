"""Tokens to the ranks that hold their experts, and results back.

``AllToAllDispatcher`` is the plain one: two exchanges over torch.distributed, gloo on CPUs and NCCL
on GPUs. Every faster dispatcher must agree with it.

Shapes:  T tokens of this rank, K top-k, H hidden, R ranks, C slots of this rank, n rows received.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist

from eplb.core.load import Phase
from eplb.core.topology import Topology
from eplb.errors import BrokenGroup
from runtime.counters import SlotCounter
from runtime.group import first_sentence


@dataclass(frozen=True)
class Received:
    """Rows that one dispatch delivered to this rank.

    ``rows`` is [n, H], grouped by local slot in slot order, or [C, M, H], M places for each slot of
    which the first ``counts`` are filled: experts must take either.
    """

    rows: torch.Tensor
    counts: torch.Tensor  # [C] rows of each local slot
    ticket: Any  # what this dispatcher's own combine needs
    scales: torch.Tensor | None = None  # [..., H / 128] scales of FP8 rows


class Dispatcher(Protocol):
    """The interface of DeepEP and other transports.

    One that can overlap its transfers with computation is an ``OverlappedDispatcher`` besides. One
    that waits on the host for torch's exchanges waits by a function that the engine may give it
    (``Rank.wait_for_exchange``), so that a dead peer ends the wait.
    """

    def dispatch(
        self, layer: int, tokens: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor
    ) -> Received:
        """Send tokens [T, H] to slots [T, K] and receive this rank's rows.

        A negative slot is padding: it goes nowhere and is not counted anywhere. The rows received
        are added to the layer's counters.

        Raises:
            BrokenGroup: a peer died or missed the group's deadline.
        """

    def combine(self, layer: int, results: torch.Tensor, received: Received) -> torch.Tensor:
        """Send results, shaped as ``received.rows``, back to where their tokens came from.

        Returns:
            [T, H] sums over k of weight times result; 0 for a token that is all padding.

        Raises:
            BrokenGroup: a peer died or missed the group's deadline.
        """


@dataclass(frozen=True)
class Pending:
    """Results on their way. ``finish`` makes the compute stream wait for them; call it once."""

    finish: Callable[[], torch.Tensor]


@runtime_checkable
class OverlappedDispatcher(Dispatcher, Protocol):
    """A dispatcher whose results may travel back while the caller computes something else.

    At most one transfer is under way: finish it before the next one begins.
    """

    def begin_combine(self, layer: int, results: torch.Tensor, received: Received) -> Pending:
        """Start a ``combine``.

        Raises:
            ConfigError: the transfer before it was not finished.
            BrokenGroup: a peer died or missed the group's deadline.
        """


@runtime_checkable
class PhasedDispatcher(Dispatcher, Protocol):
    """A dispatcher whose mode depends on what a forward pass is."""

    def begin_pass(self, phase: Phase) -> None:
        """Choose the mode of the pass that begins now; alike on every rank."""


def begin_combine(
    dispatcher: Dispatcher, layer: int, results: torch.Tensor, received: Received
) -> Pending:
    """Start a combine where the dispatcher can overlap it; else the whole of it is done here."""
    if isinstance(dispatcher, OverlappedDispatcher):
        return dispatcher.begin_combine(layer, results, received)
    output = dispatcher.combine(layer, results, received)
    return Pending(lambda: output)


@dataclass(frozen=True)
class _Ticket:
    order: torch.Tensor  # [n] arrival position of each row
    sent: torch.Tensor  # [T * K] position in the send buffer of each (token, k) pair; -1 padding
    sent_split: list[int]  # [R] rows sent to each rank
    received_split: list[int]  # [R] rows received from each rank
    weights: torch.Tensor  # [T, K]


class AllToAllDispatcher:
    """Counts first, then rows, each by ``all_to_all_single``.

    Args:
        topology: all ranks; those that are alive are the group's, in their order.
        group: of the live ranks.
        rank: this one, by its number in the topology.
        counter: of the rows that it receives.
    """

    def __init__(
        self, topology: Topology, group: dist.ProcessGroup, rank: int, counter: SlotCounter
    ) -> None:
        self._rank, self._counter = rank, counter
        self.use(topology, group)
        # Until the group's own deadline. Who knows of deaths may end it earlier: an exchange breaks
        # at the dead rank's neighbours alone, and another rank waits for those, which have left it.
        self.wait: Callable[[dist.Work], object] = dist.Work.wait

    def use(self, topology: Topology, group: dist.ProcessGroup) -> None:
        """Exchange tokens in another group from now on, after a death: between two steps."""
        self._group, self._num_slots = group, topology.num_slots
        self._num_ranks = int(topology.alive.sum())
        self._slots_of_rank = topology.slots_of_rank[topology.alive].tolist()
        is_live = topology.alive[topology.rank_of_slot]
        self._live_slots = None if is_live.all() else torch.from_numpy(np.flatnonzero(is_live))
        self._here = int(topology.alive[: self._rank].sum())  # this rank in the group

    def dispatch(
        self, layer: int, tokens: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor
    ) -> Received:
        """Send one row for each (token, k) pair, sorted by slot."""
        flat = slots.flatten()
        real = flat >= 0
        # Stable sort by slot: rows for one rank are one run, and inside it grouped by slot.
        by_slot = torch.argsort(torch.where(real, flat, self._num_slots), stable=True)
        by_slot = by_slot[: int(real.sum())]
        sent_counts = torch.bincount(flat[by_slot], minlength=self._num_slots)
        if self._live_slots is not None:
            sent_counts = sent_counts[self._live_slots]
        received_counts = self._exchange_counts(layer, sent_counts)  # [R, C]
        counts = received_counts.sum(dim=0)
        self._counter.add(layer, counts)
        sent_split = [int(part.sum()) for part in torch.split(sent_counts, self._slots_of_rank)]
        received_split = received_counts.sum(dim=1).tolist()
        arrived = self._exchange(
            layer, tokens[by_slot // slots.shape[1]], received_split, sent_split, "dispatch"
        )
        slot_of_row = torch.arange(len(counts), device=counts.device).repeat(self._num_ranks)
        order = torch.argsort(slot_of_row.repeat_interleave(received_counts.flatten()), stable=True)
        sent = torch.full_like(flat, -1)
        sent[by_slot] = torch.arange(len(by_slot), device=sent.device)
        ticket = _Ticket(order, sent, sent_split, received_split, weights)
        return Received(arrived[order], counts, ticket)

    def combine(self, layer: int, results: torch.Tensor, received: Received) -> torch.Tensor:
        """Send each row's result back, and weigh and sum where the token came from."""
        ticket: _Ticket = received.ticket
        in_arrival_order = torch.empty_like(results)
        in_arrival_order[ticket.order] = results
        back = self._exchange(
            layer, in_arrival_order, ticket.sent_split, ticket.received_split, "combine"
        )
        per_pair = back.new_zeros((len(ticket.sent), results.shape[1]))
        real = ticket.sent >= 0
        per_pair[real] = back[ticket.sent[real]]
        per_pair = per_pair.view(*ticket.weights.shape, results.shape[1])
        return (per_pair * ticket.weights[..., None]).sum(dim=1).to(results.dtype)

    def _exchange_counts(self, layer: int, counts: torch.Tensor) -> torch.Tensor:
        mine = self._slots_of_rank[self._here]
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
            self.wait(self._group.alltoall_base(output, given, in_split, out_split))
        except RuntimeError as exc:
            raise BrokenGroup(
                f"rank {self._rank}: the {what} exchange of layer {layer} failed, "
                f"a peer is dead or late: {first_sentence(exc)}"
            ) from exc
