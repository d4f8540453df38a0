"""What the commands of the simulator share."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from eplb.errors import ConfigError
from simulations.pages.document import Page
from simulations.pages.pictures import write_pictures

BAD_INPUT, LIMIT_BROKEN = 2, 1  # exit codes
MAX_WINDOWS = 4096

Trace = Annotated[
    str,
    typer.Argument(
        help="A trace, dump or store, see docs/engines.md, or generated:NAME, see "
        "docs/simulator.md."
    ),
]
ModelName = Annotated[
    str | None,
    typer.Option(help="A known model, for expert groups and bytes."),
]
Steps = Annotated[
    int | None,
    typer.Option(
        min=1, max=1_000_000_000, help="Forward passes of a window, if the load has none."
    ),
]
Hardware = Annotated[
    str | None,
    typer.Option(help="Times of steps, for this card: h20, h100, h200 or h800; needs --model."),
]
Prefill = Annotated[
    bool,
    typer.Option("--prefill", help="Tokens cross the network once for each node."),
]
OtherUs = Annotated[
    float,
    typer.Option(max=1e9, help="Microseconds of a layer outside of its experts."),
]
Overlap = Annotated[
    bool,
    typer.Option("--overlap", help="Two batches overlap communication."),
]
ExpertTimes = Annotated[
    Path | None,
    typer.Option(help="Measured times of experts, in place of the data sheet."),
]
DeploymentName = Annotated[str, typer.Option(help="Deployment, where the load is a store.")]

HtmlFile = Annotated[Path | None, typer.Option("--html", help="Write a page of plots.")]
PngFolder = Annotated[
    Path | None, typer.Option("--png", help="Write the plots into this folder, one PNG each.")
]


def write_plots(page: Callable[[], Page], html: Path | None, png: Path | None) -> None:
    """Write the page and its pictures, as far as they are asked for.

    Raises:
        ConfigError: a library is not installed, or a file cannot be written.
    """
    if html is None and png is None:
        return
    made = page()
    if html is not None:
        made.write(html)
    if png is not None:
        write_pictures(png, made)


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
