"""The process of a rank that talks to the store: samples and maps out, tasks and switches in.

A rank of an engine starts it (``store_process``), and it ends with the connection. The interpreter
of the engine is therefore never held up by what a sample costs on its way to the store, and what a
rank has sent survives the rank's death. A store that is gone is tried again; samples wait in
memory or in the spool meanwhile. What it has taken is acknowledged once it is in the store or on
disk; the rank sends the rest again to the next process.

On rank 0 it also holds the lease of the deployment, so that two engines never share a run, and the
controller's, works off tasks of kind ``rebalance``, reads the
deployment's switches, and writes the maps that serve. While another controller holds the lease,
tasks are left to it. Where the identity names a planner, the process also plans for tasks and at
the rank's intervals: a plan takes up to seconds, and beside passes it would slow every one.

    python -m rebalance.engines.common.store_link FD
"""

from __future__ import annotations

import logging
import os
import pkgutil
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

import numpy as np

from eplb.core.cost import Decision
from eplb.core.load import LoadSample
from eplb.core.placement import Placement
from eplb.errors import EplbError, PlacementError, StaleGeneration, StoreError
from eplb.migration.serialisation import topology_from_dict
from eplb.settings.loader import GROUP_VARIABLE
from eplb.versions import CONTROLLER, Announcement
from rebalance.engines.common.fsck.report import Report, report_of
from rebalance.engines.common.messages import (
    UNREAD,
    LinkReport,
    MapChange,
    MoveOutcome,
    Noted,
    PassWindow,
    PlannerAnswer,
    PlanQuestion,
    Reply,
    SampleOrigin,
    ToStore,
    from_bytes,
    to_bytes,
)
from rebalance.engines.common.start import show_log
from rebalance.types import SWITCHED_OFF
from telemetry import open_store
from telemetry.load.reporter import Reporter
from telemetry.load.spool import Spool
from telemetry.state.events import (
    DECIDED,
    FAILED,
    OFFERED,
    OUTCOME_OF_EVENT,
    Failure,
    PlanEnd,
    PlanOffer,
    plan_offer,
)
from telemetry.state.holder import new_holder, shown
from telemetry.state.lease import Lease, LeaseOf
from telemetry.state.runs import REPORT_EVERY_S, RankState
from telemetry.state.store import StateStore
from telemetry.state.tasks import Task, TaskResult, TaskState

log = logging.getLogger(f"{__package__}.store_link")  # the module runs as __main__

TICK_S = 0.05
CONTROL_S = 0.25  # how often lease, switches and tasks are looked at
RANK_REPORT_S = 2.0  # from one report of the rank to the next, also while it runs no pass
LEASE_S = 30.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # after a failure of the store
MOST_WINDOWS = 64  # windows that wait for the planner; the oldest go
NICENESS = 5  # below the engine, which shares the host's processors


