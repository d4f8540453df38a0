"""Simulated transport, whose bytes arrive late or wrong, and a simulated store."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from types import MethodType
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from eplb.clock import Clock
from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.errors import MigrationError, PlacementError, StoreError
from eplb.migration.build import Migration, Mode, Pace, Source, build_migration
from rebalance.types import IsWanted, Outcome, Record, always
from rebalance.weights.sources import HOST, Place, WeightSources, ranks_beside
from runtime.memory import digest
from runtime.streams import Completion
from telemetry.state.memory import MemoryBackend
from telemetry.state.store import StateStore

T = TypeVar("T")

# -- Votes that arrive late at some ranks, or break when a rank dies.


class Violation(AssertionError):
    """Something that must never happen, happened."""


class NotYet(Exception):
    """A wait that only others can end."""


class Votes:
    """All votes of a group, each rank's in order."""

    def __init__(self, num_ranks: int, rng: random.Random) -> None:
        self.num_ranks, self._rng = num_ranks, rng
        self.dead: set[int] = set()
        self._ballots: list[dict[int, list[int]]] = []  # per vote, by rank

    def add(self, rank: int, number: int, ballot: list[int]) -> None:
        """Take a ballot."""
        if number == len(self._ballots):
            self._ballots.append({})
        self._ballots[number][rank] = ballot

    def can_end(self, number: int) -> bool:
        """Say whether every rank has voted, or one never will."""
        return len(self._ballots[number]) == self.num_ranks or bool(self.dead)

    def end(self, number: int) -> tuple[Outcome, list[int]]:
        """How a vote that can end ends for one rank; after a death that differs among ranks."""
        ballots = self._ballots[number]
        if len(ballots) < self.num_ranks or (self.dead and self._rng.random() < 0.5):
            return Outcome.BROKEN, []
        columns = zip(*ballots.values(), strict=True)
        return Outcome.VALUE, [min(column) for column in columns]


class Member:
    """One rank's votes."""

    def __init__(self, votes: Votes, rank: int) -> None:
        self.votes, self.rank, self.number = votes, rank, -1
        self.known_dead: frozenset[int] = frozenset()  # by its liveness connections
        self.result: tuple[Outcome, list[int]] | None = None  # of the latest vote, once it arrived

    def cast(self, ballot: Sequence[int]) -> Pending:
        """Start a vote."""
        self.number, self.result = self.number + 1, None
        self.votes.add(self.rank, self.number, list(ballot))
        return Pending(self, self.number)

    @property
    def can_arrive(self) -> bool:
        """Say whether the latest vote's result is on its way."""
        is_cast = self.number >= 0 and self.rank not in self.votes.dead
        return is_cast and self.result is None and self.votes.can_end(self.number)

    def arrive(self) -> None:
        """Let the latest vote's result be there."""
        self.result = self.votes.end(self.number)

    def dead(self) -> frozenset[int]:
        """Ranks whose liveness connections broke, as far as this rank has been told."""
        return self.known_dead

    def begin_beats(self) -> None:
        """Nobody is silent here."""

    def close(self, *, is_failure: bool = False) -> None:
        """Leave; only a death makes a rank dead here."""


class Pending:
    """A vote under way."""

    def __init__(self, member: Member, number: int) -> None:
        self._member, self._number = member, number

    def poll(self, timeout_s: float) -> tuple[Outcome, list[int]]:
        """Look, or wait where the scheduler knows that a wait ends."""
        member = self._member
        if self._number != member.number:
            raise Violation(f"rank {member.rank} reads vote {self._number} after {member.number}")
        if member.result is None and timeout_s > 0:
            if not member.can_arrive:
                raise Violation(f"rank {member.rank} waits for a vote that others have yet to cast")
            member.arrive()
        return member.result or (Outcome.LATE, [])


# -- Deployments of the schedules: ranks, their slots, and placements to move between.
#
# Building a migration takes longer than a whole schedule, so there is a fixed number of
# deployments, and their migrations are cached. Migrations are frozen: schedules share nothing that
# they change.

NUM_DEPLOYMENTS = 60
NUM_RANKS = 3
HOSTS = {3: ([0, 0, 0], [0, 0, 1], [0, 1, 2]), 4: ([0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 2, 3])}
MOST_CACHED = 4000  # migrations of a deployment


class CachedMigration(Migration):
    """A migration that computes each placement once for all three ranks."""

    def placement_after(self, num_transactions: int) -> Placement:
        """The placement that serves once the first ``num_transactions`` are applied."""
        known: dict[int, Placement] = self.__dict__.setdefault("known", {})
        if num_transactions not in known:
            known[num_transactions] = super().placement_after(num_transactions)
        return known[num_transactions]


