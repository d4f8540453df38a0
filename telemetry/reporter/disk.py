"""Disk access of a spool: failures are counted and logged, and never raised."""

from __future__ import annotations

import logging
from pathlib import Path

from eplb.core.load import LoadSample
from eplb.errors import EplbError, StoreError
from telemetry.records.sample_codec import sample_from_bytes
from telemetry.reporter.segment import Place
from telemetry.reporter.spool_folder import SpoolFolder

log = logging.getLogger(__name__)


class SpoolDisk:
    """A spool's folder, or none. One that cannot be opened is given up; a full one is tried again.

    Raises:
        StoreError: another process uses the folder.
        ConfigError: the bound is too small.
    """

    def __init__(self, path: Path | None, max_bytes: int) -> None:
        self.num_errors = 0
        self.last_error = ""
        self._is_failing = False
        self._folder: SpoolFolder | None = None
        if path is None:
            return
        try:
            self._folder = SpoolFolder(path, max_bytes)
        except OSError as exc:
            self._failed(f"spool {path} cannot be opened", exc)

    @property
    def recovered(self) -> list[Place]:
        """Records that an earlier process left, oldest first."""
        return self._folder.recovered if self._folder else []

    @property
    def num_overflows(self) -> int:
        """Segments that gave way to newer ones; the ``is_removed`` of their records is set."""
        return self._folder.num_overflows if self._folder else 0

    def figures(self) -> dict[str, int]:
        """Return the counts of the folder."""
        folder = self._folder
        return {
            "torn": folder.num_torn if folder else 0,
            "damaged": folder.num_damaged if folder else 0,
            "bytes_on_disk": folder.num_bytes if folder else 0,
        }

    def write(self, record: bytes) -> Place | None:
        """Write a record; None where that fails, or without a folder."""
        if self._folder is None:
            return None
        try:
            place = self._folder.append(record)
        except (OSError, StoreError) as exc:
            self._failed(f"spool {self._folder.path} cannot be written", exc)
            return None
        if self._is_failing:
            log.warning("spool %s can be written again", self._folder.path)
        self._is_failing = False
        return place

    def read(self, place: Place) -> LoadSample:
        """Return the sample of a record.

        Raises:
            StoreError: it cannot be read.
        """
        try:
            return sample_from_bytes(place.segment.read(place))
        except (OSError, EplbError) as exc:
            raise StoreError(f"{place.segment.path}: record rejected: {exc}") from exc

    def release(self, place: Place | None) -> None:
        """Release a record."""
        if place is None or self._folder is None:
            return
        try:
            self._folder.release(place)
        except OSError as exc:  # it may be sent once more then, after a restart
            self._failed(f"spool {self._folder.path} cannot be cleaned", exc)

    def close(self) -> None:
        """Close the folder; its records stay for the next process."""
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    def _failed(self, what: str, exc: Exception) -> None:
        self.num_errors += 1
        self.last_error = f"{what}: {exc}"
        if not self._is_failing:  # once for each time that the disk is in trouble
            log.warning("%s: samples are kept in memory meanwhile", self.last_error)
        self._is_failing = True
