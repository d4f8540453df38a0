"""Large reads and writes past the page cache.

Experts are read once and then live in the host cache: pages of them in the kernel's cache would
take the memory that the host cache needs (TensorRT-LLM issue 18185 is a host loader of 240 GiB),
and copying from them costs the bandwidth that the disk gives.
"""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

CHUNK_BYTES = 8 * 2**20  # of one request; 2 to 16 MB measured alike

log = logging.getLogger(__name__)


class DirectFile:
    """A file whose bytes go between disk and page-aligned memory without a copy.

    Where the file system does not support O_DIRECT, reads and writes go through the page cache, and
    the pages are dropped afterwards.

    Raises:
        OSError: the file cannot be opened, or later read or written.
    """

    def __init__(self, path: Path, flags: int) -> None:
        self._path = path
        # Opened at once: the fallback must be the same file, even if the name was given away.
        self.buffered = os.open(path, flags)
        self._direct: int | None = None
        try:
            self._direct = os.open(f"/proc/self/fd/{self.buffered}", flags | os.O_DIRECT)
        except OSError as exc:
            if exc.errno != errno.EINVAL:
                os.close(self.buffered)
            self._fall_back(exc)

    def read_into(self, into: NDArray[np.uint8], offset: int) -> None:
        """Fill ``into``, page-aligned, from ``offset``; a file that ends before is an error."""
        done = 0
        while done < len(into):
            count = self._read(into[done:], offset + done)
            if count == 0:
                raise OSError(errno.EIO, f"{self._path} ends at byte {offset + done}")
            done += count
        if self._direct is None:
            os.posix_fadvise(self.buffered, offset, done, os.POSIX_FADV_DONTNEED)

    def _read(self, into: NDArray[np.uint8], offset: int) -> int:
        direct = self._direct
        if direct is not None:
            try:
                return os.preadv(direct, [into.data], offset)
            except OSError as exc:
                self._fall_back(exc)
        return os.preadv(self.buffered, [into.data], offset)

    def write(self, data: NDArray[np.uint8], offset: int) -> None:
        """Write all of ``data``, page-aligned; it is durable after ``sync``."""
        done = 0
        while done < len(data):
            done += self._write(data[done : done + CHUNK_BYTES], offset + done)

    def _write(self, data: NDArray[np.uint8], offset: int) -> int:
        direct = self._direct
        if direct is not None:
            try:
                return os.pwrite(direct, data.data, offset)
            except OSError as exc:
                self._fall_back(exc)
        return os.pwrite(self.buffered, data.data, offset)

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        os.fdatasync(self.buffered)
        if self._direct is None:
            os.posix_fadvise(self.buffered, 0, 0, os.POSIX_FADV_DONTNEED)

    def _fall_back(self, exc: OSError) -> None:
        if exc.errno != errno.EINVAL:  # returned by file systems without O_DIRECT
            raise exc
        # Another thread may be inside a call on the descriptor: it stays open until close.
        self._direct = None
        log.warning("%s: O_DIRECT is not supported, reading through the page cache", self._path)

    def close(self) -> None:
        """Close the file; no other thread may be using it."""
        if self._direct is not None:
            os.close(self._direct)
        os.close(self.buffered)
