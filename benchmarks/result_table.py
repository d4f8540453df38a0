"""Rows of the tables that benchmarks print: measurement, result, target."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

Row = tuple[str, str, str]  # what, found, target


def show(rows: Iterable[Row], width: int) -> None:
    """Print rows as they come, the first column ``width`` characters wide."""
    for what, found, target in rows:
        print(f"{what:<{width}}  {found}   (target {target})", flush=True)


def keep(rows: Sequence[Row], path: Path | None) -> None:
    """Write rows as JSON, where a file is named."""
    if path is not None:
        path.write_text(json.dumps(rows, indent=1))
