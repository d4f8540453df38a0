"""``eplb observability``: the Grafana dashboard and the Prometheus alert rules, as files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from api.terminal.printable import print_error

HERE = Path(__file__).parent
DASHBOARD, ALERTS = HERE / "dashboard.json", HERE / "alerts.yaml"
BAD_INPUT = 2


def observability(
    folder: Annotated[Path, typer.Argument(help="Where to write them; made if it is not there.")],
) -> None:
    """Write the Grafana dashboard and the Prometheus alert rules to a folder."""
    console = Console(soft_wrap=True, highlight=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for source in (DASHBOARD, ALERTS):
            target = folder / f"eplb-{source.name}"
            target.write_bytes(source.read_bytes())
            console.print(str(target), markup=False)
    except OSError as exc:
        print_error(f"{folder} cannot be written: {exc.strerror or exc}")
        raise typer.Exit(BAD_INPUT) from exc
