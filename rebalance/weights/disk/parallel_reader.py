"""One run of bytes of a file, read in parts by several threads, and digested as the parts come.

A disk gives its best with many requests under way. Threads that each read a whole record have as
many requests under way as there are records left, which at a fill's end are few; and one record
asked for alone would come at the speed of one request.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass, field
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from rebalance.types import Digest
from rebalance.weights.disk.direct_io import CHUNK_BYTES, DirectFile
from runtime.memory.shared import RunningDigest, whole_pages

NUM_THREADS = max(4, min(16, os.cpu_count() or 1))
WARN_S, CLOSE_DEADLINE_S = 30.0, 10.0

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Whole:
    """A read that is split into parts."""

    num_left: int
    digest: RunningDigest = field(default_factory=RunningDigest)
    error: Exception | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)

    def add(self, found: RunningDigest | Exception) -> None:
        """Add the result of one part."""
        with self.changed:
            if isinstance(found, Exception):
                self.error = found
            else:
                self.digest.join(found)
            self.num_left -= 1
            self.changed.notify_all()


@dataclass(frozen=True, eq=False)
class _Part:
    """Bytes ``first`` .. ``first + len(into)`` of a whole, which begins at ``offset``."""

    whole: _Whole
    into: NDArray[np.uint8]
    offset: int
    first: int


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
        whole = _Whole(len(starts))
        for first in starts:
            self._parts.put(_Part(whole, into[first : first + size], offset, first))
        with whole.changed:
            # No deadline ends it, as none would end a plain read: the memory is still written to.
            while not whole.changed.wait_for(lambda: not whole.num_left, WARN_S):
                log.warning(
                    "%s: still reading %d parts of %d bytes at offset %d after another %g s",
                    *(self._name, whole.num_left, len(into), offset, WARN_S),
                )
        if whole.error is not None:
            raise whole.error
        return whole.digest.value

    def _start(self) -> None:
        with self._lock:
            for number in range(len(self._threads), self._num_threads):
                # Daemons: a disk that hangs must not keep a process from its end.
                thread = threading.Thread(target=self._run, name=f"part-{number}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _run(self) -> None:
        while (part := self._parts.get()) is not None:
            part.whole.add(self._read(part))

    def _read(self, part: _Part) -> RunningDigest | Exception:
        found = RunningDigest(part.first)
        try:
            self._file.read_into(part.into, part.offset + part.first)
            found.add(part.into)
            return found
        except Exception as exc:  # raised again on the caller's thread
            return exc

    def close(self) -> None:
        """Stop the threads; no read may be waiting."""
        for _ in self._threads:
            self._parts.put(None)
        for thread in self._threads:
            thread.join(CLOSE_DEADLINE_S)
        if any(thread.is_alive() for thread in self._threads):
            log.error("%s: the disk does not respond: a reader thread is still running", self._name)
