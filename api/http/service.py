"""What the HTTP service answers, without HTTP: questions to a store, and requests put into it.

Nothing here moves anything by itself: a rebalance is a task in the store, which the controller
works off, and a switch is a row that every process obeys.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pydantic import TypeAdapter

from api.http.problems import OF_REFUSAL, ProblemType, Refused
from api.http.requests import ExplainRequest, RebalanceRequest, RollbackRequest
from api.http.routes.events.feed import EventFeed
from api.http.schemas import ControlAnswer, Health, TaskAnswer, TasksPage
from api.metrics.definitions import Level
from api.metrics.exposition import Exposition
from api.monitor.history import History
from api.monitor.monitor import Monitor
from api.monitor.plan_ends import task_answer
from api.monitor.reader import BackgroundReader
from api.monitor.verdict import unready
from api.processes.supervision import SupervisionView
from eplb.clock import Clock, Deadline
from eplb.errors import StaleRevision
from eplb.policies.table import policy_named
from telemetry.state.placements import CommittedPlacement
from telemetry.state.store import StateStore
from telemetry.state.tasks import Task, TaskState

ANY = "*"  # entity tag of whatever there is

ANSWER = TypeAdapter(Any)  # writes an answer of whatever type as JSON
MOST_MADE = 16  # answers that are kept; the largest has a megabyte

T = TypeVar("T")


class AdminService:
    """One deployment's answers. Any thread may call any method.

    Args:
        plan_wait_s: how long a request for a plan waits for the controller.
        stalled_after_s: without a step for so long, the deployment is not ready.
        metrics_level: how many series /metrics has.
        supervision: what the process that supervises others knows; by default none does.
        keeps_history: whether imbalance over time is kept, for which all runs are read.
        clock: of ``plan_wait_s``.
    """

    def __init__(
        self,
        store: StateStore,
        *,
        plan_wait_s: float = 10.0,
        stalled_after_s: float = 30.0,
        metrics_level: Level = "default",
        supervision: Callable[[], SupervisionView] = SupervisionView,
        keeps_history: bool = True,
        clock: Clock = time.monotonic,
    ) -> None:
        self.store = store
        self.monitor = Monitor(
            store,
            history=History() if keeps_history else None,
            supervision=supervision,
            stalled_after_s=stalled_after_s,
        )
        self.reader, self.feed = BackgroundReader(self.monitor), EventFeed(store)
        self.metrics = Exposition(self.monitor, metrics_level, reader=self.reader, feed=self.feed)
        self._of_reading, self._of_commit = _Made(), _Made()
        self._plan_wait_s, self._clock = plan_wait_s, clock

    # -- questions
    def health(self) -> Health:
        """Report that the store answers."""
        return Health(detail=f"the store answers, at version {self.store.version()}")

    def readiness(self) -> Health:
        """Report that every rank serves.

        Raises:
            Refused: no run, ranks that are silent or frozen, no step or no leader for too long.
        """
        reading = self.reader.reading()
        if (why_not := unready(reading)) is not None:
            raise Refused(ProblemType.NOT_READY, why_not)
        ranks, step = reading.state.ranks, reading.state.step
        return Health(detail=f"{len(ranks)} ranks serve, at step {step}")

    def json(self, make: Callable[[], object], once_a_reading: str | None = None) -> bytes:
        """Make an answer as JSON.

        Args:
            make: the answer: a dataclass.
            once_a_reading: its name, where it is made once for each reading in the background,
                because many may ask for it.
        """
        if once_a_reading is None or not self.reader.is_running:
            return ANSWER.dump_json(make())
        return self._of_reading.get(self.reader.reading(), once_a_reading, make)

    def once_a_commit(
        self, of: CommittedPlacement | None, name: str, make: Callable[[], object]
    ) -> bytes:
        """Make an answer as JSON, once as long as one placement serves."""
        key = None if of is None else (of.placement.generation, of.placement.hash, of.time)
        return self._of_commit.get(key, name, make)

    def task(self, task_id: int) -> TaskAnswer:
        """One task.

        Raises:
            Refused: there is no such task.
        """
        found = self.store.task(task_id)
        if found is None:
            raise Refused(ProblemType.NO_SUCH_TASK, f"there is no task {task_id}")
        return task_answer(self.store, found)

    def tasks(self, state: TaskState, after: int, limit: int) -> TasksPage:
        """Tasks in a state past an id, oldest first."""
        kept = self.store.tasks(state, after=after, limit=limit + 1)
        found, following = page_of(kept, limit, lambda one: one.id)
        return TasksPage(tasks=[task_answer(self.store, one) for one in found], next=following)

    # -- requests
    def cancel(self, task_id: int, reason: str) -> TaskAnswer:
        """Cancel a task that is still queued.

        Raises:
            Refused: there is no such task, or the controller has begun it.
        """
        is_cancelled = self.store.cancel(task_id, reason=reason)
        answer = self.task(task_id)
        if not is_cancelled:
            raise Refused(
                ProblemType.TASK_BEGUN, f"task {task_id} is {answer.state}, expected it queued"
            )
        return answer

    def rebalance(self, request: RebalanceRequest, if_match: str = ANY) -> TaskAnswer:
        """Ask the controller, and wait for a while; the task may not be done when this returns.

        Args:
            request: the request.
            if_match: the generation on which alone it is carried out, as an entity tag.

        Raises:
            Refused: another generation serves, movement is off, a migration is open, or the
                controller refuses.
            ConfigError: an unknown policy.
        """
        if request.policy is not None:
            policy_named(request.policy)
        expected = self.check_generation(if_match)
        self.check_may_move(request.dry_run)
        return self.ask("rebalance", request.model_dump(exclude_none=True), expected)

    def rollback(self, request: RollbackRequest, if_match: str = ANY) -> TaskAnswer:
        """Ask the controller for the way back to an earlier placement; else as ``rebalance``.

        Raises:
            Refused: movement is off, a migration is open, or the controller refuses: no such
                generation, or ranks that cannot serve it.
        """
        expected = self.check_generation(if_match)
        self.check_may_move(request.dry_run)
        return self.ask("rollback", request.model_dump(exclude_none=True), expected)

    def explain(self, request: ExplainRequest) -> TaskAnswer:
        """Ask the controller why an expert is where a plan has it; nothing moves.

        Raises:
            Refused: there is no such layer or expert, or no load yet to plan on.
            ConfigError: an unknown policy.
        """
        if request.policy is not None:
            policy_named(request.policy)
        return self.ask("explain", request.model_dump(exclude_none=True))

    def ask(self, kind: str, asked: dict[str, Any], expected: int | None = None) -> TaskAnswer:
        """Submit a task to the controller and wait a while for its result.

        Args:
            kind: of the task.
            asked: its request.
            expected: the generation on which alone it is carried out; None: on any.

        Raises:
            Refused: the controller refuses.
        """
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
        """Return the generation in an entity tag; None: it is ANY.

        Raises:
            Refused: another one serves.
        """
        if if_match == ANY:
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
        deadline = Deadline.after(self._plan_wait_s, self._clock)
        while task.state in ("queued", "running"):
            version = self.store.version()
            task = self.store.task(task.id) or task
            if task.state in ("done", "failed") or deadline.has_passed:
                break
            self.store.wait(version, deadline.left_s)
        return task

    def set_control(
        self,
        changes: dict[str, Any],
        reason: str,
        *,
        expected: int | None,
        lasts_s: int | None = None,
    ) -> tuple[ControlAnswer, str]:
        """Change switches; return them with the entity tag of the live settings.

        Args:
            changes: by name.
            reason: stored with the change.
            expected: the revision of the live settings that was read; None: any.
            lasts_s: after which the change ends by itself; None: it stays.

        Raises:
            Refused: no switch was named, or another change came first.
        """
        if not changes:
            raise Refused(
                ProblemType.INVALID_REQUEST,
                "the body names no switch, expected movement or observe",
            )
        try:
            state = self.store.change_live(
                changes, expected=expected, reason=reason, lasts_s=lasts_s
            )
        except StaleRevision as exc:
            raise Refused(ProblemType.SETTINGS_CHANGED, str(exc)) from exc
        answer = ControlAnswer(**vars(state.control), until=state.until.get("movement"))
        return answer, f'"{state.revision}"'


class _Made:
    """Answers as JSON, made once as long as what they are of stays the same."""

    def __init__(self) -> None:
        self._made: tuple[object, dict[str, bytes]] = (None, {})

    def get(self, of: object, name: str, make: Callable[[], object]) -> bytes:
        known, made = self._made
        if known != of or len(made) >= MOST_MADE:
            self._made = _, made = of, {}
        answer = made.get(name)
        if answer is None:  # two threads at once both make it, and either is right
            answer = made[name] = ANSWER.dump_json(make())
        return answer


def generation_tag(generation: int) -> str:
    """Give a generation as an entity tag (RFC 9110, 8.8.3)."""
    return f'"{generation}"'


def page_of(
    found: Sequence[T], limit: int, number: Callable[[T], int]
) -> tuple[Sequence[T], int | None]:
    """Return the first so many, and the number of the last of them if there are more."""
    page = found[:limit]
    return page, number(page[-1]) if len(found) > limit else None
