"""The records of a model's slots by their bytes: which expert each slot has, whatever its map says.

An engine's map says which expert a slot holds. After a lost transfer, a fault of memory or a reload
the bytes say otherwise, and a digest names their expert. So a record that is wrong or missing comes
from any slot of any rank that has its bytes, else from the records that were kept at the load. All
ranks do the same: what each lacks and has is exchanged first.

Shapes:  L MoE layers, E experts, S slots of R ranks, C slots of this rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from enum import Enum

import numpy as np
import torch
import torch.distributed as dist

from eplb.errors import MigrationError
from rebalance.engines.common.records import NOBODY, Kept, of_all_ranks
from rebalance.engines.common.tap import IntArray
from rebalance.types import Digest
from rebalance.weights.expert_records import (
    Tensors,
    bytes_of,
    digest_of,
    digests_of,
    num_bytes_of,
    rows_of,
    write,
)

log = logging.getLogger(__name__)

Wanted = Sequence[tuple[int, Tensors]]  # experts, and the tensors that are to have their bytes


class Verdict(Enum):
    """What the bytes of a layer's slots are, compared with its map; alike on all ranks."""

    RIGHT = "each slot has its expert"
    DAMAGED = "some slots have no right bytes"
    OF_START = "the slots have the experts of the start's map"
    REPLACED = "most slots have bytes that no expert had"


