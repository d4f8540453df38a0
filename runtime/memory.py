"""Memory of expert weights: shared by processes of a host, or by GPUs of a node; and its digests.

An arena is a ``memfd``: it has no name in the file system, so a killed process leaves nothing
behind (TensorRT-LLM issue 7377 is about stale files in /dev/shm). Others attach through its
handle, ``/proc/PID/fd/N``, while the owner lives; a mapping outlives the owner.

GPU memory of an arena can be read by every rank of the node, without the owner's help:
``torch.distributed._symmetric_memory`` maps each rank's arena into all the others; a copy out of a
peer's mapping runs on the copy engine, so pulling an expert takes no multiprocessor from serving.

Digests of records whose copies are still under way are ordered behind the copies. The host waits
for nothing and allocates nothing: to order a digest takes it as long as a fast link takes to copy
44 MB, and with further work here the link would be idle.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from eplb.errors import ConfigError, MigrationError
from runtime.group import first_refusal
from runtime.lane_weights import LANE_BYTES, LANE_WEIGHTS, LANES_AT_ONCE, factor_of
from runtime.streams import Completion

PAGE_BYTES = 4096
COMPILED_FROM_BYTES = 4 * 2**20  # loading a compiler takes as long as the plain sums of 1 GB

LaneSums = Callable[[NDArray[np.int32], NDArray[np.int64]], tuple[int, int]]

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


def plain_lane_sums(lanes: NDArray[np.int32], weights: NDArray[np.int64]) -> tuple[int, int]:
    """The sum of ``lanes``, and of lanes times their weights, modulo 2**64."""
    longs = lanes.astype(np.int64)
    plain = int(np.add.reduce(longs))
    # Not np.dot: for whole numbers it is plain loops, at half the speed.
    np.multiply(longs, weights, out=longs)
    return plain, int(np.add.reduce(longs))


def _loop_over_lanes(lanes: NDArray[np.int32], weights: NDArray[np.int64]) -> tuple[int, int]:
    """The sums of ``plain_lane_sums``, once compiled: one pass at memory's speed."""
    plain = weighted = 0  # 64 bits wide once compiled, so sums wrap
    for index in range(len(lanes)):
        lane = int(lanes[index])
        plain += lane
        weighted += lane * int(weights[index])
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
    compiled_lane_sums()(np.zeros(1, dtype=np.int32), LANE_WEIGHTS[:1])


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
        sums_of = compiled_lane_sums() if is_long else plain_lane_sums
        # Block by block: whole records of 64-bit numbers would go through main memory four times.
        while len(lanes):
            block, place = divmod(self._num_lanes, LANES_AT_ONCE)
            part, lanes = lanes[: LANES_AT_ONCE - place], lanes[LANES_AT_ONCE - place :]
            plain, weighted = sums_of(part, LANE_WEIGHTS[place : place + len(part)])
            self._plain += plain
            self._weighted += weighted * factor_of(block)
            self._num_lanes += len(part)

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
    """Two sums over the 32-bit lanes of a record, plain and weighted by place, modulo 2**64.

    Sums are associative, so a GPU kernel with integer atomics gives the same figures in any order,
    and the weighted one sees lanes that changed places. The weight of a place is like a random
    number: with the place itself as its weight, permutations of small numbers, such as an index of
    a quantisation, have equal sums by the thousand. Zeros behind a record do not change it.
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


class SymmetricArena:
    """One rank's part of a symmetric allocation; every rank's part has the same size.

    Never freed while serving: freeing one synchronises the device.

    Raises:
        ConfigError: the GPUs cannot map each other's memory, or a peer reads wrong bytes; on every
            rank if on one.
    """

    def __init__(self, num_bytes: int, group: dist.ProcessGroup, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self._rank, self._size, self._group = group.rank(), group.size(), group
        wrong = ""
        try:
            self.bytes: torch.Tensor = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
            self._mapping: Any = symmetric.rendezvous(self.bytes, group)
        except RuntimeError as exc:
            wrong = f"the GPUs cannot map each other's memory, expected all of a node to: {exc}"
        # All ranks receive a refusal: otherwise they would wait for that rank in the next
        # collective.
        self._refuse_if_any(wrong)
        self._refuse_if_any(self._self_test())

    @property
    def handle(self) -> str:
        """No path: peers read through ``peer``."""
        return ""

    def peer(self, rank: int) -> torch.Tensor:
        """The arena of another rank, as bytes of this process."""
        size = tuple(self.bytes.shape)
        mapped: torch.Tensor = self._mapping.get_buffer(rank, size, torch.uint8)
        return mapped

    def _refuse_if_any(self, mine: str) -> None:
        wrong = first_refusal(mine, self._group)
        if wrong:
            raise ConfigError(wrong)

    def _self_test(self) -> str:
        """Read a mark from every peer: a mapping that exists may still be wrong."""
        mark, wrong = self.bytes[:8].view(torch.int64), ""
        mark.fill_(0x5EED + self._rank)
        torch.cuda.synchronize()
        dist.barrier(self._group)
        for rank in range(self._size):
            found = int(self.peer(rank)[:8].view(torch.int64).item())
            if found != 0x5EED + rank:
                wrong = f"reads {found:#x} from rank {rank}, expected {0x5EED + rank:#x}"
        dist.barrier(self._group)
        self.bytes[:8].zero_()
        return wrong


TOGETHER = 4  # records of one launch
RESULTS_AT_ONCE = 64  # places made together; more are made when so many digests are pending


class _Place(NamedTuple):
    """Memory for the results of one launch."""

    sums: torch.Tensor  # [TOGETHER, 2] int64 on the device
    results: torch.Tensor  # [TOGETHER, 2] int64 on the host


@dataclass(frozen=True, eq=False)
class PendingDigests:
    """The digests of some records that may still be on their way."""

    records: Sequence[torch.Tensor]  # [record_bytes] each, evenly spaced, 1 .. TOGETHER of them
    completions: Sequence[Completion]
    place: _Place | None  # None: on a CPU they are worked out when they are read

    def is_complete(self) -> bool:
        """Return whether they may be read."""
        return all(completion.is_complete() for completion in self.completions)


class RecordDigests:
    """Computes digests on one stream; used by one thread, which owns the stream."""

    def __init__(self) -> None:
        self._free: list[_Place] = []  # nothing writes to them
        self._pending: set[PendingDigests] = set()
        self._stream: torch.cuda.Stream | None = None

    @property
    def completions(self) -> list[Completion]:
        """Completions of all digests that were not read yet."""
        return [done for pending in self._pending for done in pending.completions]

    def order(self, records: Sequence[torch.Tensor], after: Sequence[Completion]) -> PendingDigests:
        """Order the digests of at most TOGETHER records, behind the completions ``after``.

        Args:
            records: [record_bytes] each, ``evenly_spaced`` in one arena.
            after: completions of the records' copies, one by one.
        """
        first = records[0]
        if first.is_cuda:
            pending = self._launch(records, after)
        else:
            pending = PendingDigests(records, after, None)
        self._pending.add(pending)
        return pending

    def _launch(
        self, records: Sequence[torch.Tensor], after: Sequence[Completion]
    ) -> PendingDigests:
        from runtime.kernels.digest import digest_records

        if self._stream is None:
            self._stream = torch.cuda.current_stream()
        first = records[0]
        place = self._free.pop() if self._free else self._make(first.device)
        for completion in after:
            completion.hold_back(self._stream)
        apart = records[1].data_ptr() - first.data_ptr() if len(records) > 1 else first.numel()
        lowest = first if apart > 0 else records[-1]
        size, strides = (len(records), first.numel()), (abs(apart), 1)
        digest_records(torch.as_strided(lowest, size, strides), place.sums[: len(records)])
        place.results.copy_(place.sums, non_blocking=True)
        return PendingDigests(records, [Completion(is_cuda=True, stream=self._stream)], place)

    def read(self, pending: PendingDigests) -> list[tuple[int, int]]:
        """The digests in order, as ``runtime.memory.digest`` gives them.

        Once, and once they are complete.
        """
        assert pending.is_complete(), "a digest is read once it is worked out"
        self._pending.remove(pending)
        records = pending.records
        if pending.place is None:
            return [digest(record) for record in records]
        rows = pending.place.results[: len(records)].tolist()
        self._free.append(pending.place)
        found = [(plain, weighted) for plain, weighted in rows]
        return found if records[-1].data_ptr() >= records[0].data_ptr() else found[::-1]

    def clear(self) -> None:
        """Drop digests that will not be read; all of them are complete."""
        assert all(pending.is_complete() for pending in self._pending), (
            "they are still being written"
        )
        self._free += [pending.place for pending in self._pending if pending.place is not None]
        self._pending.clear()

    def _make(self, device: torch.device) -> _Place:
        shape = (RESULTS_AT_ONCE, TOGETHER, 2)
        sums = torch.empty(shape, dtype=torch.int64, device=device)
        # Pinned: a copy into pageable memory would make the host wait for it.
        results = torch.empty(shape, dtype=torch.int64, device="cpu", pin_memory=True)
        self._free += map(_Place, sums, results)
        return self._free.pop()


def evenly_spaced(records: Sequence[torch.Tensor]) -> int:
    """How many of ``records``, from the first on, lie at even distances in memory."""
    places = [record.data_ptr() for record in records]
    steps = [after - before for before, after in pairwise(places)]
    even = takewhile(lambda step: step == steps[0], steps)
    return 1 + sum(1 for _ in even)
