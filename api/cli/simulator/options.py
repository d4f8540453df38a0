"""What the commands of the simulator share."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from eplb.errors import ConfigError

BAD_INPUT, LIMIT_BROKEN = 2, 1  # exit codes
MAX_WINDOWS = 4096

Trace = Annotated[
    str,
    typer.Argument(
        help="A trace, dump or store, see docs/engines.md, or generated:NAME, see "
        "docs/simulator.md."
    ),
]
DeploymentName = Annotated[str, typer.Option(help="Deployment, where the load is a store.")]


def numbers(option: str, text: str, least: int = 1, most: int = 65_536) -> tuple[int, ...]:
    """Distinct whole numbers, separated by commas.

    Raises:
        ConfigError: anything else, or a number out of range.
    """
    try:
        found = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        found = ()
    if not found or min(found) < least or max(found) > most:
        raise ConfigError(f"{option} is {text!r}, expected numbers of {least} to {most}, as 1,2,4")
    return found


def command_line() -> str:
    """The command as it was typed, for reports."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
