"""The placement check in one rank of an engine: begun before anything moved, then a slot at times.

A fault is logged, written to the store as the event ``placement_fault``, and shown by the gauge's
part ``placement``. The check changes nothing; if it fails itself it ends, and passes go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from rebalance.engines.fsck.check import Gather, PlacementCheck, begin_check
from rebalance.engines.fsck.faults import Fault
from rebalance.engines.fsck.report import BEGUN, FAULT, ROUND
from rebalance.engines.fsck.tensors import EngineView
from rebalance.engines.gauge import set_part

log = logging.getLogger(__name__)
MOST_KEPT = 100  # faults that are reported; a wrong map would name every slot

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

    def after_map(self) -> None:
        """Check how ranks choose replicas by a new map."""
        if self._check is not None and self._check_choices is not None:
            self._note(self._check_choices(self._view, self._gather))

    def visit(self, *, is_idle: bool) -> None:
        """Look at a slot, if there is time for it. Never raises."""
        if self._check is None:
            return
        try:
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
