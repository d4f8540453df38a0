"""The placement check inside SGLang: begun before anything moved, then a slot now and then.

A fault is logged, written to the store as the event ``placement_fault``, and shown by the gauge's
part ``placement``. The check changes nothing; if it fails itself it ends, and passes go on.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch.distributed as dist

from rebalance.engines.fsck.check import PlacementCheck, begin_check
from rebalance.engines.fsck.faults import Fault
from rebalance.engines.fsck.report import BEGUN, FAULT, ROUND
from rebalance.engines.fsck.sglang import SglangView
from rebalance.engines.gauge import set_part
from rebalance.engines.sglang.store_link import StoreLink
from runtime.group.agreement import gathered_large

log = logging.getLogger(__name__)
MOST_KEPT = 100  # faults that are reported; a wrong map would name every slot


class SlotChecks:
    """What one rank checks. ``begin`` and ``after_map`` are collective, ``visit`` is not.

    Args:
        group: a CPU group of all ranks that nothing else uses.
        store: where faults go; None: the log alone.
        run: of the store.
    """

    def __init__(self, group: dist.ProcessGroup, store: StoreLink | None, run: str) -> None:
        self._group, self._store, self._run = group, store, run
        self._rounds = 0  # that were reported
        self._view: SglangView | None = None
        self._check: PlacementCheck | None = None
        self.faults: dict[Fault, None] = {}  # in the order in which they were found

    @property
    def num_checked(self) -> int:
        """Slots that were looked at."""
        return 0 if self._check is None else self._check.num_checked

    def begin(self, model: Any, rank: int, num_ranks: int) -> None:
        """Digest all slots, compare with the other ranks, and check how they choose replicas."""

        def make_view() -> SglangView:
            self._view = SglangView(model, rank, num_ranks)
            return self._view

        self._check, faults, reason = begin_check(make_view, self._gather, time.monotonic)
        if self._check is None:
            log.warning("placement check is off: %s", reason)
        set_part("sglang", "placement", is_on=self._check is not None)
        self._write(BEGUN, reason=reason)
        self._note(faults)
        self.after_map()

    def after_map(self) -> None:
        """Check how ranks choose replicas by a new map."""
        if self._check is not None and self._view is not None:
            self._note(self._view.check_choices(self._gather))

    def visit(self, *, is_idle: bool) -> None:
        """Look at a slot, if there is time for it."""
        if self._check is None:
            return
        try:
            self._note(self._check.visit(is_idle=is_idle))
            if self._check.num_rounds != self._rounds:
                self._rounds = self._check.num_rounds
                self._write(ROUND, rounds=self._rounds)
        except Exception as exc:
            self._check = None
            set_part("sglang", "placement", is_on=False)
            log.warning("placement check ended: %s: %s", type(exc).__name__, exc)

    def sweep(self) -> list[Fault]:
        """Look at all slots of this rank now."""
        found = [] if self._check is None else self._check.sweep()
        self._note(found)
        return found

    def _gather(self, value: Any) -> list[Any]:
        return gathered_large(value, self._group)

    def _note(self, faults: list[Fault]) -> None:
        if faults:
            set_part("sglang", "placement", is_on=False)
        for fault in faults:
            if fault in self.faults or len(self.faults) >= MOST_KEPT:
                continue
            self.faults[fault] = None
            log.error("placement fault: %s", fault)
            self._write(FAULT, text=str(fault), **vars(fault))

    def _write(self, event: str, /, **detail: Any) -> None:
        if self._store is not None:
            about = {"run": self._run, "rank": dist.get_rank(self._group)}
            self._store.events.append((event, about | detail))
