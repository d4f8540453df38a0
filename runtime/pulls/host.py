"""Just-in-time replicas between processes of one host, in numpy and plain torch.

Shapes:  T tokens, K top-k, N sources, R ranks, C slots of a rank, J spare slots of a rank.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from eplb.core.topology import Topology
from eplb.errors import BrokenGroup, RankError
from runtime.batch.pulls import (
    NO_SLOT,
    Ints,
    PullRule,
    Pulls,
    moved_by_slot,
    plan_pulls,
    pulls_digest,
    slot_tokens,
)
from runtime.batch_split import BatchSplit, Exchange
from runtime.counters import SlotCounter
from runtime.dispatch.all_to_all import first_sentence
from runtime.pulls.layer import check_extra_slots
from runtime.pulls.readers import Read

FAILED = -1  # in place of a digest: this rank could not pull


class Reader(Protocol):
    """Pulls records; ``runtime.pulls.readers``."""

    def begin(self, layer: int, reads: list[Read]) -> None:
        """Start the pulls of a layer."""

    def finish(self) -> str:
        """Wait for them. Returns "", or what was not pulled and why."""


class HostPulls:
    """Pulls of one rank.

    Args:
        split: of this rank, over a table with ``rule.spare_slots`` extra slots.
        topology: of the placement, without spare slots.
        rank: this one, a source and a rank of the topology.
        domain: [R] ranks of one domain can read each other's memory; -1 takes and gives nothing.
        rule: alike on all ranks.
        reader: into this rank's spare records.
        exchange: gathers a word of all ranks.
        counter: with ``rule.spare_slots`` extra slots.

    Raises:
        ConfigError: the table has another number of extra slots.
    """

    def __init__(
        self,
        split: BatchSplit,
        topology: Topology,
        rank: int,
        domain: Ints,
        rule: PullRule,
        reader: Reader,
        exchange: Exchange,
        counter: SlotCounter,
    ) -> None:
        check_extra_slots(split, rule)
        self._split, self._rank, self._domain, self._rule = split, rank, domain, rule
        self._reader, self._exchange, self._counter = reader, exchange, counter
        self._topology = topology
        self._per_rank = int(topology.slots_of_rank.max())
        self._words = torch.zeros((topology.num_ranks, 1), dtype=torch.int32)
        self._layer, self._word, self._is_open = -1, 0, False

    def redirect(self, layer: int, experts: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """See ``runtime.pulls.layer.Pulls``."""
        counts = self._split.totals.numpy().astype(np.int64)
        ends = self._split.up_to.numpy().astype(np.int64)
        served = slot_tokens(counts, self._split.layout(layer), ends)
        pulls = plan_pulls(served, self._domain, self._rule)
        self._layer, self._word, self._is_open = layer, pulls_digest(pulls, served), True
        self._reader.begin(layer, self._reads(pulls))
        moved = moved_by_slot(pulls, self._per_rank)[self._rank]
        mine = int(self._topology.slots_of_rank[self._rank])
        self._counter.add_sampled(layer, torch.from_numpy(moved[:mine]))
        return redirected(pulls, self._topology, self._split.positions(experts), slots)

    def _reads(self, pulls: Pulls) -> list[Read]:
        return [
            Read(*divmod(int(source), self._per_rank), spare)
            for spare, source in enumerate(pulls.source[self._rank])
            if source != NO_SLOT
        ]

    def close_layer(self) -> None:
        """See ``runtime.pulls.layer.Pulls``."""
        if not self._is_open:
            return
        self._is_open = False
        wrong = self._reader.finish()
        word = torch.tensor([FAILED if wrong else self._word], dtype=torch.int32)
        where = f"rank {self._rank}: layer {self._layer}"
        try:
            self._exchange(word, self._words)
        except RuntimeError as exc:
            raise BrokenGroup(
                f"{where} was not closed after its pulls, a peer is dead or late: "
                f"{first_sentence(exc)}"
            ) from exc
        words = self._words.flatten().tolist()
        if FAILED in words:
            failed = [rank for rank, found in enumerate(words) if found == FAILED]
            raise BrokenGroup(
                f"{where} is not served: {wrong or f'ranks {failed} could not pull a record'}"
            )
        if len(set(words)) > 1:
            raise RankError(
                f"{where}: ranks decided different pulls (digests {words}), expected one: their "
                "counts, tables or pull rules differ"
            )


def redirected(
    pulls: Pulls, topology: Topology, positions: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """Slots [T, K] of the wider dispatch, where tokens of the pulled runs go to spare slots.

    Args:
        pulls: of the layer.
        topology: of the placement, without spare slots.
        positions: [T, K] numbers of the tokens among all sources' tokens of their expert.
        slots: [T, K] as the split chose them, in the numbers of the wider dispatch.
    """
    first_slot = topology.widened(pulls.source.shape[1]).first_slot
    per_rank = int(topology.slots_of_rank.max())
    changed = slots.clone()
    for taker, spare in np.argwhere(pulls.source != NO_SLOT):
        giver, place = divmod(int(pulls.source[taker, spare]), per_rank)
        is_taken = slots == int(first_slot[giver]) + place
        is_taken &= positions >= int(pulls.first[taker, spare])
        is_taken &= positions < int(pulls.end[taker, spare])
        changed[is_taken] = int(first_slot[taker] + topology.slots_of_rank[taker] + spare)
    return changed
