"""``eplb config``: the effective settings, and the reference page."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from api.config.reference import effective, reference_page
from api.settings import load
from api.terminal.printable import print_error
from eplb.errors import ConfigError, EplbError

BAD_INPUT = 2


def config(
    config: Annotated[Path | None, typer.Option(help="A TOML file of settings.")] = None,
    setting: Annotated[list[str] | None, typer.Option(help="Any setting: NAME=VALUE.")] = None,
    reference: Annotated[bool, typer.Option(help="Print the reference page instead.")] = False,
) -> None:
    """Print every setting and where its value comes from; passwords are masked."""
    if reference:
        typer.echo(reference_page(), nl=False)
        return
    try:
        named = named_settings(setting or [])
        loaded = load({}, config=config, environ=os.environ, named=named)
    except EplbError as exc:
        print_error(exc)
        raise typer.Exit(BAD_INPUT) from exc
    typer.echo(effective(loaded.settings, loaded.places), nl=False)


def named_settings(pairs: list[str]) -> dict[str, Any]:
    """Read NAME=VALUE pairs; the settings check names and values.

    Raises:
        ConfigError: a pair without "=".
    """
    split = [pair.partition("=") for pair in pairs]
    for name, equals, _ in split:
        if not equals:
            raise ConfigError(f"--setting is {name!r}, expected NAME=VALUE")
    return {name.replace("-", "_"): value for name, _, value in split}
