"""One deployment's part of the service: its store, its reader, and what several operations share.

Nothing here moves anything by itself: a rebalance is a task in the store, which the controller
works off, and a switch is a row that every process obeys.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from api.access.audit import Audit, AuditLines
from api.http.answers import TaskAnswer, task_answer
from api.http.problems import ProblemType, Refused
from api.metrics.definitions import Level, ServiceFigures
from api.metrics.exposition import metric_families
from api.monitor.history import History
from api.monitor.monitor import Monitor
from api.monitor.reader import BackgroundReader
from api.monitor.verdict import unready
from api.processes.supervision import SupervisionView
from eplb.clock import Deadline
from eplb.errors import counted
from eplb.migration.serialisation import topology_from_dict
from telemetry.state.runs import RunInfo
from telemetry.state.store import StateStore
from telemetry.state.tasks import Refusal, Task

ANY = "*"  # entity tag of whatever there is

# Refusals of the controller whose problem has another name than the reason.
_RENAMED = {
    Refusal.EXPIRED: ProblemType.TASK_EXPIRED,
    Refusal.ABANDONED: ProblemType.TASK_ABANDONED,
    Refusal.CANCELLED: ProblemType.TASK_CANCELLED,
}
OF_REFUSAL = {one.value: _RENAMED.get(one) or ProblemType[one.name] for one in Refusal}

MOST_MADE = 16  # answers that are kept; the largest has a megabyte


class Made:
    """Answers as JSON, made once as long as what they are made of stays the same."""

    def __init__(self) -> None:
        self._made: tuple[object, dict[str, bytes]] = (None, {})

    def get(self, of: object, name: str, make: Callable[[], bytes]) -> bytes:
        """Return the answer of a name; it is made if another ``of`` was given since."""
        known, made = self._made
        if known != of or len(made) >= MOST_MADE:
            self._made = _, made = of, {}
        answer = made.get(name)
        if answer is None:  # two threads at once both make it, and either is right
            answer = made[name] = make()
        return answer


class AdminService:
    """One deployment's answers. Any thread may call any method.

    Args:
        plan_wait_s: how long a request for a plan waits for the controller.
        metrics_level: how many series /metrics has.
        supervision: what the process that supervises others knows; by default none does.
        keeps_history: whether imbalance over time is kept, for which all runs are read.
        audit: of the state folder; None: there is none.
        latest: so many samples of each rank are read at first, the latest; None: all.
    """

    def __init__(
        self,
        store: StateStore,
        *,
        plan_wait_s: float = 10.0,
        metrics_level: Level = "default",
        supervision: Callable[[], SupervisionView] = SupervisionView,
        keeps_history: bool = True,
        audit: Audit | None = None,
        latest: int | None = None,
    ) -> None:
        self.store = store
        self.monitor = Monitor(
            store,
            history=History() if keeps_history else None,
            supervision=supervision,
            folder=None if audit is None else audit.path.parent,
            latest=latest,
        )
        self._audit, self.audit_lost = audit, 0  # lines that neither file nor store took
        self.reader = BackgroundReader(self.monitor)
        self.num_streams = self.num_slow_streams = 0  # event streams: open; ended as too slow
        self._metrics_level = metrics_level
        self.of_reading, self.of_commit = Made(), Made()
        self._plan_wait_s = plan_wait_s

    @property
    def name(self) -> str:
        """Name of the deployment."""
        return self.store.deployment

    # -- questions
    def metrics(self) -> Iterator[Any]:
        """Give the metrics in the library's own form.

        Raises:
            StoreError: the store cannot be read.
        """
        if self._audit is not None and self.reader.reading().state.store.audit_waiting:
            AuditLines(self._audit, self.store).catch_up()
        of_service = ServiceFigures(self.num_streams, self.num_slow_streams, self.audit_lost)
        return metric_families(self.reader, self._metrics_level, of_service)

    def readiness(self) -> str:
        """State that every rank serves. Where the reader runs, this never waits for the store.

        Raises:
            Refused: no run, ranks that are silent or frozen, no step or no leader for too long.
        """
        if self.reader.is_running and self.reader.latest is None:
            raise Refused(ProblemType.STORE_UNAVAILABLE, "the store has not answered yet")
        reading = self.reader.reading()
        if (why_not := unready(reading)) is not None:
            raise Refused(ProblemType.NOT_READY, why_not)
        state = reading.state
        return f"{counted(len(state.group.members), 'rank', 'serve')}, at step {state.group.step}"

    def task(self, task_id: int) -> TaskAnswer:
        """One task.

        Raises:
            Refused: there is no such task.
        """
        found = self.store.task(task_id)
        if found is None:
            raise Refused(ProblemType.NO_SUCH_TASK, f"there is no task {task_id}")
        return task_answer(self.store, found)

    def num_ranks(self, info: RunInfo | None) -> int:
        """Live ranks of a run; 0: not known."""
        if info is None or not info.topology:
            return 0
        return int(topology_from_dict(dict(info.topology)).alive.sum())

    # -- requests
    def ask(self, kind: str, asked: dict[str, Any], expected: int | None = None) -> TaskAnswer:
        """Submit a task to the controller and wait a while for its result.

        Args:
            kind: of the task.
            asked: its request.
            expected: the generation on which alone it is carried out; None: on any.

        Raises:
            Refused: the controller refuses.
        """
        if groups := self.store.groups():
            why = f"{self.name} has the EP groups {', '.join(groups)}, expected one of them"
            raise Refused(ProblemType.CONTROLLER_REFUSED, why)
        if expected is not None:
            asked = asked | {"if_generation": expected}
        task = self._wait_for(self.store.submit(kind, asked))
        if task.state == "failed":
            # The controller checks the generation again, when it begins the task.
            if expected is not None:
                self.check_generation(generation_tag(expected))
            why = task.result.error or "no reason was given"
            raise Refused(
                OF_REFUSAL.get(task.result.refusal, ProblemType.CONTROLLER_REFUSED),
                f"task {task.id}: {why}",
            )
        return task_answer(self.store, task)

    def check_generation(self, if_match: str) -> int | None:
        """Return the generation in an entity tag; None: it is "*", any.

        Raises:
            Refused: another one serves.
        """
        if if_match == "*":
            return None
        committed = self.store.committed()
        serving = "none" if committed is None else generation_tag(committed.placement.generation)
        if serving != if_match:
            raise Refused(
                ProblemType.GENERATION_MOVED_ON,
                f"the generation that serves is {serving}, expected {if_match}",
            )
        return int(if_match.strip('"'))

    def check_may_move(self, is_dry_run: bool) -> None:
        """Refuse what no controller would carry out now.

        Raises:
            Refused: movement is off, or a migration is open.
        """
        control, migration = self.store.control(), self.store.published()
        if not is_dry_run and not control.movement:
            why = "movement is off, expected it on; a dry run is possible"
            raise Refused(ProblemType.MOVEMENT_OFF, why)
        if not is_dry_run and control.observe:
            why = "observe is on, expected it off; a dry run is possible"
            raise Refused(ProblemType.MOVEMENT_OFF, why)
        if migration is not None:
            raise Refused(
                ProblemType.MIGRATION_OPEN,
                f"the migration of plan {migration.plan_id} is open, expected it committed or "
                "aborted before the next plan",
            )

    def _wait_for(self, task: Task) -> Task:
        deadline = Deadline.after(self._plan_wait_s, time.monotonic)
        while task.state in ("queued", "running"):
            version = self.store.version()
            task = self.store.task(task.id) or task
            if task.state in ("done", "failed") or deadline.has_passed:
                break
            self.store.wait(version, deadline.left_s)
        return task


def generation_tag(generation: int) -> str:
    """Give a generation as an entity tag (RFC 9110, 8.8.3)."""
    return f'"{generation}"'
