"""The summary of a demo as a file of JSON: all of it appears, or nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eplb.errors import ConfigError


def check_writable(path: Path | None) -> None:
    """Refuse a summary file that could not be written a minute later.

    Raises:
        ConfigError: the folder is missing or read-only, or the path is a folder.
    """
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"--json {path} is a folder, expected a file")
    unfinished = _unfinished(path)
    try:
        unfinished.touch()
        unfinished.unlink()
    except OSError as exc:
        raise ConfigError(f"--json {path} cannot be written: {exc.strerror}") from exc


def write_json(path: Path, summary: dict[str, Any]) -> None:
    """Write the summary: all of it appears, or nothing.

    Raises:
        ConfigError: the disk is full or read-only.
    """
    unfinished = _unfinished(path)
    try:
        unfinished.write_text(json.dumps(summary, indent=2) + "\n")
        unfinished.replace(path)
    except OSError as exc:
        unfinished.unlink(missing_ok=True)
        raise ConfigError(f"--json {path} cannot be written: {exc.strerror}") from exc


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}.unfinished")
