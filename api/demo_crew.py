"""The processes of the demo: started, listened to, missed when they end, and ended.

a slab per host, the controller     as long as the demo; the controller may die and come back
the checker and all ranks           from one start of the ranks to the next: ``start_ranks``,
                                    ``end_ranks``
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from api.demo_summary import RankReport, is_right
from api.processes import Child, refusal
from api.worker_checker import CheckedStep
from api.worker_plan import WorkerPlan
from eplb.errors import BrokenGroup, EplbError, RankError, StoreError
from eplb.recovery import Recovery
from telemetry.store import LoadStore

if TYPE_CHECKING:
    from runtime.rendezvous import Rendezvous

READY_DEADLINE_S = 120.0
RECOVERY_DEADLINE_S = 90.0  # for survivors of a death to agree and end
GRACE_S = 2.0  # after a first failure, for the others to say what they saw
MAX_CONTROLLER_RESTARTS = 20
CHECKER = "the reference checker"
POLL_S = 0.25

log = logging.getLogger(__name__)


class DeadRank(BrokenGroup):
    """A rank ended that should not have, or was left behind by the others."""

    def __init__(self, how: str) -> None:
        super().__init__(f"{how}, the demo cannot go on without it")
        self.how = how


class Crew:
    """The demo's processes, and what they told."""

    def __init__(self, plan: WorkerPlan, store: LoadStore) -> None:
        self._plan, self._store = plan, store
        self._children: list[Child] = []
        self._ranks: list[Child] = []
        self._controller: Child | None = None
        self._rendezvous: Rendezvous | None = None  # of the last start of the ranks
        self.controller_restarts = 0
        self.checks: list[CheckedStep] = []
        self._reports: dict[str, RankReport] = {}
        self._ready: set[str] = set()
        self._done: set[str] = set()
        self._serving: set[str] = set()  # ranks that have answered since the last start
        self._left_behind: list[Child] = []  # ranks that the survivors went on without
        self._are_ranks_ending = False  # after a death: that they end is no news

    # -- start and end

    def start(self) -> None:
        """Start every process but the ranks and their checker.

        Raises:
            EplbError: one of them could not start.
        """
        # Imported here: torch takes seconds, and every refusal before this needs none of it.
        from api.worker_slab import run_slab

        for host in range(len(self._plan.slabs)):
            child = Child(f"the preload process of host {host}", run_slab, self._plan, host)
            self._children.append(child)
        self._wait_until_ready()
        self._start_controller()

    def _start_controller(self) -> None:
        from api.worker_controller import run_controller

        self._controller = Child("the controller", run_controller, self._plan)
        self._children.append(self._controller)

    def start_ranks(self, plan: WorkerPlan) -> None:
        """Start the checker and all ranks, up to where they can serve.

        Raises:
            EplbError: one of them could not start.
        """
        from api.worker_checker import run_checker
        from api.worker_rank import run_rank
        from runtime.rendezvous import Rendezvous

        # Here and not in rank 0, which is as mortal as any other; new for each start, because what
        # ranks of an earlier one have left there would be taken for these ranks' words.
        self._rendezvous = Rendezvous()
        self._plan = plan = replace(plan, rendezvous=self._rendezvous.handle)
        context = get_context("forkserver")
        pipes = [context.Pipe(duplex=False) for _ in range(plan.topology.num_ranks)]
        readers = [reader for reader, _ in pipes]
        self._children.append(Child(CHECKER, run_checker, plan, readers))
        self._ranks = [
            Child(f"rank {rank}", run_rank, plan, rank, writer)
            for rank, (_, writer) in enumerate(pipes)
        ]
        self._children += self._ranks
        for reader, writer in pipes:
            reader.close()
            writer.close()
        self._wait_until_ready()

    def let_ranks_serve(self, started: float) -> None:
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
        """Let survivors agree and end, and the checker check what it was given; then end them."""
        ending = [child for child in self._children if self._is_of_ranks(child)]
        names = {child.name for child in ending}
        self._are_ranks_ending = True
        # Ranks that had not served yet have nothing to agree on, and would only wait for the dead.
        deadline = time.monotonic() + (RECOVERY_DEADLINE_S if self._serving else 0.0)
        while not names <= self._done and time.monotonic() < deadline:
            for child in self._left_behind:
                child.kill()
            self._listen()
        self._are_ranks_ending = False
        for child in ending:
            child.stop(deadline_s=0.0)
            self._children.remove(child)
        for forgotten in (self._ranks, self._left_behind):
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
        for child in self._ranks:
            child.command("halt")
        self._wait_for("halted", lambda: len(self._reports) == len(self._ranks), deadline_s)
        self._wait_for("finished checking", lambda: CHECKER in self._done, checks_deadline_s)
        return [self._reports[child.name] for child in self._ranks]

    def end(self) -> None:
        """End every process that still runs."""
        for child in self._children:
            child.stop(deadline_s=0.0 if child.process.is_alive() else GRACE_S)

    # -- listening to the processes

    def wait_until(self, is_reached: Callable[[], bool]) -> None:
        """Listen for as long as it takes.

        Raises:
            BrokenGroup: a rank is dead or late; all ranks may be started again.
            EplbError: another process ended that should not have.
        """
        while not is_reached():
            self._listen()

    def _wait_until_ready(self) -> None:
        everyone = len(self._children)
        self._wait_for("ready", lambda: len(self._ready) == everyone, READY_DEADLINE_S)

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
        """Take in what processes say, and notice when one ends that should not."""
        pipes: dict[Any, Child] = {
            child.messages: child for child in self._children if child.name not in self._done
        }
        for pipe in wait(list(pipes), POLL_S):
            child = pipes[pipe]
            message = child.receive()
            if message is None:
                self._mourn(child)
            else:
                self._hear(child, *message)

    def _hear(self, child: Child, kind: str, body: Any) -> None:
        if kind == "ready":
            self._ready.add(child.name)
        elif kind == "checked":
            self.checks.append(body)
            if not is_right(body, self._plan.precision):
                self.note("reference", f"{body} is not the reference's answer")
        elif kind == "served":
            self._reports[child.name] = body
            self._done.add(child.name)
        elif kind == "done":
            self._done.add(child.name)
        elif kind == "serving":
            self._serving.add(child.name)
        elif kind == "recovered":
            log.info("%s: generation %d, %s", child.name, body.generation, body.reason)
            self._leave_behind(body)
        elif kind == "warning":
            self.note(child.name, body)
        elif kind == "failed" and self._is_ending(child):
            self._done.add(child.name)
        elif kind == "failed":
            raise self._cause(refusal(child.name, body))
        else:
            raise AssertionError(f"{child.name} sent {kind!r}, which nobody expects")

    def _leave_behind(self, record: Recovery) -> None:
        """Note whom the survivors went on without. One that only stood still may wake up yet.

        Raises:
            DeadRank: this is the first that is heard of it.
        """
        ranks = enumerate(self._ranks)
        self._left_behind = [child for rank, child in ranks if rank not in record.survivors]
        if not self._are_ranks_ending:
            raise self._cause(DeadRank(record.reason))

    def _is_of_ranks(self, child: Child) -> bool:
        return child in self._ranks or child.name == CHECKER

    def _is_ending(self, child: Child) -> bool:
        return self._are_ranks_ending and self._is_of_ranks(child)

    def _mourn(self, child: Child) -> None:
        child.process.join(GRACE_S)
        if self._is_ending(child):
            self._done.add(child.name)
            return
        if child is self._controller:
            self.controller_restarts += 1
            if self.controller_restarts > MAX_CONTROLLER_RESTARTS:
                raise RankError(f"the controller died {self.controller_restarts} times")
            self.note(child.name, f"{child.how_it_ended()}; it is started again")
            self._children.remove(child)
            child.stop(deadline_s=0.0)
            self._start_controller()
            return
        raise self._cause(self._loss_of(child))

    def _loss_of(self, child: Child) -> RankError:
        if child in self._ranks:
            return DeadRank(child.how_it_ended())
        return RankError(f"{child.how_it_ended()}, the demo cannot go on without it")

    def _cause(self, first: EplbError) -> EplbError:
        """Find what really happened: peers of a dead rank fail too, and may be heard first."""
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            killed = [child for child in self._children if (child.process.exitcode or 0) < 0]
            if killed:
                return self._loss_of(killed[0])
            wait([child.process.sentinel for child in self._children], POLL_S)
        return first

    def note(self, where: str, message: str) -> None:
        """Write down something that went wrong and ends nothing."""
        log.warning("%s: %s", where, message)
        try:
            self._store.add_event("error", {"where": where, "message": message})
        except StoreError as exc:  # a store in trouble ends no serving; it is said, at least here
            log.warning("not written down: %s", exc)
