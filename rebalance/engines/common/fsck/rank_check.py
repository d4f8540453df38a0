"""The placement check in one rank of an engine: begun before anything moved, then a slot at times.

A fault is logged, written to the store as the event ``placement_fault``, and shown by the gauge's
part ``placement``. A slot with wrong bytes gets those of its kept record, where there is one. A
check that fails itself ends, and passes go on.

Shapes:  N tokens, K experts of a token, S slots, R ranks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from eplb.errors import MigrationError
from rebalance.engines.common.fsck.check import Gather, PlacementCheck, begin_check
from rebalance.engines.common.fsck.report import BEGUN, FAULT, REPAIRED, ROUND, Fault
from rebalance.engines.common.fsck.tensors import EngineView
from rebalance.engines.common.gauge import set_part
from rebalance.engines.common.records import Kept, write

log = logging.getLogger(__name__)
MOST_KEPT = 100  # faults that are reported; a wrong map would name every slot

IntArray = NDArray[np.int64]

# The kind and the detail of an event, for the store. It must not wait.
Write = Callable[[str, dict[str, Any]], None]


class RankCheck:
    """What one rank checks. ``begin`` and ``after_map`` are collective, the rest is not.

    Args:
        engine: name of the gauge.
        gather: a collective that nothing else uses meanwhile.
        write: where faults go beside the log.
        check_choices: compares how ranks choose replicas, from this rank's view; collective.
    """

    def __init__(
        self,
        engine: str,
        gather: Gather,
        write: Write,
        check_choices: Callable[[Any, Gather], list[Fault]] | None = None,
    ) -> None:
        self._engine, self._gather, self._write = engine, gather, write
        self._check_choices = check_choices
        self._rounds = 0  # that were reported
        self._view: EngineView | None = None
        self._check: PlacementCheck | None = None
        self._repair: SlotRepair | None = None
        self.faults: dict[Fault, None] = {}  # in the order in which they were found

    @property
    def num_checked(self) -> int:
        """Slots that were looked at."""
        return 0 if self._check is None else self._check.num_checked

    def begin(self, make_view: Callable[[], EngineView]) -> None:
        """Digest all slots, compare with the other ranks, and check how they choose replicas.

        Raises only what the collective raises: a view that cannot be made ends the check on all
        ranks.
        """

        def made() -> EngineView:
            self._view = make_view()
            return self._view

        self._check, faults, reason = begin_check(made, self._gather, time.monotonic)
        if self._check is None:
            log.warning("placement check is off: %s", reason)
        set_part(self._engine, "placement", is_on=self._check is not None)
        self._write(BEGUN, {"reason": reason})
        self._note(faults)
        self.after_map()

    def repair_from(self, kept: Kept) -> None:
        """Repair slots from these records from now on."""
        if self._view is not None:
            self._repair = SlotRepair(kept, self._view)

    def after_map(self) -> None:
        """Check how ranks choose replicas by a new map."""
        if self._check is not None and self._check_choices is not None:
            self._note(self._check_choices(self._view, self._gather))

    def visit(self, *, is_idle: bool) -> None:
        """Look at a slot, if there is time for it. Never raises."""
        if self._check is None:
            return
        try:
            if self._repair is not None and (slot := self._repair.visit()) is not None:
                # A look from before the repair would report bytes that are no longer there.
                self._check.forget_look()
                self._repaired(*slot)
            self._note(self._check.visit(is_idle=is_idle))
            if self._check.num_rounds != self._rounds:
                self._rounds = self._check.num_rounds
                self._write(ROUND, {"rounds": self._rounds})
        except Exception as exc:
            self._check = None
            set_part(self._engine, "placement", is_on=False)
            log.warning("placement check ended: %s: %s", type(exc).__name__, exc)

    def sweep(self) -> list[Fault]:
        """Look at all slots of this rank now."""
        found = [] if self._check is None else self._check.sweep()
        self._note(found)
        return found

    def _note(self, faults: list[Fault]) -> None:
        if faults:
            set_part(self._engine, "placement", is_on=False)
        for fault in faults:
            if fault in self.faults or len(self.faults) >= MOST_KEPT:
                continue
            self.faults[fault] = None
            log.error("placement fault: %s", fault)
            self._write(FAULT, {"text": str(fault), **vars(fault)})
            if self._repair is not None and fault.kind == "slot":
                self._repair.begin(fault)

    def _repaired(self, row: int, slot: int) -> None:
        """Forget the faults of a slot: its next visit finds what is wrong with it still."""
        self.faults = {one: None for one in self.faults if (one.row, one.slot) != (row, slot)}
        set_part(self._engine, "placement", is_on=not self.faults)
        log.warning("layer %d slot %d: repaired from kept records", row, slot)
        self._write(REPAIRED, {"row": row, "slot": slot})


class SlotRepair:
    """Gives a slot with wrong bytes those of its record, one slot at a time.

    The record is brought on a thread, because a disk may be slow. It is written between two passes,
    by the thread that runs them, if the slot is still wrong and most slots of this rank in the
    layer have the bytes of the load: otherwise the weights were replaced, and records are older.

    Args:
        kept: records of the model, whose layers are the rows of the view in order.
        view: the engine's tensors and map.
    """

    def __init__(self, kept: Kept, view: EngineView) -> None:
        self._kept, self._view = kept, view
        self._layer_of = {row: layer for layer, row in enumerate(view.rows)}
        self._fault: Fault | None = None  # whose record is on its way
        self._record: torch.Tensor | None = None  # once it is here
        self._error = ""

    def begin(self, fault: Fault) -> None:
        """Have the record of a slot's expert brought, unless another one is on its way."""
        if self._fault is None:
            self._fault, self._record, self._error = fault, None, ""
            Thread(target=self._bring, args=(fault,), name="eplb-repair", daemon=True).start()

    def _bring(self, fault: Fault) -> None:
        try:
            self._record = self._kept.bring(self._layer_of[fault.row], fault.expert)
        except Exception as exc:
            self._error = f"{exc}" if isinstance(exc, MigrationError) else repr(exc)

    def visit(self) -> tuple[int, int] | None:
        """Write the record that is here, if it is still wanted; return layer and slot then."""
        fault, record = self._fault, self._record
        if fault is None or (record is None and not self._error):
            return None
        self._fault = None
        why_not = self._error or self._why_not(fault)
        if why_not or record is None:
            log.warning("not repaired: layer %d slot %d: %s", fault.row, fault.slot, why_not)
            return None
        write(record, self._tensors(fault.row, fault.slot))
        return fault.row, fault.slot

    def _tensors(self, row: int, slot: int) -> list[torch.Tensor]:
        """What the engine moves of a slot of this rank: the tensors of its record."""
        moved = self._view.tensors(row).moved
        return [tensor[slot % len(tensor)] for tensor in moved]

    def _why_not(self, fault: Fault) -> str:
        """Why the slot must stay as it is; "" if it gets the record."""
        view, row = self._view, fault.row
        held, layer = view.held(row), self._layer_of[row]
        if held[fault.slot] != fault.expert:
            return "it holds another expert by now"
        each = len(held) // view.num_ranks
        wrong = [
            slot
            for slot in range(view.rank * each, (view.rank + 1) * each)
            if not self._kept.is_right(layer, int(held[slot]), self._tensors(row, slot))
        ]
        if fault.slot not in wrong:
            return f"{fault.name} is no part of its record, or it is right by now"
        if 2 * len(wrong) > each:
            return f"{len(wrong)} of {each} slots of the layer have other bytes than at the load"
        return ""


