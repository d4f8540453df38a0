"""The mover behind vLLM's ``EplbCommunicator``: receivers ask, and check what they get.

Each receiver asks a rank that holds the expert, all ranks answer, and a digest of the record
decides whether it is used. A record is the engine's tensors of one expert as its kernels read them.
A wrong record is asked for once more, of another holder where there is one. If any rank is left
without a right record, all ranks repeat the batch by vLLM's own communicator, so a fault of this
one moves nothing wrong and stops nothing.

Digests of a layer are taken before its first move and exchanged; replicas must have the same.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from rebalance.engines.gauge import set_part
from rebalance.types import Digest
from runtime.memory.shared import digest

if TYPE_CHECKING:
    from rebalance.engines.vllm.process import PluginProcess

ATTEMPTS = 2
NOBODY = -1

log = logging.getLogger(__name__)
Tensors = Sequence[torch.Tensor]  # of one expert, one from each of the layer's weights


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
            self._sends: list[tuple[Tensors, int, int]] = []
            self._recvs: list[tuple[Tensors, int, int]] = []
            self._layer, self._old = -1, np.empty(0, dtype=np.int64)
            self._known: dict[int, dict[int, Digest]] = {}  # by layer and expert
            self._stream: Any = None
            self.num_checked = self.num_wrong = self.num_repeated = self.num_skipped = 0

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
            shape = len(self._weights), process.num_experts
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
                    for expert, record in self._exchanged(sources).items():
                        if _digest_of(record) == expected.get(expert):
                            _write(record, wanted[expert])
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
                    if not self._anywhere(len(sources)):
                        set_part("vllm", "mover", is_on=True)
                        return True
            # The weights may have been replaced since: taken again before the next move.
            self._known.pop(self._layer, None)
            self.num_repeated += 1
            set_part("vllm", "mover", is_on=False)
            log.error("layer %d: moved by vLLM's own communicator, unchecked", self._layer)
            return False

        def _rows(self, rank: int) -> Any:
            num_local = self._weights[0][0].shape[0]
            return self._old[rank * num_local :][:num_local]

        def _record(self, row: int) -> torch.Tensor:
            return _bytes_of([weight[row] for weight in self._weights[self._layer]])

        def _digests(self) -> dict[int, Digest]:
            """Digest of each expert of the layer; collective at the first move of a layer."""
            if self._layer in self._known:
                return self._known[self._layer]
            num_local, rank = self._weights[0][0].shape[0], self._group.rank_in_group
            mine = torch.zeros((num_local, 2), dtype=torch.int64)
            for row, expert in enumerate(self._rows(rank)):
                if expert != NOBODY:
                    mine[row] = torch.tensor(_digest_of(self._record(row)))
            table = self._gathered(mine)
            found: dict[int, Digest] = {}
            for other in range(self._group.world_size):
                for row, expert in enumerate(self._rows(other)):
                    given = (int(table[other, row, 0]), int(table[other, row, 1]))
                    if expert != NOBODY and found.setdefault(int(expert), given) != given:
                        log.error(
                            "layer %d expert %d: the replica on rank %d differs from another",
                            self._layer,
                            expert,
                            other,
                        )
            self._known[self._layer] = found
            return found

        def _exchanged(self, sources: dict[int, int]) -> dict[int, torch.Tensor]:
            """Ask for experts by the rank to ask, and answer the others; collective."""
            rank, size = self._group.rank_in_group, self._group.world_size
            asked = torch.full((self._weights[0][0].shape[0], 2), NOBODY)
            for place, (expert, source) in enumerate(sources.items()):
                asked[place] = torch.tensor([source, expert])
            everyone = self._gathered(asked)
            num_bytes = sum(w[0].numel() * w.element_size() for w in self._weights[self._layer])
            held = {int(expert): row for row, expert in reversed(list(enumerate(self._rows(rank))))}
            got = {e: torch.empty(num_bytes, dtype=torch.uint8) for e in sources}
            operations, kept = [], []
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
            for work in dist.batch_isend_irecv(operations) if operations else []:
                work.wait()
            return got

        def _operation(self, what: Any, record: torch.Tensor, peer: int) -> Any:
            return dist.P2POp(what, record, group=self._group.cpu_group, group_peer=peer)

        def _other_holder(self, expert: int, source: int) -> int:
            num_local = self._weights[0][0].shape[0]
            holders = {int(slot) // num_local for slot in np.flatnonzero(self._old == expert)}
            return min(holders - {source}, default=source)

        def _gathered(self, mine: torch.Tensor) -> torch.Tensor:
            everyone = [torch.empty_like(mine) for _ in range(self._group.world_size)]
            dist.all_gather(everyone, mine, group=self._group.cpu_group)
            return torch.stack(everyone)

        def _anywhere(self, num_missing: int) -> bool:
            missing = torch.tensor([num_missing])
            dist.all_reduce(missing, group=self._group.cpu_group)
            return bool(missing.item())

    return CheckedCommunicator


def _bytes_of(tensors: Tensors) -> torch.Tensor:
    """The bytes of one expert on the host."""
    return torch.cat([t.detach().contiguous().view(-1).view(torch.uint8).cpu() for t in tensors])


def _write(record: torch.Tensor, tensors: Tensors) -> None:
    for tensor, part in _parts(record, tensors):
        tensor.copy_(part.view(tensor.dtype).view(tensor.shape))


def _parts(record: torch.Tensor, tensors: Tensors) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    at = 0
    for tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        # A copy is aligned to any type; a part of a record is not.
        yield tensor, record[at : at + num_bytes].clone()
        at += num_bytes


def _digest_of(record: torch.Tensor) -> Digest:
    """Of a record of any length: the digest reads words of 8 bytes."""
    padding = -len(record) % 8
    if padding:
        record = torch.cat([record, record.new_zeros(padding)])
    plain, weighted = digest(record)
    return plain, weighted
