"""``eplb observability``: the Grafana dashboard and the Prometheus alert rules, as files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from api.terminal.printing import line
from eplb.errors import ConfigError
from telemetry.written_files import write_atomically

HERE = Path(__file__).parent
DASHBOARD, ALERTS = HERE / "dashboard.json", HERE / "alerts.yaml"


def observability(
    folder: Annotated[Path, typer.Argument(help="Where to write them; made if it is not there.")],
) -> None:
    """Write the Grafana dashboard and the Prometheus alert rules to a folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"{folder} cannot be written: {exc.strerror or exc}") from exc
    for source in (DASHBOARD, ALERTS):
        target = folder / f"eplb-{source.name}"
        write_atomically(target, source.read_bytes())
        line(str(target))
