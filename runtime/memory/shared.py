"""Shared memory of the processes of one host, which ends with its last user.

An arena is a ``memfd``: it has no name in the file system, so a killed process leaves nothing
behind (TensorRT-LLM issue 7377 is about stale files in /dev/shm). Others attach through its
handle, ``/proc/PID/fd/N``, while the owner lives; a mapping outlives the owner.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from eplb.errors import MigrationError

PAGE_BYTES = 4096
LANE_BYTES = 4  # a digest is over 32-bit lanes
LANES_AT_ONCE = 2**17  # summed together: as 64-bit numbers they fit a core's second-level cache
_POSITIONS = np.arange(1, LANES_AT_ONCE + 1, dtype=np.int64)
COMPILED_FROM_BYTES = 4 * 2**20  # loading a compiler takes as long as the plain sums of 1 GB

LaneSums = Callable[[NDArray[np.int32]], tuple[int, int]]


log = logging.getLogger(__name__)


def whole_pages(num_bytes: int) -> int:
    """Round bytes up to whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


class SharedArena:
    """Bytes that this process owns and others on the host may read.

    Untouched pages take no memory. ``folder`` puts the arena into a nameless file of a tmpfs
    instead, whose own size then limits it.

    Raises:
        MigrationError: the system gives no such memory.
    """

    def __init__(self, name: str, num_bytes: int, *, folder: Path | None = None) -> None:
        refusal = f"no arena {name} of {num_bytes} bytes"
        try:
            self._descriptor = (
                os.memfd_create(name)
                if folder is None
                else os.open(folder, os.O_RDWR | os.O_TMPFILE, 0o600)
            )
        except OSError as exc:
            raise MigrationError(f"{refusal}: {exc}") from exc
        try:
            os.ftruncate(self._descriptor, num_bytes)
            self._mapping = mmap.mmap(self._descriptor, num_bytes)
        except (OSError, OverflowError) as exc:
            os.close(self._descriptor)
            raise MigrationError(f"{refusal}: {exc}") from exc
        self.bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)

    def reserve(self, start: int, num_bytes: int) -> None:
        """Allocate the pages of a span now.

        Without this a missing page is a SIGBUS in the process that first touches it.

        Raises:
            MigrationError: there is not enough memory.
        """
        try:
            os.posix_fallocate(self._descriptor, start, num_bytes)
        except OSError as exc:
            raise MigrationError(
                f"no shared memory for {num_bytes} bytes at {start} of the arena: {exc}"
            ) from exc

    @property
    def handle(self) -> str:
        """Path by which other processes of this host attach."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def close(self) -> None:
        """Prevent further attachments; the memory is freed with its last mapping."""
        os.close(self._descriptor)


def attach(handle: str, num_bytes: int, *, for_gpu: bool = False) -> NDArray[np.uint8]:
    """Map another process's arena, read-only unless a GPU is to read it.

    CUDA registers only writable memory; but no process writes through this mapping.

    Raises:
        MigrationError: the owner has exited, or its arena has another size.
    """
    try:
        descriptor = os.open(handle, os.O_RDWR if for_gpu else os.O_RDONLY)
    except OSError as exc:
        raise MigrationError(f"arena {handle} cannot be attached, is its owner alive?") from exc
    try:
        found = os.fstat(descriptor).st_size
        if found != num_bytes:
            raise MigrationError(f"arena {handle} has {found} bytes, expected {num_bytes}")
        access = mmap.PROT_READ | (mmap.PROT_WRITE if for_gpu else 0)
        mapping = mmap.mmap(descriptor, num_bytes, prot=access)
    finally:
        os.close(descriptor)
    return np.frombuffer(mapping, dtype=np.uint8)


def plain_lane_sums(lanes: NDArray[np.int32]) -> tuple[int, int]:
    """The sum of ``lanes``, and of lanes times their positions from 1 on, modulo 2**64."""
    # Block by block: whole records of 64-bit numbers would go through main memory four times.
    plain_sum = weighted_sum = 0
    block = np.empty(min(len(lanes), LANES_AT_ONCE), dtype=np.int64)
    for first in range(0, len(lanes), LANES_AT_ONCE):
        part = lanes[first : first + LANES_AT_ONCE]
        longs = block[: len(part)]
        np.copyto(longs, part)
        plain = int(np.add.reduce(longs))
        # Not np.dot: for whole numbers it is plain loops, at half the speed.
        np.multiply(longs, _POSITIONS[: len(longs)], out=longs)
        plain_sum += plain
        weighted_sum += int(np.add.reduce(longs)) + plain * first
    return plain_sum, weighted_sum


def _loop_over_lanes(lanes: NDArray[np.int32]) -> tuple[int, int]:
    """What ``plain_lane_sums`` gives, once compiled: one pass at memory's speed."""
    plain = weighted = 0  # 64 bits wide once compiled, so sums wrap
    for index in range(len(lanes)):
        lane = int(lanes[index])
        plain += lane
        weighted += lane * (index + 1)
    return plain, weighted


@cache
def compiled_lane_sums() -> LaneSums:
    """Four times as fast, and readers of a disk do not share the interpreter's lock over it."""
    try:
        from eplb.core import compiler  # noqa: F401
        from eplb.core.jit import jit
    except ImportError:  # a GPU host's own Python may have no numba
        log.info("numba is not installed: digests on the CPU are worked out by numpy")
        return plain_lane_sums
    return jit(_loop_over_lanes)


def compile_digest() -> None:
    """Compile the digest of long records, before a preload waits for it."""
    compiled_lane_sums()(np.zeros(1, dtype=np.int32))


class RunningDigest:
    """The digest of bytes that come piece by piece.

    Args:
        first_byte: where the bytes begin in their record, at a whole lane; see ``join``.
    """

    def __init__(self, first_byte: int = 0) -> None:
        self._plain = self._weighted = 0
        self._num_lanes = first_byte // LANE_BYTES

    def add(self, piece: NDArray[np.uint8]) -> None:
        """Add the next bytes, a whole number of 32-bit lanes."""
        lanes = piece.view(np.int32)
        is_long = piece.nbytes >= COMPILED_FROM_BYTES
        plain, weighted = (compiled_lane_sums() if is_long else plain_lane_sums)(lanes)
        self._plain += plain
        self._weighted += weighted + plain * self._num_lanes
        self._num_lanes += len(lanes)

    def join(self, part: RunningDigest) -> None:
        """Add the sums of another part of the same record; parts may come in any order."""
        self._plain += part._plain
        self._weighted += part._weighted

    @property
    def value(self) -> tuple[int, int]:
        """The two sums so far, as signed 64-bit numbers."""
        return _signed(self._plain), _signed(self._weighted)


def _signed(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def digest(record: torch.Tensor) -> tuple[int, int]:
    """Two sums over the 32-bit lanes of a record, plain and weighted by position, modulo 2**64.

    Sums are associative, so a GPU kernel with integer atomics gives the same figures in any order,
    and the weighted one sees lanes that changed places.
    """
    if record.is_cuda:
        from runtime.kernels.digest import digest_records

        sums = torch.empty((1, 2), dtype=torch.int64, device=record.device)
        digest_records(record.view(1, -1), sums)
        plain, weighted = sums[0].tolist()
        return plain, weighted
    running = RunningDigest()
    running.add(record.view(torch.uint8).numpy())
    return running.value
