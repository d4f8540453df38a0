"""The thread of rank 0 that has windows planned on, away from the forward thread.

It asks the planner process every interval and for each task; an answer waits in ``ready`` until
the next round distributes it. Tasks and switches come from the process at the store, and what came
of a question goes there.
"""

from __future__ import annotations

import logging
from collections import deque
from threading import Event, Thread
from typing import Any

import numpy as np

from eplb.errors import EplbError
from rebalance.engines.common.gauge import set_part
from rebalance.engines.common.messages import Outcome, Question
from rebalance.engines.common.planning import System
from rebalance.engines.common.plugin_settings import PluginSettings
from rebalance.engines.common.store_process import StoreProcess
from rebalance.engines.common.tap import Counted, IntArray
from rebalance.engines.sglang.planner.planning import (
    Observed,
    Planned,
    Terms,
    answer_of,
    request_record,
)
from rebalance.engines.sglang.planner.process import PlannerProcess
from rebalance.engines.sglang.tap import Shape

log = logging.getLogger(__name__)

TICK_S = 0.02
MOST_WAITING = 64  # windows; the oldest go
PLAN_WINDOWS = 16
LIST_LENGTH = 64  # of a replica list with uneven shares: shares are within 1 % of the planned ones
BACK_OFF_S = 5.0  # from one failure of the planner to the next question


class PlannerLink:
    """Windows in, plans out; other threads only append to its queues or read its fields."""

    def __init__(self, shape: Shape, settings: PluginSettings, store: StoreProcess) -> None:
        self._shape, self._settings, self._store = shape, settings, store
        self._inbox: deque[tuple[Counted, IntArray]] = deque(maxlen=MOST_WAITING)
        self._windows: deque[IntArray] = deque(maxlen=PLAN_WINDOWS)
        self._latest: tuple[IntArray, IntArray] | None = None  # map and weights of its slots
        self._asked: Question | None = None
        self._pause_ticks = 0
        self.planner = PlannerProcess()
        self.questions: deque[Question] = deque()  # asked at each interval
        self.ready: tuple[bytes, Question] | None = None  # the forward thread takes it
        self._is_first = True
        self._end = Event()
        self._thread = Thread(target=self._run, name="eplb-planner-link", daemon=True)
        self._thread.start()

    @property
    def why_kept(self) -> str:
        """Why nothing may move now, by the deployment's switches."""
        return self._store.why_kept

    def add(self, counted: Counted, weights: IntArray) -> None:
        """Hand over a window, and the weights [L, S] of its map's slots. Never blocks."""
        self._inbox.append((counted, weights))

    def close(self) -> None:
        """End the thread and the planner."""
        self.close_soon()
        self._thread.join(10.0)

    def close_soon(self) -> None:
        """Have the thread and the planner end; no wait for them."""
        self._end.set()

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self.planner.close()

    def _serve(self) -> None:
        while not self._end.wait(TICK_S):
            try:
                self._turn()
            except (OSError, EOFError, EplbError) as exc:
                # A question that failed is answered; the next interval asks again.
                set_part("sglang", "planner", is_on=False)
                log.warning("no plan: %s: %s; the map that serves stays", type(exc).__name__, exc)
                if self._asked is not None:
                    error = f"{type(exc).__name__}: {exc}"
                    self._store.tell(Outcome(self._asked, error=error))
                self._asked = None
                self.planner.close()
                self._pause_ticks = int(BACK_OFF_S / TICK_S)
            except Exception:
                set_part("sglang", "planner", is_on=False)
                log.exception("the planner's thread ends; the map that serves stays")
                return

    def _turn(self) -> None:
        while self._inbox:
            self._take(*self._inbox.popleft())
        if self._asked is not None:
            record = self.planner.answer()
            if record is not None:
                set_part("sglang", "planner", is_on=True)
                question, self._asked = self._asked, None
                self._answered(record, question)
            return
        if self._pause_ticks > 0:
            self._pause_ticks -= 1
        elif self._latest is not None and self.ready is None:
            asking = self._store.questions or self.questions
            if asking:
                self._asked = asking.popleft()
                self.planner.ask(self._request(*self._latest))

    def _take(self, counted: Counted, weights: IntArray) -> None:
        self._windows.append(counted.by_expert(self._shape.num_experts))
        assert counted.held is not None, "counts are of slots"
        self._latest = counted.held, weights

    def _request(self, held: IntArray, weights: IntArray) -> bytes:
        shape, settings = self._shape, self._settings
        terms = Terms(
            algorithm=shape.algorithm,
            system=System(shape.num_ranks, shape.num_nodes, shape.num_groups, shape.expert_bytes),
            list_length=min(LIST_LENGTH, held.shape[1]),
            pay_back_s=settings.cost.pay_back_s,
            target_imbalance=settings.budget.target_imbalance,
            max_moved=1.0 if self._is_first else settings.engine.max_moved,
        )
        observed = Observed(np.stack(self._windows), held, weights, shape.movable)
        return request_record(observed, terms)

    def _answered(self, record: bytes, question: Question) -> None:
        planned = answer_of(record)
        log.info(
            "trigger=%s moves=%s booked=%.3f effective=%.3f reason=%r",
            question.trigger,
            planned.moves,
            planned.booked,
            planned.effective,
            planned.reason,
        )
        if not planned.moves or question.is_dry or self.why_kept:
            self._store.tell(Outcome(question, _figures(planned), kept=self.why_kept))
            return
        self._is_first = False
        self.ready = (record, question)


def _figures(planned: Planned) -> dict[str, Any]:
    names = ("moves", "reason", "before", "after", "booked", "effective")
    return {name: getattr(planned, name) for name in names}
