"""The summary of a demo as a file of JSON: all of it appears, or nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

from eplb.errors import ConfigError


class SummaryFile:
    """Opened before the run, so that its end needs no descriptor; without a path, nothing.

    Raises:
        ConfigError: the folder is missing or read-only, or the path is a folder.
    """

    def __init__(self, path: Path | None) -> None:
        self._path, self._file = path, None if path is None else _opened(path)

    def write(self, summary: dict[str, Any]) -> None:
        """Write the summary: all of it appears, or nothing.

        Raises:
            ConfigError: the disk is full or read-only.
        """
        if self._file is None or self._path is None:
            return
        try:
            self._file.write(json.dumps(summary, indent=2) + "\n")
            self._file.flush()
            _unfinished(self._path).replace(self._path)
        except OSError as exc:
            raise ConfigError(f"--json {self._path} cannot be written: {exc.strerror}") from exc

    def close(self) -> None:
        """Remove what is unfinished."""
        if self._file is not None and self._path is not None:
            self._file.close()
            _unfinished(self._path).unlink(missing_ok=True)


def _opened(path: Path) -> TextIO:
    if path.is_dir():
        raise ConfigError(f"--json {path} is a folder, expected a file")
    try:
        return _unfinished(path).open("w", encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"--json {path} cannot be written: {exc.strerror}") from exc


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}.unfinished")
