"""Simulated transport, whose bytes arrive late or wrong, and a simulated store."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from benchmarks.schedules.ballots import NotYet, Violation
from benchmarks.schedules.device import RECORD_BYTES, Bank, record_words
from eplb.core.topology import Topology
from eplb.errors import MigrationError, StoreError
from eplb.migration.build import Source
from rebalance.threads.cancellation import IsWanted, always
from rebalance.transport.interface import HOST, Place
from rebalance.transport.processes import ranks_beside
from rebalance.types import Record
from runtime.streams import Completion
from telemetry.stores.memory import MemoryStore

Row = tuple[int, int]  # rank, and row in its bank


@dataclass(eq=False)
class InFlightChunk(Completion):
    """A chunk under way."""

    plan_id: int
    record: Record
    source: Row | None  # None: the host
    target: Row
    put: Callable[[], None]  # writes the bytes
    has_landed: bool = False

    def __post_init__(self) -> None:
        super().__init__(is_cuda=False)

    def is_complete(self) -> bool:
        """Say whether the bytes are there."""
        return self.has_landed


@dataclass
class Faults:
    """Current faults of the links."""

    wrong_bytes: float = 0.0  # probability of a chunk
    wrong_places: set[tuple[Record, Place]] = field(default_factory=set)  # always wrong there
    refusals: float = 0.0  # of a pull
    host_refuses: bool = False


class Transport:
    """The simulated transport of one rank."""

    def __init__(
        self, rank: int, topology: Topology, banks: list[Bank], faults: Faults, rng: random.Random
    ) -> None:
        self.rank, self.bank = rank, banks[rank]
        self._banks, self._faults, self._rng = banks, faults, rng
        self.readable = frozenset([rank, *ranks_beside(rank, topology)])
        self.reachable = frozenset(range(topology.num_ranks)) - self.readable
        self.host_room = 100
        self.in_flight: list[InFlightChunk] = []
        self.dead: set[int] = set()
        self.watch: Callable[[InFlightChunk], None] = lambda landing: None
        self.plan_id: Callable[[], int] = lambda: 0
        self._held: set[Record] = set()
        self._version, self._has_new_weights = 0, rng.random() < 0.5

    def begin(self) -> None:
        """No device to bind to."""

    def preload(
        self, records: Sequence[Record], deadline_s: float, is_wanted: IsWanted = always
    ) -> Mapping[str, int]:
        """Have the host hold records."""
        if self._faults.host_refuses:
            raise MigrationError("the host's disk is gone")
        if self._version and not self._has_new_weights:
            raise MigrationError(f"weights version {self._version} is not in the host cache")
        self._held.update(records)
        return {"disk": RECORD_BYTES * len(records)}

    def hint(self, records: Sequence[Record]) -> None:
        """Reading ahead takes no time."""

    def reload(self, record: Record, deadline_s: float, is_wanted: IsWanted = always) -> None:
        """Read a record again; what was wrong with it may be the disk's."""
        if self._rng.random() < 0.5:
            raise MigrationError(f"{record} is damaged on the disk")
        self._faults.wrong_places.discard((record, HOST))

    def release(self, records: Sequence[Record]) -> None:
        """Forget records."""
        self._held.difference_update(records)

    def serve_weights(self, version: int, deadline_s: float) -> None:
        """Have no older records."""
        self._held.clear()
        self._version = version

    def pull(self, record: Record, place: Place, offset: int, into: torch.Tensor) -> Completion:
        """Order a chunk."""
        if self._rng.random() < self._faults.refusals:
            raise MigrationError("the link broke")
        if place == HOST and record not in self._held:
            raise Violation(f"rank {self.rank} pulls {record}, which its host was not asked for")
        if place.rank not in (self.reachable if place.is_far else self.readable) and place != HOST:
            raise Violation(f"rank {self.rank} reads rank {place.rank}, which is on another host")
        source = None
        if place.source is not Source.HOST:
            bank = self._banks[place.rank]
            source = (place.rank, record[0] * bank.num_slots + place.slot)
        row, start = self._banks[self.rank].row_of(into)
        put = self._write(record, place, source, (row, start, len(into)))
        landing = InFlightChunk(self.plan_id(), record, source, (self.rank, row), put)
        if start != offset:
            raise Violation(f"rank {self.rank} writes byte {offset} of {record} to byte {start}")
        self.watch(landing)
        self.in_flight.append(landing)
        return landing

    def _write(
        self, record: Record, place: Place, source: Row | None, span: tuple[int, int, int]
    ) -> Callable[[], None]:
        row, start, size = span
        is_wrong = self._rng.random() < self._faults.wrong_bytes
        is_wrong |= (record, place) in self._faults.wrong_places
        version = self._version

        def put() -> None:
            lanes = slice(start // 4, (start + size) // 4)
            if source is None:
                found = record_words(version)[record][lanes]
            elif source[0] in self.dead and self._rng.random() < 0.5:
                found = np.full(size // 4, -1, dtype=np.int32)  # its memory is gone
            else:
                found = self._banks[source[0]].words[source[1], lanes]
            self._banks[self.rank].words[row, lanes] = ~found if is_wrong else found

        return put

    def land(self, landing: InFlightChunk) -> None:
        """Let a chunk be there."""
        self.in_flight.remove(landing)
        landing.put()
        landing.has_landed = True


# -- the store


class Store(MemoryStore):
    """A store that may fail for a time, and that never blocks."""

    is_down = False

    def wait(self, version: int, timeout_s: float) -> int:
        """Return the version, or raise NotYet instead of waiting."""
        if timeout_s > 0 and version == self.version():
            raise NotYet
        return self.version()

    def _check_open(self) -> None:
        if self.is_down:
            raise StoreError("the disk is full")
        super()._check_open()
