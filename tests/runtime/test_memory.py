"""Memory that the system does not give is an error in words, and leaves nothing open."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from eplb.errors import MigrationError
from runtime.memory import (
    COMPILED_FROM_BYTES,
    LANE_BYTES,
    LANE_WEIGHTS,
    LANES_AT_ONCE,
    PAGE_BYTES,
    RunningDigest,
    SharedArena,
    attach,
    compiled_lane_sums,
    digest,
    factor_of,
    plain_lane_sums,
)


def num_open() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize("num_bytes", [2**62, 2**70, -1])
def test_memory_that_there_is_not_is_refused_and_leaves_no_file_open(num_bytes: int) -> None:
    before = num_open()

    with pytest.raises(MigrationError, match=f"no arena test of {num_bytes} bytes"):
        SharedArena("test", num_bytes)

    assert num_open() == before


def test_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MigrationError, match=r"no arena test of 4096 bytes: .*No such file"):
        SharedArena("test", PAGE_BYTES, folder=tmp_path / "none")


def test_closed_arena_stays_readable_where_mapped_and_rejects_attachment() -> None:
    arena = SharedArena("test", PAGE_BYTES)
    arena.bytes[5] = 7
    handle, seen = arena.handle, attach(arena.handle, PAGE_BYTES)

    arena.close()

    assert (int(seen[5]), int(arena.bytes[5])) == (7, 7)
    with pytest.raises(MigrationError, match="is its owner alive"):
        attach(handle, PAGE_BYTES)


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

    one, two, three = LANE_WEIGHTS[:3].tolist()
    assert digest(torch.from_numpy(as_bytes([5, -2, 10]))) == weighed(
        5 * one - 2 * two + 10 * three
    )
    assert digest(torch.from_numpy(as_bytes([-2, 5, 10]))) == weighed(
        5 * two - 2 * one + 10 * three
    )
    assert running.value == last.value == weighed(5 * one - 2 * two + 10 * three)


def weighed(weighted: int) -> tuple[int, int]:
    """The digest of lanes that sum up to 13: no lane counts for nothing in the first block."""
    return 13, (weighted * factor_of(0) + HALF) % (2 * HALF) - HALF


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_permutations_of_small_numbers_have_different_digests(dtype: str) -> None:
    orders = np.array(list(permutations(range(7))), dtype=dtype)
    for start in (0, 1, 3, 1000, 2**17 - 4, 2**17, 2**20 + 5):
        found = set()
        for order in orders:
            running = RunningDigest(first_byte=LANE_BYTES * start)
            running.add(order.view(np.uint8))
            found.add(running.value)
        assert len(found) == len(orders), start


def test_swapped_lanes_of_different_blocks_have_different_digests() -> None:
    drawn = np.random.default_rng(0)
    lanes = drawn.integers(-100, 100, 3 * LANES_AT_ONCE, dtype=np.int64).astype(np.int32)
    whole = digest(torch.from_numpy(lanes.view(np.uint8)))
    for place in drawn.integers(0, LANES_AT_ONCE, 20).tolist():
        swapped = lanes.copy()
        other = place + LANES_AT_ONCE * int(drawn.integers(1, 3))
        swapped[[place, other]] = swapped[[other, place]]
        is_other = swapped[place] != lanes[place]
        assert (digest(torch.from_numpy(swapped.view(np.uint8))) != whole) == is_other


@pytest.mark.parametrize("num_lanes", [0, 1, 2**17 - 1, 2**17 + 3])
def test_compiled_sums_equal_the_reference(num_lanes: int) -> None:
    random = np.random.default_rng(num_lanes)
    lanes = random.integers(-(2**31), 2**31, num_lanes, dtype=np.int64).astype(np.int32)
    weights = np.resize(LANE_WEIGHTS, num_lanes)
    assert compiled_lane_sums()(lanes, weights) == plain_lane_sums(lanes, weights)


def test_weighted_sum_wraps_around_at_64_bits_in_both_ways() -> None:
    num_lanes = COMPILED_FROM_BYTES  # four times as many bytes: these are compiled for
    lanes = np.full(num_lanes, 2**31 - 1, dtype=np.int32)
    blocks = sum(map(factor_of, range(num_lanes // LANES_AT_ONCE)))
    exact = (2**31 - 1) * int(LANE_WEIGHTS.sum()) * blocks
    expected = ((2**31 - 1) * num_lanes, (exact + HALF) % (2 * HALF) - HALF)
    in_pieces, piece = RunningDigest(), COMPILED_FROM_BYTES // 2  # too short to be compiled for
    for first in range(0, lanes.nbytes, piece):
        in_pieces.add(lanes.view(np.uint8)[first : first + piece])

    assert exact > HALF, "it wraps"
    assert in_pieces.value == expected
    assert digest(torch.from_numpy(lanes.view(np.uint8))) == expected
