"""Memory that the system does not give is an error in words, and leaves nothing open."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from eplb.errors import MigrationError
from runtime.memory import (
    COMPILED_FROM_BYTES,
    PAGE_BYTES,
    RunningDigest,
    SharedArena,
    attach,
    compiled_lane_sums,
    digest,
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
