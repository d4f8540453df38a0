"""The processes of the demo: start, messages, restart after an exit, end.

a host cache per host, the controller   as long as the demo
the checker and all ranks               from one start of the ranks to the next: ``start_ranks``,
                                        ``end_ranks``

Ranks serve: the exit of one breaks the group. The others do not, and are supervised
(``api/processes/supervision.py``): their exits and hangs never end serving.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing import get_context, resource_sharer
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from api.demo.summary import RankReport, is_right
from api.demo.workers.checker import CheckedStep
from api.demo.workers.plan import WorkerPlan
from api.http.server import HttpService
from api.processes.children import Child, refusal
from api.processes.supervision import Kill, Supervised, Supervisor
from eplb.errors import BrokenGroup, EplbError, MigrationError, RankError, StoreError
from eplb.migration.recovery import Recovery
from telemetry.state.store import StateStore

if TYPE_CHECKING:
    pass

READY_DEADLINE_S = 120.0
RECOVERY_DEADLINE_S = 90.0  # for survivors of a rank's exit to agree and end
GRACE_S = 2.0  # after a first failure, for the reports of the others
CONTROLLER, CHECKER = "the controller", "the reference checker"
POLL_S = 0.25
LEASE_LOOK_S = 1.0

log = logging.getLogger(__name__)


class DeadRank(BrokenGroup):
    """A rank exited unexpectedly, or the survivors excluded it."""

    def __init__(self, how: str) -> None:
        super().__init__(f"{how}, the demo cannot continue without it")
        self.how = how


def name_of_host(host: int) -> str:
    """Name the process that keeps a host's records in memory."""
    return f"the preload process of host {host}"


