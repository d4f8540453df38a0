"""Records of all experts, kept from the load on: in memory of this host, and on a disk.

Each expert is captured once, by the first rank that holds it, before anything has moved. Ranks of
one host read each other's memory through a mapping, which outlives its owner. On a disk each rank
has a file of its own, which a later start of the same model finds again and compares.

Shapes:  L MoE layers, E experts, P physical experts, C of them on this rank.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from eplb.errors import EplbError, MigrationError
from rebalance.engines.vllm.moves.record import (
    Tensors,
    bytes_of,
    digest_of,
    num_bytes_of,
    rows_of,
)
from rebalance.types import Digest
from rebalance.weights.disk.record_file import RecordFile
from rebalance.weights.disk.record_origin import RecordOrigin
from runtime.group import first_refusal, gathered
from runtime.memory.shared import SharedArena, attach, whole_pages

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Places:
    """Where records are kept.

    Args:
        memory_bytes: of each rank, at most; 0: none.
        folder: of the files; None: no disk. It may be one that all hosts share.
        name: of the deployment and its group of ranks, in the names of the files.
        model: what the engine calls the model, with all that decides its weights.
    """

    memory_bytes: int
    folder: Path | None
    name: str
    model: str

    def file_of(self, rank: int) -> Path:
        """The file of a rank's records."""
        assert self.folder is not None, "there is a disk"
        return self.folder / f"{self.name}-rank-{rank:04d}.records"


class KeptRecords:
    """Records of one model, read by one rank. ``capture`` makes it.

    Args:
        weights: [L] of the tensors [C, ...] of each layer.
        held: [L, P] the map of the load.
        rank: of this process.
        places: where records are kept.
    """

    def __init__(
        self, weights: list[Tensors], held: NDArray[np.int64], rank: int, places: Places
    ) -> None:
        self._rank, self._places = rank, places
        self._each, self.held = weights[0][0].shape[0], held.copy()
        num_experts, layers = int(held.max()) + 1, np.arange(len(held))
        # The first slot that holds each expert, and its place among those of the rank.
        self._slot = np.zeros((len(held), num_experts), dtype=np.int64)
        for slot in reversed(range(held.shape[1])):
            self._slot[layers, held[:, slot]] = slot
        is_first = self._slot[layers[:, None], held] == np.arange(held.shape[1])
        by_rank = is_first.reshape(len(held), -1, self._each).swapaxes(0, 1)
        counted = by_rank.reshape(len(by_rank), -1).cumsum(axis=1).reshape(by_rank.shape) - 1
        self._entry = counted.swapaxes(0, 1).reshape(held.shape)
        self._num_own = int(by_rank[rank].sum())
        sizes = {num_bytes_of(rows_of(layer, 0)) for layer in weights}
        if len(sizes) != 1:
            raise MigrationError(f"layers have records of {sorted(sizes)} bytes, expected one size")
        self._record_bytes = whole_pages(sizes.pop())
        self._most = places.memory_bytes // self._record_bytes
        kinds = [(tuple(one.shape[1:]), str(one.dtype)) for one in weights[0]]
        self._origin = RecordOrigin(
            hashlib.blake2b(repr(kinds).encode(), digest_size=16).hexdigest(),
            places.model,
            len(held),
            num_experts,
            self._record_bytes,
        )
        self._arena: SharedArena | None = None
        self._arena_name = f"eplb-records-{secrets.token_hex(8)}"
        self._memory: dict[int, NDArray[np.uint8]] = {}  # by rank
        self._files: dict[int, RecordFile | None] = {}  # by rank; None: not on this host
        self.num_written = 0  # records that the file lacked
        self._scratch = SharedArena("eplb-record", self._record_bytes).bytes
        self.digests = np.zeros((len(held), held.shape[1], 2), dtype=np.int64)  # of all slots

    def keep(self, weights: list[Tensors]) -> torch.Tensor:
        """Capture the experts of which this rank is the first holder.

        Returns:
            [L, C, 2] digests of this rank's slots.

        Raises:
            MigrationError: there is no such memory.
            CheckpointError: the file is of another model, or another process writes it.
            OSError: the disk is full or fails.
        """
        mine = torch.zeros((len(weights), self._each, 2), dtype=torch.int64)
        num_kept = min(self._num_own, self._most)
        if num_kept:
            self._arena = SharedArena(self._arena_name, num_kept * self._record_bytes)
            self._arena.reserve(0, num_kept * self._record_bytes)
        file = self._own_file()
        for layer, tensors in enumerate(weights):
            for row in range(self._each):
                record = bytes_of(rows_of(tensors, row))
                found = digest_of(record)
                mine[layer, row] = torch.tensor(found)
                slot = self._rank * self._each + row
                expert = int(self.held[layer, slot])
                if self._slot[layer, expert] != slot:
                    continue
                entry = int(self._entry[layer, slot])
                if self._arena is not None and entry < num_kept:
                    self._arena.bytes[entry * self._record_bytes :][: len(record)] = record
                if file is not None and file.digest_of((layer, expert)) != found:
                    self._scratch.zero_()
                    self._scratch[: len(record)] = record
                    file.write((layer, expert), self._scratch, found)
                    self.num_written += 1
        if file is not None:
            file.flush()
        log.info(
            "records of %d experts kept: %d in memory (%d bytes), %d written to the disk",
            self._num_own,
            num_kept,
            num_kept * self._record_bytes,
            self.num_written,
        )
        return mine

    def _own_file(self) -> RecordFile | None:
        if self._places.folder is None:
            return None
        path = self._places.file_of(self._rank)
        file = RecordFile.open_or_make(path, self._origin)
        if not file.may_write:
            raise MigrationError(f"record file {path} is written by another process, expected none")
        self._files[self._rank] = file
        return file

    @property
    def handle(self) -> tuple[str, str, int]:
        """How other ranks of this host attach: path, name of the memory, and its bytes."""
        if self._arena is None:
            return "", "", 0
        return self._arena.handle, self._arena_name, self._arena.bytes.numel()

    def attach_to(self, rank: int, handle: tuple[str, str, int]) -> None:
        """Map the memory of another rank, if it is on this host."""
        path, name, num_bytes = handle
        if not num_bytes:
            return
        try:
            if not str(Path(path).readlink()).startswith(f"/memfd:{name}"):  # of another host
                return
            found = attach(path, num_bytes)
        except (OSError, MigrationError) as exc:
            log.debug("memory of rank %d: %s", rank, exc)
            return
        self._memory[rank] = found.reshape(-1, self._record_bytes)

    def read(self, layer: int, expert: int, expected: Digest) -> tuple[torch.Tensor, str] | None:
        """Return a record and where it was; None where no place has one of this digest.

        The record is valid until the next one is read.
        """
        slot = int(self._slot[layer, expert])
        owner, entry = slot // self._each, int(self._entry[layer, slot])
        memory = self._memory.get(owner)
        if memory is not None and entry < len(memory):
            self._scratch.numpy()[:] = memory[entry]
            if digest_of(self._scratch) == expected:
                return self._scratch, "memory"
            log.error("layer %d expert %d: wrong bytes in the memory of records", layer, expert)
        file = self._file_of(owner)
        if file is None or file.digest_of((layer, expert)) != expected:
            return None
        try:
            if file.read((layer, expert), self._scratch) == expected:
                return self._scratch, "disk"
            log.error("%s: layer %d expert %d: wrong bytes", file.path, layer, expert)
        except OSError as exc:
            log.error("%s: layer %d expert %d: %s", file.path, layer, expert, exc)
        return None

    def _file_of(self, rank: int) -> RecordFile | None:
        if rank not in self._files:
            self._files[rank] = None
            if self._places.folder is not None and self._places.file_of(rank).exists():
                try:
                    self._files[rank] = RecordFile(self._places.file_of(rank), self._origin)
                except EplbError as exc:
                    log.warning("%s", exc)
        return self._files[rank]


