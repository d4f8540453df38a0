"""The folder that a demo keeps its store, weights and text in, and the lock that guards it."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from eplb.errors import ConfigError

SETTINGS_FILE = "settings.toml"


class StateDir:
    """One demo at a time in one folder. The lock ends with the process.

    Raises:
        ConfigError: the folder cannot be made or written, or another demo is using it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as exc:
            raise ConfigError(f"state folder {path} cannot be used: {exc.strerror}") from exc
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            holder = os.read(self._lock, 32).decode().strip()
            os.close(self._lock)
            raise ConfigError(
                f"state folder {path} is in use by process {holder or 'unknown'}, "
                "expected another folder (--state-dir) or that demo to end"
            ) from exc
        try:
            os.truncate(self._lock, 0)
            os.write(self._lock, f"{os.getpid()}\n".encode())
            self._remove_unfinished()
        except OSError as exc:
            self.close()
            raise ConfigError(f"state folder {path} cannot be written: {exc.strerror}") from exc

    def save_arrays(self, name: str, arrays: Mapping[str, NDArray[np.integer]]) -> Path:
        """Write arrays for the processes to read: all of the file appears, or nothing.

        Raises:
            ConfigError: the disk is full or read-only.
        """
        return self._save(name, lambda file: np.savez(file, allow_pickle=False, **arrays))

    def save_text(self, name: str, text: str) -> Path:
        """Write text for this user alone: all of the file appears, or nothing.

        Raises:
            ConfigError: the disk is full or read-only.
        """
        return self._save(name, lambda file: file.write(text.encode()))

    def _save(self, name: str, write: Callable[[BinaryIO], object]) -> Path:
        path = self.path / name
        unfinished = path.with_name(f"{name}.unfinished")
        try:
            with unfinished.open("wb") as file:
                os.fchmod(file.fileno(), 0o600)
                write(file)
            unfinished.replace(path)
        except OSError as exc:
            unfinished.unlink(missing_ok=True)
            raise ConfigError(f"{path} cannot be written: {exc.strerror}") from exc
        return path

    def _remove_unfinished(self) -> None:
        """Remove unfinished files of a demo that was killed."""
        for path in self.path.glob("*.unfinished"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def close(self) -> None:
        """Release the lock of the folder."""
        os.close(self._lock)
