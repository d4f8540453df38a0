"""Digests on the CPU: two sums over a record's 32-bit lanes, plain and weighted by position."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from runtime.memory import (
    COMPILED_FROM_BYTES,
    RunningDigest,
    compiled_lane_sums,
    digest,
    plain_lane_sums,
)

HALF = 2**63


def as_bytes(lanes: list[int]) -> NDArray[np.uint8]:
    return np.array(lanes, dtype=np.int32).view(np.uint8)


def test_lanes_are_summed_and_weighed_by_their_places_whole_or_in_parts() -> None:
    first, last, running = RunningDigest(), RunningDigest(first_byte=4), RunningDigest()
    running.add(as_bytes([5]))
    running.add(as_bytes([-2, 10]))
    last.add(as_bytes([-2, 10]))
    first.add(as_bytes([5]))
    last.join(first)

    assert digest(torch.from_numpy(as_bytes([5, -2, 10]))) == (13, 5 - 4 + 30)
    assert digest(torch.from_numpy(as_bytes([-2, 5, 10]))) == (13, -2 + 10 + 30)
    assert running.value == last.value == (13, 31)


@pytest.mark.parametrize("num_lanes", [0, 1, 2**17 - 1, 2**17 + 3])
def test_compiled_sums_equal_the_reference(num_lanes: int) -> None:
    random = np.random.default_rng(num_lanes)
    lanes = random.integers(-(2**31), 2**31, num_lanes, dtype=np.int64).astype(np.int32)
    assert compiled_lane_sums()(lanes) == plain_lane_sums(lanes)


def test_weighted_sum_wraps_around_at_64_bits_in_both_ways() -> None:
    num_lanes = COMPILED_FROM_BYTES  # four times as many bytes: these are compiled for
    lanes = np.full(num_lanes, 2**31 - 1, dtype=np.int32)
    exact = (2**31 - 1) * (num_lanes * (num_lanes + 1) // 2)
    expected = ((2**31 - 1) * num_lanes, (exact + HALF) % (2 * HALF) - HALF)
    in_pieces, piece = RunningDigest(), COMPILED_FROM_BYTES // 2  # too short to be compiled for
    for first in range(0, lanes.nbytes, piece):
        in_pieces.add(lanes.view(np.uint8)[first : first + piece])

    assert exact > HALF, "it wraps"
    assert in_pieces.value == expected
    assert digest(torch.from_numpy(lanes.view(np.uint8))) == expected