def capture(
    find: Callable[[], tuple[list[Tensors], NDArray[np.int64]]], group: Any, places: Places
) -> KeptRecords | None:
    """Capture each expert once; a collective of all ranks, before anything has moved.

    Args:
        find: returns [L] of the tensors [C, ...] of each layer, and [L, P] the map of the load,
            without empty slots. It may raise.
        group: vLLM's coordinator of the ranks that balance.
        places: where records are kept.

    Returns:
        The records; None on all ranks where one of them cannot keep its own.

    Raises:
        RuntimeError: a rank died or was late.
    """
    refusal, kept, mine = "", None, torch.empty(0)
    try:
        weights, held = find()
        kept = KeptRecords(weights, held, group.rank_in_group, places)
        mine = kept.keep(weights)
    except Exception as exc:  # told to the other ranks, which wait in the next collective
        log.debug("records", exc_info=True)
        refusal = f"{type(exc).__name__}: {exc}" if not isinstance(exc, EplbError) else str(exc)
    why_not = first_refusal(refusal, group.cpu_group)
    if why_not or kept is None:
        log.error("no records of experts are kept: %s", why_not)
        return None
    everyone = [torch.empty_like(mine) for _ in range(group.world_size)]
    dist.all_gather(everyone, mine, group=group.cpu_group)
    kept.digests = torch.cat(everyone, dim=1).numpy()
    for rank, (path, name, size) in enumerate(gathered(kept.handle, group.cpu_group)):
        kept.attach_to(rank, (path, name, size))
    return kept