class StoreLink:
    """One rank's link to the store, on a thread; other threads only append to its queues.

    Args:
        identity: of the rank.
        reply: sends a message to the rank.
    """

    def __init__(self, identity: SampleOrigin, reply: Callable[[Reply], None]) -> None:
        self._identity, self._reply = identity, reply
        # The rank sends no more than MOST_SENT messages before the first of them is safe.
        self._samples: deque[LoadSample] = deque()
        self._records: deque[Noted | MapChange | MoveOutcome] = deque()  # in the order of writing
        self._num_taken = 0  # messages of the rank
        self._outcomes: deque[MoveOutcome] = deque()  # that end tasks
        self._open_task = 0  # the task that the rank works on; 0: none
        self._failure = ""  # of the latest plan, where it was the first with these words
        self._store: StateStore | None = None
        self._whole: StateStore | None = None  # of a deployment with several groups, on rank 0
        self._reporter: Reporter | None = None
        self._leases: dict[LeaseOf, Lease] = {}
        self._holder, self._has_run, self._next_look = new_holder(), False, 0.0
        self._next_control = self._next_rank_report = 0.0
        self._latest: LoadSample | None = None
        self._num_failures = self._num_errors = 0
        self._report = LinkReport(False, self._unread, -1)  # the last one; none was sent yet
        self._reporting = Lock()
        self._is_failing = False  # whether the failure that lasts was logged
        # Why a release that was not tested moves nothing yet; "" once all ranks have checked.
        self._unproved, self._next_proof = identity.untried, 0.0
        self._end = Event()
        self._planning = PlannerLink(identity, self) if identity.planner else None
        self._thread = Thread(target=self._run, name="eplb-store-link", daemon=True)
        self._thread.start()

    def take(self, message: ToStore) -> None:
        """Queue a message of the rank."""
        if self._planning is None or not self._planning.takes(message):
            queue: deque[Any] = self._samples if isinstance(message, LoadSample) else self._records
            queue.append(message)
        self._num_taken += 1

    def close(self) -> None:
        """End the thread, and write what still waits if the store answers."""
        self._end.set()
        if self._planning is not None:
            self._planning.close()
        self._thread.join()

    def _run(self) -> None:
        pause_s, wait_s, is_last = FIRST_PAUSE_S, TICK_S, False
        while not is_last:
            is_last = self._end.wait(wait_s)
            try:
                self._turn(is_last=is_last)
                pause_s, wait_s = FIRST_PAUSE_S, TICK_S
                self._is_failing &= not self._has_run  # a second engine is refused again and again
                self._send_report(is_on=self._reaches_the_store(), **self._safe())
            except Exception as exc:
                level = logging.WARNING if isinstance(exc, (EplbError, OSError)) else logging.ERROR
                if not self._is_failing:
                    log.log(level, "the store cannot be used: %s; the engine serves on", exc)
                self._is_failing = True
                self._num_failures += 1
                self._send_report(is_on=False, why_kept=self._unread)
                pause_s, wait_s = min(2 * pause_s, LONGEST_PAUSE_S), pause_s
        if self._reporter is not None:
            with suppress(EplbError):
                self._reporter.close(5.0)
            self._send_report(**self._safe())
        if self._store is not None:
            with suppress(EplbError):
                for lease in self._leases.values():
                    self._store.release_lease(lease)
            self._store.close()
        if self._whole is not None:
            self._whole.close()

    def _reaches_the_store(self) -> bool:
        """Whether samples are written; while one that failed still waits, they are not."""
        if not self._has_run:
            return False
        assert self._reporter is not None, "the store is open"
        stats, before = self._reporter.stats(), self._num_errors
        self._num_errors = stats.errors
        if stats.errors > before:
            return False
        return stats.errors == 0 or stats.waiting == 0 or self._report.is_on

    def _safe(self) -> dict[str, int]:
        """How many messages survive the end of this process, and how many samples were dropped."""
        if self._reporter is None:
            return {}
        num_taken = self._num_taken  # first: what is taken from now on is looked for in vain
        waits, stats = bool(self._samples or self._records), self._reporter.stats()
        is_safe = not waits and not stats.waiting_in_memory
        return {"num_dropped": stats.dropped + stats.refused} | (
            {"num_safe": num_taken} if is_safe else {}
        )

    @property
    def why_kept(self) -> str:
        """Why nothing may move now, by the deployment's switches."""
        return self._report.why_kept

    @property
    def _unread(self) -> str:
        """Why nothing may move while the store does not answer; rank 0 decides for all."""
        return UNREAD if self._identity.is_first else ""

    def _send_report(self, **changes: Any) -> None:
        with self._reporting:
            report = replace(self._report, num_failures=self._num_failures, **changes)
            if report != self._report:
                self._report = report
                self._reply(report)

    def answered(self, outcome: MoveOutcome, record: bytes = b"") -> None:
        """Take what came of a question to the planner: a plan for the ranks, or why there is none.

        A plan's outcome comes from the ranks, with the map.
        """
        num_failed = (self._report.num_failed_plans or 0) + 1 if outcome.error else 0
        self._send_report(num_failed_plans=num_failed)
        self._records.append(replace(outcome, is_begun=bool(record)))
        self._reply(PlannerAnswer(outcome.question, np.frombuffer(record, dtype=np.uint8)))

    def _turn(self, *, is_last: bool) -> None:
        store = self._opened() if self._store is None else self._store
        if not self._begins(store) and (self._identity.is_first or not is_last):
            return
        self._offer()
        while self._records:
            self._write(store, self._records[0])
            self._records.popleft()
        if time.monotonic() >= self._next_rank_report:
            self._report_rank(store)
            self._next_rank_report = time.monotonic() + RANK_REPORT_S
        if not self._identity.is_first:
            return
        if time.monotonic() >= self._next_control:
            self._control(store)
            self._next_control = time.monotonic() + CONTROL_S

    def _opened(self) -> StateStore:
        identity = self._identity
        store = open_store(identity.store, identity.deployment)
        try:
            if identity.is_first and identity.whole:
                self._whole = open_store(identity.store, identity.whole)
            spool = Spool(Path(identity.spool)) if identity.spool else None
            self._reporter = Reporter(store, spool=spool, seed=identity.rank)
            self._reporter.clock.follow()
        except BaseException:
            store.close()
            raise
        self._store = store
        return store

    def _begins(self, store: StateStore) -> bool:
        """Whether the deployment serves this run, which rank 0 begins; others write nothing before.

        Raises:
            StoreError: another engine runs in the deployment.
        """
        identity, now = self._identity, time.monotonic()
        if now < self._next_look or (self._has_run and not identity.is_first):
            return self._has_run
        self._next_look, self._has_run = now + CONTROL_S, False
        if identity.is_first:
            lease = store.acquire_lease(self._holder, LEASE_S, of="deployment")
            if lease is None:
                raise StoreError(self._refusal(store))
            self._leases["deployment"] = lease
        run = store.current_run()  # a store that came back empty has none
        if identity.is_first and (run is None or run.run != identity.info.run):
            (self._whole or store).set_groups(identity.engine, identity.groups)
            run = replace(identity.info, time=store.backend.now())
            store.begin_run(run)
        self._has_run = run is not None and run.run == identity.info.run
        return self._has_run

    def _refusal(self, store: StateStore) -> str:
        run, lease = store.current_run(), store.latest_lease("deployment")
        holder = "another process" if lease is None else shown(lease.holder)
        return (
            f"deployment {store.deployment!r} has run {'none' if run is None else run.run} of "
            f"{holder}, expected no other engine: {GROUP_VARIABLE} names each of several engines "
            "that have one file"
        )

    def _offer(self) -> None:
        assert self._reporter is not None, "the store is open"
        while self._samples:
            self._latest = sample = self._samples.popleft()
            # The rank dates its samples by its host's clock, as this process reads it.
            offset_s = self._reporter.clock.offset_s
            self._reporter.offer(replace(sample, time=sample.time - offset_s))

    def _report_rank(self, store: StateStore) -> None:
        """Report step and map of the latest sample: a rank without a report counts as silent."""
        step, generation, sequence = 0, 0, 0
        if (latest := self._latest) is not None:
            step, generation = latest.last_step, latest.generation
            sequence = latest.sequence + 1
        run, rank = self._identity.info.run, self._identity.rank
        detail = {REPORT_EVERY_S: RANK_REPORT_S}
        now = store.backend.now()
        store.report(
            RankState(run, rank, now, step, generation, "idle", 0, 0, sequence, 0, detail=detail)
        )

    def _write(self, store: StateStore, record: Noted | MapChange | MoveOutcome) -> None:
        if isinstance(record, Noted):
            store.add_event(record.kind, record.detail)
        elif isinstance(record, MapChange):
            self._commit(store, record)
        else:
            self._note_plan(store, record)

    def _commit(self, store: StateStore, change: MapChange) -> None:
        """Write a map that serves."""
        serving, error = store.committed(), ""
        expected = None if serving is None else serving.placement.generation
        before = change.held if serving is None else serving.placement.slot_to_expert
        share = () if change.share is None else (change.share,)
        plan_id = self._open_plan(store) if change.figures else 0
        try:
            placement = Placement(change.held, change.num_experts, change.generation, *share)
            store.commit(placement, expected=expected, plan_id=plan_id, reason=change.reason)
        except (PlacementError, StaleGeneration) as exc:
            # Generations begin with the time of the engine's start: its clock may have gone back.
            error = f"the map that serves cannot be written: {exc}"
            log.warning("%s", error)
            self._note_error(store, "map", error, plan_id)
        if change.question is not None and change.question.task_id:
            moves = int((change.held != before).sum()) if before.shape == change.held.shape else 0
            served = {"moves": moves, "serves": change.generation, "plan_id": plan_id}
            figures = change.figures | served
            self._outcomes.append(MoveOutcome(change.question, figures, error))

    def _note_plan(self, store: StateStore, outcome: MoveOutcome) -> None:
        """Record a plan as a controller does: its decision, and that the ranks begin to move."""
        question = outcome.question
        if outcome.error:
            self._note_error(store, "plan", outcome.error, self._open_plan(store))
        elif not question.is_dry and outcome.kept != UNREAD:
            serving, figures = store.committed(), outcome.figures
            base = 0 if serving is None else serving.placement.generation
            target = base + (figures["decision"] != Decision.KEEP.value)
            about: dict[str, Any] = {"generation": base, "target_generation": target}
            about |= {"trigger": question.trigger, "actor": "engine"}
            if question.task_id:
                about |= {"trigger": "request", "actor": f"task {question.task_id}"}
            if outcome.kept and target > base:
                about["reason"] = f"{figures['reason']} (not moved: {outcome.kept})"
            store.add_event(DECIDED, figures | about)
            if outcome.is_begun:
                offer = PlanOffer(store.next_plan_id(), base, target, figures["moves"], 1)
                store.add_event(OFFERED, offer)
        if not outcome.error:
            self._failure = ""
        if question.task_id and not outcome.is_begun:
            self._outcomes.append(outcome)

    def _note_error(self, store: StateStore, where: str, error: str, plan_id: int) -> None:
        """Record the end of the open plan, else the first failure with these words."""
        if plan_id:
            serving = store.committed()
            generation = None if serving is None else serving.placement.generation
            store.add_event("abort", PlanEnd(generation, plan_id, error))
        elif error != self._failure:
            store.add_event(FAILED, Failure(where, error))
            self._failure = error

    def _open_plan(self, store: StateStore) -> int:
        """Plan id of the plan of this run that the ranks move to; 0: there is none."""
        latest = next(store.events_backwards({"run", "publish", *OUTCOME_OF_EVENT}), None)
        offer = None if latest is None else plan_offer(latest)
        return 0 if offer is None else offer.plan_id

    def _control(self, store: StateStore) -> None:
        """Lease, switches and tasks of rank 0."""
        holder = f"{self._identity.info.run}-rank-{self._identity.rank}"
        lease, before = store.acquire_lease(holder, LEASE_S), self._leases.get("controller")
        if lease is not None and (before is None or before.token != lease.token):
            store.announce(Announcement(CONTROLLER, holder))
        # A switch of the whole deployment is one of each group.
        kept = why_kept(store) or ("" if self._whole is None else why_kept(self._whole))
        kept = kept or self._why_observed(store)
        self._send_report(why_kept=kept, is_on=self._reaches_the_store())
        if lease is None:
            self._leases.pop("controller", None)
            return
        self._leases["controller"] = lease
        self._finish(store, lease.token)
        if self._open_task or (task := self._next_task(store, lease.token)) is None:
            return
        refusal = why_refused(task.kind, task.request)
        if refusal:
            store.finish(task.id, "failed", TaskResult(refusal), fence=lease.token)
            return
        self._open_task = task.id
        question = PlanQuestion("task", task.id, bool(task.request.get("dry_run", True)))
        if self._planning is None or not self._planning.takes(question):
            self._reply(question)

    @staticmethod
    def _next_task(store: StateStore, fence: int) -> Task | None:
        """A task that an earlier process of this rank had open when it died, else a queued one."""
        return next(iter(store.tasks("running", limit=1)), None) or store.claim(fence=fence)

    def _why_observed(self, store: StateStore) -> str:
        if self._unproved and time.monotonic() >= self._next_proof:
            self._next_proof = time.monotonic() + RANK_REPORT_S
            num_ranks = topology_from_dict(dict(self._identity.info.topology)).num_ranks
            lacking = why_unproved(report_of(store), num_ranks)
            self._unproved = f"{self._identity.untried}: {lacking}" if lacking else ""
        return self._unproved

    def _finish(self, store: StateStore, fence: int) -> None:
        while self._outcomes:
            outcome = self._outcomes[0]
            state: TaskState = "failed" if outcome.error else "done"
            plan_id = int(outcome.figures.get("plan_id", 0))
            result = TaskResult(outcome.error, plan_id, _details_of(outcome))
            number = outcome.question.task_id
            # A process that dies may leave an outcome for the next, which has asked once more.
            if (task := store.task(number)) is not None and task.state == "running":
                store.finish(number, state, result, fence=fence)
            if number == self._open_task:
                self._open_task = 0
            self._outcomes.popleft()


