"""``eplb status`` and ``eplb top``: how a deployment stands, for people and for scripts.

Both show answers of the admin API: of a service by its URL, or made in this process on a store.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from threading import Event
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter

from api.access.audit import Audit
from api.cli.admin.client import asking
from api.cli.config import Configured
from api.cli.options import ApiOptions, AsJson, with_options
from api.cli.store_place import audit_folder, configured_store, open_existing
from api.config.tree import Settings
from api.deploy.deployment import secret_of
from api.deploy.first_placement import check_secret, last_start
from api.http.service import AdminService
from api.interrupts import StopSignals
from api.monitor.anomalies import Anomaly
from api.monitor.document import StateDocument, document_of, state_in
from api.monitor.state import State
from api.operations import watching
from api.operations.table import answer_in_process, read_answer
from api.terminal.live import LiveView
from api.terminal.picture import Look, render
from api.terminal.printable import printable, unbreakable_console
from api.terminal.printing import at
from api.terminal.progress import progress
from eplb.clock import duration_text
from eplb.errors import ConfigError, counted
from eplb.migration.serialisation import topology_from_dict
from telemetry.state.store import StateStore, without_password

NOT_OK = 1
LOOK_S = 0.25
LAST_PROBLEM_S = 86_400.0  # an older one is not shown
LATEST = 20  # samples of a rank: with 16 steps each five windows, and enough to judge its counters
WINDOWS, EVENTS, ANOMALIES = 512, 500, 3  # more than a terminal shows


@with_options
def status(
    place: ApiOptions,
    configured: Configured,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also leader, imbalance, pace, and each rank.")
    ] = False,
    json_output: AsJson = False,
) -> None:
    """Show how a deployment stands: the verdict, the latest plan, and what else is wrong.

    Of a deployment with several EP groups each is shown, by its name.
    Exit status 0: nothing is wrong; 1: something is; 2: the deployment cannot be read.
    """

    def of(place: ApiOptions) -> tuple[State, str, str]:
        with _asked(place, configured, latest=LATEST) as (ask, where):
            state = state_in(ask(watching.state))
            ended = () if json_output else ask(watching.anomalies, state="ended").anomalies
            return state, where, _last_problem(ended, state.store.time)

    found = [of(place)]
    if groups := found[0][0].store.groups:
        found = [of(replace(place, deployment=name)) for name in groups]
    states = [state for state, *_ in found]
    if json_output:
        shown: Any = TypeAdapter(list[StateDocument]) if groups else TypeAdapter(StateDocument)
        documents = [document_of(state) for state in states]
        typer.echo(shown.dump_json(documents if groups else documents[0], indent=1).decode())
    else:
        for state, where, last in found:
            of_group = f"{state.store.deployment}: " if groups else ""
            for line in (*_lines(state, where, verbose), *filter(None, [last])):
                typer.echo(printable(of_group + line))
    if any(state.problems for state in states):
        raise typer.Exit(NOT_OK)


@with_options
def top(
    place: ApiOptions,
    configured: Configured,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end.")] = False,
) -> None:
    """Watch a deployment in the terminal: verdict, load of ranks, imbalance, migration, decisions.

    It ends with Ctrl-C. Without a terminal it prints a line for each window and event.
    """
    console, stop = unbreakable_console(sys.stdout), StopSignals()
    with _asked(place, configured, watches=not once) as (ask, _):
        if once:
            console.print(render(_look(ask), console.width, max(40, console.height)))
            return
        with LiveView(partial(_look, ask), console=console) as view:
            while view.is_showing and not stop.received:
                Event().wait(LOOK_S)


Ask = Callable[..., Any]  # takes the function of a route and its arguments; gives the answer


@contextmanager
def _asked(
    place: ApiOptions,
    configured: Configured,
    *,
    watches: bool = False,
    latest: int | None = None,
) -> Iterator[tuple[Ask, str]]:
    """Give what asks an API, and where that is; a configuration must be that of its store.

    Args:
        watches: whether a store is read in the background meanwhile.
        latest: so many samples of each rank are read of a store, the latest; None: all.
    """
    if place.url is not None:
        shown = without_password(place.url)
        if configured.is_named:
            raise ConfigError(
                f"a configuration names a store, found the service {shown} as well, expected one "
                "of them: leave out --service and EPLB_SERVICE, or --config, --setting and "
                "--profile"
            )
        with asking(place) as send:
            yield lambda one, **query: read_answer(one, send(one, **query).content), f"at {shown}"
        return
    settings = configured.settings()
    url, deployment = configured_store(place.store, place.deployment, settings)
    with progress(f"waiting for {without_password(url)}"):
        store = open_existing(url, deployment)
    with closing(store):
        if place.store is None and place.deployment is None:
            check_configured(store, settings, os.environ)
        audit = Audit(audit_folder(url))
        service = AdminService(store, keeps_history=False, audit=audit, latest=latest)
        if watches:
            service.reader.start()
        try:
            yield (
                partial(answer_in_process, service),
                f"in {without_password(url)}",
            )
        finally:
            service.reader.stop()


def _look(ask: Ask) -> Look:
    imbalance = ask(watching.imbalance, last=WINDOWS)
    return Look(
        state=state_in(ask(watching.state)),
        heat=ask(watching.heat),
        windows=imbalance.windows,
        rebalances=imbalance.rebalances,
        events=ask(watching.events, latest=EVENTS).events,
        anomalies=ask(watching.anomalies, limit=ANOMALIES).anomalies,
    )


def check_configured(store: StateStore, settings: Settings, environ: Mapping[str, str]) -> None:
    """Refuse a configuration that is another one than that of the deployment; reads only.

    A store of the demo has nothing to compare with.

    Raises:
        ConfigError: another secret, or another number of ranks.
        StoreError: the store cannot be read.
    """
    if last_start(store) is None:
        return
    check_secret(store, secret_of(settings, environ, makes=False))
    run, given = store.current_run(), settings.topology
    expected = given.nodes * given.ranks_per_node
    if run is None:
        return
    found = topology_from_dict(dict(run.topology)).num_ranks
    if found != expected:
        raise ConfigError(
            f"store: deployment {store.deployment!r} serves with {found} ranks (run {run.run}), "
            f"expected {expected} (topology.nodes x topology.ranks_per_node)"
        )


def _lines(state: State, where: str, is_verbose: bool) -> Iterator[str]:
    """A state as lines for people."""
    yield f"{state.verdict}: {state.reason}"
    for plan in state.plans.decisions[-1:]:
        yield f"{plan.decision} at {at(plan.time)}: {plan.reason}"
    if is_verbose:
        yield from _all_of(state, where)
    yield from (f"problem    {one}" for one in state.problems[1:])


def _last_problem(ended: Sequence[Anomaly], now: float) -> str:
    """The latest problem that has ended within a day; "": none is known."""
    known = [one for one in ended if one.severity != "notice" and one.kind != "no-run"]
    last = max(known, key=lambda one: one.until or 0.0, default=None)
    if last is None or last.until is None or now - last.until > LAST_PROBLEM_S:
        return ""
    end = (
        f", over after {duration_text(last.until - last.since)}" if last.until > last.since else ""
    )
    return f"last problem at {at(last.since)}{end}: {last.text}"


def _all_of(state: State, where: str) -> Iterator[str]:
    found, window, moving = state.processes.controller, state.load.last_score, state.plans.migration
    serves = [view for view in state.group.members if not view.has_ended]
    turn = f"last turn {found.turn_age_s or 0.0:.0f} s ago"
    leader = f"{found.leader}, {turn}, lease for {found.lease_left_s:.0f} s more"
    # "ranks, host cache 0: eplb 0.2.0 (protocol 2)": one that differs stands apart.
    alike = {
        version: ", ".join(name for name, its in state.processes.versions.items() if its == version)
        for version in state.processes.versions.values()
    }
    lines = {
        "deployment": f"{state.store.deployment} {where}",
        "leader": leader if found.leader else "none",
        "serves": "nothing yet"
        if state.start.run is None
        else f"generation {state.plans.generation}, step {state.group.step}, run {state.start.run}",
        "imbalance": "no complete window yet"
        if window is None
        else "no tokens in the latest window"
        if window.measured is None
        else f"{window.measured:.2f} in the latest window, {window.contiguous:.2f} unbalanced",
        "migration": "none"
        if moving is None
        else f"plan {moving.plan_id}: {counted(moving.num_moves, 'move')}, "
        + (f"{moving.fraction:.0%} done" if serves else "open when the ranks ended"),
        "pace": state.plans.pace.text,
        "curve": state.plans.expert_curve,
        "switches": f"movement {_on(state.orders.movement)}, observe {_on(state.orders.observe)}",
        "versions": "; ".join(f"{names}: {version}" for version, names in alike.items()) or "none",
    }
    yield from (f"{name:<11}{line}" for name, line in lines.items())
    if (ranks := state.group.membership) is not None:
        waits = f": {ranks.waits}" if ranks.waits else ""
        serve = f"{counted(len(serves), 'rank', 'serve')}, {len(ranks.wanted)} wanted"
        yield f"members    {serve}, epoch {ranks.epoch}, {ranks.phase}{waits}"
    if state.group.ranks:
        yield "rank  node  state    generation  step      step ms  wait ms  last report"
    for view in state.group.ranks:
        phase = view.phase if view.is_alive or view.age_s is None else "silent"
        phase = "ended" if view.has_ended else phase
        age = "never" if view.age_s is None else f"{view.age_s:.1f} s ago"
        node = state.start.node_of_rank[view.rank]
        times = (f"{'-' if ms is None else f'{ms:.1f}':<9}" for ms in (view.step_ms, view.wait_ms))
        place = f"{view.rank:<6}{node:<6}{phase:<9}{view.generation:<12}{view.step:<10}"
        yield f"{place}{''.join(times)}{age}"


def _on(is_on: bool) -> str:
    return "on" if is_on else "off"
