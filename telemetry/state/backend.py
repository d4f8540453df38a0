"""Back ends: tables, a journal and a log of one deployment, and one atomic change of them.

A back end knows nothing of placements or leases. ``telemetry/state/store.py`` decides, over the
four things that a back end has:

    tables     key -> record; one of them, HEAD, is read whole before each decision
    changes    a decision reads tables and names writes; all are made at one moment, or none
    journal    events, numbered in the order of their changes
    log        samples: many, compact, each (stream, source, sequence) once

Every method raises StoreError when the back end itself fails (disk full, read-only, unreachable,
damaged). Methods may be called from any thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import ClassVar, NamedTuple, TypeVar

from eplb.errors import StoreError
from telemetry.state.unreadable import Unreadable

T = TypeVar("T")
Value = str | bytes  # a record: text, or packed
_GREATEST_ID = 2**63 - 1
_SHOWN = 80  # characters of a value that is not what it should be
GAP = 1000  # more numbers than a server gives out in what it may lose in a crash


class Table(NamedTuple):
    """A table of records by key."""

    name: str
    is_ordered: bool = False  # each record has an order, by which ranges are read and pruned
    is_index: bool = False  # ordered, and its records are empty: it has keys alone

    def of(self, *parts: object) -> Table:
        """Return one table among many of this name."""
        return self._replace(name=":".join([self.name, *map(str, parts)]))


HEAD = Table("state")  # few and small records: what decisions rest on, and counters


class Range(NamedTuple):
    """Which records of an ordered table are read."""

    after: float = -inf  # only those of a greater order
    before: float = inf  # only those of a smaller order
    limit: int | None = None
    newest_first: bool = False


ALL, NEWEST = Range(), Range(limit=1, newest_first=True)


class Entry(NamedTuple):
    """A record for the log; a repeated (stream, source, sequence) is not added."""

    stream: str
    source: int
    sequence: int
    time: float
    record: bytes


class JournalLine(NamedTuple):
    """An event as it is stored."""

    id: int  # only grows; never given out again
    time: float  # seconds since the epoch, by the back end's clock
    kind: str
    detail: str


class Write(NamedTuple):
    """A record that a change sets, or removes."""

    value: Value | None  # None: removed
    order: float | None


class Reader(ABC):
    """What can be read of a deployment's tables."""

    unreadable: Unreadable  # counts the records that whoever reads the deployment skips

    @abstractmethod
    def get(self, table: Table, key: object) -> Value | None:
        """Return a record, or None."""

    @abstractmethod
    def scan(self, table: Table, within: Range = ALL) -> list[tuple[str, Value]]:
        """Return (key, record) by order and key; of a table without an order, all by key."""


class Change(Reader):
    """The reads and writes of one decision; ``get`` sees its own writes, ``scan`` does not.

    Args:
        time: seconds since the epoch, by the back end's clock.
        reader: the tables as they are at that moment.
        server: id of this start of a server that may lose its last writes in a crash; "": none may.
        head: the records of HEAD, where they were read at that moment.
    """

    def __init__(
        self,
        time: float,
        reader: Reader,
        server: str = "",
        head: Mapping[str, Value] | None = None,
    ) -> None:
        self.time, self._reader, self._server, self._head = time, reader, server, head
        self.unreadable = reader.unreadable
        self.writes: dict[tuple[Table, str], Write] = {}
        self.events: list[tuple[str, str]] = []  # kind, detail
        self.is_awaited = False  # readers wait for it

    @property
    def is_empty(self) -> bool:
        """Whether it changes nothing."""
        return not (self.writes or self.events or self.is_awaited)

    def get(self, table: Table, key: object) -> Value | None:
        """Return a record, or None."""
        write = self.writes.get((table, str(key)))
        if write is not None:
            return write.value
        if table == HEAD and self._head is not None:
            return self._head.get(str(key))
        return self._reader.get(table, key)

    def scan(self, table: Table, within: Range = ALL) -> list[tuple[str, Value]]:
        """Return (key, record), as they were before this change."""
        return self._reader.scan(table, within)

    def put(self, table: Table, key: object, value: Value, order: float | None = None) -> None:
        """Set a record. A key that is a number is its own order, unless one is given."""
        if table.is_ordered and order is None:
            order = float(key)  # type: ignore[arg-type]  # a number
        self.writes[table, str(key)] = Write(value, order)

    def delete(self, table: Table, key: object) -> None:
        """Remove a record, if there is one."""
        self.writes[table, str(key)] = Write(None, None)

    def append(self, kind: str, detail: str) -> None:
        """Append an event; readers that wait are woken."""
        self.events.append((kind, detail))
        self.is_awaited = True

    def wake(self) -> None:
        """Wake readers that wait, without an event."""
        self.is_awaited = True

    def last(self, counter: str) -> int:
        """Return the greatest number of a counter that may have been given out.

        After a start of the server that is a gap above the greatest that is known: it may have lost
        the last ones that it acknowledged.
        """
        given_by = self.get(HEAD, f"server_of_{counter}")
        gap = 0 if given_by is None or text_of(given_by) == self._server else GAP
        return number_in(self.get(HEAD, f"last_{counter}"), f"the last {counter}") + gap

    def next(self, counter: str) -> int:
        """Give out the next number of a counter."""
        return self.give_out(counter, self.last(counter) + 1)

    def give_out(self, counter: str, number: int) -> int:
        """Note that a number is the greatest of its counter, and return it."""
        self.put(HEAD, f"last_{counter}", str(number))
        if self._server:
            self.put(HEAD, f"server_of_{counter}", self._server)
        return number


