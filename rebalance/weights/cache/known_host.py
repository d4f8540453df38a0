"""One other host, as this one has come to know it: what it holds, and whether it does answer."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from rebalance.types import Record
from rebalance.weights.link.back_off import BackOff
from rebalance.weights.link.link_settings import HostAddress

INVENTORY_AGE_S = 1.0  # maximum age of a host's list of records in memory


class KnownHost:
    """State of one other host. Thread-safe.

    Args:
        address: where it listens.
        back_off_s: upper limit of one back-off.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        address: HostAddress,
        back_off_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address, self._clock = address, clock
        self.back_off = BackOff(str(self), back_off_s, clock)
        self.requesting_inventory = threading.Lock()  # by one thread at a time
        self.wrong: set[Record] = set()  # that it gave with wrong bytes, once
        self._inventory, self._inventory_until = 0, -math.inf

    def __str__(self) -> str:
        return "host {} port {}".format(*self.address)

    @property
    def has_inventory(self) -> bool:
        """Return whether it was ever asked what it holds."""
        return self._inventory_until > -math.inf

    def is_inventory_old(self) -> bool:
        """Return whether it is to be asked what it holds."""
        return self._clock() >= self._inventory_until

    def note_inventory(self, inventory: int) -> None:
        """Set the host's inventory: a bit for each record, by number."""
        self._inventory, self._inventory_until = inventory, self._clock() + INVENTORY_AGE_S

    def holds(self, number: int) -> bool:
        """Return whether it held a record when it was asked last."""
        return bool(self._inventory >> number & 1)
