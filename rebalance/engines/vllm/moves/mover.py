"""The mover behind vLLM's ``EplbCommunicator``: receivers ask, and check what they get.

Each receiver asks a rank that holds the expert, all ranks answer, and a digest of the record
decides whether it is used. A wrong record is asked for once more, of another holder where there is
one. What is still missing, because its holders are late or have lost it, comes from the records
that were kept at the load, of this host's memory or of a disk. If any rank is left without a right
record, all ranks repeat the batch by vLLM's own communicator, so a fault of this one moves nothing
wrong and stops nothing.

Digests are those of the kept records, else taken from a layer before its first move and exchanged;
replicas must have the same.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from rebalance.engines.gauge import set_part
from rebalance.engines.vllm.moves.record import (
    Tensors,
    bytes_of,
    digest_of,
    num_bytes_of,
    rows_of,
    write,
)
from rebalance.types import Digest

if TYPE_CHECKING:
    from rebalance.engines.vllm.moves.kept_records import KeptRecords
    from rebalance.engines.vllm.process import PluginProcess

ATTEMPTS = 2
NOBODY = -1
PEER_DEADLINE_S = 30.0  # for all records of a batch to arrive

log = logging.getLogger(__name__)


def communicator_class(process: PluginProcess, base: Any, on_stream: Any) -> type:
    """Make the class of the communicator.

    Args:
        process: the plug-in in this process.
        base: vLLM's ``EplbCommunicator``.
        on_stream: vLLM's ``device_stream``.
    """

    class CheckedCommunicator(base):  # type: ignore[misc]
        """Moves checked records; ``own`` is vLLM's communicator, used if one stays wrong."""

        def __init__(self, group: Any, weights: Sequence[Tensors], own: Any) -> None:
            self._group, self._weights, self._own = group, weights, own
            self._num_experts = process.num_experts  # of the model that is being added
            self._sends: list[tuple[Tensors, int, int]] = []
            self._recvs: list[tuple[Tensors, int, int]] = []
            self._layer, self._old = -1, np.empty(0, dtype=np.int64)
            self._known: dict[int, dict[int, Digest]] = {}  # by layer and expert
            self._stream: Any = None
            # A group of its own: one that a late peer has broken is of no use afterwards.
            self._links: Any = dist.new_group(
                group.ranks,
                timeout=timedelta(seconds=PEER_DEADLINE_S),
                backend="gloo",
                use_local_synchronization=True,
            )
            self._abandoned: object = None  # what operations of broken links may still write to
            self._records: KeptRecords | None = None
            self.num_checked = self.num_wrong = self.num_repeated = self.num_skipped = 0
            self.num_from = {"memory": 0, "disk": 0}  # kept records that were used

        def use_records(self, records: KeptRecords) -> None:
            """Use the records of this model's experts from now on; alike on all ranks."""
            self._records = records

        @property
        def needs_profile_buffer_reservation(self) -> bool:
            return bool(self._own.needs_profile_buffer_reservation)

        def set_stream(self, stream: Any) -> None:
            self._stream = stream
            self._own.set_stream(stream)

        def set_transfer_context(self, old_indices: Any, layer_idx: int) -> None:
            self._old, self._layer = np.array(old_indices, dtype=np.int64), layer_idx
            self._own.set_transfer_context(old_indices, layer_idx)

        def add_send(self, tensors: list[torch.Tensor], dst_rank: int, expert_id: int) -> None:
            self._sends.append((tensors, dst_rank, expert_id))

        def add_recv(self, tensors: list[torch.Tensor], src_rank: int, expert_id: int) -> None:
            self._recvs.append((tensors, src_rank, expert_id))

        def execute(self) -> None:
            sends, recvs = self._sends, self._recvs
            self._sends, self._recvs = [], []
            shape = len(self._weights), self._num_experts
            if process.decisions.keeps_layer(self._old, self._layer, *shape):
                self.num_skipped += 1  # on all ranks: nobody sends or receives
                return
            if not process.is_on("mover") or not self._pulled(recvs):
                self._by_engine(sends, recvs)

        def _by_engine(self, sends: Any, recvs: Any) -> None:
            for tensors, rank, expert in sends:
                self._own.add_send(tensors, rank, expert_id=expert)
            for tensors, rank, expert in recvs:
                self._own.add_recv(tensors, rank, expert_id=expert)
            self._own.execute()

        def _pulled(self, recvs: Any) -> bool:
            """Whether every rank has all that it asked for; alike on all ranks."""
            with on_stream(self._stream):
                expected = self._digests()
                wanted = {expert: tensors for tensors, _, expert in recvs}
                sources = {expert: source for _, source, expert in recvs}
                for _ in range(ATTEMPTS):
                    if self._links is not None:
                        self._take_from_peers(wanted, sources, expected)
                    if not self._anywhere(len(sources)):
                        set_part("vllm", "mover", is_on=self._links is not None)
                        return True
                set_part("vllm", "mover", is_on=False)
                if self._has_records(expected):
                    self._take_records(wanted, sources, expected)
                    if not self._anywhere(len(sources)):
                        return True
            # The weights may have been replaced since: taken again before the next move.
            self._known.pop(self._layer, None)
            self.num_repeated += 1
            log.error("layer %d: moved by vLLM's own communicator, unchecked", self._layer)
            return False

        def _take_from_peers(
            self, wanted: dict[int, Tensors], sources: dict[int, int], expected: dict[int, Digest]
        ) -> None:
            """Write what arrives and is right; ``sources`` keeps the rest, with whom to ask."""
            for expert, record in self._exchanged(sources).items():
                if digest_of(record) == expected.get(expert):
                    write(record, wanted[expert])
                    del sources[expert]
                    self.num_checked += 1
                else:
                    self.num_wrong += 1
                    log.error(
                        "layer %d expert %d from rank %d: digest mismatch",
                        self._layer,
                        expert,
                        sources[expert],
                    )
                    sources[expert] = self._other_holder(expert, sources[expert])

        def _take_records(
            self, wanted: dict[int, Tensors], sources: dict[int, int], expected: dict[int, Digest]
        ) -> None:
            """Write the kept records of experts that no peer had."""
            assert self._records is not None, "records are kept"
            for expert in list(sources):
                found = self._records.read(self._layer, expert, expected[expert])
                if found is None:
                    log.error("layer %d expert %d: no record is kept", self._layer, expert)
                    continue
                record, place = found
                write(record, wanted[expert])
                del sources[expert]
                self.num_from[place] += 1
                log.warning(
                    "layer %d expert %d: taken from the %s, no peer had it",
                    self._layer,
                    expert,
                    place,
                )

        def _has_records(self, expected: dict[int, Digest]) -> bool:
            """Whether records are kept, and of the weights that serve; alike on all ranks.

            Where most slots of a layer have other bytes than at the load, the weights were
            replaced, and records would bring back the old ones.
            """
            if self._records is None:
                return False
            differ = [
                digest_of(self._record(row)) != expected.get(int(expert))
                for row, expert in enumerate(self._rows(self._group.rank_in_group))
                if expert != NOBODY
            ]
            if 2 * self._summed(sum(differ)) <= len(self._old):
                return True
            self._records = None
            self._known.clear()
            process.records_ended("the weights were replaced since the load")
            return False

        def _rows(self, rank: int) -> Any:
            num_local = self._weights[0][0].shape[0]
            return self._old[rank * num_local :][:num_local]

        def _record(self, row: int) -> torch.Tensor:
            return bytes_of(rows_of(self._weights[self._layer], row))

        def _digests(self) -> dict[int, Digest]:
            """Digest of each expert of the layer; collective at the first move of a layer."""
            layer = self._layer
            if layer not in self._known:
                if self._records is not None:
                    held, table = self._records.held[layer], self._records.digests[layer]
                else:
                    held, table = self._old, self._live_digests()
                self._known[layer] = _agreed(held, table, layer)
            return self._known[layer]

        def _live_digests(self) -> NDArray[np.int64]:
            """[P, 2] of all slots of the layer, as they are now; collective."""
            rank = self._group.rank_in_group
            mine = torch.zeros((self._weights[0][0].shape[0], 2), dtype=torch.int64)
            for row, expert in enumerate(self._rows(rank)):
                if expert != NOBODY:
                    mine[row] = torch.tensor(digest_of(self._record(row)))
            table: NDArray[np.int64] = self._gathered(mine).reshape(-1, 2).numpy()
            return table

        def _exchanged(self, sources: dict[int, int]) -> dict[int, torch.Tensor]:
            """Ask for experts by the rank to ask, and answer the others; collective."""
            rank, size = self._group.rank_in_group, self._group.world_size
            asked = torch.full((self._weights[0][0].shape[0], 2), NOBODY)
            for place, (expert, source) in enumerate(sources.items()):
                asked[place] = torch.tensor([source, expert])
            everyone = self._gathered(asked)
            num_bytes = num_bytes_of(rows_of(self._weights[self._layer], 0))
            held = {int(expert): row for row, expert in reversed(list(enumerate(self._rows(rank))))}
            got = {e: torch.empty(num_bytes, dtype=torch.uint8) for e in sources}
            operations, kept, works = [], [], []
            for reader in range(size):
                for source, expert in everyone[reader].tolist():
                    if reader == rank and source != NOBODY:
                        operations.append(self._operation(dist.irecv, got[expert], source))
                    elif source == rank:
                        # One that is not here is answered with zeros, which no digest matches.
                        row = held.get(expert, NOBODY)
                        record = torch.zeros(num_bytes, dtype=torch.uint8)
                        kept.append(self._record(row) if row != NOBODY else record)
                        operations.append(self._operation(dist.isend, kept[-1], reader))
            try:
                works = dist.batch_isend_irecv(operations) if operations else []
                for work in works:
                    work.wait()
            except RuntimeError as exc:
                log.error("layer %d: a peer is gone or late: %s", self._layer, exc)
                self._links, self._abandoned = None, (works, got, kept)
                return {}
            return got

        def _operation(self, what: Any, record: torch.Tensor, peer: int) -> Any:
            return dist.P2POp(what, record, group=self._links, group_peer=peer)

        def _other_holder(self, expert: int, source: int) -> int:
            num_local = self._weights[0][0].shape[0]
            holders = {int(slot) // num_local for slot in np.flatnonzero(self._old == expert)}
            return min(holders - {source}, default=source)

        def _gathered(self, mine: torch.Tensor) -> torch.Tensor:
            everyone = [torch.empty_like(mine) for _ in range(self._group.world_size)]
            dist.all_gather(everyone, mine, group=self._group.cpu_group)
            return torch.stack(everyone)

        def _anywhere(self, num_missing: int) -> bool:
            """Whether any rank misses records; one whose peer is late ends the links of all."""
            word = torch.tensor([num_missing, int(self._links is None)])
            dist.all_reduce(word, group=self._group.cpu_group)
            num_missing, num_broken = word.tolist()
            if num_broken:
                self._links = None
            return num_missing > 0

        def _summed(self, number: int) -> int:
            word = torch.tensor([number])
            dist.all_reduce(word, group=self._group.cpu_group)
            return int(word)

    return CheckedCommunicator


def _agreed(held: NDArray[np.int64], table: NDArray[np.int64], layer: int) -> dict[int, Digest]:
    """The digest of each expert: that of its first slot.

    Args:
        held: [P] experts by slot.
        table: [P, 2] digests by slot.
        layer: for the log.
    """
    found: dict[int, Digest] = {}
    for slot, expert in enumerate(held.tolist()):
        given = (int(table[slot, 0]), int(table[slot, 1]))
        if expert != NOBODY and found.setdefault(expert, given) != given:
            log.error(
                "layer %d expert %d: the replica in slot %d differs from another",
                layer,
                expert,
                slot,
            )
    return found
