"""A kind of link as staging sees it: records in line, chunks under way, and when more may go.

Pulls at full speed delay serving: 88 MB from a peer in every step added 52 % to the slowest steps,
8 MB in every step (19 GB/s) added 0.3 % (measured on 4 x H200). So bytes are pulled in small
chunks, at a steady rate. Nothing here waits: callers get the time of the next attempt.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from eplb.errors import MigrationError
from eplb.migration.build import Move
from rebalance.stage.stage_settings import (
    BURST_CHUNKS,
    SERVING_BYTES_PER_SECOND,
    LinkBudget,
    StageSettings,
)
from rebalance.types import Record
from rebalance.weights.sources import Link, Place
from runtime.streams import Completion

log = logging.getLogger(__name__)

NOW = -math.inf  # a time that has always passed


class TokenBucket:
    """A rate in bytes per second, with a burst of at most ``burst_bytes`` after idle time."""

    def __init__(
        self, bytes_per_second: float, burst_bytes: int, clock: Callable[[], float]
    ) -> None:
        self._rate, self._burst, self._clock = bytes_per_second, burst_bytes, clock
        self._bytes, self._at = float(burst_bytes), clock()

    def ready_at(self, num_bytes: int) -> float:
        """When ``num_bytes`` may go; a time that has passed means now.

        More than the burst may go once the bucket is full, and is paid for afterwards.
        """
        self._refill()
        missing = min(num_bytes, self._burst) - self._bytes
        return NOW if missing <= 0 else self._at + missing / self._rate

    def take(self, num_bytes: int) -> None:
        """Spend ``num_bytes``."""
        self._refill()
        self._bytes -= num_bytes

    def change_rate(self, bytes_per_second: float) -> None:
        """Refill at another rate from now on; what was spent before stays spent."""
        self._refill()
        self._rate = bytes_per_second

    def _refill(self) -> None:
        now = self._clock()
        if math.isinf(self._rate):
            self._bytes = float(self._burst)
        else:
            grown = self._bytes + (now - self._at) * self._rate
            self._bytes = min(float(self._burst), grown)
        self._at = now


@dataclass(eq=False)
class Pull:
    """One move's bytes on their way."""

    move: Move
    into: torch.Tensor  # [record_bytes]
    held: NDArray[np.int32]  # [L, S] experts in the slots that may be read, EMPTY in others
    places: tuple[Place, ...] = ()  # sources of this attempt; chunks come from them in turn
    offset: int = 0  # bytes ordered in this attempt
    num_chunks: int = 0  # ordered in this attempt
    num_flying: int = 0
    has_failed: bool = False  # this attempt: restarted once its chunks have arrived
    num_tried: int = 0
    suspected: tuple[Place, ...] = ()  # gave wrong bytes together
    is_reloaded: bool = False  # the host has read it again, once
    failed: dict[Place, str] = field(default_factory=dict)  # places with the reason

    def __post_init__(self) -> None:
        self.num_bytes = self.into.numel()  # read often, and slow to get from torch

    @property
    def name(self) -> str:
        """For messages."""
        return f"layer {self.move.layer} expert {self.move.expert}"

    @property
    def origin(self) -> str:
        """The places of this attempt, for messages."""
        return " or ".join(map(str, self.places))

    @property
    def record(self) -> Record:
        """(layer, expert)."""
        return self.move.layer, self.move.expert

    def fails(self, place: Place, why: str) -> None:
        """Note that a place cannot be read; that was no attempt if it had given nothing yet."""
        self.failed[place] = why
        if not self.num_chunks:
            self.num_tried -= 1

    def begin(self, places: tuple[Place, ...]) -> None:
        """Start an attempt from its first byte."""
        self.places, self.num_tried = places, self.num_tried + 1
        self.offset, self.num_chunks, self.has_failed = 0, 0, False

    def next_place(self, is_alive: Callable[[Place], bool]) -> Place | None:
        """The next of the attempt's places in turn; None when none is left alive."""
        for place in self.places:
            if place not in self.failed and not is_alive(place):
                self.failed[place] = f"rank {place.rank} is dead"
        left = [place for place in self.places if place not in self.failed]
        return left[self.num_chunks % len(left)] if left else None


@dataclass
class Chunk:
    """A part of a record that was ordered."""

    pull: Pull
    completion: Completion
    num_bytes: int
    deadline: float


