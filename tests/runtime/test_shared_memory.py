"""Memory that the system does not give is an error in words, and leaves nothing open."""

from __future__ import annotations

from pathlib import Path

import pytest

from eplb.errors import MigrationError
from runtime.memory import PAGE_BYTES, SharedArena, attach


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
