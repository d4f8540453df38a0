"""What vLLM moves is checked before it serves, whatever vLLM's communicator is.

vLLM's own transfer fills its buffers. Then a digest of each record in them, and of each slot that
stays as it is, decides whether it is used; it is taken on vLLM's stream. What is wrong or missing
comes from a slot of any rank that has the bytes, else from the records that were kept at the load
(``common/slot_records.py``). If any rank is left without a right record, all ranks do the same, by
what their slots have:

    most slots have bytes of no expert    the weights were replaced: the transfer stands, unchecked
    any other case                        the layer keeps its map, so that no wrong byte spreads
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import numpy as np

from rebalance.engines.common.slot_records import SlotRecords, Verdict, Wanted
from rebalance.engines.common.tap import IntArray
from rebalance.weights.expert_records import Tensors, rows_of

MOST_NAMED = 8  # slots in a line of the log

log = logging.getLogger(__name__)


class TransferCheck:
    """Checks the transfers of one model, on the thread and the stream of vLLM's transfer.

    Args:
        records: of the model.
    """

    def __init__(self, records: SlotRecords) -> None:
        self.records = records
        self.is_replaced = False  # the weights have other bytes than at the load; on all ranks
        self.relabelled: set[int] = set()  # layers whose next map needs no transfer
        self.keeping: set[int] = set()  # layers that keep their map at the next commit
        self.faulty: set[int] = set()  # layers that kept it, and were not right since
        self.num_checked = self.num_wrong = self.num_kept = self.num_unchecked = 0

    def check(self, layer: int, old: IntArray, new: IntArray, buffers: Tensors, moved: Any) -> Any:
        """Judge what a transfer has brought; collective where the map of the layer changes.

        Args:
            layer: by its order in the model.
            old: [S] the map that serves.
            new: [S] the map that is to serve.
            buffers: [C, ...] each, with the records that change.
            moved: what vLLM says of the transfer.

        Returns:
            What vLLM is to copy from the buffers: nothing where the layer keeps its map.
        """
        if self.is_replaced or np.array_equal(old, new):
            return moved  # alike on all ranks
        is_filled = ~moved.is_unchanged & (moved.is_received_locally | moved.recv_primary_mask)
        slots = self.records.wanted_slots(layer, new)
        # What is received, and what stays: afterwards each slot of the layer was looked at.
        judged = [
            (expert, rows_of(buffers, row) if is_filled[row] else tensors)
            for row, (expert, tensors) in enumerate(slots)
            if is_filled[row] or moved.is_unchanged[row]
        ]
        wrong = self._wrong(layer, judged)
        self.num_checked += int(is_filled.sum())
        self.num_wrong += len(wrong)
        wants = self.records.exchange_wants(layer, wrong)
        if wants is None:
            return moved
        live = self.records.experts_of_slots(layer)
        verdict = self.records.verdict(layer, old, live)
        if verdict is Verdict.REPLACED:
            self.is_replaced = True
            self.num_unchecked += 1
            log.error("layer %d: %s: experts move unchecked", layer, verdict.value)
            return moved
        if verdict is not Verdict.OF_START and not self.records.bring(layer, wrong, wants, live):
            return moved
        self.keep(layer, verdict, self.records.wrong_slots(layer, old, live))
        return dataclasses.replace(
            moved, is_unchanged=np.ones_like(moved.is_unchanged), recv_count=0
        )

    def _wrong(self, layer: int, judged: Wanted) -> Wanted:
        try:
            return self.records.wrong(layer, judged)
        except Exception:  # the other ranks wait in the next collective
            log.exception("layer %d: records cannot be read", layer)
            return judged

    def keep(self, layer: int, verdict: Verdict, wrong: IntArray) -> None:
        """Have the layer serve as before; the next decision repairs it."""
        self.keeping.add(layer)
        self.faulty.add(layer)
        self.num_kept += 1
        named = ", ".join(map(str, wrong[:MOST_NAMED])) + ", ..." * (len(wrong) > MOST_NAMED)
        where = f"; wrong bytes in slots {named}" if len(wrong) else ""
        log.error("layer %d keeps its map: %s%s", layer, verdict.value, where)
