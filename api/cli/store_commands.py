"""``eplb store``: what is in a store, a copy of its file, and removal of old records."""

from __future__ import annotations

import json
import os
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from api.cli.options import AsJson, ConfiguredDeployment, ConfiguredStore
from api.cli.store_place import configured_store, file_at, open_existing
from api.config.tree import load, profile_names
from api.monitor.monitor import Monitor
from api.terminal.printing import TIME_OR_AGE, listing, time_of
from eplb.errors import counted
from eplb.settings.loader import PROFILE_VARIABLE
from telemetry import deployments_of
from telemetry.load.rollup import HOUR, MINUTE
from telemetry.state.sqlite_backup import backup as copy_store
from telemetry.state.sqlite_backup import shrink as shrink_file

app = typer.Typer(no_args_is_help=True)


@app.command("list")
def list_deployments(
    store: ConfiguredStore = None,
    json_output: AsJson = False,
) -> None:
    """List the deployments of a store, and how each stands; profiles are deployments."""
    url = store or _configured_url()
    found = []
    for name in deployments_of(url):
        with closing(open_existing(url, name)) as opened:
            monitor = Monitor(opened)
            monitor.refresh()
            found.append((monitor.reading().state, opened.live().text("stage") or None))
    rows = [
        {
            "deployment": one.store.deployment,
            "verdict": one.verdict,
            "ranks": len(one.start.node_of_rank),
            "generation": one.plans.generation,
            "imbalance": one.load.last_score.measured if one.load.last_score else None,
            "stage": stage,
            "leader": one.processes.controller.leader or None,
        }
        for one, stage in found
    ]
    if json_output:
        typer.echo(json.dumps(rows, indent=1))
    else:
        columns = "deployment verdict ranks generation imbalance stage leader"
        listing(rows, columns, none="no deployments")


def _configured_url() -> str:
    """The store of the configuration, of whatever profile: all share it."""
    names = profile_names(None, os.environ)
    chosen = os.environ.get(PROFILE_VARIABLE) or next(iter(names), None)
    settings = load({}, config=None, environ=os.environ, profile=chosen)
    return configured_store(settings=settings)[0]


@app.command()
def backup(
    target: Annotated[Path, typer.Argument(help="A new file for the copy.")],
    store: ConfiguredStore = None,
) -> None:
    """Copy a store's file while it is in use, all deployments in it, as it is at one moment."""
    path = file_at(store or _configured_url(), "a copy")
    num_bytes = copy_store(path, target)
    typer.echo(f"{path} copied to {target}: {num_bytes:,} bytes")


@app.command()
def purge(
    before: Annotated[str, typer.Option(help=f"A time as {TIME_OR_AGE}.")],
    store: ConfiguredStore = None,
    deployment: ConfiguredDeployment = None,
    shrink: Annotated[bool, typer.Option(help="Make the file smaller; writers wait.")] = False,
) -> None:
    """Remove samples and roll-ups older than a time, without rolling them up.

    Placements, tasks and events stay.
    """
    before_time = time_of("--before", before)
    url, name = configured_store(store, deployment)
    path = file_at(url, "--shrink") if shrink else None
    # A deployment that never ran is refused: a misspelt name must not look like an empty store.
    with closing(open_existing(url, name)) as opened:
        samples = opened.prune(before_time)
        minutes, hours = (opened.prune_rollups(s, before_time) for s in (MINUTE, HOUR))
    if path is not None:
        shrink_file(path)
    typer.echo(
        f"{name}: removed {counted(samples, 'sample')}, {counted(minutes, 'roll-up')} of a "
        f"minute and {hours} of an hour before "
        f"{datetime.fromtimestamp(before_time, UTC):%Y-%m-%d %H:%M:%S} UTC"
    )