@dataclass
class Deployment:
    """One set of ranks, and target placements."""

    topology: Topology
    pace: Pace
    start: Placement
    targets: tuple[Placement, ...]
    known: dict[tuple[object, ...], Migration | None] = field(default_factory=dict)

    def migration(
        self, base: Placement, target: int, plan_id: int, version: int
    ) -> Migration | None:
        """The migration from ``base`` to a target; None where there is nothing to do."""
        key = (base.hash, base.generation, target, plan_id, version)
        if key not in self.known:
            if len(self.known) > MOST_CACHED:
                self.known.clear()
            self.known[key] = self._build(base, self.targets[target], plan_id, version)
        return self.known[key]

    def _build(
        self, base: Placement, target: Placement, plan_id: int, version: int
    ) -> Migration | None:
        try:
            built = build_migration(
                base,
                target,
                self.topology,
                plan_id=plan_id,
                pace=self.pace,
                weights_version=version,
            )
        except (MigrationError, PlacementError):
            return None  # e.g. a mix of layers that the target cannot follow with these spares
        if not built.transactions:
            return None
        return CachedMigration(**{one.name: getattr(built, one.name) for one in fields(built)})


@cache
def deployment(number: int, num_ranks: int = NUM_RANKS) -> Deployment:
    """One of NUM_DEPLOYMENTS, always the same."""
    rng = random.Random(1000 + number)
    mode: Mode = rng.choice(["copy", "flip"])
    num_layers, num_experts, filled = rng.randint(2, 4), rng.choice([3, 4]), 2
    spares = rng.choice([1, 2]) if mode == "flip" else 0
    num_slots = filled + spares
    pace = Pace(
        staging_experts=0 if mode == "flip" else rng.randint(2, 4),
        transactions_per_commit=rng.choice([1, 1, 2]),
        mode=mode,
        spare_slots=spares,
        layers_per_transaction=rng.choice([0, 1, 1, 2]),
    )
    topology = Topology(
        np.zeros(num_ranks, dtype=np.int32),
        np.full(num_ranks, num_slots, dtype=np.int32),
        host_of_rank=np.array(rng.choice(HOSTS[num_ranks]), dtype=np.int32),
    )

    def placement() -> Placement:
        rows = [_row(rng, num_ranks, num_experts, filled, num_slots) for _ in range(num_layers)]
        return Placement(np.array(rows), num_experts)

    return Deployment(topology, pace, placement(), tuple(placement() for _ in range(3)))


def _row(
    rng: random.Random, num_ranks: int, num_experts: int, filled: int, num_slots: int
) -> list[int]:
    """One layer: every expert somewhere, none twice on a rank."""
    while True:
        held = [rng.sample(range(num_experts), filled) for _ in range(num_ranks)]
        if len({expert for experts in held for expert in experts}) == num_experts:
            spare = [EMPTY] * (num_slots - filled)
            return [expert for experts in held for expert in experts + spare]


# -- A rank's memory and its stream of work, in place of a GPU: orders are done later, in order.
#
# Bytes name what they are: every 32-bit lane of a record tells weights version, layer, expert and
# its own position, so that half a record or another one's is never taken for the right one.
#
# Shapes:  L MoE layers, C slots of a rank, K staging entries, S slots of all ranks.

LANES = 4
RECORD_BYTES = 4 * LANES
MOST_LAYERS, MOST_EXPERTS = 8, 8


@cache
def record_words(version: int) -> NDArray[np.int32]:
    """[MOST_LAYERS, MOST_EXPERTS, LANES] of every expert of a weights version."""
    count = MOST_LAYERS * MOST_EXPERTS * LANES
    words = 1 + version * count + np.arange(count, dtype=np.int32)
    return words.reshape(MOST_LAYERS, MOST_EXPERTS, LANES)


@cache
def digest_table(version: int, num_layers: int, num_experts: int) -> torch.Tensor:
    """[L, E, 2] of a weights version."""
    words = record_words(version)
    return torch.tensor(
        [
            [digest(torch.from_numpy(words[layer, expert])) for expert in range(num_experts)]
            for layer in range(num_layers)
        ]
    )


class Event(Completion):
    """A point of a rank's stream."""

    def __init__(self, *, is_done: bool) -> None:
        super().__init__(is_cuda=False)
        self.is_done = is_done

    def is_complete(self) -> bool:
        """Say whether the stream has passed it."""
        return self.is_done


@dataclass(frozen=True)
class Copy:
    """The copy of a staging entry into a live slot, by their rows in the bank."""

    entry: int
    row: int