def check_choices(
    row: int, experts: IntArray, chosen: Sequence[IntArray], held: IntArray, *, is_shared: bool
) -> list[Fault]:
    """Compare slots that ranks chose for the same tokens: every expert is to be computed once.

    With an all-to-all, each rank dispatches its own tokens, and its slot must hold the expert.
    Without one, all ranks run the experts over the same tokens and add their parts: if they choose
    different replicas, an expert is added several times or not at all, and the output is wrong
    without an error.

    Args:
        row: layer.
        experts: [N, K] that the router chose.
        chosen: of each rank, [N, K] slots.
        held: [S] experts by slot.
        is_shared: whether ranks run the experts over the same tokens.
    """
    faults = []
    for rank, slots in enumerate(chosen):
        is_slot = (slots >= 0) & (slots < len(held))
        wrong = ~is_slot | (held[np.where(is_slot, slots, 0)] != experts)
        for place in np.argwhere(wrong)[:1]:
            slot, expert = int(slots[tuple(place)]), int(experts[tuple(place)])
            what = f"of rank {rank} is for another expert, expected a slot that holds it"
            faults.append(Fault("choice", row, slot, expert, "the choice", what))
        differs = np.argwhere(slots != chosen[0])
        if is_shared and len(differs):
            place = tuple(differs[0])
            what = (
                f"of rank {rank} differs from rank 0's slot {chosen[0][place]} for {len(differs)} "
                f"of {slots.size} choices, expected the same on all ranks: without an all-to-all "
                "ranks add their parts, so the output is wrong"
            )
            slot, expert = int(slots[place]), int(experts[place])
            faults.append(Fault("choice", row, slot, expert, "the choice", what))
    return faults
