"""The mover behind vLLM's ``EplbCommunicator``: what vLLM moves is checked, and replaced if wrong.

vLLM's own communicator moves the experts, on a group of its own whose deadline ends a silent peer.
A digest of each record that arrives decides whether it is used. A wrong record is asked for once
more, of another holder where there is one. What is still missing is staged from the records that
were kept at the load (``common/records.py``): host memory, another host, disk. If any
rank is left without a right record, all ranks look at the slots that they serve:

    most slots of the layer are wrong   the weights were replaced: vLLM's own communicator moves
    some are wrong                      the layer keeps its map, so that no wrong byte spreads
    none is wrong                       the links are: vLLM's own communicator moves, unchecked

Digests are taken and exchanged after the load; replicas must have the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from rebalance.engines.common.records import (
    NOBODY,
    Kept,
    agreed,
    of_all_ranks,
    slot_digests,
)
from rebalance.engines.common.start import set_part
from rebalance.types import Digest
from rebalance.weights.expert_records import Tensors, bytes_of, digest_of, rows_of

if TYPE_CHECKING:
    from rebalance.engines.vllm.process import PluginProcess

ATTEMPTS = 2
PEER_DEADLINE_S = 30.0  # for all records of a batch to arrive

Transfer = tuple[Tensors, int, int]  # tensors of one expert, the other rank, the expert

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

        def __init__(
            self,
            group: Any,
            weights: Sequence[Tensors],
            buffers: Tensors,
            own: Any,
            own_on: Callable[[Any], Any],
        ) -> None:
            self._group, self._weights, self._buffers, self._own = group, weights, buffers, own
            self._num_experts = process.num_experts  # of the model that is being added
            self._sends: list[Transfer] = []
            self._recvs: list[Transfer] = []
            self._layer, self._old = -1, np.empty(0, dtype=np.int64)
            self.wanted = self._old  # [P] of the layer that is being moved
            self._known: dict[int, dict[int, Digest]] = {}  # by layer and expert
            self._stream: Any = None
            # A group of its own: one that a late peer has broken is of no use afterwards.
            links = dist.new_group(
                group.ranks,
                timeout=timedelta(seconds=PEER_DEADLINE_S),
                backend="gloo",
                use_local_synchronization=True,
            )
            self._peers: Any = own_on(links)
            self._abandoned: object = None  # what operations of broken links may still write to
            self.kept: Kept | None = None  # records of this model, alike on all ranks
            self.unmoved: set[int] = set()  # layers that keep their map at the next commit
            self.num_checked = self.num_wrong = self.num_repeated = self.num_kept = 0

        @property
        def needs_profile_buffer_reservation(self) -> bool:
            return bool(self._own.needs_profile_buffer_reservation)

        def set_stream(self, stream: Any) -> None:
            self._stream = stream
            self._own.set_stream(stream)
            if self._peers is not None:  # vLLM's worker calls this again for each rebalance
                self._peers.set_stream(stream)

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
            if process.keeps_layer(self, self._old, self._layer):
                return  # on all ranks: nobody sends or receives
            if process.is_on("mover") and (
                self._is_moved(sends, recvs) or self._layer in self.unmoved
            ):
                return
            self._move(self._own, sends, recvs)

        def take_references(self, held: np.ndarray) -> None:
            """Agree on the digests of all experts after the load; collective.

            Args:
                held: [L, S] the map of the load.
            """
            for layer, row in enumerate(held):
                self._old, self._layer = np.array(row, dtype=np.int64), layer
                self._digests()

        def _move(self, by: Any, sends: list[Transfer], recvs: list[Transfer]) -> None:
            for tensors, rank, expert in sends:
                by.add_send(tensors, rank, expert_id=expert)
            for tensors, rank, expert in recvs:
                by.add_recv(tensors, rank, expert_id=expert)
            by.execute()

        def _is_moved(self, sends: list[Transfer], recvs: list[Transfer]) -> bool:
            """Whether every rank has right records of all that it receives; alike on all ranks."""
            with on_stream(self._stream):
                expected = self._digests()
                copies = self._wrong_copies(expected)
                if self._peers is None:
                    recvs = recvs + copies
                for attempt in range(ATTEMPTS):
                    if self._peers is None:
                        break
                    if attempt:
                        sends, recvs = self._asked_again(recvs)
                    recvs = self._missing_of_peers(sends, recvs, expected) + copies
                    copies = []
                    if not self._anywhere(len(recvs)):
                        set_part("vllm", "mover", is_on=self._peers is not None)
                        return True
                set_part("vllm", "mover", is_on=False)
                wrong, num_wrong = self._wrong_slots()
                if 2 * num_wrong > len(self._old):
                    self._forget()
                elif (kept := self.kept) is not None:
                    recvs = [one for one in recvs if not kept.restore(self._layer, one[2], one[0])]
                    if not self._anywhere(len(recvs)):
                        return True
            if self._known and num_wrong:
                self._keep_map(wrong)
                return False
            self.num_repeated += 1
            log.error("layer %d: moved by vLLM's own communicator, unchecked", self._layer)
            return False

        def _wrong_slots(self) -> tuple[list[int], int]:
            """Slots of this rank without their expert's bytes, and how many all ranks have."""
            expected, weights = self._digests(), self._weights[self._layer]
            own = self._rows(self._group.rank_in_group)
            wrong = [
                place
                for place, expert in enumerate(own)
                if digest_of(bytes_of(rows_of(weights, place))) != expected.get(int(expert))
            ]
            return wrong, self._summed(len(wrong))[0]

        def _forget(self) -> None:
            """Drop digests and records of the load: the weights were replaced since."""
            self._known.clear()  # taken again before the next move of each layer
            if self.kept is not None:
                self.kept = None
                process.records_ended()

        def _keep_map(self, wrong: list[int]) -> None:
            """Have the layer serve as before; the placement check names the tensors."""
            self.unmoved.add(self._layer)
            self.num_kept += 1
            first = self._group.rank_in_group * self._weights[0][0].shape[0]
            slots = [first + place for place in wrong]
            log.error("layer %d keeps its map: wrong bytes in slots %s", self._layer, slots)
            process.suspect(self._layer, wrong)

        def _wrong_copies(self, expected: dict[int, Digest]) -> list[Transfer]:
            """What vLLM has copied wrong from slots of this rank to its buffers, as from a peer."""
            rank, num_local = self._group.rank_in_group, self._weights[0][0].shape[0]
            old, new = self._rows(rank), self.wanted[rank * num_local :][:num_local]
            copies = [
                (rows_of(self._buffers, place), rank, int(expert))
                for place, expert in enumerate(new)
                if expert != old[place] and expert in old
            ]
            return [one for one in copies if digest_of(bytes_of(one[0])) != expected.get(one[2])]

        def _missing_of_peers(
            self, sends: list[Transfer], recvs: list[Transfer], expected: dict[int, Digest]
        ) -> list[Transfer]:
            """Exchange with peers; return what did not arrive, or with a wrong digest."""
            own_rank = self._group.rank_in_group
            try:
                self._move(self._peers, sends, [one for one in recvs if one[1] != own_rank])
            except RuntimeError as exc:
                log.error("layer %d: a peer is gone or late: %s", self._layer, exc)
                self._peers, self._abandoned = None, (self._peers, exc)
                return recvs
            missing = []
            for tensors, rank, expert in recvs:
                if digest_of(bytes_of(tensors)) == expected.get(expert):
                    self.num_checked += 1
                    continue
                self.num_wrong += 1
                name = f"layer {self._layer} expert {expert}"
                log.error("%s from rank %d: digest mismatch", name, rank)
                missing.append((tensors, rank, expert))
            return missing

        def _asked_again(self, missing: list[Transfer]) -> tuple[list[Transfer], list[Transfer]]:
            """What to send and receive so that others give what is missing; collective."""
            rank, size = self._group.rank_in_group, self._group.world_size
            recvs = [(tensors, self._other_holder(e, was), e) for tensors, was, e in missing]
            asked = torch.full((self._weights[0][0].shape[0], 2), NOBODY)
            for place, (_, source, expert) in enumerate(recvs):
                asked[place] = torch.tensor([source, expert])
            everyone = of_all_ranks(asked, self._group.cpu_group)
            held = {int(expert): row for row, expert in reversed(list(enumerate(self._rows(rank))))}
            sends = [
                (rows_of(self._weights[self._layer], held[expert]), reader, expert)
                for reader in range(size)
                for source, expert in everyone[reader].tolist()
                if source == rank != reader  # a wrong copy of its own has no other holder
            ]
            return sends, recvs

        def _rows(self, rank: int) -> Any:
            num_local = self._weights[0][0].shape[0]
            return self._old[rank * num_local :][:num_local]

        def _digests(self) -> dict[int, Digest]:
            """Digest of each expert of the layer; collective after ``_forget`` and the load."""
            layer, kept = self._layer, self.kept
            if layer not in self._known:
                if kept is not None:
                    experts = range(self._num_experts)
                    self._known[layer] = {one: kept.digest_of(layer, one) for one in experts}
                else:
                    by_rank = of_all_ranks(
                        slot_digests(self._weights[layer]), self._group.cpu_group
                    )
                    self._known[layer] = agreed(self._old, by_rank, layer)
            return self._known[layer]

        def _other_holder(self, expert: int, source: int) -> int:
            num_local = self._weights[0][0].shape[0]
            holders = {int(slot) // num_local for slot in np.flatnonzero(self._old == expert)}
            return min(holders - {source}, default=source)

        def _anywhere(self, num_missing: int) -> bool:
            """Whether any rank misses records; one whose peer is late ends the links of all."""
            num_missing, num_broken = self._summed(num_missing, int(self._peers is None))
            if num_broken:
                self._peers = None
            return num_missing > 0

        def _summed(self, *numbers: int) -> list[int]:
            """The sums over all ranks; collective."""
            word = torch.tensor(numbers)
            dist.all_reduce(word, group=self._group.cpu_group)
            return word.tolist()

    return CheckedCommunicator
