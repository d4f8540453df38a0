"""What the HTTP service answers, without HTTP: questions to a store, and requests put into it.

Nothing here moves anything by itself: a rebalance is a task in the store, which the controller
works off, and a switch is a row that every process obeys.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from api.http.problems import OF_REFUSAL, ProblemType, Refused
from api.http.requests import ExplainRequest, RebalanceRequest, RollbackRequest
from api.http.routes.events.feed import EventFeed
from api.http.schemas import (
    ControlAnswer,
    DecisionAnswer,
    DriftAnswer,
    EventAnswer,
    EventsPage,
    Health,
    HistoryAnswer,
    Imbalance,
    Load,
    LoadWindow,
    Mark,
    MigrationAnswer,
    PlanAnswer,
    Progress,
    RebalanceAnswer,
    RebalancesPage,
    Score,
    State,
    TaskAnswer,
    TasksPage,
    TransactionAnswer,
)
from api.metrics.definitions import Level
from api.metrics.exposition import Exposition
from api.monitor.history import History
from api.monitor.monitor import Monitor
from api.monitor.plan_ends import task_answer
from api.monitor.reader import Reader
from api.monitor.snapshot import Snapshot
from api.monitor.verdict import Around, unready
from api.processes.supervision import SupervisionView
from eplb.clock import Clock, Deadline
from eplb.errors import StaleRevision
from eplb.policies.table import policy_named
from telemetry.state.events import Event
from telemetry.state.placements import CommittedPlacement
from telemetry.state.store import StateStore
from telemetry.state.tasks import Task, TaskState

ANY = "*"  # entity tag of whatever there is

MOST_MADE = 16  # answers that are kept; the largest has a megabyte

T = TypeVar("T")


class AdminService:
    """One deployment's answers. Any thread may call any method.

    Args:
        plan_wait_s: how long a request for a plan waits for the controller.
        stalled_after_s: without a step for so long, the deployment is not ready.
        metrics_level: how many series /metrics has.
        supervision: what the process that supervises others knows; by default none does.
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
        clock: Clock = time.monotonic,
    ) -> None:
        self.store = store
        self._monitor = Monitor(store, history=History(), supervision=supervision)
        self.reader = Reader(store, self._monitor, stalled_after_s=stalled_after_s)
        self.feed = EventFeed(store)
        self.metrics = Exposition(
            store, self._monitor, metrics_level, reader=self.reader, feed=self.feed
        )
        self._of_reading, self._of_commit = _Made(), _Made()
        self._plan_wait_s, self._stalled_after_s = plan_wait_s, stalled_after_s
        self._clock = clock

    def _snapshot(self) -> Snapshot:
        return self.reader.reading().seen

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
        seen, leads = reading.seen, reading.leads
        around = Around(leads.why_none, turn_age_s=leads.turn_age_s)
        why_not = reading.unread or unready(seen, self._stalled_after_s, around)
        if why_not is not None:
            raise Refused(ProblemType.NOT_READY, why_not)
        return Health(detail=f"{len(seen.ranks)} ranks serve, at step {seen.step}")

    def state(self) -> State:
        """Everything at a glance."""
        reading = self.reader.reading()
        seen, leads, judged = reading.seen, reading.leads, reading.judged
        latest = self._monitor.rebalances()[:1]
        fields: dict[str, Any] = {
            "verdict": judged.grade,
            "reason": judged.reason,
            "problems": list(judged.problems),
            "leader": leads.leader,
            "starting": leads.starting,
            "led_s": leads.held_s,
            "turn_age_s": leads.turn_age_s,
            "last_rebalance": latest[0] if latest else None,
        }
        others = State.model_fields.keys() - fields.keys()
        fields |= {name: getattr(seen, name) for name in others}
        # Three digits are more than a picture shows, and a third of the bytes.
        for name in ("heatmap", "expert_heat"):
            heat = fields[name]
            fields[name] = None if heat is None else _rows(heat)
        return State.model_validate(fields, from_attributes=True)

    def once_a_reading(self, name: str, make: Callable[[], BaseModel]) -> bytes:
        """Make an answer as JSON, once for each reading of the store: many may ask for it."""
        return self._of_reading.get(self.reader.reading(), name, make)

    def once_a_commit(
        self, of: CommittedPlacement | None, name: str, make: Callable[[], BaseModel]
    ) -> bytes:
        """Make an answer as JSON, once as long as one placement serves."""
        key = None if of is None else (of.placement.generation, of.placement.hash, of.time)
        return self._of_commit.get(key, name, make)

    def load(self, last: int) -> Load:
        """The latest windows with their matrices."""
        self._snapshot()
        windows = self._monitor.windows(last)
        return Load(
            windows=[LoadWindow.model_validate(window) for window in windows],
            tokens=[window.tokens.tolist() for window in windows],
            rank_load=[window.received.tolist() for window in windows],
        )

    def imbalance(self, last: int) -> Imbalance:
        """Imbalance over time, and where it was rebalanced."""
        seen = self._snapshot()
        return Imbalance(
            windows=[Score.model_validate(score) for score in seen.series[-last:]],
            rebalances=[Mark.model_validate(mark) for mark in seen.marks],
        )

    def drift(self) -> DriftAnswer:
        """How far the load is from the one that the serving placement was planned on."""
        found, generation = self.metrics.drift(), self._snapshot().generation
        if found is None:
            return DriftAnswer(generation=generation, overall=None, layers=None, noise=None)
        return DriftAnswer(
            generation=generation,
            overall=found.overall,
            layers=found.per_layer.tolist(),
            noise=found.noise,
        )

    def history(self, seconds: int, points: int) -> HistoryAnswer:
        """Imbalance of the latest stretch of time, of all runs."""
        until = self._snapshot().time
        since = until - seconds
        return HistoryAnswer.model_validate(
            {
                "since": since,
                "until": until,
                "points": self._monitor.points(since, until, points),
                "marks": self._monitor.history_marks(since, until),
            },
            from_attributes=True,
        )

    def rebalances(self, limit: int, before: int | None) -> RebalancesPage:
        """Migrations of all runs below a plan id, newest first; None: from the newest."""
        self._snapshot()
        every = self._monitor.rebalances()
        kept = [one for one in every if before is None or one.plan_id < before]
        found, following = page_of(kept, limit, lambda one: one.plan_id)
        return RebalancesPage(
            rebalances=[RebalanceAnswer.model_validate(one) for one in found], next=following
        )

    def plan(self) -> PlanAnswer:
        """The open migration and the last decision."""
        seen = self._snapshot()
        last = DecisionAnswer.model_validate(seen.decisions[-1]) if seen.decisions else None
        return PlanAnswer(migration=self._migration(seen), last_decision=last)

    def _migration(self, seen: Snapshot) -> MigrationAnswer | None:
        migration, progress = self.store.published(), seen.migration
        # It may have closed between the two reads: then there is none to show.
        if migration is None or progress is None or migration.plan_id != progress.plan_id:
            return None
        by_source = Counter(move.source.name.lower() for move in migration.moves)
        return MigrationAnswer(
            progress=Progress.model_validate(progress),
            moves_by_source=dict(by_source),
            transactions=[
                TransactionAnswer(
                    layers=list(txn.layers), num_moves=len(txn.moves), num_rounds=len(txn.rounds)
                )
                for txn in migration.transactions
            ],
        )

    def events(self, after: int, limit: int) -> EventsPage:
        """Events past an id, oldest first."""
        found, following = page_of(self.store.events(after=after, limit=limit + 1), limit, _id)
        return EventsPage(events=[EventAnswer(**asdict(one)) for one in found], next=following)

    def latest_events(self, limit: int) -> EventsPage:
        """The latest events, oldest first."""
        found = reversed(self.store.latest_events(limit=limit))
        return EventsPage(events=[EventAnswer(**asdict(one)) for one in found], next=None)

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
        found, following = page_of(kept, limit, _id)
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

    def get(self, of: object, name: str, make: Callable[[], BaseModel]) -> bytes:
        known, made = self._made
        if known != of or len(made) >= MOST_MADE:
            self._made = _, made = of, {}
        answer = made.get(name)
        if answer is None:  # two threads at once both make it, and either is right
            answer = made[name] = make().model_dump_json().encode()
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


def _id(one: Event | Task) -> int:
    return one.id


def _rows(heat: NDArray[np.float64]) -> list[list[float] | None]:
    """Rows of ratios; None for a layer without tokens."""
    is_empty = np.isnan(heat[:, 0])  # [L]; a row is all NaN or has none
    rows: list[list[float]] = np.round(heat, 3).tolist()
    return [None if is_empty[layer] else row for layer, row in enumerate(rows)]
