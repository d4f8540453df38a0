"""Records that are read in parts, by several threads at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rebalance.weights.disk.direct_io import DirectFile, ParallelReader
from runtime.memory import PAGE_BYTES, SharedArena, digest
from tests.support.limits import NEVER_S

NUM_PAGES = 10


@pytest.fixture
def written() -> NDArray[np.uint8]:
    """Ten pages of seeded bytes."""
    return np.random.default_rng(3).integers(0, 256, NUM_PAGES * PAGE_BYTES, dtype=np.uint8)


@pytest.fixture
def file(tmp_path: Path, written: NDArray[np.uint8]) -> Iterator[DirectFile]:
    """A page of other bytes, and then those."""
    path = tmp_path / "records"
    path.write_bytes(bytes(PAGE_BYTES) + written.tobytes())
    with closing(DirectFile(path, os.O_RDONLY)) as opened:
        yield opened


@pytest.fixture
def memory() -> torch.Tensor:
    """Page-aligned memory for a page more than is read."""
    return SharedArena("test", (NUM_PAGES + 1) * PAGE_BYTES).bytes


@pytest.mark.parametrize("pages_of_a_part", [1, 3, NUM_PAGES, 2 * NUM_PAGES])
@pytest.mark.parametrize("num_threads", [1, 4])
def test_part_reads_return_every_byte_and_the_whole_digest(
    file: DirectFile,
    written: NDArray[np.uint8],
    memory: torch.Tensor,
    num_threads: int,
    pages_of_a_part: int,
) -> None:
    into = memory[: len(written)]
    with closing(ParallelReader(file, "it", num_threads, pages_of_a_part * PAGE_BYTES)) as reader:
        found = reader.read(into.numpy(), PAGE_BYTES)

    assert (into.numpy() == written).all()
    assert not memory[len(written) :].any(), "what lies behind is left alone"
    assert found == digest(torch.from_numpy(written))


def test_concurrent_reads_return_their_own_bytes(
    file: DirectFile, written: NDArray[np.uint8], memory: torch.Tensor
) -> None:
    pages = written.reshape(NUM_PAGES, PAGE_BYTES)
    found: dict[int, tuple[int, int]] = {}
    with closing(ParallelReader(file, "it", 3, PAGE_BYTES)) as reader:

        def read(number: int) -> None:
            into = memory[number * PAGE_BYTES :][:PAGE_BYTES].numpy()
            for _ in range(20):
                found[number] = reader.read(into, (1 + number) * PAGE_BYTES)

        callers = [threading.Thread(target=read, args=(number,)) for number in range(NUM_PAGES)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(NEVER_S)

    assert (memory.numpy()[: len(written)] == written).all()
    assert found == {n: digest(torch.from_numpy(page)) for n, page in enumerate(pages)}


def test_truncated_file_is_an_error_after_all_reads_have_ended(
    file: DirectFile, written: NDArray[np.uint8], memory: torch.Tensor
) -> None:
    with closing(ParallelReader(file, "it", 4, PAGE_BYTES)) as reader:
        with pytest.raises(OSError, match=f"ends at byte {(NUM_PAGES + 1) * PAGE_BYTES}"):
            reader.read(memory.numpy(), PAGE_BYTES)
        # All ten parts that the file has came, whichever thread met its end, and when.
        assert (memory.numpy()[: len(written)] == written).all()

        memory.zero_()
        reader.read(memory[: len(written)].numpy(), PAGE_BYTES)  # and it goes on reading

    assert (memory.numpy()[: len(written)] == written).all()


def test_closing_ends_its_threads(file: DirectFile, memory: torch.Tensor) -> None:
    before = threading.active_count()
    reader = ParallelReader(file, "it", 4)
    assert threading.active_count() == before, "nobody has read yet"
    reader.read(memory[:PAGE_BYTES].numpy(), 0)
    assert threading.active_count() == before + 4
    reader.close()
    assert threading.active_count() == before