class SlotRecords:
    """Judges slots of all ranks by their bytes, and brings records to where they are missing.

    Args:
        weights: returns what the engine moves of a layer on this rank, as it is now: C slots.
        digests: [L, E, 2] of all experts, agreed by all ranks.
        start: [L, S] the map of the engine's start, by which it loads weights again.
        group: of the ranks, for tensors on the host; nothing else uses it meanwhile.
        kept: the records of the model; None: none are kept.
    """

    def __init__(
        self,
        weights: Callable[[int], Tensors],
        digests: torch.Tensor,
        start: IntArray,
        group: dist.ProcessGroup,
        kept: Kept | None,
    ) -> None:
        self._weights, self.start, self._group, self.kept = weights, start.copy(), group, kept
        self.rank = dist.get_rank(group)
        self._expert_of: list[dict[Digest, int]] = []  # by layer: the first with a digest
        self._alike: list[IntArray] = []  # by layer: [E] the first expert with the same bytes
        for layer in digests.tolist():
            expert_of: dict[Digest, int] = {}
            alike = [expert_of.setdefault((a, b), expert) for expert, (a, b) in enumerate(layer)]
            self._expert_of.append(expert_of)
            self._alike.append(np.array(alike, dtype=np.int64))

    def wrong(self, layer: int, wanted: Wanted) -> list[tuple[int, Tensors]]:
        """Those whose tensors do not have the bytes of their expert."""
        known, alike = self._expert_of[layer], self._alike[layer]
        found = digests_of([tensors for _, tensors in wanted])
        return [
            one
            for one, digest in zip(wanted, found, strict=True)
            if known.get(digest) != alike[one[0]]
        ]

    def wanted_slots(self, layer: int, held: IntArray) -> list[tuple[int, Tensors]]:
        """The slots of this rank: the expert of each by the map [S], and its tensors."""
        weights = self._weights(layer)
        num_own = len(weights[0])
        own = held[self.rank * num_own :][:num_own].tolist()
        return [(expert, rows_of(weights, place)) for place, expert in enumerate(own)]

    def experts_of_slots(self, layer: int) -> IntArray:
        """[S] the expert whose bytes each slot of all ranks has; NOBODY: none's. Collective."""
        weights, known = self._weights(layer), self._expert_of[layer]
        own = [NOBODY] * len(weights[0])
        try:
            records = [rows_of(weights, place) for place in range(len(own))]
            own = [known.get(digest, NOBODY) for digest in digests_of(records)]
        except Exception:  # the other ranks wait in the collective
            log.exception("layer %d: the slots of this rank cannot be read", layer)
        everyone = of_all_ranks(torch.tensor(own, dtype=torch.int64), self._group)
        return everyone.flatten().numpy()

    def wrong_slots(self, layer: int, held: IntArray, live: IntArray) -> IntArray:
        """The slots of all ranks that do not have the bytes of their expert.

        Args:
            layer: which.
            held: [S] experts by the map.
            live: [S] experts by the bytes.
        """
        return np.flatnonzero(live != self._alike[layer][held])

    def verdict(self, layer: int, held: IntArray, live: IntArray) -> Verdict:
        """Compare a layer's map and bytes; as ``wrong_slots``."""
        if not len(self.wrong_slots(layer, held, live)):
            return Verdict.RIGHT
        if not len(self.wrong_slots(layer, self.start[layer], live)):
            return Verdict.OF_START
        is_replaced = 2 * np.count_nonzero(live == NOBODY) > len(live)
        return Verdict.REPLACED if is_replaced else Verdict.DAMAGED

    def exchange_wants(self, layer: int, wanted: Wanted) -> IntArray | None:
        """[R, C] experts that each rank lacks, NOBODY behind them; None: no rank lacks any.

        Collective.
        """
        own = np.full(len(self._weights(layer)[0]), NOBODY, dtype=np.int64)
        own[: len(wanted)] = [expert for expert, _ in wanted]
        everyone = of_all_ranks(torch.from_numpy(own), self._group).numpy()
        return everyone if (everyone != NOBODY).any() else None

    def bring(self, layer: int, wanted: Wanted, wants: IntArray, live: IntArray) -> int:
        """Write right bytes to what is wanted, and return how many on all ranks lack them still.

        Collective. Everything is read before anything is written: a slot with wrong bytes of its
        own may have those that another one needs.

        Args:
            layer: which.
            wanted: of this rank.
            wants: of all ranks, as ``exchange_wants`` has returned them.
            live: [S] the expert whose bytes each slot has.
        """
        brought = self._from_slots(layer, wants, live)
        num_kept = num_missing = 0
        for number, (expert, tensors) in enumerate(wanted):
            record = brought.get(number)
            if record is None or self._is_other(layer, expert, record):
                record = self._from_kept(layer, expert)
                num_kept += record is not None
            if record is None:
                num_missing += 1
            else:
                write(record, tensors)
        if len(wanted) > num_missing:
            log.warning(
                "layer %d: %d records were wrong: %d from other slots, %d from kept records, %d "
                "from nowhere",
                *(layer, len(wanted), len(wanted) - num_kept - num_missing, num_kept, num_missing),
            )
        word = torch.tensor(num_missing)
        dist.all_reduce(word, group=self._group)
        return int(word)

    def _is_other(self, layer: int, expert: int, record: torch.Tensor) -> bool:
        holder = self._expert_of[layer].get(digest_of(record))
        return bool(holder != self._alike[layer][expert])

    def _from_slots(self, layer: int, wants: IntArray, live: IntArray) -> dict[int, torch.Tensor]:
        """Records for this rank, by their number among those that it wants; collective.

        One after the other, in an order that all ranks know: few are wrong, and memory for one
        record is enough on each rank that gives.
        """
        weights, brought = self._weights(layer), dict[int, torch.Tensor]()
        num_own, num_bytes = len(weights[0]), num_bytes_of(rows_of(weights, 0))
        for reader, number in np.argwhere(wants != NOBODY).tolist():
            holders = np.flatnonzero(live == self._alike[layer][wants[reader, number]])
            if not len(holders):
                continue
            own = holders[holders // num_own == reader]
            slot = int(own[0] if len(own) else holders[(reader + number) % len(holders)])
            source = slot // num_own
            if source == self.rank:
                record = self._read(layer, slot % num_own, num_bytes)
                if reader == source:
                    brought[number] = record
                else:
                    dist.send(record, group=self._group, group_dst=reader)
            elif reader == self.rank:
                brought[number] = torch.empty(num_bytes, dtype=torch.uint8)
                dist.recv(brought[number], group=self._group, group_src=source)
        return brought

    def _read(self, layer: int, place: int, num_bytes: int) -> torch.Tensor:
        """The bytes of a slot of this rank; zeros, which no digest is of, if it cannot be read."""
        try:
            return bytes_of(rows_of(self._weights(layer), place)).cpu()
        except Exception:  # the rank that lacks them waits for them
            log.exception("layer %d: slot %d of this rank cannot be read", layer, place)
            return torch.zeros(num_bytes, dtype=torch.uint8)

    def _from_kept(self, layer: int, expert: int) -> torch.Tensor | None:
        if self.kept is None:
            return None
        try:
            return self.kept.bring(layer, expert)
        except MigrationError as exc:
            log.error("layer %d expert %d: %s", layer, expert, exc)
            return None
