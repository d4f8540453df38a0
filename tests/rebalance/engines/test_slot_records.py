"""Slots are judged by their bytes, and get right ones from whichever slot has them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rebalance.engines.common.records import NOBODY, digests_of_experts, digests_of_slots
from rebalance.engines.common.slot_records import SlotRecords, Verdict
from tests.support.processes import run_ranks_in

START = np.array([[0, 1, 2, 3, 0, 1]])  # one layer, three slots on each of two ranks
MOVED = np.array([[3, 1, 2, 0, 0, 1]])


def weights_of(experts: list[int]) -> list[torch.Tensor]:
    """What an engine moves of a layer: experts 2 and 3 are permutations of one another."""
    orders = [[0, 1, 2, 3], [5, 5, 5, 5], [7, 6, 5, 4], [4, 5, 6, 7]]
    return [
        torch.tensor([orders[expert] for expert in experts], dtype=torch.int32),
        torch.tensor([[expert] * 3 for expert in experts], dtype=torch.uint8),
    ]


def own_of(held: np.ndarray, rank: int) -> list[int]:
    return [int(expert) for expert in held[0, 3 * rank : 3 * rank + 3]]


def mended(rank: int, live: list[int], held: list[int], lost: list[int]) -> tuple[str, int, bool]:
    """Judge and repair a layer whose slots have the bytes of other experts, or of none."""
    weights = weights_of(own_of(START, rank))
    digests = digests_of_experts(START, digests_of_slots([weights], dist.group.WORLD))
    records = SlotRecords(lambda layer: weights, digests, START, dist.group.WORLD, None)
    for tensor, other in zip(weights, weights_of(live[3 * rank :][:3]), strict=True):
        tensor.copy_(other)
    for slot in lost:
        if slot // 3 == rank:
            weights[0][slot % 3] = -1
    row = np.array(held)
    found = records.experts_of_slots(0)
    verdict = records.verdict(0, row, found)
    wrong = records.wrong(0, records.wanted_slots(0, row))
    wants = records.exchange_wants(0, wrong)
    missing = 0 if wants is None else records.bring(0, wrong, wants, found)
    expected = weights_of(held[3 * rank :][:3])
    return verdict.name, missing, all(map(torch.equal, weights, expected))


@pytest.mark.parametrize(
    ("live", "held", "lost", "verdict", "missing"),
    [
        (START[0], START[0], [], Verdict.RIGHT, 0),
        (START[0], MOVED[0], [], Verdict.OF_START, 0),
        (MOVED[0], MOVED[0], [3], Verdict.DAMAGED, 0),
        (MOVED[0], MOVED[0], [2], Verdict.DAMAGED, 1),
        ([1, 3, 2, 0, 0, 1], MOVED[0], [], Verdict.DAMAGED, 0),
        (START[0], START[0], [0, 1, 2, 3], Verdict.REPLACED, 2),
    ],
    ids=["right", "reloaded", "replica", "only one", "swapped", "replaced"],
)
def test_layer_is_judged_by_its_bytes_and_repaired_from_other_slots(
    live: list[int],
    held: list[int],
    lost: list[int],
    verdict: Verdict,
    missing: int,
    tmp_path: Path,
) -> None:
    slots = [list(map(int, one)) for one in (live, held)]
    found = run_ranks_in(tmp_path, 2, lambda rank: mended(rank, *slots, lost))

    assert {(name, num_missing) for name, num_missing, _ in found} == {(verdict.name, missing)}
    assert all(is_right for *_, is_right in found) == (not missing)


def unreadable(rank: int) -> list[int]:
    """The experts of all slots, while rank 1 cannot read those of its own."""
    weights = weights_of(own_of(START, rank))
    digests = digests_of_experts(START, digests_of_slots([weights], dist.group.WORLD))
    records = SlotRecords(lambda layer: weights, digests, START, dist.group.WORLD, None)
    if rank == 1:
        weights[0] = weights[0].to("meta")
    return [int(expert) for expert in records.experts_of_slots(0)]


def test_rank_that_cannot_read_its_slots_has_nobody_in_them_and_leaves_no_rank_waiting(
    tmp_path: Path,
) -> None:
    assert run_ranks_in(tmp_path, 2, unreadable) == [[0, 1, 2, NOBODY, NOBODY, NOBODY]] * 2
