"""One other host, as this one has come to know it: what it holds, and whether it does answer."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from rebalance.host_link_settings import HostAddress
from rebalance.transport import Record

BOOK_AGE_S = 1.0  # a host's list of what it holds is asked for anew when it is as old as this
FIRST_BACK_OFF_S = 1.0  # doubled at every failure that follows another

log = logging.getLogger(__name__)


class KnownHost:
    """Any thread may call any method.

    Args:
        address: where it listens.
        back_off_s: for so long it is left alone after failures, at most.
        clock: which time passes for it.
    """

    def __init__(
        self,
        address: HostAddress,
        back_off_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address, self._lock = address, threading.Lock()
        self.asking_book = threading.Lock()  # by one thread at a time
        self.wrong: set[Record] = set()  # that it gave with wrong bytes, once
        self._most_back_off_s, self._clock = back_off_s, clock
        self._back_off_s, self._until, self._why = 0.0, -math.inf, ""
        self._book, self._book_until = 0, -math.inf

    def __str__(self) -> str:
        return "host {} port {}".format(*self.address)

    def left_alone(self) -> str:
        """Say why it is not asked now; "" if it may be."""
        with self._lock:
            left_s = self._until - self._clock()
            return f"left alone for {left_s:.1f} s more, because {self._why}" if left_s > 0 else ""

    def fails(self, why: str) -> None:
        """Leave it alone for a while, and longer after every failure that follows another."""
        with self._lock:
            now = self._clock()
            if now < self._until:
                return  # the same failure, seen by another thread
            doubled = max(FIRST_BACK_OFF_S, 2 * self._back_off_s)
            self._back_off_s = min(self._most_back_off_s, doubled)
            self._until, self._why = now + self._back_off_s, why
        log.warning("%s is left alone for %.3g s: %s", self, self._back_off_s, why)

    def is_well(self) -> None:
        """Note that it gave what it was asked for."""
        with self._lock:
            self._back_off_s = 0.0

    @property
    def has_book(self) -> bool:
        """Say whether it was ever asked what it holds."""
        return self._book_until > -math.inf

    def is_book_old(self) -> bool:
        """Say whether it is to be asked what it holds."""
        return self._clock() >= self._book_until

    def note_book(self, book: int) -> None:
        """Note what it holds: a bit for each record, by number."""
        self._book, self._book_until = book, self._clock() + BOOK_AGE_S

    def holds(self, number: int) -> bool:
        """Say whether it held a record when it was asked last."""
        return bool(self._book >> number & 1)
