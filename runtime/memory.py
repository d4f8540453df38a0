"""Memory that several processes of one host share, and that vanishes with its last user.

An arena is a ``memfd``: it has no name in the file system, so a killed process leaves nothing
behind (TensorRT-LLM issue 7377 is about stale files in /dev/shm). Others attach through its
handle, ``/proc/PID/fd/N``, while the owner lives; a mapping outlives the owner.
"""

from __future__ import annotations

import mmap
import os

import numpy as np
import torch
from numpy.typing import NDArray

from eplb.errors import MigrationError

PAGE_BYTES = 4096


class SharedArena:
    """Bytes that this process owns and others on the host may read."""

    def __init__(self, name: str, num_bytes: int) -> None:
        self._descriptor = os.memfd_create(name)
        os.ftruncate(self._descriptor, num_bytes)
        self._mapping = mmap.mmap(self._descriptor, num_bytes)
        self.bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)

    @property
    def handle(self) -> str:
        """Path by which other processes of this host attach."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"


def attach(handle: str, num_bytes: int, *, for_gpu: bool = False) -> NDArray[np.uint8]:
    """Map another process's arena, read-only unless a GPU is to read it.

    CUDA registers only memory that may be written; nobody writes through this mapping all the same.

    Raises:
        MigrationError: the owner is gone, or its arena has another size.
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
    lanes = record.view(torch.int32).to(torch.int64)
    positions = torch.arange(1, len(lanes) + 1, dtype=torch.int64, device=lanes.device)
    return int(lanes.sum()), int((lanes * positions).sum())
