"""The thread of rank 0 that has windows planned on, away from the forward thread.

It asks the planner process every interval and for each task; an answer waits in ``ready`` until
the next round distributes it. Nothing here touches a store.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from threading import Event, Thread

import numpy as np

from eplb.errors import EplbError
from rebalance.engines.common.gauge import set_part
from rebalance.engines.sglang.planner.planning import (
    Observed,
    Planned,
    Terms,
    answer_of,
    request_record,
)
from rebalance.engines.sglang.planner.process import PlannerProcess
from rebalance.engines.sglang.windows import IntArray, Shape, Window

log = logging.getLogger(__name__)

TICK_S = 0.02
MOST_WAITING = 64  # windows; the oldest go
PLAN_WINDOWS = 16
LIST_LENGTH = 64  # of a replica list with uneven shares: shares are within 1 % of the planned ones
BACK_OFF_S = 5.0  # from one failure of the planner to the next question


@dataclass(frozen=True)
class Question:
    """Why a plan is asked for."""

    trigger: str  # interval, or task
    task_id: int = 0
    is_dry: bool = False  # plan, and move nothing


@dataclass(frozen=True)
class Outcome:
    """What came of a question."""

    question: Question
    planned: Planned | None
    error: str = ""
    kept: str = ""  # why the plan, which would move experts, does not


class PlannerLink:
    """Windows in, plans out; other threads only append to its queues or read its fields."""

    def __init__(self, shape: Shape, *, pay_back_s: float, target: float, max_moved: float) -> None:
        self._shape, self._pay_back_s, self._target = shape, pay_back_s, target
        self._max_moved = max_moved
        self._inbox: deque[Window] = deque(maxlen=MOST_WAITING)
        self._windows: deque[IntArray] = deque(maxlen=PLAN_WINDOWS)
        self._latest: Window | None = None
        self._asked: Question | None = None
        self._pause_ticks = 0
        self.planner = PlannerProcess()
        self.questions: deque[Question] = deque()
        self.outcomes: deque[Outcome] = deque(maxlen=MOST_WAITING)
        self.ready: tuple[bytes, Question] | None = None  # the forward thread takes it
        self.why_kept = ""  # why nothing may move now, by the deployment's switches
        self._is_first = True
        self._end = Event()
        self._thread = Thread(target=self._run, name="eplb-planner-link", daemon=True)
        self._thread.start()

    def add(self, window: Window) -> None:
        """Hand over a window. Never blocks."""
        self._inbox.append(window)

    def close(self) -> None:
        """End the thread and the planner."""
        self._end.set()
        self._thread.join(10.0)

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
                    self.outcomes.append(Outcome(self._asked, None, f"{type(exc).__name__}: {exc}"))
                self._asked = None
                self.planner.close()
                self._pause_ticks = int(BACK_OFF_S / TICK_S)
            except Exception:
                set_part("sglang", "planner", is_on=False)
                log.exception("the planner's thread ends; the map that serves stays")
                return

    def _turn(self) -> None:
        while self._inbox:
            self._take(self._inbox.popleft())
        if self._asked is not None:
            record = self.planner.answer()
            if record is not None:
                set_part("sglang", "planner", is_on=True)
                question, self._asked = self._asked, None
                self._answered(record, question)
            return
        if self._pause_ticks > 0:
            self._pause_ticks -= 1
        elif self.questions and self._windows and self.ready is None and self._latest is not None:
            self._asked = self.questions.popleft()
            self.planner.ask(self._request())

    def _take(self, window: Window) -> None:
        self._windows.append(window.by_expert(self._shape.num_experts))
        self._latest = window

    def _request(self) -> bytes:
        assert self._latest is not None, "there is a window"
        shape, latest = self._shape, self._latest
        terms = Terms(
            algorithm=shape.algorithm,
            num_ranks=shape.num_ranks,
            num_nodes=shape.num_nodes,
            num_groups=shape.num_groups,
            expert_bytes=shape.expert_bytes,
            list_length=min(LIST_LENGTH, latest.held.shape[1]),
            pay_back_s=self._pay_back_s,
            target_imbalance=self._target,
            max_moved=1.0 if self._is_first else self._max_moved,
        )
        observed = Observed(np.stack(self._windows), latest.held, latest.weights, shape.movable)
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
            self.outcomes.append(Outcome(question, planned, kept=self.why_kept))
            return
        self._is_first = False
        self.ready = (record, question)
