"""Kernels of just-in-time replicas against numpy, word by word, run by triton's interpreter.

``test_kernels.py`` runs this file in a process with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from runtime.batch.kernels import pulls as kernels
from runtime.batch.kernels.counts import count_experts, num_blocks
from runtime.batch.pull_rule import (
    PullRule,
    Pulls,
    SlotTokens,
    moved_by_slot,
    plan_pulls,
    pulls_digest,
    slot_tokens,
)
from runtime.batch.pulls import redirected
from runtime.batch.split import NO_END, BatchSplit
from runtime.batch.split_rule import split_batch
from runtime.routing import RoutingTable

EXPERTS, TOKENS, TOP_K, RECORD_BYTES = 16, 60, 4, 8192
CASES = [(seed, spares) for seed in range(6) for spares in (1, 2)]


class Case:
    """A layer on ranks of unequal size, and a batch of three sources, all from a seed."""

    def __init__(self, seed: int, spares: int) -> None:
        rng = np.random.default_rng(seed)
        self.topology = Topology(np.zeros(5, int), slots_of_rank=np.array([4, 5, 3, 5, 4]))
        held = np.full(21, EMPTY)
        held[rng.permutation(21)[:EXPERTS]] = np.arange(EXPERTS)
        free = np.flatnonzero(held == EMPTY)
        held[free[:4]] = rng.choice(EXPERTS, 4)
        self.placement = Placement(held[None], EXPERTS)
        self.rule = PullRule(
            spares, *rng.integers(1, 20, 2).tolist(), int(rng.integers(40)), 1 + seed % 3
        )
        self.domain = np.where(rng.random(5) < 0.15, -1, seed % 2 * (np.arange(5) // 3))
        self.table = RoutingTable(
            self.placement, max_replicas=4, topology=self.topology, extra_slots=spares
        )
        share = rng.dirichlet(np.full(EXPERTS, 0.5))
        batches = rng.choice(EXPERTS, (3, TOKENS, TOP_K), p=share)
        batches[rng.random(batches.shape) < 0.1] = -1
        self.batches = torch.from_numpy(batches)
        counts = [np.bincount(one[one >= 0], minlength=EXPERTS) for one in batches]
        self.gathered = torch.from_numpy(np.stack(counts).astype(np.int32))
        # The reference for all sources: what the kernels of the split would hand over.
        self.split = [self.made_split(source) for source in range(3)]
        self.slots = [
            split.slots(0, one) for split, one in zip(self.split, self.batches, strict=True)
        ]

    def made_split(self, source: int) -> BatchSplit:
        def exchange(own: torch.Tensor, gathered: torch.Tensor) -> None:
            gathered.copy_(self.gathered)

        return BatchSplit(
            self.table,
            exchange,
            source=source,
            num_sources=3,
            max_pairs=TOKENS * TOP_K,
        )

    def expected(self) -> tuple[Pulls, SlotTokens]:
        counts = self.split[0].batch.totals.numpy().astype(np.int64)
        served = slot_tokens(counts, self.split[0].layout(0), self.split[0].batch.up_to.numpy())
        return plan_pulls(served, self.domain, self.rule), served

    def ranks(self, bases: list[int] | None = None) -> kernels.Ranks:
        addresses = [0] * 5 if bases is None else bases
        spares = self.rule.spare_slots
        return kernels.Ranks.on(torch.device("cpu"), self.topology, self.domain, spares, addresses)

    def decided(self, rank: int, counter: torch.Tensor) -> kernels.Decided:
        layer = {name: one[0] for name, one in self.table.split.items()}
        found = kernels.Decided.on(torch.device("cpu"), 5 * self.rule.spare_slots)
        totals, up_to = self.split[0].batch.totals, self.split[0].batch.up_to
        kernels.plan_pulls(layer, totals, up_to, self.ranks(), self.rule, rank, counter, found)
        return found


@pytest.mark.parametrize(("seed", "spares"), CASES)
def test_kernels_decide_and_redirect_as_the_reference_token_by_token(
    seed: int, spares: int
) -> None:
    case = Case(seed, spares)
    expected, served = case.expected()
    rank = seed % 5
    counter = torch.full((5 + spares,), 7, dtype=torch.int32)

    decided = case.decided(rank, counter)

    assert decided.source.tolist() == expected.source.flatten().tolist()
    is_pulled = expected.source.flatten() >= 0
    assert decided.first[is_pulled].tolist() == expected.first.flatten()[is_pulled].tolist()
    assert decided.end[is_pulled].tolist() == expected.end.flatten()[is_pulled].tolist()
    assert int(decided.word) == pulls_digest(expected, served)
    moved = moved_by_slot(expected, 5)[rank].tolist()
    assert counter.tolist() == [7 + tokens for tokens in moved] + [7] * spares
    for source in range(3):
        experts, slots = case.batches[source], case.slots[source].clone()
        blocks = torch.zeros((num_blocks(TOKENS * TOP_K), EXPERTS), dtype=torch.int32)
        count_experts(experts, blocks, torch.zeros(EXPERTS, dtype=torch.int32))
        split = case.split[source]
        kernels.redirect(experts, blocks, split.batch.starts, case.ranks(), decided, 5, slots)
        wanted = redirected(expected, case.topology, split.positions(experts), case.slots[source])
        assert torch.equal(slots, wanted)


def test_cases_pull_and_some_do_not() -> None:
    pulled = [(Case(*one).expected()[0].source >= 0).sum() for one in CASES]

    assert max(pulled) >= 3
    assert min(pulled) == 0


def test_pull_copies_the_records_of_the_deciding_slots_alone() -> None:
    case = next(
        case for case in (Case(*one) for one in CASES) if (case.expected()[0].source >= 0).sum() > 1
    )
    spares, layers = case.rule.spare_slots, 2
    rng = np.random.default_rng(1)
    sizes = [layers * int(slots) * RECORD_BYTES for slots in case.topology.slots_of_rank]
    banks = [torch.from_numpy(rng.integers(0, 255, size, dtype=np.uint8)) for size in sizes]
    ranks = case.ranks([bank.data_ptr() for bank in banks])
    expected, _ = case.expected()

    for rank in range(5):
        decided = case.decided(rank, torch.zeros(5 + spares, dtype=torch.int32))
        records = torch.zeros((spares, RECORD_BYTES), dtype=torch.uint8)
        kernels.pull(1, rank, ranks, decided, 5, records, programs=3)

        for spare, source in enumerate(expected.source[rank]):
            if source < 0:
                assert not records[spare].any()
                continue
            giver, slot = divmod(int(source), 5)
            bank = banks[giver].view(layers, -1, RECORD_BYTES)
            assert torch.equal(records[spare], bank[1, slot])


def test_different_words_are_counted() -> None:
    found = torch.zeros(1, dtype=torch.int32)

    kernels.count_differences(torch.tensor([[3], [3], [3]], dtype=torch.int32), found)
    assert int(found) == 0
    kernels.count_differences(torch.tensor([[3], [4], [5]], dtype=torch.int32), found)
    assert int(found) == 2


def test_split_of_the_reference_has_ends_that_kernels_read() -> None:
    case = Case(0, 1)
    layout = case.split[0].layout(0)
    split = split_batch(case.split[0].batch.totals.numpy(), layout).tokens

    assert case.split[0].batch.up_to.max() == NO_END
    assert split.shape == tuple(case.split[0].batch.up_to.shape)
