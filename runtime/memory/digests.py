"""Digests of records whose copies are still under way: ordered behind the copies.

The host waits for nothing here and allocates nothing. To order a digest takes the host as long as a
fast link takes to copy 44 MB: with further work here the link would be idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import NamedTuple

import torch

from runtime.memory.shared import digest
from runtime.streams import Completion

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
        """The digests in order, as ``runtime.memory.shared.digest`` gives them.

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