def _details_of(outcome: MoveOutcome) -> dict[str, Any]:
    """The figures of a plan as the result of a controller's task has them."""
    names = {"imbalance_before": "before", "imbalance_after": "after", "moves": "num_moves"}
    detail = {names.get(name, name): value for name, value in outcome.figures.items()}
    detail["dry_run"] = outcome.question.is_dry
    if outcome.kept:
        detail["kept"] = outcome.kept
    return detail


class PlannerLink:
    """Asks the planner, on a thread of its own; one plan at a time is with the ranks.

    A planner takes the identity's ``terms``. It has ``add(window)``, and ``plan()``, which returns
    the packed plan, b"" if it moves nothing, and its figures; None without a window.
    """

    def __init__(self, identity: SampleOrigin, link: StoreLink) -> None:
        self._identity, self._link = identity, link
        self._windows: deque[PassWindow] = deque(maxlen=MOST_WINDOWS)
        self._questions: deque[PlanQuestion] = deque()
        self._planner: Any = None
        self._given: PlanQuestion | None = None  # whose plan the ranks have and do not serve yet
        self._end = Event()
        self._thread = Thread(target=self._run, name="eplb-planning", daemon=True)
        self._thread.start()

    def takes(self, message: ToStore) -> bool:
        """Queue what a planner needs; whether it is for the planner alone."""
        if isinstance(message, PassWindow):
            self._windows.append(message)
        elif isinstance(message, PlanQuestion):
            if message.task_id or message not in self._questions:  # an interval asks once
                self._questions.append(message)
        else:
            if isinstance(message, (MapChange, MoveOutcome)):
                self._given = None
            return False
        return True

    def close(self) -> None:
        """End the thread; a plan that is being made is not waited for."""
        self._end.set()

    def _run(self) -> None:
        while not self._end.wait(TICK_S):
            if self._questions and self._given is None:
                self._answer()

    def _plan(self) -> tuple[bytes, dict[str, Any]] | None:
        if self._planner is None:  # here: one that cannot be loaded is an answer too
            planner = pkgutil.resolve_name(self._identity.planner)
            self._planner = planner(self._identity.terms)
        while self._windows:
            self._planner.add(self._windows.popleft())
        found: tuple[bytes, dict[str, Any]] | None = self._planner.plan()
        return found

    def _answer(self) -> None:
        question = self._questions[0]
        began = time.monotonic()
        try:
            found = self._plan()
        except Exception as exc:
            log.warning("no plan: %s: %s; the map that serves stays", type(exc).__name__, exc)
            self._questions.popleft()
            self._link.answered(MoveOutcome(question, error=f"{type(exc).__name__}: {exc}"))
            return
        if found is None:
            return
        self._questions.popleft()
        record, figures = found
        figures = figures | {"plan_seconds": round(time.monotonic() - began, 4)}
        kept = self._link.why_kept
        log.info(
            "decision=%s reason=%r moved=%d seconds=%.3f kept=%r",
            figures["decision"],
            figures["reason"],
            figures["moves"],
            figures["plan_seconds"],
            kept,
        )
        if not record or question.is_dry or kept:
            record = b""
        self._given = question if record else None
        self._link.answered(MoveOutcome(question, figures, kept=kept), record)


