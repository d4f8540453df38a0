"""Supervises processes that may be restarted: a controller, the commands of a demo.

    STARTING --report--> RUNNING --no report within deadline--> SIGKILL
       ^                    |                                      |
       |                    +---------------- exit ----------------+
       |                                                           v
       +------- delay over ------ BACK_OFF, or DEGRADED beyond the restart budget

A process that starts may take as long as it needs, for example to compile: it is killed only if it
reports no progress of its start within ``start_deadline_s``.

No process is given up. A budget is so many restarts within a window of time: beyond it each restart
waits a minute, and serving continues without the process until then. Clocks are arguments, and
nothing here waits.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated

from eplb.declared import Meaning, Setting, check_fields
from eplb.errors import EplbError, StoreError

if TYPE_CHECKING:
    from telemetry.state.store import StateStore  # a command whose library is missing says so

FIRST_DELAY_S = 0.1  # of a restart; doubled with each that follows soon
PAUSE_S = 60.0  # delay of a restart beyond the budget: a repair of the cause takes minutes
STEADY_S = 60.0  # a process that ran for so long begins with the first delay again
REPORT_PERIOD_S = 0.5  # how often a process reports progress, about

log = logging.getLogger(__name__)

Clock = Callable[[], float]
Kill = Callable[[], None]
Note = Callable[[str, str], None]  # stores an event: name of the process, what happened


def note_in(store: StateStore) -> Note:
    """Give what logs and stores a failure that ends nothing."""

    from telemetry.state.events import FAILED, Failure  # as StateStore above

    def note(where: str, message: str) -> None:
        log.warning("%s: %s", where, message)
        try:
            store.add_event(FAILED, Failure(where, message))
        except StoreError as exc:
            log.warning("event not stored: %s", exc)

    return note


@dataclass(frozen=True)
class SupervisionSettings:
    """How often processes may be restarted, and when one that runs counts as hung."""

    restart_after_death: Annotated[
        int,
        Setting(
            "restarts of the ranks within an hour; each further one waits a minute",
            unit="restarts",
        ),
    ] = 3
    process_restarts: Annotated[
        int,
        Setting(
            "restarts of each other process within an hour; each further one waits a minute",
            unit="restarts",
        ),
    ] = 20
    restart_window_s: float = 3600.0  # window of both budgets: more failures need a repair
    restart_delay_s: Annotated[float, Setting("longest delay before a restart", at_most=3600)] = 5.0
    hung_after_s: Annotated[
        float,
        Setting(
            "time without a report after which a process is killed; longer than a plan takes",
            at_least=1,
            at_most=3600,
        ),
    ] = 30.0
    start_deadline_s: Annotated[
        float,
        Setting(
            "time without progress of a start after which the process is killed",
            at_least=1,
            at_most=3600,
        ),
    ] = 300.0

    def __post_init__(self) -> None:
        check_fields(self)


class Restarts:
    """Delays of restarts: doubled while a process exits soon, and long beyond the budget.

    Args:
        budget: restarts within the window of the settings that are not paused.
        settings: the window, and the longest delay within the budget.
    """

    def __init__(
        self, budget: int, settings: SupervisionSettings, clock: Clock = time.monotonic
    ) -> None:
        self._budget, self._settings, self._clock = budget, settings, clock
        self._times: deque[float] = deque()
        self._delay_s = FIRST_DELAY_S
        self.is_over_budget = False  # whether the latest restart is beyond the budget

    def next_delay_s(self, ran_s: float) -> float:
        """Count a restart, of a process that ran for so long; returns its delay."""
        now = self._clock()
        while self._times and now - self._times[0] >= self._settings.restart_window_s:
            self._times.popleft()
        self.is_over_budget = len(self._times) >= self._budget
        self._times.append(now)
        if ran_s >= STEADY_S:
            self._delay_s = FIRST_DELAY_S
        delay_s = min(self._delay_s, self._settings.restart_delay_s)
        self._delay_s *= 2
        return max(PAUSE_S, delay_s) if self.is_over_budget else delay_s

    def __str__(self) -> str:
        return f"{self._budget} restarts within {self._settings.restart_window_s:g} s"


class ProcessState(Enum):
    """Where a process is in the drawing above; DOWN: ended on purpose, or never begun."""

    DOWN = "down"
    STARTING = "starting"
    RUNNING = "running"
    BACK_OFF = "in back-off"
    DEGRADED = "restart budget used up"


@dataclass(frozen=True)
class ProcessView:
    """State of a process for metrics and readiness."""

    name: str
    kind: Annotated[str, Meaning("controller, host_cache and others", example="controller")]
    state: ProcessState
    report_age_s: Annotated[
        float | None, Meaning("time since its last report, over restarts; null: none yet")
    ]
    is_late: Annotated[bool, Meaning("it has not reported for half of the deadline")]
    restarts: Annotated[int, Meaning("restarts since the deployment was started")]
    reason: Annotated[str, Meaning("reason of its latest end; empty: it never ended")]
    work: Annotated[
        str, Meaning("what it reports of its start; empty: it is not starting, or reports nothing")
    ] = ""
    has_exited: Annotated[
        bool, Meaning("its process is known to have ended without an order: one of this host")
    ] = False


@dataclass(frozen=True)
class SupervisionView:
    """What the supervising process knows and the store does not."""

    processes: tuple[ProcessView, ...] = ()


class Supervised:
    """One process that does not serve. ``view`` may be called by any thread, the rest by one.

    Args:
        name: shown in events and messages.
        kind: the label of metrics.
        start: starts one more, and returns what ends it at once, even where it hangs.
        note: stores an event.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        start: Callable[[], Kill],
        note: Note,
        settings: SupervisionSettings,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        self.name, self._kind, self._start, self._note = name, kind, start, note
        self._settings, self._clock = settings, clock
        self._restarts = Restarts(settings.process_restarts, settings, clock)
        self.state, self.restarts, self.was_ready = ProcessState.DOWN, 0, False
        self._kill: Kill | None = None
        self._started = self._progressed = self._due = self._looked = clock()
        self._work = ""
        self._reported: float | None = None
        self._reason, self._is_late_noted = "", False

    # -- called when a message or an exit of the process is seen

    def begin(self) -> None:
        """Start it now, whatever its budget: it is needed, or its ranks are restarted."""
        self._is_late_noted = False
        self._started = self._progressed = self._looked = self._clock()
        self.state, self._work = ProcessState.STARTING, ""
        self._kill = self._start()

    def starting(self, work: str) -> None:
        """Record progress of its start."""
        if self.state is ProcessState.STARTING:
            self._progressed, self._work = self._clock(), work

    def reported(self) -> None:
        """Record a report: it makes progress."""
        if self.is_up:
            self._work = ""
            self.state, self.was_ready = ProcessState.RUNNING, True
            self._reported, self._is_late_noted = self._clock(), False

    def retire(self) -> None:
        """Record that it is ended on purpose."""
        self.state, self._kill = ProcessState.DOWN, None
        self._reported = None

    def ended(self, how: str) -> None:
        """Record that it exited, and plan its restart."""
        now = self._clock()
        self._kill, self._reason, self._work = None, how, ""
        delay_s = self._restarts.next_delay_s(now - self._started)
        self._due, self.state = now + delay_s, ProcessState.BACK_OFF
        note = f"{how}; restarting in {delay_s:.1f} s"
        if self._restarts.is_over_budget:
            self.state = ProcessState.DEGRADED
            note += f": {self._restarts} used up, serving continues without it"
        self._note(self.name, note)

    # -- called often

    @property
    def is_up(self) -> bool:
        """Return whether there is a process."""
        return self._kill is not None

    @property
    def is_running(self) -> bool:
        """Whether it has reported since it was started."""
        return self.state is ProcessState.RUNNING

    def check(self) -> None:
        """Kill the process if it hangs; restart it if that is due."""
        now = self._clock()
        if now - self._looked > self._settings.hung_after_s / 2:
            # The supervisor itself was suspended and received no reports meanwhile.
            self._started = self._progressed = now
            self._reported = now if self._reported is not None else None
        self._looked = now
        if self._kill is not None:
            self._end_if_hung(self._kill, now)
            return
        is_to_come_back = self.state in (ProcessState.BACK_OFF, ProcessState.DEGRADED)
        if is_to_come_back and now >= self._due:
            self._start_again()

    def _start_again(self) -> None:
        self.restarts += 1
        try:
            self.begin()
        except (EplbError, OSError) as exc:
            self.ended(f"{self.name} could not be started: {exc}")

    def _end_if_hung(self, kill: Kill, now: float) -> None:
        is_starting = self.state is ProcessState.STARTING
        limit_s = self._settings.start_deadline_s if is_starting else self._settings.hung_after_s
        since = self._progressed if is_starting or self._reported is None else self._reported
        silent_s = now - since
        if silent_s >= limit_s:
            what = f"progress of its start ({self._work})" if self._work else "report"
            expected = f"expected one within {limit_s:g} s"
            self._note(self.name, f"no {what} for {silent_s:.1f} s, {expected}: killed")
            kill()
            # Its exit is reported separately.
            self._started = self._progressed = self._reported = now
        elif not is_starting and silent_s >= limit_s / 2 and not self._is_late_noted:
            self._is_late_noted = True
            self._note(self.name, f"no report for {silent_s:.1f} s, SIGKILL after {limit_s:g} s")

    def view(self) -> ProcessView:
        """Return the present state."""
        age_s = None
        if self._reported is not None:
            age_s = max(0.0, self._clock() - self._reported)
        is_late = age_s is not None and age_s >= self._settings.hung_after_s / 2
        return ProcessView(
            self.name,
            self._kind,
            self.state,
            age_s,
            is_late,
            self.restarts,
            self._reason,
            self._work,
        )
