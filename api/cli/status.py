"""``eplb status``: how a deployment stands, for people and for scripts."""

from __future__ import annotations

import json
import os
from contextlib import closing
from typing import Annotated

import typer

from api.cli.config import named_settings
from api.cli.deploy import Config, Setting, refused
from api.cli.store_place import configured_store, open_existing
from api.config.loader import load
from eplb.errors import EplbError
from telemetry.stores.redis.connection.address import without_password

NOT_OK = 1


def status(
    config: Config = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    setting: Setting = None,
) -> None:
    """Show who leads, what serves, the ranks, the imbalance and the switches.

    Exit status 0: nothing is wrong; 1: something is; 2: the deployment cannot be read.
    """
    # Imported here: it needs the extra "api".
    from api.deploy.status import check_configured, read_status, render

    try:
        named = named_settings(setting or [])
        loaded = load({}, config=config, environ=os.environ, named=named)
        url, deployment = configured_store(loaded=loaded)
        with closing(open_existing(url, deployment)) as store:
            check_configured(store, loaded.settings, os.environ)
            found = read_status(store, without_password(url))
    except EplbError as exc:
        raise refused(exc) from exc
    typer.echo(json.dumps(found.as_json(), indent=1) if json_output else render(found))
    if not found.is_ok:
        raise typer.Exit(NOT_OK)
