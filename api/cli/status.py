"""``eplb status`` and ``eplb top``: how a deployment stands, for people and for scripts."""

from __future__ import annotations

import json
import os
from contextlib import closing
from threading import Event
from typing import Annotated

import typer

from api.cli.deploy import Config, Profile, Setting, refused, settings_of
from api.cli.store_place import configured_store, open_existing
from api.interrupts import StopSignals
from api.terminal.console import unbreakable_console
from eplb.errors import EplbError
from telemetry.state.store import without_password

NOT_OK = 1
LOOK_S = 0.25


def status(
    config: Config = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    setting: Setting = None,
    profile: Profile = None,
) -> None:
    """Show who leads, what serves, the ranks, the imbalance and the switches.

    Exit status 0: nothing is wrong; 1: something is; 2: the deployment cannot be read.
    """
    # Imported here: it needs the extra "api".
    from api.deploy.status import check_configured, read_status, render

    try:
        settings = settings_of(config, setting, profile)
        url, deployment = configured_store(settings=settings)
        with closing(open_existing(url, deployment)) as store:
            check_configured(store, settings, os.environ)
            found = read_status(store, without_password(url))
    except EplbError as exc:
        raise refused(exc) from exc
    typer.echo(json.dumps(found.as_json(), indent=1) if json_output else render(found))
    if not found.is_ok:
        raise typer.Exit(NOT_OK)


def top(
    config: Config = None,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end.")] = False,
    setting: Setting = None,
    profile: Profile = None,
) -> None:
    """Watch a deployment in the terminal: verdict, load of ranks, imbalance, migration, decisions.

    It reads the store alone, and ends with Ctrl-C. Without a terminal it prints a line for each
    window and event.
    """
    # Imported here: it needs the extra "api".
    from api.deploy.status import check_configured
    from api.monitor.monitor import Monitor
    from api.terminal.live import LiveView
    from api.terminal.picture import render

    console, stop = unbreakable_console(), StopSignals()
    try:
        settings = settings_of(config, setting, profile)
        url, deployment = configured_store(settings=settings)
        with closing(open_existing(url, deployment)) as store:
            check_configured(store, settings, os.environ)
            monitor = Monitor(store)
            if once:
                monitor.refresh()
                console.print(render(monitor.snapshot(), console.width, max(40, console.height)))
                return
            with LiveView(monitor, console=console):
                while not stop.received:
                    Event().wait(LOOK_S)
    except EplbError as exc:
        raise refused(exc) from exc
