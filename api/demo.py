"""``eplb demo``: the whole journey on one machine, in real processes, measured.

ranks ---- samples ----> store ----> controller          one checker recomputes sampled steps
  ^                        |             |               one slab per host reads the weights
  +------- migrations -----+-------------+               this process watches, and serves HTTP
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from rich.console import Console

from api.app import create_app
from api.demo_setup import begin, begin_again, prepare
from api.demo_summary import RankReport, is_right, render_summary, summarise
from api.live import LiveView
from api.monitor import Monitor
from api.processes import Child, preload_modules, refusal
from api.server import HttpService
from api.settings import DemoSettings
from api.state_dir import StateDir
from api.worker_checker import CheckedStep
from api.worker_plan import DEPLOYMENT, WorkerPlan
from eplb.errors import ConfigError, EplbError, RankError, StoreError
from telemetry import open_store
from telemetry.store import LoadStore

READY_DEADLINE_S = 120.0
HALT_DEADLINE_S = 60.0
CHECKS_DEADLINE_S = 60.0
RECOVERY_DEADLINE_S = 90.0  # for survivors of a death to agree and end
GRACE_S = 2.0  # after a first failure, for the others to say what they saw
MAX_CONTROLLER_RESTARTS = 20
CHECKER = "the reference checker"
POLL_S = 0.25
WORKER_MODULES = (
    "api.worker_rank",
    "api.worker_checker",
    "api.worker_slab",
    "api.worker_controller",
)

log = logging.getLogger(__name__)


def run_demo(settings: DemoSettings, console: Console) -> dict[str, Any]:
    """Run the demo to its summary; with ``serve``, on until interrupted.

    Raises:
        EplbError: anything that keeps it from running, or that ended it; nothing is left running.
    """
    check_writable(settings.json_path)
    with ExitStack() as stack:
        state = StateDir(settings.state_dir)
        stack.callback(state.close)
        store = open_store(settings.store or state.store, DEPLOYMENT)
        stack.callback(store.close)
        app = create_app(store, metrics_level=settings.metrics_level)
        service = HttpService(app, settings.host, settings.port)
        service.start()
        stack.callback(service.stop)
        plan = prepare(settings, state)
        console.print(f"eplb demo: {service.url}", highlight=False)
        demo = Demo(settings, plan, store, console)
        stack.callback(demo.end)
        begin(settings, plan, store)
        demo.start()
        summary = demo.serve()
    if settings.json_path is not None:
        write_json(settings.json_path, summary)
    return summary


class DeadRank(RankError):
    """A rank ended that should not have. All ranks may be started again."""

    def __init__(self, how: str) -> None:
        super().__init__(f"{how}, the demo cannot go on without it")
        self.how = how


class Demo:
    """The demo's processes, and what they told."""

    def __init__(
        self, settings: DemoSettings, plan: WorkerPlan, store: LoadStore, console: Console
    ) -> None:
        self._settings, self._plan, self._store = settings, plan, store
        self._console = console
        self._monitor = Monitor(store)
        self._children: list[Child] = []
        self._ranks: list[Child] = []
        self._controller: Child | None = None
        self._controller_restarts = 0
        self._ready: set[str] = set()
        self._done: set[str] = set()
        self._reports: dict[str, RankReport] = {}
        self._checks: list[CheckedStep] = []
        self._serving: set[str] = set()  # ranks that have answered since the last start
        self._deaths: list[str] = []
        self._unserved_since: float | None = None
        self._unserved_s = 0.0
        self._are_ranks_ending = False  # after a death: that they end is no news

    # -- start and end

    def start(self) -> None:
        """Start every process, and let the ranks begin together.

        Raises:
            EplbError: one of them could not start.
        """
        # Imported here: torch takes seconds, and every refusal before this needs none of it.
        from api.worker_controller import run_controller
        from api.worker_slab import run_slab

        preload_modules(*WORKER_MODULES)
        for host in range(len(self._plan.slabs)):
            child = Child(f"the preload process of host {host}", run_slab, self._plan, host)
            self._add(child)
        self._wait_until_ready()
        self._start_controller(run_controller)
        self._start_ranks()
        self._started = time.monotonic()
        self._let_ranks_serve()

    def _start_ranks(self) -> None:
        """Start the checker and all ranks, up to where they can serve."""
        from torch._C._distributed_c10d import TCPStore

        from api.worker_checker import run_checker
        from api.worker_rank import run_rank

        deadline = timedelta(seconds=READY_DEADLINE_S)
        # Here and not in rank 0, which is as mortal as any other; new for each start, because what
        # ranks of an earlier one have left there would be taken for these ranks' words.
        self._rendezvous = TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=deadline
        )
        self._plan = plan = replace(self._plan, rendezvous_port=self._rendezvous.port)
        context = get_context("forkserver")
        pipes = [context.Pipe(duplex=False) for _ in range(plan.topology.num_ranks)]
        readers = [reader for reader, _ in pipes]
        self._add(Child(CHECKER, run_checker, plan, readers))
        for rank, (_, writer) in enumerate(pipes):
            child = Child(f"rank {rank}", run_rank, plan, rank, writer)
            self._ranks.append(child)
            self._add(child)
        for reader, writer in pipes:
            reader.close()
            writer.close()
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        everyone = len(self._children)
        self._wait_for("ready", lambda: len(self._ready) == everyone, READY_DEADLINE_S)

    def _let_ranks_serve(self) -> None:
        for child in self._ranks:
            child.command("start", self._started)

    def _add(self, child: Child) -> None:
        self._children.append(child)

    def _start_controller(self, main: Callable[..., None]) -> None:
        self._run_controller = main
        self._controller = Child("the controller", main, self._plan)
        self._add(self._controller)

    def end(self) -> None:
        """End every process that still runs."""
        for child in self._children:
            child.stop(deadline_s=0.0 if child.process.is_alive() else GRACE_S)

    # -- serving

    def serve(self) -> dict[str, Any]:
        """Serve for the time that was asked for, halt, and sum up.

        Raises:
            RankError: a rank or another process died.
        """
        until = self._started + self._settings.seconds
        with LiveView(self._monitor, view=self._settings.view, console=self._console):
            try:
                self._serve_until(lambda: time.monotonic() >= until)
                if self._settings.serve:
                    self._serve_until(lambda: False)
            except KeyboardInterrupt:
                self._console.print("interrupted: halting the ranks", highlight=False)
            for child in self._ranks:
                child.command("halt")
            self._wait_for(
                "halted", lambda: len(self._reports) == len(self._ranks), HALT_DEADLINE_S
            )
            self._wait_for(
                "finished checking",
                lambda: CHECKER in self._done,
                CHECKS_DEADLINE_S,
            )
        summary = self._summary()
        self._console.print(render_summary(summary))
        return summary

    def _summary(self) -> dict[str, Any]:
        self._monitor.refresh()
        return summarise(
            self._plan,
            self._monitor.snapshot(),
            [self._reports[child.name] for child in self._ranks],
            self._store.sample_counts(self._plan.run),
            self._checks,
        ) | {
            "controller_restarts": self._controller_restarts,
            "deaths": len(self._deaths),
            "unserved_s": round(self._unserved_s, 2),
        }

    # -- deaths of ranks

    def _serve_until(self, is_reached: Callable[[], bool]) -> None:
        """Serve; a rank's death ends all ranks, and they are started again from the store.

        Raises:
            DeadRank: one death more than the settings allow for.
        """
        while True:
            try:
                if self._unserved_since is not None:
                    self._start_again()
                self._wait_until(is_reached)
                return
            except DeadRank as death:
                if len(self._deaths) == self._settings.restart_after_death:
                    raise
                self._deaths.append(death.how)
                self._unserved_since = self._unserved_since or time.monotonic()
                self._note("ranks", f"{death.how}; all ranks start again")

    def _start_again(self) -> None:
        assert self._unserved_since is not None, "somebody died"
        try:
            self._end_ranks()
            self._plan = begin_again(self._plan, self._store)
            self._start_ranks()
            self._let_ranks_serve()
            self._wait_for(
                "serving again",
                lambda: len(self._serving) == len(self._ranks),
                READY_DEADLINE_S,
            )
        except KeyboardInterrupt as exc:
            raise RankError("interrupted while the ranks were started again") from exc
        self._unserved_s += time.monotonic() - self._unserved_since
        self._unserved_since = None

    def _end_ranks(self) -> None:
        """Let survivors agree and end, and the checker check what it was given; then end them."""
        ending = [
            child for child in self._children if child in self._ranks or child.name == CHECKER
        ]
        names = {child.name for child in ending}
        self._are_ranks_ending = True
        # Ranks that had not served yet have nothing to agree on, and would only wait for the dead.
        deadline = time.monotonic() + (RECOVERY_DEADLINE_S if self._serving else 0.0)
        while not names <= self._done and time.monotonic() < deadline:
            self._listen()
        self._are_ranks_ending = False
        for child in ending:
            child.stop(deadline_s=0.0)
            self._children.remove(child)
        self._ranks.clear()
        self._serving.clear()
        self._reports.clear()
        self._ready -= names
        self._done -= names

    # -- listening to the processes

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

    def _wait_until(self, is_reached: Callable[[], bool]) -> None:
        while not is_reached():
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
            self._checks.append(body)
            if not is_right(body, self._plan.precision):
                self._note("reference", f"{body} is not the reference's answer")
        elif kind == "served":
            self._reports[child.name] = body
            self._done.add(child.name)
        elif kind == "done":
            self._done.add(child.name)
        elif kind == "serving":
            self._serving.add(child.name)
        elif kind == "recovered":
            log.info("%s: generation %d, %s", child.name, body.generation, body.reason)
        elif kind == "warning":
            self._note(child.name, body)
        elif kind == "failed" and self._is_ending(child):
            self._done.add(child.name)
        elif kind == "failed":
            raise self._cause(refusal(child.name, body))
        else:
            raise AssertionError(f"{child.name} sent {kind!r}, which nobody expects")

    def _is_ending(self, child: Child) -> bool:
        return self._are_ranks_ending and (child in self._ranks or child.name == CHECKER)

    def _mourn(self, child: Child) -> None:
        child.process.join(GRACE_S)
        if self._is_ending(child):
            self._done.add(child.name)
            return
        if child is self._controller:
            self._controller_restarts += 1
            if self._controller_restarts > MAX_CONTROLLER_RESTARTS:
                raise RankError(f"the controller died {self._controller_restarts} times")
            self._note(child.name, f"{child.how_it_ended()}; it is started again")
            self._children.remove(child)
            child.stop(deadline_s=0.0)
            self._start_controller(self._run_controller)
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

    def _note(self, where: str, message: str) -> None:
        log.warning("%s: %s", where, message)
        try:
            self._store.add_event("error", {"where": where, "message": message})
        except StoreError as exc:  # a store in trouble ends no serving; it is said, at least here
            log.warning("not written down: %s", exc)


def check_writable(path: Path | None) -> None:
    """Refuse a summary file that could not be written a minute later.

    Raises:
        ConfigError: the folder is missing or read-only, or the path is a folder.
    """
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"--json {path} is a folder, expected a file")
    unfinished = _unfinished(path)
    try:
        unfinished.touch()
        unfinished.unlink()
    except OSError as exc:
        raise ConfigError(f"--json {path} cannot be written: {exc.strerror}") from exc


def write_json(path: Path, summary: dict[str, Any]) -> None:
    """Write the summary: all of it appears, or nothing.

    Raises:
        ConfigError: the disk is full or read-only.
    """
    unfinished = _unfinished(path)
    try:
        unfinished.write_text(json.dumps(summary, indent=2) + "\n")
        unfinished.replace(path)
    except OSError as exc:
        unfinished.unlink(missing_ok=True)
        raise ConfigError(f"--json {path} cannot be written: {exc.strerror}") from exc


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}.unfinished")
