"""Large reads and writes past the page cache.

Experts are read once and then live in the host cache: pages of them in the kernel's cache would
take the memory that the host cache needs (TensorRT-LLM issue 18185 is a host loader of 240 GiB),
and copying from them costs the bandwidth that the disk gives.

A disk gives its best with many requests under way. Threads that each read a whole record have as
many requests under way as there are records left, which at a fill's end are few; and one record
asked for alone would come at the speed of one request. So ``ParallelReader`` splits a read, and
digests the parts as they come.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path
from queue import Empty, SimpleQueue

import numpy as np
from numpy.typing import NDArray

from rebalance.types import Digest
from runtime.memory import RunningDigest, whole_pages

CHUNK_BYTES = 8 * 2**20  # size of one request; 2 to 16 MB measured alike
NUM_THREADS = max(4, min(16, os.cpu_count() or 1))
WARN_S, CLOSE_DEADLINE_S = 30.0, 10.0

# Where a part of a read goes to, where the read begins in the file, the part's first byte in it,
# and who waits for the part's digest.
_Part = tuple[NDArray[np.uint8], int, int, "SimpleQueue[RunningDigest | Exception]"]

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


class ParallelReader:
    """Reads one file for any number of callers; its threads start with the first read.

    Args:
        file: open file; the caller closes it.
        name: of the file, for messages.
        num_threads: concurrent disk requests.
        part_bytes: maximum size of one request.
    """

    def __init__(
        self,
        file: DirectFile,
        name: str,
        num_threads: int = NUM_THREADS,
        part_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._file, self._name, self._num_threads = file, name, num_threads
        self._part_bytes = part_bytes
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._parts: SimpleQueue[_Part | None] = SimpleQueue()

    def read(self, into: NDArray[np.uint8], offset: int) -> Digest:
        """Fill page-aligned ``into`` from ``offset`` on; return the digest found.

        When it returns or raises, no thread writes to ``into`` any more.

        Raises:
            OSError: the disk cannot be read.
        """
        self._start()
        num_parts = max(1, -(-len(into) // self._part_bytes))
        # Whole pages, as alike as can be: a short last part would be a request for little.
        size = whole_pages(max(1, -(-len(into) // num_parts)))
        starts = range(0, len(into), size)
        results: SimpleQueue[RunningDigest | Exception] = SimpleQueue()
        for first in starts:
            self._parts.put((into[first : first + size], offset, first, results))
        whole, error, num_left = RunningDigest(), None, len(starts)
        while num_left:
            try:
                # No deadline ends it, as none would end a plain read: the memory is still written.
                found = results.get(timeout=WARN_S)
            except Empty:
                log.warning(
                    "%s: still reading %d parts of %d bytes at offset %d after another %g s",
                    *(self._name, num_left, len(into), offset, WARN_S),
                )
                continue
            num_left -= 1
            if isinstance(found, Exception):
                error = found
            else:
                whole.join(found)
        if error is not None:
            raise error
        return whole.value

    def _start(self) -> None:
        with self._lock:
            for number in range(len(self._threads), self._num_threads):
                # Daemons: a disk that hangs must not keep a process from its end.
                thread = threading.Thread(target=self._run, name=f"part-{number}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _run(self) -> None:
        while (part := self._parts.get()) is not None:
            into, offset, first, results = part
            found = RunningDigest(first)
            try:
                self._file.read_into(into, offset + first)
                found.add(into)
                results.put(found)
            except Exception as exc:  # raised again on the caller's thread
                results.put(exc)

    def close(self) -> None:
        """Stop the threads; no read may be waiting."""
        for _ in self._threads:
            self._parts.put(None)
        for thread in self._threads:
            thread.join(CLOSE_DEADLINE_S)
        if any(thread.is_alive() for thread in self._threads):
            log.error("%s: the disk does not respond: a reader thread is still running", self._name)