class Backend(Reader):
    """One deployment's tables, journal and log in a store."""

    kind: ClassVar[str]  # name in messages and metrics: memory, sqlite, redis
    deployment: str

    @abstractmethod
    def decide(self, what: str, decision: Callable[[Change], T]) -> T:
        """Let a decision read and name writes, and make them all at one moment.

        The decision may run again, on what another change made meanwhile. If it raises, nothing is
        changed. ``what`` names it in errors.
        """

    @abstractmethod
    def make(self, what: str, write: Callable[[Change], None]) -> list[int]:
        """Make writes that rest on nothing that was read; return the ids of their events."""

    def put(self, table: Table, key: object, value: Value) -> None:
        """Set a record by itself; no reader waits for it."""
        self.make(f"writing of {table.name}", lambda change: change.put(table, key, value))

    @abstractmethod
    def prune(self, table: Table, before: float) -> int:
        """Remove the records of an ordered table with a smaller order, and return how many."""

    @abstractmethod
    def now(self) -> float:
        """Return seconds since the epoch, by the back end's clock."""

    @abstractmethod
    def journal(
        self, *, after: int = 0, before: int | None = None, limit: int, newest_first: bool = False
    ) -> list[JournalLine]:
        """Return events past the id ``after`` and below the id ``before``, by their ids."""

    @abstractmethod
    def prune_journal(self, keep: int) -> int:
        """Remove all but the latest ``keep`` events, and return how many."""

    @abstractmethod
    def append(self, entries: Sequence[Entry]) -> int:
        """Add records to the log, and return how many were new. What it returned for stays."""

    @abstractmethod
    def read(self, stream: str, after: int, limit: int) -> list[tuple[int, bytes]]:
        """Return (cursor, record) of a stream past a cursor, in order of arrival."""

    @abstractmethod
    def cursor_before(self, stream: str, latest: int) -> int:
        """Return the cursor past which a stream has so many records, the latest; 0: or fewer."""

    @abstractmethod
    def read_between(
        self, since: float, before: float, after: int, limit: int
    ) -> list[tuple[int, bytes]]:
        """Return (cursor, record) of every stream, of times in [since, before), past a cursor."""

    @abstractmethod
    def counts(self, stream: str) -> dict[int, int]:
        """Return how many records of each source were added, those included that were pruned."""

    @abstractmethod
    def prune_log(self, before: float) -> int:
        """Remove the records of times below ``before``, and return how many."""

    def why_full(self) -> str:
        """Return why the back end has no room for changes; "": it takes them, or was not asked."""
        return ""

    def make_room(self) -> bool:
        """Give a full store room for the kill switch; False: there is none to give."""
        return False

    @abstractmethod
    def version(self) -> int:
        """Return a number that grows with each change that readers wait for."""

    @abstractmethod
    def wait(self, version: int, timeout_s: float) -> int:
        """Return the version once it differs from ``version``, or after ``timeout_s``."""

    @abstractmethod
    def close(self) -> None:
        """Release files and threads and end every wait; what was acknowledged stays."""


def in_key_order(records: Iterable[tuple[str, Value]]) -> list[tuple[str, Value]]:
    """Return the records of a table without an order: numbers first, then names."""
    return sorted(records, key=lambda record: (not record[0].isdigit(), *_number_first(record[0])))


def _number_first(key: str) -> tuple[int, str]:
    return (int(key), "") if key.isdigit() else (0, key)


def text_of(value: Value, what: str = "a value of the store") -> str:
    """Return a record that is text as such.

    Raises:
        StoreError: it is no text.
    """
    try:
        return value if isinstance(value, str) else value.decode()
    except UnicodeDecodeError as exc:
        raise StoreError(f"{what} is {_excerpt(value)}, expected text: {exc}") from exc


def number_in(value: Value | None, what: str) -> int:
    """Return the whole number that a record is; 0: there is none, or an empty one.

    Raises:
        StoreError: it is something else.
    """
    try:
        number = int(value or 0)
    except ValueError:
        number = _GREATEST_ID + 1
    if abs(number) > _GREATEST_ID:
        raise StoreError(f"{what} is {_excerpt(value)}, expected a whole number below 2**63")
    return number


def packed(value: Value, what: str) -> bytes:
    """Return a record that is packed as such.

    Raises:
        StoreError: it is text.
    """
    if isinstance(value, bytes):
        return value
    raise StoreError(f"{what} is the text {_excerpt(value)}, expected a packed record")


def _excerpt(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
