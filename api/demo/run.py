"""``eplb demo``: an ordinary deployment on one machine, started, watched and measured.

    eplb serve           controller, HTTP service, page
    eplb host-cache      one for each host, which is a loopback address
    eplb launch          one for each host: its ranks, with the engine of ``api/demo/engine.py``
    api.demo.checking    computes sampled steps again

Figures come from what a deployment has, its store, and from files that engine and checker write.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import takewhile
from typing import Any

from rich.console import Console

from api.cli.options import ReportOptions
from api.config.tree import Settings
from api.demo.checking import CheckedStep, checks_in
from api.demo.options import Options
from api.demo.setup import Prepared, begin, check_settings, prepare
from api.demo.state_dir import StateDir
from api.demo.summary import (
    RankReport,
    render_summary,
    summarise,
)
from api.deploy.local_ranks import EXIT_DEADLINE_S, HALT_DEADLINE_S
from api.monitor.history import History
from api.monitor.monitor import Monitor
from api.processes.commands import (
    Command,
    CommandEnded,
    Commands,
    own_command,
    raise_descriptor_limit,
)
from api.processes.supervision import note_in
from api.terminal.live import LiveView, look_at
from eplb.errors import RankError, StoreError
from eplb.migration.serialisation import topology_from_dict
from telemetry.state.events import OUTAGE, REGROUPED, outage_of
from telemetry.state.store import StateStore

POLL_S = 0.25
START_DEADLINE_S = 300.0  # deadline until every rank serves
CHECKS_DEADLINE_S = 60.0
END_DEADLINE_S = 30.0  # deadline of the service, which ends its controller first
GRACE_S = 2.0  # after the end of a first launcher, for what the others report

log = logging.getLogger(__name__)


def run_demo(
    options: Options, settings: Settings, console: Console, given: ReportOptions
) -> dict[str, Any]:
    """Run the demo to its summary; with ``serve``, until interrupted.

    Args:
        options: of the demo.
        settings: of its deployment.
        console: for what is shown meanwhile.
        given: how the summary is given.

    Raises:
        EplbError: the demo could not start, or failed; all processes have ended then.
    """
    raise_descriptor_limit()
    check_settings(options, settings)
    given.check()
    with ExitStack() as stack:
        state = StateDir(settings.deployment.state_dir)
        stack.callback(state.close)
        prepared = prepare(options, settings, state)
        store = prepared.deployment.opened_store()
        stack.callback(store.close)
        since = begin(options, prepared.deployment, store)
        demo = Demo(options, prepared, store, console, since, given)
        stack.callback(demo.end)
        demo.start()
        return demo.serve()


class Demo:
    """A demo from its start to its summary, over the deaths of ranks."""

    def __init__(
        self,
        options: Options,
        prepared: Prepared,
        store: StateStore,
        console: Console,
        since: int,
        given: ReportOptions,
    ) -> None:
        self._options, self._prepared, self._store = options, prepared, store
        self._given = given
        self._deployment = prepared.deployment
        self._since = since  # id of the latest event before the start
        self._console, self._monitor = console, Monitor(store, history=History())
        self._began = store.backend.now()
        supervision = self._deployment.settings.supervision
        self._commands = Commands(supervision, note_in(store))
        self.checks: list[CheckedStep] = []
        self._checks_read = 0
        self._runs: list[str] = []  # starts of the ranks that have served
        self._num_ranks = 0  # number of ranks that serve in the latest start
        self._launchers: list[Command] = []

    def start(self) -> None:
        """Start every command, and wait until all ranks serve.

        Raises:
            EplbError: one of them could not start.
        """
        hosts, add = range(len(self._deployment.hosts)), self._commands.add
        environ, engine = self._prepared.environ, str(self._prepared.engine_path)
        caches = [
            add(
                f"the host cache of host {host}",
                "host_cache",
                own_command("host-cache", "--host", str(host)),
                environ,
            )
            for host in hosts
        ]
        serve = add("the service", "serve", own_command("serve"), environ)
        checking = [sys.executable, "-P", "-m", "api.demo.checking", engine]
        self._checker = add("the reference checker", "checker", checking, environ)
        # Ranks would wait for a cache that starts late, and each would say so on the terminal.
        self._look_until(
            lambda: all(cache.supervised.was_ready for cache in caches), "the host caches"
        )
        ranks = ("--module", "api.demo.engine", "--", engine)
        self._launchers = [
            add(
                f"the launcher of host {host}",
                "launch",
                own_command("launch", "--host", str(host), *ranks),
                environ,
                comes_back=False,
            )
            for host in hosts
        ]
        self._look_until(lambda: serve.supervised.was_ready, "the service")
        http = self._deployment.settings.http
        scheme = "https" if http.certificate else "http"
        address = f"[{http.host}]" if ":" in http.host else http.host
        self._console.print(f"eplb demo: {scheme}://{address}:{http.port}", highlight=False)
        self._look_until(lambda: bool(self._runs), "the ranks")

    def end(self) -> None:
        """End every process that still runs."""
        self._commands.end_all(END_DEADLINE_S)

    def serve(self) -> dict[str, Any]:
        """Serve for the configured time, halt, and write the summary, also after a failure.

        Raises:
            RankError: the ranks ended; the summary has the known figures.
        """
        until = time.monotonic() + self._options.seconds
        failure: BaseException | None = None
        reports: list[RankReport] = []
        try:
            view = self._options.view
            with LiveView(partial(look_at, self._monitor), view=view, console=self._console):
                try:
                    while self._options.serve or time.monotonic() < until:
                        self._look()
                except KeyboardInterrupt:
                    self._console.print("interrupted: halting the ranks", highlight=False)
                self._halt()
                reports = self._reports()
        except (Exception, KeyboardInterrupt) as exc:
            failure = exc
        summary = self._summary(reports, failure)
        if failure is not None:
            self._given.give(summary, lambda: None)
            raise failure
        self._given.give(summary, lambda: self._console.print(render_summary(summary)))
        return summary

    def _look_until(self, is_reached: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + START_DEADLINE_S
        while not is_reached():
            if time.monotonic() >= deadline:
                raise RankError(f"{what}: not ready within {START_DEADLINE_S:.0f} s")
            self._look()

    def _look(self) -> None:
        """Handle reports and exits of commands, results of checks, and starts of ranks.

        Raises:
            EplbError: the ranks ended, or a command refused to start.
        """
        try:
            self._commands.look(POLL_S)
        except CommandEnded as exc:
            raise self._cause(exc) from exc
        self._read_checks()
        try:
            self._look_at_run()
        except StoreError as exc:
            log.debug("the start of the ranks is not known: %s", exc)

    def _cause(self, first: CommandEnded) -> RankError | CommandEnded:
        """Find the first cause: the launchers of the other hosts end too, and may end first."""
        if first.command not in self._launchers:
            return first
        ended, deadline = [first], time.monotonic() + GRACE_S
        while len(ended) < len(self._launchers) and time.monotonic() < deadline:
            try:
                self._commands.look(POLL_S)
            except CommandEnded as exc:
                ended.append(exc)
        how = [str(one) for one in ended]
        killed = [words for words in how if "was killed by" in words]
        return RankError(f"{(killed or how)[0]}, the demo cannot continue without it")

    def _read_checks(self) -> None:
        checks = self._prepared.engine.checks
        found, self._checks_read = checks_in(checks.results, self._checks_read)
        self.checks += found
        for check in found:
            if not check.is_right(checks.precision):
                note_in(self._store)("reference", f"output differs from the reference: {check}")

    def _look_at_run(self) -> None:
        """Record a start of the ranks, or survivors, once all of them have served a step."""
        info = self._store.current_run()
        if info is None or info.run in self._runs or not self._is_new(info.run):
            return
        states = self._store.rank_states(info.run)
        first = [state.figures.first_token or 0.0 for state in states]
        num_ranks = int(topology_from_dict(dict(info.topology)).alive.sum())
        if len(states) < num_ranks or not all(first):
            return
        self._runs.append(info.run)
        self._num_ranks = num_ranks

    def _is_new(self, run: str) -> bool:
        """Whether a run was begun by this demo's ranks; the store may have an earlier one."""
        starts = (event for event in self._store.events_backwards({"run"}))
        return any(event.id > self._since and event.detail["run"] == run for event in starts)

    def _halt(self) -> None:
        """Have all ranks end at one step, and the checker once it has checked what they sent."""
        # Launchers have these deadlines for their ranks.
        self._commands.end(self._launchers, HALT_DEADLINE_S + EXIT_DEADLINE_S + GRACE_S)
        with suppress(StoreError):  # the summary names what is missing
            self._look_at_run()  # a start that served its first steps since the last look
        self._commands.end([self._checker], CHECKS_DEADLINE_S)
        self._read_checks()

    def _reports(self) -> list[RankReport]:
        """What the ranks of the latest start have written at their end."""
        paths = sorted(self._prepared.engine.figures.glob(f"{self._runs[-1]}-rank-*.json"))
        found = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        return found if len(found) == self._num_ranks else []

    def _summary(
        self, reports: Sequence[RankReport], failure: BaseException | None
    ) -> dict[str, Any]:
        """Build the summary from the known figures; ``missing`` names the others."""
        missing = [f"a regular end: {type(failure).__name__}: {failure}"] if failure else []
        run, counts, unserved_s = self._runs[-1], None, 0.0
        deaths, restarts = len(self._runs) - 1, self._restarts()
        try:
            self._monitor.refresh()
            counts = self._store.sample_counts(run)
            planned = self._store.events_backwards({REGROUPED})
            deaths -= sum(one.time >= self._began for one in planned)
            ended = map(outage_of, self._store.events_backwards({OUTAGE}))
            unserved_s = sum(one.unserved_s for one in ended if one and one.start >= self._began)
            restarts["controller"] += self._restarts_of_controller()
        except StoreError as exc:
            missing.append(f"the latest load and the number of samples: {exc}")
        if not reports:
            missing.append("the reports of the ranks: steps, times, bytes and samples lost")
        engine, seen = self._prepared.engine, self._monitor.reading()
        return summarise(self._deployment, engine, run, seen, reports, counts, self.checks) | {
            "controller_restarts": restarts["controller"],
            "restarts": restarts,
            "deaths": deaths,
            "unserved_s": round(unserved_s, 2),
            "missing": missing,
        }

    def _restarts(self) -> dict[str, int]:
        """Restarts of commands by kind."""
        total = {"controller": 0}
        for view in self._commands.view().processes:
            total[view.kind] = total.get(view.kind, 0) + view.restarts
        return total

    def _restarts_of_controller(self) -> int:
        """Restarts that ``eplb serve`` has noted in the store."""
        errors = takewhile(
            lambda event: event.id > self._since, self._store.events_backwards({"error"})
        )
        return sum(
            event.detail["where"] == "the controller"
            and "; restarting in" in event.detail["message"]
            for event in errors
        )