class Hold:
    """Pauses of staging that an engine requests, during prefills or KV transfers.

    Thread-safe. Staging stands still while any of them lasts. A pause without a resume ends at its
    deadline, because a migration that never ends would block every later one.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._until: dict[object, float] = {}  # deadline of each pause, by whose it is

    def pause(self, deadline_s: float, of: object = None) -> None:
        """Pause staging until ``resume`` or for ``deadline_s``; a second call restarts it.

        Args:
            of: whose pause it is; each one's ends by itself.
        """
        with self._lock:
            self._until[of] = self.clock() + deadline_s

    def resume(self, of: object = None) -> None:
        """End one's pause; nothing where it has ended already."""
        with self._lock:
            self._until.pop(of, None)

    def ready_at(self) -> float:
        """When staging may continue; a time in the past means now."""
        with self._lock:
            now = self.clock()
            for of in [of for of, until in self._until.items() if now >= until]:
                log.warning(
                    "staging resumed: the pause reached its deadline without resume_staging"
                )
                del self._until[of]
            return max(self._until.values(), default=NOW)


class Lane:
    """One kind of link of one rank."""

    def __init__(self, link: Link, settings: StageSettings, hold: Hold) -> None:
        own: LinkBudget = getattr(settings, link.value)
        self.chunk_bytes = own.chunk_bytes
        self.flying: deque[Chunk] = deque()
        self._queue: deque[Pull] = deque()
        self._in_flight, self._deadline_s = settings.in_flight, settings.pull_deadline_s
        self._hold, self._clock = hold, hold.clock
        burst_bytes = BURST_CHUNKS * own.chunk_bytes
        self._own_rate = own.bytes_per_second
        self._bucket = TokenBucket(own.bytes_per_second, burst_bytes, hold.clock)

    @property
    def is_active(self) -> bool:
        """Return whether something is in line or under way."""
        return bool(self._queue or self.flying)

    @property
    def is_flowing(self) -> bool:
        """Return whether another chunk goes now, or as soon as one lands."""
        is_full = len(self.flying) >= self._in_flight
        return bool(self._queue) and (is_full or self.ready_at() <= self._clock())

    def use(self, part: float) -> None:
        """Use a part of the budget; a link without one counts as SERVING_BYTES_PER_SECOND."""
        is_free = math.isinf(self._own_rate) and part < 1
        self._bucket.change_rate(part * (SERVING_BYTES_PER_SECOND if is_free else self._own_rate))

    def add(self, pull: Pull) -> None:
        """Queue a record."""
        self._queue.append(pull)

    def next(self) -> Pull | None:
        """The record whose next chunk may go now, if there is one."""
        return self._queue[0] if self.ready_at() <= self._clock() else None

    def ready_at(self) -> float:
        """When the next chunk may go, by the budget and the engine's hold; never for none."""
        if not self._queue or len(self.flying) >= self._in_flight:
            return math.inf
        pull = self._queue[0]
        num_bytes = min(self.chunk_bytes, pull.num_bytes - pull.offset)
        return max(self._bucket.ready_at(num_bytes), self._hold.ready_at())

    def ordered(self, pull: Pull, num_bytes: int, completion: Completion) -> None:
        """Note that the next chunk of a record, the first in line, is under way."""
        self._bucket.take(num_bytes)
        deadline = self._clock() + self._deadline_s
        self.flying.append(Chunk(pull, completion, num_bytes, deadline))
        pull.offset += num_bytes
        pull.num_chunks, pull.num_flying = pull.num_chunks + 1, pull.num_flying + 1
        if pull.offset == pull.num_bytes:
            self._queue.popleft()

    def give_up(self, pull: Pull) -> None:
        """Remove the first record of the queue."""
        assert self._queue[0] is pull, "only the record whose turn it is can fail"
        self._queue.popleft()

    def land(self) -> Pull | None:
        """Return the record of the oldest chunk if that has arrived.

        Raises:
            MigrationError: it has not arrived before its deadline.
        """
        if not self.flying:
            return None
        chunk = self.flying[0]
        if not chunk.completion.is_complete():
            if self._clock() < chunk.deadline:
                return None
            raise MigrationError(
                f"{chunk.pull.name}: {chunk.num_bytes} bytes from "
                f"{chunk.pull.origin} did not arrive within {self._deadline_s:.3g} s"
            )
        self.flying.popleft()
        chunk.pull.num_flying -= 1
        return chunk.pull

    def clear(self) -> None:
        """Forget everything; nothing may be under way any more."""
        self._queue.clear()
        self.flying.clear()

    def stop(self) -> None:
        """Order nothing more."""
        self._queue.clear()