class DemoProcesses:
    """The demo's processes, and their reports."""

    def __init__(self, plan: WorkerPlan, store: StateStore, supervisor: Supervisor) -> None:
        self._plan, self._store, self._supervisor = plan, store, supervisor
        self._children: list[Child] = []
        self._ranks: list[Child] = []
        self._controller = self._supervised(CONTROLLER, "controller", self._new_controller)
        self._checker = self._supervised(CHECKER, "checker", self._new_checker)
        self._host_caches = [
            self._supervised(name_of_host(host), "host_cache", partial(self._new_host_cache, host))
            for host in range(len(plan.host_caches))
        ]
        self._service: HttpService | None = None
        self._http: Supervised | None = None
        self._lease_due = 0.0
        self._helpers = {one.name: one for one in supervisor.processes}
        self.checks: list[CheckedStep] = []
        self._reports: dict[str, RankReport] = {}
        self._ready: set[str] = set()
        self._done: set[str] = set()
        self._serving: set[str] = set()  # ranks that have answered since the last start
        self._excluded: list[Child] = []  # ranks that the survivors excluded
        self._are_ranks_ending = False  # after the exit of a rank the others are expected to end
        self._is_halting = False

    # -- start and end

    def start(self) -> None:
        """Start every process but the ranks and their checker.

        Raises:
            EplbError: one of them could not start.
        """
        for host_cache in self._host_caches:
            host_cache.begin()
        self._wait_until_ready(self._host_caches)
        self._controller.begin()

    def _supervised(
        self, name: str, kind: str, start: Callable[[], Kill], *, reports_progress: bool = True
    ) -> Supervised:
        supervisor = self._supervisor
        made = Supervised(
            name,
            kind,
            start,
            self.note,
            supervisor.settings,
            reports_progress=reports_progress,
            clock=supervisor.clock,
        )
        return supervisor.add(made)

    # Imported there: torch takes seconds, and every refusal before a start needs none of it.

    def _new_host_cache(self, host: int) -> Kill:
        from api.demo.workers.host_cache import run_host_cache

        return self._started(Child(name_of_host(host), run_host_cache, self._plan, host)).kill

    def _new_controller(self) -> Kill:
        from api.processes.controller import run_controller

        return self._started(Child(CONTROLLER, run_controller, self._plan.controller_job)).kill

    def _new_checker(self) -> Kill:
        """Start the checker, and give each rank that runs a pipe to it.

        New pipes: one whose reader was killed may hold half of a message.
        """
        from api.demo.workers.checker import run_checker

        pipes = [get_context("forkserver").Pipe(duplex=False) for _ in self._ranks]
        readers = [reader for reader, _ in pipes]
        child = Child(CHECKER, run_checker, self._plan, readers)
        for rank, (reader, writer) in zip(self._ranks, pipes, strict=True):
            reader.close()
            rank.command("checks", writer)
            writer.close()
        return self._started(child).kill

    def _started(self, child: Child) -> Child:
        self._children.append(child)
        return child

    def start_ranks(self, plan: WorkerPlan) -> None:
        """Start the checker and all ranks, up to where they can serve.

        Raises:
            BrokenGroup: a rank could not read its weights from its host's cache.
            EplbError: one of them could not start.
        """
        from api.demo.workers.rank import run_rank
        from runtime.group import Rendezvous

        # Here and not in rank 0, which may exit as any other; new for each start, because what
        # ranks of an earlier one have left there would be read as these ranks' messages.
        self._rendezvous = Rendezvous()
        self._plan = plan = replace(plan, rendezvous=self._rendezvous.handle)
        for host_cache in self._host_caches:  # ranks fill their slots from it
            if not host_cache.is_up:
                host_cache.begin()
        self._wait_until_ready(self._host_caches)
        num_ranks = plan.topology.num_ranks
        step_times = get_context("forkserver").RawArray("d", num_ranks)
        self._supervisor.step_times = step_times
        self._ranks = [
            self._started(Child(f"rank {rank}", run_rank, plan, rank, step_times, rank=rank))
            for rank in range(num_ranks)
        ]
        self._checker.begin()
        self._wait_until_ready([*self._host_caches, self._checker, *self._ranks])

    def start_serving(self, started: float) -> None:
        """Let all ranks begin; ``started`` is when the demo did, by the monotonic clock."""
        for child in self._ranks:
            child.command("start", started)

    def wait_until_all_serve(self) -> None:
        """Wait until every rank has answered.

        Raises:
            RankError: not in time, or one ended.
        """
        self._wait_for(
            "serving again", lambda: len(self._serving) == len(self._ranks), READY_DEADLINE_S
        )

    def end_ranks(self) -> None:
        """Wait until survivors have agreed and ended and the checker is done; then end them."""
        self._checker.retire()
        # Pipes to the checker that a rank has not taken would keep the checker waiting for it.
        resource_sharer.stop()
        ending = [child for child in self._children if self._is_of_ranks(child)]
        names = {child.name for child in ending}
        self._are_ranks_ending = True
        # Ranks that had not served need no recovery, and would wait for the exited one.
        deadline = time.monotonic() + (RECOVERY_DEADLINE_S if self._serving else 0.0)
        while not names <= self._done and time.monotonic() < deadline:
            for child in self._excluded:
                child.kill()
            self._listen()
        self._are_ranks_ending = False
        for child in ending:
            child.stop(deadline_s=0.0)
            self._children.remove(child)
        for forgotten in (self._ranks, self._excluded):
            forgotten.clear()
        self._serving.clear()
        self._reports.clear()
        self._ready -= names
        self._done -= names

    def halt(self, deadline_s: float, checks_deadline_s: float) -> list[RankReport]:
        """Have all ranks end at one step; return what each reports, once all is checked.

        Raises:
            RankError: a rank or the checker ended before, or not in time.
        """
        self._is_halting = True
        for child in self._ranks:
            child.command("halt")
        self._wait_for("halted", lambda: len(self._reports) == len(self._ranks), deadline_s)
        self._wait_for(
            "finished checking",
            lambda: CHECKER in self._done or not self._checker.is_up,
            checks_deadline_s,
        )
        return [self._reports[child.name] for child in self._ranks]

    def end(self) -> None:
        """End every process that still runs."""
        for child in self._children:
            child.stop(deadline_s=0.0 if child.process.is_alive() else GRACE_S)

    # -- listening to the processes

    def wait_until(self, is_reached: Callable[[], bool]) -> None:
        """Handle messages until it is so.

        Raises:
            BrokenGroup: a rank exited or is late; all ranks may be restarted.
            EplbError: a rank refused to serve on.
        """
        while not is_reached():
            self._listen()

    def _wait_until_ready(self, wanted: Sequence[Child | Supervised]) -> None:
        names = {one.name for one in wanted}
        self._wait_for("ready", lambda: names <= self._ready, READY_DEADLINE_S)

    def _wait_for(self, what: str, is_reached: Callable[[], bool], deadline_s: float) -> None:
        deadline = time.monotonic() + deadline_s
        while not is_reached():
            if time.monotonic() >= deadline:
                waiting = [c.name for c in self._children if c.name not in self._ready]
                raise RankError(
                    f"not {what} within {deadline_s:.0f} s"
                    + (f", still waiting for {', '.join(waiting)}" if waiting else "")
                )
            self._listen()

    def _listen(self) -> None:
        """Handle messages of processes, and unexpected exits."""
        pipes: dict[Any, Child] = {
            child.messages: child for child in self._children if child.name not in self._done
        }
        for pipe in wait(list(pipes), POLL_S):
            child = pipes[pipe]
            # All messages: a supervised process is judged by the age of its latest report.
            while (message := child.receive()) is not None:
                self._handle(child, *message)
                # A process that is done sends no more: the end of its pipe is expected.
                if child.name in self._done or not child.messages.poll():
                    break
            else:
                self._handle_exit(child)
        self._check_http()
        self._check_lease()
        self._supervisor.check()

    def _handle(self, child: Child, kind: str, body: Any) -> None:
        helper = self._helpers.get(child.name)
        if helper is not None and kind == "starting":
            helper.starting(body)
            return
        if helper is not None and kind != "failed":
            helper.reported()
        if kind == "ready":
            self._ready.add(child.name)
        elif kind == "progress":
            pass
        elif kind == "checked":
            self.checks.append(body)
            if not is_right(body, self._plan.precision):
                self.note("reference", f"output differs from the reference: {body}")
        elif kind == "served":
            self._reports[child.name] = body
            self._done.add(child.name)
        elif kind == "done":
            self._done.add(child.name)
        elif kind == "serving":
            self._serving.add(child.name)
        elif kind == "recovered":
            log.info("%s: generation %d, %s", child.name, body.generation, body.reason)
            self._exclude(body)
        elif kind == "warning":
            self.note(child.name, body)
        elif kind == "failed" and self._is_ending(child):
            self._done.add(child.name)
        elif kind == "failed" and helper is not None and helper.was_ready:
            self.note(child.name, str(refusal(child.name, body)))
        elif kind == "failed":
            raise self._cause(self._failure_of(child, body))
        else:
            raise AssertionError(f"unexpected message {kind!r} from {child.name}")

    def _exclude(self, record: Recovery) -> None:
        """Record which ranks the survivors excluded. A suspended one may resume later.

        Raises:
            DeadRank: the first report of it.
        """
        ranks = enumerate(self._ranks)
        self._excluded = [child for rank, child in ranks if rank not in record.survivors]
        if not self._are_ranks_ending:
            raise self._cause(DeadRank(record.reason))

    def _is_of_ranks(self, child: Child) -> bool:
        return child in self._ranks or child.name == CHECKER

    def _is_ending(self, child: Child) -> bool:
        return self._are_ranks_ending and self._is_of_ranks(child)

    def _handle_exit(self, child: Child) -> None:
        child.process.join(GRACE_S)
        if self._is_ending(child):
            self._done.add(child.name)
            return
        helper = self._helpers.get(child.name)
        if helper is None:
            raise self._cause(DeadRank(child.exit_text()))
        self._ready.discard(child.name)
        self._children.remove(child)
        child.stop(deadline_s=0.0)
        if self._is_halting:
            helper.retire()  # nothing needs it any more
        else:
            helper.ended(child.exit_text())

    def _failure_of(self, child: Child, body: tuple[str, str]) -> EplbError:
        """Separate a rank that could not fill its slots, which may be retried, from any other."""
        kind, sentence = body
        if kind == MigrationError.__name__ and child in self._ranks:
            return DeadRank(f"{child.name} could not start: {sentence}")
        return refusal(child.name, body)

    def _cause(self, first: EplbError) -> EplbError:
        """Find the first cause: peers of an exited rank fail too, and may report first."""
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            killed = [child for child in self._ranks if (child.process.exitcode or 0) < 0]
            if killed:
                return DeadRank(killed[0].exit_text())
            wait([child.process.sentinel for child in self._ranks], POLL_S)
        return first

    def supervise_http(self, service: HttpService) -> None:
        """Restart the HTTP service, which serves already, when its thread ends."""

        def start() -> Kill:
            if not service.is_alive:
                service.start()
            return service.stop

        self._service = service
        self._http = self._supervised("the HTTP service", "http", start, reports_progress=False)
        self._http.begin()

    def _check_lease(self) -> None:
        now = self._supervisor.clock()
        if now < self._lease_due:
            return
        self._lease_due = now + LEASE_LOOK_S
        with suppress(StoreError):  # its age grows, which is what it is for
            self._supervisor.record_lease(self._store.lease())

    def _check_http(self) -> None:
        if self._service is None or self._http is None or not self._http.is_up:
            return
        if self._service.is_alive:
            self._http.reported()
        else:
            self._http.ended("the HTTP service exited unexpectedly")

    def restarts(self) -> dict[str, int]:
        """Restarts by kind of process, since the start."""
        total: Counter[str] = Counter()
        for view in self._supervisor.view().processes:
            total[view.kind] += view.restarts
        return dict(total)

    def note(self, where: str, message: str) -> None:
        """Log and store a failure that ends nothing."""
        log.warning("%s: %s", where, message)
        self.add_event("error", {"where": where, "message": message})

    def add_event(self, kind: str, detail: dict[str, Any]) -> None:
        """Store an event; a failing store does not end serving."""
        try:
            self._store.add_event(kind, detail)
        except StoreError as exc:
            log.warning("event not stored: %s", exc)