@dataclass(frozen=True, eq=False)
class Step:
    """The kernels of one step: they route by this table, and read the slots that it names."""

    number: int
    rows: NDArray[np.int32]  # [L, S] expert of each slot, EMPTY where no token goes
    identity: tuple[bytes, int]  # the rows' bytes, and the weights version


@dataclass
class Stream:
    """What a rank's device was told to do and has not done yet."""

    is_immediate: bool  # as on a CPU: a copy is done when it is ordered
    queue: deque[Copy | Event | Step] = field(default_factory=deque)
    watch: Callable[[Copy], None] = lambda copy: None  # told of a copy when ordered and when made

    @property
    def num_steps(self) -> int:
        """Steps that were begun by the host and not made."""
        return sum(isinstance(order, Step) for order in self.queue)


@dataclass(frozen=True)
class Schema:
    """What a record is made of."""

    record_bytes: int = RECORD_BYTES


class Bank:
    """Live slots and staging entries, row by row: [L x C live, K staging]."""

    handle = ""

    def __init__(self, num_layers: int, num_slots: int, num_staging: int, stream: Stream) -> None:
        self.num_layers, self.num_slots, self.num_staging = num_layers, num_slots, num_staging
        self.schema = Schema()
        self.num_live, self.device = num_layers * num_slots, torch.device("cpu")
        self.words = np.zeros((self.num_live + num_staging, LANES), dtype=np.int32)
        whole = torch.from_numpy(self.words.view(np.uint8))
        self.records = list(whole.unbind())
        self._start, self.stream = whole.data_ptr(), stream

    def row_of(self, into: torch.Tensor) -> tuple[int, int]:
        """(row, byte in it) that a part of a record begins at."""
        return divmod(into.data_ptr() - self._start, RECORD_BYTES)

    def live(self, layer: int, slot: int) -> torch.Tensor:
        """Record of a live slot."""
        return self.records[layer * self.num_slots + slot]

    def staging(self, entry: int) -> torch.Tensor:
        """Record of a staging entry."""
        return self.records[self.num_live + entry]

    def swap(self, layer: int, slot: int, entry: int) -> None:
        """Order the copy of a staged record into a live slot."""
        copy = Copy(self.num_live + entry, layer * self.num_slots + slot)
        self.stream.watch(copy)
        if self.stream.is_immediate:
            self.make(copy)
        else:
            self.stream.queue.append(copy)

    def make(self, copy: Copy) -> None:
        """Copy now."""
        self.words[copy.row] = self.words[copy.entry]

    def mark(self) -> Completion:
        """Return what tells when all that was ordered so far is made."""
        event = Event(is_done=self.stream.is_immediate or not self.stream.queue)
        if not event.is_done:
            self.stream.queue.append(event)
        return event

    def digest(self, layer: int, slot: int) -> tuple[int, int]:
        """Digest of a live slot."""
        return digest(self.live(layer, slot))


@dataclass(frozen=True)
class TableLayers:
    """Rows of some layers, ready to be copied into a table."""

    layers: list[int]
    rows: NDArray[np.int32]
    generation: int


class Table:
    """Which expert each slot is routed to for; it stands in for the tensors of a routing table."""

    strays = torch.zeros(1, dtype=torch.int32)

    def __init__(self, placement: Placement) -> None:
        self.rows = placement.slot_to_expert.copy()
        self.generation = placement.generation

    def prepare(self, placement: Placement, layers: Iterable[int]) -> TableLayers:
        """Work out the rows of some layers."""
        chosen = sorted(layers)
        return TableLayers(chosen, placement.slot_to_expert[chosen], placement.generation)

    def load(self, placement: Placement, layers: Iterable[int]) -> None:
        """Let all layers serve."""
        self.rows, self.generation = placement.slot_to_expert.copy(), placement.generation

    def swap(self, prepared: TableLayers) -> None:
        """Let prepared layers serve. Steps that were begun keep what they were begun with."""
        self.rows = self.rows.copy()
        self.rows[prepared.layers] = prepared.rows
        self.generation = prepared.generation


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