def why_kept(store: StateStore) -> str:
    """Why a plug-in may move nothing now; "" where it may.

    A plug-in's plan knows no cordons and no pins, so while there are any it keeps the map: a
    cordoned rank gets no further expert, and a drained one keeps those that it has.

    Raises:
        StoreError: the store does not answer.
    """
    state = store.expire_live()  # beside a plug-in there may be no controller that does
    if not state.control.movement:
        return SWITCHED_OFF
    if state.control.observe:
        return "the deployment is only observed"
    for name in ("cordons", "pins"):
        if found := state.text(name):
            return f"{name} are {found!r}, expected none: plans of the plug-in know no {name}"
    return ""


def why_unproved(report: Report, num_ranks: int) -> str:
    """What a release that was not tested lacks to move experts: each rank's check of its slots."""
    for rank in range(num_ranks):
        if reason := report.ranks.get(rank, "it has not begun"):
            return f"rank {rank} does not check its slots: {reason}"
        if not report.rounds.get(rank, 0):
            return f"rank {rank} has not looked at all its slots, expected one round of each rank"
    for fault in report.faults:
        return f"the placement check has found a fault: {fault}"
    return ""


def why_refused(kind: str, request: Mapping[str, Any]) -> str:
    """What a task asks for that a plug-in cannot do; "" for nothing."""
    if kind != "rebalance":
        return f"the task is of kind {kind!r}, expected 'rebalance'"
    if request.get("throttle"):
        return (
            f"the request has the throttle {request['throttle']}, expected none: the engine moves "
            "weights at its own pace"
        )
    if request.get("policy") not in (None, "auto"):
        return f"the request has the policy {request['policy']!r}, expected 'auto'"
    return ""


def serve(connection: Connection) -> None:
    """Serve a rank until its last message, or its death."""

    def reply(what: Reply) -> None:
        with suppress(OSError):  # the rank is gone; its messages are still written
            connection.send_bytes(to_bytes(what))

    link = StoreLink(from_bytes(connection.recv_bytes()), reply)
    with suppress(EOFError, OSError):
        while message := connection.recv_bytes():
            link.take(from_bytes(message))
    link.close()


if __name__ == "__main__":
    os.nice(NICENESS)
    show_log()
    with Connection(int(sys.argv[1])) as to_rank:
        serve(to_rank)
