"""The placement check in one rank of an engine: begun before anything moved, then a slot at times.

A fault is logged, written to the store as the event ``placement_fault``, and shown by the gauge's
part ``placement``. A slot with wrong bytes gets those of its kept record, where there is one. A
fault is over once a look finds its slot right. A check that fails itself ends, and passes go on.

Shapes:  L layers, N tokens, K experts of a token, S slots, R ranks.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any

import numpy as np
import torch

from eplb.errors import reason_of
from rebalance.engines.common.fsck import check
from rebalance.engines.common.fsck.check import EngineView
from rebalance.engines.common.fsck.report import BEGUN, FAULT, MOVES, REPAIRED, ROUND, Fault
from rebalance.engines.common.records import Kept
from rebalance.engines.common.start import set_part
from rebalance.engines.common.tap import IntArray
from rebalance.weights.expert_records import rows_of, write

log = logging.getLogger(__name__)
STOP_MOVES = ("slot", "factor")  # kinds of faults
MOST_KEPT = 100  # faults that are reported; a wrong map would name every slot

# All ranks' values, which JSON can express, in order of ranks: a collective.
Gather = Callable[[Any], list[Any]]
# The kind and the detail of an event, for the store. It must not wait.
Write = Callable[[str, dict[str, Any]], object]
# Of some layers: experts [N, K] of some tokens, and the slots [L, N, K] that this rank chooses.
Choose = Callable[[Sequence[int]], tuple[IntArray, IntArray]]


FAULTS_STOP_MOVES = "slots or factors of a rank are wrong, and more would follow with each move"


def report_stop(before: str, reason: str, write: Write) -> str:
    """Report why no expert moves, where that has changed, and return it; "": experts move."""
    if reason != before:
        if reason:
            log.error("no expert moves any more: %s", reason)
        else:
            log.warning("experts move again, which they did not: %s", before)
        write(MOVES, {"stopped": reason})
    return reason


class RankCheck:
    """What one rank checks. ``begin`` and ``after_map`` are collective, the rest is not.

    Args:
        engine: name of the gauge.
        gather: a collective that nothing else uses meanwhile.
        write: where faults go beside the log.
        choose: replicas by the map that serves, to be compared with those of other ranks; None:
            they are not compared.
        is_shared: whether ranks run the experts over the same tokens.
    """

    def __init__(
        self,
        engine: str,
        gather: Gather,
        write: Write,
        choose: Choose | None = None,
        *,
        is_shared: bool = False,
    ) -> None:
        self._engine, self._gather, self._write = engine, gather, write
        self._choose, self._is_shared = choose, is_shared
        self._rounds = 0  # rounds that were reported
        self._view: EngineView | None = None
        self._check: check.PlacementCheck | None = None
        self._repair: SlotRepair | None = None
        self.faults: dict[Fault, None] = {}  # in the order in which they were found

    @property
    def num_checked(self) -> int:
        """Slots that were looked at."""
        return 0 if self._check is None else self._check.num_checked

    @property
    def num_wrong(self) -> int:
        """Slots and factors that are known to be wrong: a move would use their bytes."""
        return sum(fault.kind in STOP_MOVES for fault in self.faults)

    @property
    def wrong_layers(self) -> set[int]:
        """Layers with a wrong slot of this rank."""
        return {fault.row for fault in self.faults if fault.kind == "slot"}

    @property
    def left_behind(self) -> str:
        """Which tensor the engine does not move with its expert, in words; "": none was found."""
        for fault in self.faults:
            if fault.kind == "slot" and self._view is not None:
                moved = len(self._view.moved(fault.row))
                names = {one.name for one in self._view.tensors(fault.row)[0][:moved]}
                if fault.name not in names:
                    return f"the engine does not move {fault.name} with its expert"
        return ""

    def look_again(self, row: int, *, is_right: bool) -> None:
        """Look next at the slots of a layer that were wrong: they may be right by now.

        Args:
            row: of the layer.
            is_right: whether the bytes of all its slots were found right; where the check has
                ended, and looks at nothing any more, this decides.
        """
        if self._view is None:
            return
        if self._check is None and is_right:
            over = [it for it in self.faults if it.kind == "slot" and it.row == row]
            self._forget([(it.kind, it.row, it.slot, it.name) for it in over])
        layer, first = self._view.rows.index(row), self._view.slot(0)
        for fault in self.faults:
            if fault.row == row and fault.kind in STOP_MOVES:
                self.look_first(layer, max(0, fault.slot - first))

    def begin(self, make_view: Callable[[], EngineView]) -> None:
        """Digest all slots, compare with the other ranks, and check how they choose replicas.

        Raises only what the collective raises: a view that cannot be made ends the check on all
        ranks.
        """
        view, own, reason = None, None, ""
        try:
            view = make_view()
            own = check.digests_of(view)
        except Exception as exc:
            reason = reason_of(exc)
        by_rank = self._gather((own, reason))
        refused = [f"rank {rank}: {why}" for rank, (_, why) in enumerate(by_rank) if why]
        faults: list[Fault] = []
        if view is not None and not refused:
            references, faults = check.agreed(view, [found for found, _ in by_rank])
            self._check = check.PlacementCheck(view, references, time.monotonic, check.PART)
            self._view = view
        else:
            log.warning("placement check is off: %s", refused[0])
        set_part(self._engine, "placement", is_on=self._check is not None)
        if self._check is not None:
            try:
                self._check.prepare()
            except Exception as exc:
                self._end(exc)
        self._write(BEGUN, {"reason": refused[0] if refused else ""})
        self._note(faults)
        self.after_map()

    def repair_from(self, kept: Kept) -> None:
        """Repair slots from these records from now on."""
        if self._view is not None:
            self._repair = SlotRepair(kept, self._view)

    def after_map(self) -> None:
        """Compare the slots that ranks choose for the same tokens, whatever fails on this one."""
        view = self._view
        if view is None or self._choose is None:
            return
        experts, own = np.zeros((0, 1), dtype=np.int64), np.zeros((0, 0, 1), dtype=np.int64)
        try:
            experts, own = self._choose(view.rows)
        except Exception as exc:
            log.warning("choices of replicas cannot be checked: %s: %s", type(exc).__name__, exc)
        by_rank = [np.array(found, dtype=np.int64) for found in self._gather(own.tolist())]
        if not all(map(len, by_rank)):
            return
        for row, *chosen in zip(view.rows, *by_rank, strict=True):
            held = view.held(row)
            self._note(check_choices(row, experts, chosen, held, is_shared=self._is_shared))

    def visit(self, *, is_idle: bool) -> None:
        """Look at a slot, if there is time for it. Never raises."""
        if self._check is None:
            return
        try:
            if self._repair is not None and (slot := self._repair.visit()) is not None:
                # A look from before the repair would report bytes that are no longer there.
                self._check.forget_look()
                self._repaired(*slot)
            faults = self._check.visit(is_idle=is_idle)
            self._forget(self._check.right)
            self._note(faults)
            if self._check.num_rounds != self._rounds:
                self._rounds = self._check.num_rounds
                self._write(ROUND, {"rounds": self._rounds})
        except Exception as exc:
            self._end(exc)

    def _end(self, exc: Exception) -> None:
        self._check = None
        set_part(self._engine, "placement", is_on=False)
        log.warning("placement check ended: %s: %s", type(exc).__name__, exc)

    def look_first(self, layer: int, place: int) -> None:
        """Look next at a slot of this rank that another part found wrong.

        Args:
            layer: position among the checked layers.
            place: the slot, 0..C-1.
        """
        if self._check is not None:
            self._check.look_first(layer, place)

    def _forget(self, right: list[tuple[str, int, int, str]]) -> None:
        """Forget the faults of what was found right."""
        over = [it for it in self.faults if (it.kind, it.row, it.slot, it.name) in right]
        for fault in over:
            del self.faults[fault]
            log.warning("placement fault is over: %s", fault)
            self._write(REPAIRED, {"row": fault.row, "slot": fault.slot, "name": fault.name})
        if over:
            set_part(self._engine, "placement", is_on=self._check is not None and not self.faults)

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
        self._waiting: deque[Fault] = deque()  # faults whose turn comes
        self._fault: Fault | None = None  # whose record is on its way
        self._record: torch.Tensor | None = None  # once it is here
        self._error = ""

    def begin(self, fault: Fault) -> None:
        """Have the record of a slot's expert brought, once those before it were written."""
        self._waiting.append(fault)
        self._begin_next()

    def _begin_next(self) -> None:
        if self._fault is None and self._waiting:
            self._fault, self._record, self._error = self._waiting.popleft(), None, ""
            Thread(target=self._bring, args=(self._fault,), name="eplb-repair", daemon=True).start()

    def _bring(self, fault: Fault) -> None:
        try:
            self._record = self._kept.bring(self._view.rows.index(fault.row), fault.expert)
        except Exception as exc:
            self._error = reason_of(exc)

    def visit(self) -> tuple[int, int] | None:
        """Write the record that is here, if it is still wanted; return layer and slot then."""
        fault, record = self._fault, self._record
        if fault is None or (record is None and not self._error):
            return None
        self._fault = None
        why_not = self._error or self._why_not(fault)
        self._begin_next()
        if why_not or record is None:
            log.warning("not repaired: layer %d slot %d: %s", fault.row, fault.slot, why_not)
            return None
        place = fault.slot - self._view.slot(0)
        write(record, rows_of(self._view.moved(fault.row), place))
        return fault.row, fault.slot

    def _why_not(self, fault: Fault) -> str:
        """Why the slot must stay as it is; "" if it gets the record."""
        view, held, first = self._view, self._view.held(fault.row), self._view.slot(0)
        if held[fault.slot] != fault.expert:
            return "it holds another expert by now"
        layer, own = view.rows.index(fault.row), held[first : first + view.num_own]
        wrong = self._kept.wrong(layer, own, view.moved(fault.row))
        if fault.slot - first not in wrong:
            return f"{fault.name} is no part of its record, or it is right by now"
        if 2 * len(wrong) > view.num_own:
            slots = f"{len(wrong)} of {view.num_own} slots of the layer"
            return f"{slots} have other bytes than at the load"
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
            faults.append(Fault("choice", row, "the choice", what, slot, expert))
        differs = np.argwhere(slots != chosen[0])
        if is_shared and len(differs):
            place = tuple(differs[0])
            what = (
                f"of rank {rank} differs from rank 0's slot {chosen[0][place]} for {len(differs)} "
                f"of {slots.size} choices, expected the same on all ranks: without an all-to-all "
                "ranks add their parts, so the output is wrong"
            )
            slot, expert = int(slots[place]), int(experts[place])
            faults.append(Fault("choice", row, "the choice", what, slot, expert))
    return faults