class Host:
    """The simulated memory of one rank's host."""

    ranks: frozenset[int] = frozenset()
    room = 100

    def __init__(self, faults: Faults, rng: random.Random) -> None:
        self._faults, self._rng = faults, rng
        self.leased: set[Record] = set()
        self.version, self._has_new_weights = 0, rng.random() < 0.5

    def lease(
        self, records: Sequence[Record], *, deadline_s: float, is_wanted: IsWanted = always
    ) -> int:
        """Have records in memory."""
        if self.leased.issuperset(records):
            return 0
        if self._faults.host_refuses:
            raise MigrationError("the host's disk is gone")
        if self.version and not self._has_new_weights:
            raise MigrationError(f"weights version {self.version} is not in the host cache")
        self.leased.update(records)
        return RECORD_BYTES * len(records)

    def hint(self, records: Sequence[Record]) -> None:
        """Reading ahead takes no time."""

    def reload(self, record: Record, *, deadline_s: float, is_wanted: IsWanted = always) -> None:
        """Read a record again; what was wrong with it may be the disk's."""
        if self._rng.random() < 0.5:
            self.leased.discard(record)
            raise MigrationError(f"{record} is damaged on the disk")
        self._faults.wrong_places.discard((record, HOST))

    def release(self, records: Collection[Record] | None = None) -> None:
        """Forget records."""
        self.leased.difference_update(self.leased.copy() if records is None else records)

    def invalidate(self, version: int, *, deadline_s: float) -> None:
        """Have no older records."""
        self.leased.clear()
        self.version = version


class Transport(WeightSources):
    """The simulated sources of one rank."""

    def __init__(
        self, rank: int, topology: Topology, banks: list[Bank], faults: Faults, rng: random.Random
    ) -> None:
        self.rank, self.bank = rank, banks[rank]
        self._banks, self._faults, self._rng = banks, faults, rng
        self.readable = frozenset([rank, *ranks_beside(rank, topology)])
        self.host = self._host = Host(faults, rng)  # type: ignore[assignment]
        self.in_flight: list[InFlightChunk] = []
        self.dead: set[int] = set()
        self.watch: Callable[[InFlightChunk], None] = lambda landing: None
        self.plan_id: Callable[[], int] = lambda: 0

    def begin(self, device: torch.device) -> None:
        """No device to bind to."""

    def invalidate(self, version: int, *, deadline_s: float) -> None:
        """Have no older records on the host."""
        self._host.invalidate(version, deadline_s=deadline_s)

    def end_copies(self) -> None:
        """Copies that are under way stay so: the rank does not go on elsewhere."""

    def pull(self, record: Record, place: Place, offset: int, into: torch.Tensor) -> Completion:
        """Order a chunk."""
        if self._rng.random() < self._faults.refusals:
            raise MigrationError("the link broke")
        if place == HOST and record not in self._host.leased:
            raise Violation(f"rank {self.rank} pulls {record}, which its host was not asked for")
        if place.rank not in self.readable and place != HOST:
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
        version = self._host.version

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


class Failing(MemoryBackend):
    """A back end that may fail for a time, and that counts its changes."""

    is_down = False

    @property
    def state(self) -> int:
        """A value that differs after each change."""
        return self.num_writes

    @property
    def known_version(self) -> int:
        """The version, also while it fails."""
        was_down, self.is_down = self.is_down, False
        try:
            return self.version()
        finally:
            self.is_down = was_down

    def check_open(self) -> None:
        """Refuse a use while it fails."""
        if self.is_down:
            raise StoreError("the disk is full")
        super().check_open()


class Store(StateStore):
    """A store that may fail for a time, and that never blocks."""

    def __init__(self, deployment: str, *, clock: Clock) -> None:
        self.failing = Failing(deployment, clock=clock)
        super().__init__(self.failing, monotonic=clock)
        self._peeked: dict[object, Any] = {}
        self._peeked_in = -1

    @property
    def is_down(self) -> bool:
        """Whether every call fails."""
        return self.failing.is_down

    @is_down.setter
    def is_down(self, is_down: bool) -> None:
        self.failing.is_down = is_down

    @property
    def known_version(self) -> int:
        """The version, for the schedule alone."""
        return self.failing.known_version

    def peek(self, read: Callable[[], T]) -> T:
        """Read what a call would, if the store did not fail: for the schedule alone.

        A method's answer is kept until the next change: schedules look before every turn.
        """
        if isinstance(read, MethodType):
            if self._peeked_in != self.failing.state:
                self._peeked.clear()
                self._peeked_in = self.failing.state
            if read.__func__ not in self._peeked:
                self._peeked[read.__func__] = self._peek(read)
            known: T = self._peeked[read.__func__]
            return known
        return self._peek(read)

    def _peek(self, read: Callable[[], T]) -> T:
        was_down, self.is_down = self.is_down, False
        try:
            return read()
        finally:
            self.is_down = was_down

    def wait(self, version: int, timeout_s: float) -> int:
        """Return the version, or raise NotYet instead of waiting."""
        if timeout_s > 0 and version == self.version():
            raise NotYet
        return self.version()
