"""``eplb demo``: a whole deployment on one machine, in real processes, measured.

ranks ---- samples ----> store ----> controller          one checker recomputes sampled steps
  ^                        |             |               one host cache per host reads the weights
  +------- migrations -----+-------------+               this process watches, and serves HTTP
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from rich.console import Console

from api.config.reference import effective
from api.config.tree import Settings
from api.demo.processes import DeadRank, DemoProcesses
from api.demo.setup import begin, begin_again, give_up_lease, prepare
from api.demo.state_dir import StateDir
from api.demo.summary import RankReport, render_summary, summarise
from api.demo.summary_file import SummaryFile
from api.demo.workers.plan import DEPLOYMENT, WorkerPlan
from api.http.app import create_app
from api.http.server import HttpService
from api.monitor.monitor import Monitor
from api.processes.deployment_lease import DeploymentLease
from api.processes.descriptors import raise_descriptor_limit
from api.processes.supervision import RestartBudget, Supervisor
from api.terminal.live import LiveView, look_at
from eplb.core.placement import Placement
from eplb.errors import BrokenGroup, RankError, StoreError
from telemetry import open_store
from telemetry.state.store import StateStore

HALT_DEADLINE_S = 60.0
CHECKS_DEADLINE_S = 60.0


def run_demo(settings: Settings, console: Console) -> dict[str, Any]:
    """Run the demo to its summary; with ``serve``, until interrupted.

    Raises:
        EplbError: the demo could not start, or failed; all processes have ended then.
    """
    raise_descriptor_limit()
    with ExitStack() as stack:
        summary_file = SummaryFile(settings.demo.json_path)
        stack.callback(summary_file.close)
        state = StateDir(settings.deployment.state_dir)
        stack.callback(state.close)
        state.save_settings(effective(settings))
        store = open_store(settings.deployment.store or state.store, DEPLOYMENT)
        stack.callback(store.close)
        deployment = DeploymentLease(
            store, settings.controller.lease_ttl_s, joins=settings.demo.join
        )
        deployment.take()
        stack.callback(deployment.release)
        supervisor = Supervisor(settings.supervision)
        http = settings.http
        app = create_app(
            store,
            metrics_level=http.metrics_level,
            supervision=supervisor.view,
            state_dir=settings.deployment.state_dir,
            is_watching=True,
        )
        service = HttpService(app, http.host, http.port, certificate=http.certificate)
        service.start()
        stack.callback(service.stop)
        plan = prepare(settings, state)
        console.print(f"eplb demo: {service.url}", highlight=False)
        demo = Demo(settings, plan, store, console, deployment, supervisor)
        demo.supervise_http(service)
        stack.callback(give_up_lease, plan, store)
        stack.callback(demo.end)
        demo.first = begin(settings, plan, store)
        demo.start()
        # What was loaded by now stays to the end; collecting among it stops every thread for 0.2 s.
        gc.freeze()
        return demo.serve(summary_file)


class Demo:
    """A demo from its start to its summary, over the deaths of ranks."""

    def __init__(
        self,
        settings: Settings,
        plan: WorkerPlan,
        store: StateStore,
        console: Console,
        deployment: DeploymentLease,
        supervisor: Supervisor,
    ) -> None:
        self._settings, self._plan, self._store = settings, plan, store
        self._deployment = deployment
        self.first: Placement  # that the run starts from
        self._console, self._monitor = console, Monitor(store, supervision=supervisor.view)
        self._supervisor, self._unserved = supervisor, supervisor.unserved
        self._processes = DemoProcesses(plan, store, supervisor)
        self._losses: list[str] = []  # why ranks were restarted
        self._budget = RestartBudget(
            settings.supervision.restart_after_death, settings.supervision.restart_window_s
        )

    def supervise_http(self, service: HttpService) -> None:
        """Start the HTTP service again when its thread ends."""
        self._processes.supervise_http(service)

    def start(self) -> None:
        """Start every process, and let the ranks begin together.

        Raises:
            EplbError: one of them could not start.
        """
        self._processes.start()
        self._processes.start_ranks(self._plan)
        self._started = time.monotonic()
        self._processes.start_serving(self._started)

    def end(self) -> None:
        """End every process that still runs."""
        self._processes.end()

    def serve(self, summary_file: SummaryFile) -> dict[str, Any]:
        """Serve for the configured time, halt, and write the summary, also after a failure.

        Raises:
            RankError: a rank or another process exited; the summary has the known figures.
        """
        until = self._started + self._settings.demo.seconds
        reports: list[RankReport] = []
        failure: BaseException | None = None
        try:
            look = partial(look_at, self._monitor)
            with LiveView(look, view=self._settings.demo.view, console=self._console):
                try:
                    self._serve_until(lambda: time.monotonic() >= until)
                    if self._settings.demo.serve:
                        self._serve_until(lambda: False)
                except KeyboardInterrupt:
                    self._console.print("interrupted: halting the ranks", highlight=False)
                reports = self._processes.halt(HALT_DEADLINE_S, CHECKS_DEADLINE_S)
        except (Exception, KeyboardInterrupt) as exc:
            failure = exc
        summary = self._summary(reports, failure)
        summary_file.write(summary)
        if failure is not None:
            raise failure
        self._console.print(render_summary(summary))
        return summary

    def _summary(
        self, reports: Sequence[RankReport], failure: BaseException | None
    ) -> dict[str, Any]:
        """Build the summary from the known figures; ``missing`` names the others."""
        missing = [f"a regular end: {type(failure).__name__}: {failure}"] if failure else []
        counts: Mapping[int, int] | None = None
        try:
            self._monitor.refresh()
            counts = self._store.sample_counts(self._plan.run)
        except StoreError as exc:
            missing.append(f"the latest load and the number of samples: {exc}")
        seen, checks = self._monitor.reading(), self._processes.checks
        if not reports:
            missing.append("the reports of the ranks: steps, times, bytes and samples lost")
        restarts = self._processes.restarts()
        return summarise(self._plan, seen, reports, counts, checks) | {
            "controller_restarts": restarts["controller"],
            "restarts": restarts,
            "deaths": len(self._losses),
            "unserved_s": round(self._unserved.total_s, 2),
            "missing": missing,
        }

    def _serve_until(self, is_reached: Callable[[], bool]) -> None:
        """Serve; when the group breaks, all ranks end and are restarted from the store.

        This includes a group that broke because a rank was late: the committed placement is right
        for a start of all ranks, whatever broke the group.

        Raises:
            BrokenGroup: one more than the settings allow for within their window.
            StoreError: another process has taken the deployment over.
        """

        def is_over() -> bool:
            self._deployment.check()
            return is_reached()

        while True:
            try:
                if self._unserved.is_open:
                    self._start_again()
                self._processes.wait_until(is_over)
                return
            except BrokenGroup as broken:
                if self._budget.is_used_up:
                    raise
                self._budget.spend()
                how = broken.how if isinstance(broken, DeadRank) else str(broken)
                self._losses.append(how)
                self._unserved.broken(self._supervisor.last_token())
                self._processes.note("ranks", f"{how}; restarting all ranks")

    def _start_again(self) -> None:
        try:
            self._processes.end_ranks()
            self._plan = begin_again(self._plan, self._store, self.first)
            self._processes.start_ranks(self._plan)
            self._processes.start_serving(self._started)
            self._processes.wait_until_all_serve()
        except KeyboardInterrupt as exc:
            raise RankError("interrupted while the ranks were restarting") from exc
        except OSError as exc:  # no descriptor, for example
            raise RankError(f"the ranks could not be restarted: {exc}") from exc
        gap_s = round(self._unserved.serving(), 2)
        self._processes.add_event("serving", {"reason": self._losses[-1], "unserved_s": gap_s})
