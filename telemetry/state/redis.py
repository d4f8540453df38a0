"""The back end for several hosts: one Redis server, or one slot of a Redis Cluster.

What is acknowledged is as safe as the server's append-only file makes it; ``durability`` reports
how safe that is. A crash on the client's side loses nothing. When the server does not respond, a
call retries for some seconds and then raises StoreError. Whether a change was made in the meantime
is then unknown, and safe to request again.

A decision reads HEAD, and sends its writes with the revision that it read. Redis makes them if
nothing was decided since; otherwise it decides again. Writes that rest on nothing, such as an
event, have no revision. A server that crashed, or a replica that took over, may have lost what was
last acknowledged. So the revision is the id of the last decision, not a number that could come
again; and counters leave a gap with each start of the server (``Change.last``).

The keys of a deployment are ``prefix:{deployment}:name``. Redis Cluster hashes what stands in the
braces, so all lie in one slot, on one server, where a script may use them together.

    state        HASH    HEAD: what decisions rest on, counters, revision, version
    TABLE        HASH    key -> record; of an ordered table TABLE:order ZSET: key by its order
    events       STREAM  id-0: time, kind, detail
    sampled      SET     names of the streams of the log
    samples:RUN  STREAM  cursor-0: record
    times:RUN    ZSET    cursor by the time of its record
    seen:RUN     HASH    source -> how many records, and which sequences
    receipt:ID   STRING  answer to a change of the last two minutes
    wake         channel: a change was made; a hint, never data
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from threading import Event, Lock
from typing import Any, Literal, TypeVar

from eplb.clock import Clock
from eplb.errors import StoreError
from eplb.settings.deployment import check_deployment_name
from telemetry.state.backend import (
    ALL,
    HEAD,
    Backend,
    Change,
    Entry,
    JournalLine,
    Range,
    Table,
    Value,
    in_key_order,
    number_in,
    text_of,
)
from telemetry.state.redis_address import RedisAddress, parse_address
from telemetry.state.redis_link import LinkError, RedisLink, Trouble
from telemetry.state.redis_scripts import APPEND, CHANGE, LOOK, PRUNE, PRUNE_SAMPLES, REPAIR
from telemetry.state.unreadable import Unreadable

SCHEMA_VERSION = "2"  # counts up with each change of the layout above
OLDEST_SERVER = (6, 2)
_AT_ONCE = 500  # records of a script, which blocks all other clients: some milliseconds
_LOOK_S = 0.25  # poll interval while notifications arrive: also the time to detect a closed store
_DEAF_LOOK_S = 0.05  # poll interval without notifications
_DEAF_S = 5.0  # time without notifications after a failure of their connection

# What acknowledged changes survive:
#   always    kill -9 and power loss: written and synced before the answer
#   everysec  both but for the last two seconds at most: a write waits for a slow sync to end
#   no        kill -9, most of the time; power loss costs what the system had not written yet
#   none      there is no append-only file: what came after the last snapshot is lost
#   unknown   the server does not let its settings be read
Durability = Literal["always", "everysec", "no", "none", "unknown"]

T = TypeVar("T")
log = logging.getLogger(__name__)


class RedisBackend(Backend):
    """One deployment in Redis. Threads may share it; each process opens its own.

    Args:
        clock: for times in place of the server's, for tests and simulations.

    Raises:
        ConfigError: the URL or the deployment's name cannot be used.
        StoreError: the server cannot be reached or must not be trusted with placements.
    """

    kind = "redis"

    def __init__(
        self, url: str | RedisAddress, deployment: str, *, clock: Clock | None = None
    ) -> None:
        address = url if isinstance(url, RedisAddress) else parse_address(url)
        check_deployment_name(deployment)
        self.deployment, self._clock = deployment, clock
        self.unreadable = Unreadable()
        self._prefix = f"{address.prefix}:{{{deployment}}}:"
        self._state, self._events = self._key("state"), self._key("events")
        self.link = RedisLink(address)
        try:
            self.durability: Durability = self._check_server()
            self._repair()
        except BaseException:
            self.link.close()
            raise
        self._waiter = _Waiter(self.link, self._key("wake"), self.version)

    # -- tables

    def get(self, table: Table, key: object) -> Value | None:
        """Return a record, or None."""
        value: bytes | None = self.link.read("HGET", self._key(table.name), str(key))
        return value

    def scan(self, table: Table, within: Range = ALL) -> list[tuple[str, Value]]:
        """Return (key, record) by order and key."""
        if not table.is_ordered:
            records = self.link.read("HGETALL", self._key(table.name))
            return in_key_order(self._named(table, records.items()))
        command, bounds = "ZRANGEBYSCORE", (f"({within.after!r}", f"({within.before!r}")
        if within.newest_first:
            command, bounds = "ZREVRANGEBYSCORE", bounds[::-1]
        most = -1 if within.limit is None else within.limit
        keys = self.link.read(command, self._key(table.name, "order"), *bounds, "LIMIT", 0, most)
        if table.is_index or not keys:
            return self._named(table, ((key, b"") for key in keys))
        values = self.link.read("HMGET", self._key(table.name), *keys)
        pairs = zip(keys, values, strict=True)
        return self._named(table, ((key, value) for key, value in pairs if value is not None))

    def _named(
        self, table: Table, records: Iterable[tuple[bytes, Value]]
    ) -> list[tuple[str, Value]]:
        keys = [(key, (key, value)) for key, value in records]
        of_text = self.unreadable.readable(keys, lambda r: (text_of(r[0]), r[1]), table.name)
        return [record for _, record in of_text]

    def put(self, table: Table, key: object, value: Value) -> None:
        """Set a record by itself."""
        assert not table.is_ordered, "an ordered table is written in a change"
        self.link.write("HSET", self._key(table.name), str(key), value)

    def prune(self, table: Table, before: float) -> int:
        """Remove the records of an ordered table with a smaller order."""
        keys = (self._key(table.name), self._key(table.name, "order"))
        return self._in_parts(f"pruning of {table.name}", PRUNE, keys, (f"({before!r}",))

    # -- changes

    def decide(self, what: str, decision: Callable[[Change], T]) -> T:
        """Let a decision read and name writes, and make them; repeat both after a conflict.

        Raises:
            StoreError: others came first for as long as a call may take.
        """
        limit_s = self.link.address.limits.deadline_s
        deadline = time.monotonic() + limit_s
        while True:
            now, server, head = self._look()
            change = Change(now, self, server, head)
            result = decision(change)
            if change.is_empty or self._made(what, change, head) is not None:
                return result
            if time.monotonic() > deadline:
                raise StoreError(
                    f"Redis store {self.link.address}: {what} lost to concurrent changes for "
                    f"{limit_s:g} s, expected to be applied"
                )

    def make(self, what: str, write: Callable[[Change], None]) -> list[int]:
        """Make writes that rest on nothing that was read."""
        change = Change(self._clock() if self._clock is not None else 0.0, self)
        write(change)
        ids = self._made(what, change, None)
        assert ids is not None, "a change without a revision cannot conflict"
        return ids

    def now(self) -> float:
        """Return seconds since the epoch, by the server's clock unless one was given."""
        return self._clock() if self._clock is not None else self._look()[0]

    def _look(self) -> tuple[float, str, Mapping[str, Value]]:
        """Read the clock, the id of this start of the server, and HEAD, at one moment."""
        (seconds, micros), server, flat = self.link.run(
            f"look at {self._state}", LOOK, (self._state,), is_write=False
        )
        now = int(seconds) + int(micros) / 1e6 if self._clock is None else self._clock()
        fields = zip(flat[::2], flat[1::2], strict=True)
        return now, server.decode(), dict(self._named(HEAD, fields))

    def _made(
        self, what: str, change: Change, head: Mapping[str, Value] | None
    ) -> list[int] | None:
        """Ids of the events, or None when another decision came first."""
        # Not seeded: no two changes may ever have the same id.
        change_id = secrets.token_hex(8)
        keys = [self._state, self._events, self._key("receipt", change_id)]
        state_words: list[Any] = []
        before, after = list[Any](), list[Any]()

        def command(part: list[Any], name: str, key: str, *words: Any) -> None:
            if key not in keys:
                keys.append(key)
            part += [name, keys.index(key) + 1, len(words), *words]

        for (table, key), write in change.writes.items():
            records, order = self._key(table.name), self._key(table.name, "order")
            if table == HEAD:
                state_words += [key, write.value]
            elif write.value is None:  # after the state, which must never refer to what is removed
                if not table.is_index:
                    command(after, "HDEL", records, key)
                if table.is_ordered:
                    command(after, "ZREM", order, key)
            else:
                if not table.is_index:
                    command(before, "HSET", records, key, write.value)
                if table.is_ordered:
                    command(before, "ZADD", order, repr(write.order), key)
        if head is not None and "schema" not in head:  # a server that lost its contents
            state_words += ["schema", SCHEMA_VERSION]
        values: list[Any] = [
            "" if head is None else head.get("revision", "none"),
            change_id,
            "" if self._clock is None else repr(change.time),
            int(change.is_awaited),
            self._key("wake"),
            len(change.events),
            *(word for event in change.events for word in event),
            len(state_words),
            *state_words,
        ]
        values += [len(values) + 2 + len(before), *before, *after]
        answer, *event_ids = self.link.run(what, CHANGE, keys, values).decode().split()
        return [int(event) for event in event_ids] if answer == "made" else None

    # -- the journal

    def journal(
        self, *, after: int = 0, before: int | None = None, limit: int, newest_first: bool = False
    ) -> list[JournalLine]:
        """Return events past an id and below another.

        An id is the server's clock in milliseconds, or one more than the last.
        """
        first, last = f"{max(0, after) + 1}-0", "+" if before is None else f"({before}-0"
        if newest_first:
            entries = self.link.read("XREVRANGE", self._events, last, first, "COUNT", limit)
        else:
            entries = self.link.read("XRANGE", self._events, first, last, "COUNT", limit)
        return [_line_of(_number_of(entry_id), fields) for entry_id, fields in entries]

    def prune_journal(self, keep: int) -> int:
        """Remove all but the latest ``keep`` events."""
        return int(self.link.write("XTRIM", self._events, "MAXLEN", "=", keep))

    # -- the log

    def why_full(self) -> str:
        """Return why the server refuses changes for want of memory or disk; "": it takes them."""
        try:
            # A write that changes nothing, and is refused like any other.
            self.link.write("HSETNX", self._state, "schema", SCHEMA_VERSION)
        except LinkError as exc:
            if exc.trouble in (Trouble.FULL, Trouble.NOT_SAVING):
                return str(exc)  # another failure is told by those who read and write
        return ""

    def make_room(self) -> bool:
        """Forget the oldest samples, which a full server lets go, until it takes a change."""
        for stream in self._streams():
            keys = [self._key("sampled"), self._key("samples", stream), self._key("times", stream)]
            what, asked = f"room in run {stream!r}", (stream, "inf", _AT_ONCE)
            while self.why_full() and int(self.link.run(what, PRUNE_SAMPLES, keys, asked)):
                log.warning("run %s: forgot old samples, to have room for a change", stream)
        return not self.why_full()

    def append(self, entries: Sequence[Entry]) -> int:
        """Add records to the log.

        A repeat is detected by the sequences seen of its source, which outlive the records: a spool
        may send again what was pruned, and it counts once.
        """
        for entry in entries:
            # Lua counts in doubles; and a script that fails half way is not undone, so nothing may
            # reach it that it cannot take.
            if abs(entry.sequence) >= 2**53:
                raise StoreError(
                    f"sample of rank {entry.source} has sequence {entry.sequence}, expected one "
                    "below 2**53"
                )
        parts = (entries[at : at + _AT_ONCE] for at in range(0, len(entries), _AT_ONCE))
        return sum(map(self._append, parts))

    def read(self, stream: str, after: int, limit: int) -> list[tuple[int, bytes]]:
        """Return (cursor, record) of a stream past a cursor."""
        return list(islice(self._records(stream, after + 1), limit))

    def cursor_before(self, stream: str, latest: int) -> int:
        """Return the cursor past which a stream has so many records, the latest; 0: or fewer."""
        key = self._key("samples", stream)
        newest_first = self.link.read("XREVRANGE", key, "+", "-", "COUNT", latest + 1)
        return _number_of(newest_first[latest][0]) if len(newest_first) > latest else 0

    def read_between(
        self, since: float, before: float, after: int, limit: int
    ) -> list[tuple[int, bytes]]:
        """Return (cursor, record) of every stream, of times in [since, before)."""
        bounds = (repr(float(since)), f"({float(before)!r}")
        cursors = sorted(
            (cursor, stream)
            for stream in self._streams()
            for cursor in self._cursors(stream, bounds)
            if cursor > after
        )[:limit]
        records = []
        for stream in {stream for _, stream in cursors}:
            wanted = [cursor for cursor, of in cursors if of == stream]
            wanted_set = set(wanted)
            for first, last in _close_together(wanted):
                near = self._records(stream, first, last)
                records += [record for record in near if record[0] in wanted_set]
        return sorted(records)

    def counts(self, stream: str) -> dict[int, int]:
        """Return how many records of each source were added, those included that were pruned."""
        seen = self.link.read("HGETALL", self._key("seen", stream))
        counts = [(name, text) for name, text in seen.items() if name.isdigit()]
        of_source = self.unreadable.readable(counts, _count_in, f"count of run {stream} for rank")
        return dict(sorted((int(name), number) for name, number in of_source))

    def prune_log(self, before: float) -> int:
        """Remove the records of times below ``before``."""
        self._repair()
        num_pruned, bound = 0, repr(float(before))
        for stream in self._streams():
            keys = [self._key("sampled"), self._key("samples", stream), self._key("times", stream)]
            what = f"pruning of run {stream!r}"
            num_pruned += self._in_parts(what, PRUNE_SAMPLES, keys, (stream, bound))
        return num_pruned

    def _append(self, entries: Sequence[Entry]) -> int:
        streams = list(dict.fromkeys(entry.stream for entry in entries))
        keys = [self._state, self._key("sampled")]
        keys += [self._key(name, s) for s in streams for name in ("samples", "times", "seen")]
        words: list[Any] = [self.link.address.limits.max_samples, len(streams), *streams]
        for entry in entries:
            words += (streams.index(entry.stream) + 1, entry.source, entry.sequence)
            words += (repr(float(entry.time)), entry.record)
        return int(self.link.run(f"append of {len(entries)} samples", APPEND, keys, words))

    def _records(
        self, stream: str, first: int, last: int | None = None
    ) -> Iterator[tuple[int, bytes]]:
        """(cursor, record) of a stream, from one cursor to another."""
        key, until = self._key("samples", stream), "+" if last is None else f"{last}-0"
        while True:
            entries = self.link.read("XRANGE", key, f"{first}-0", until, "COUNT", _AT_ONCE)
            for entry_id, fields in entries:
                cursor = _number_of(entry_id)
                yield cursor, fields.get(b"s", b"")
            if len(entries) < _AT_ONCE:
                return
            first = cursor + 1

    def _repair(self) -> None:
        """Forget what a torn write left, where a server ran it after its start."""
        for stream in self._streams():
            keys = [self._key(name, stream) for name in ("samples", "times", "seen")]
            forgotten = int(self.link.run(f"repair of run {stream!r}", REPAIR, keys))
            if forgotten:
                log.warning("run %s: forgot %d samples of a torn write", stream, forgotten)

    def _streams(self) -> list[str]:
        names = [(name, name) for name in self.link.read("SMEMBERS", self._key("sampled"))]
        return [name for _, name in self.unreadable.readable(names, text_of, "name of a run")]

    def _cursors(self, stream: str, bounds: tuple[str, str]) -> list[int]:
        """Cursors of a stream within bounds of time."""
        words = self.link.read("ZRANGEBYSCORE", self._key("times", stream), *bounds)
        kind = f"cursor of run {stream}"
        named = [(word, word) for word in words]
        return [n for _, n in self.unreadable.readable(named, lambda w: number_in(w, kind), kind)]

    # -- waiting, checks, keys

    def version(self) -> int:
        """Return a number that grows with each change that readers wait for.

        One that cannot be read counts as 0: the next change writes a greater one, by the clock.
        """
        version = [("version", self.link.read("HGET", self._state, "version"))]
        numbers = self.unreadable.readable(version, lambda v: number_in(v, "version"), HEAD.name)
        return numbers[0][1] if numbers else 0

    def wait(self, version: int, timeout_s: float) -> int:
        """Return the version once it differs, or after ``timeout_s``."""
        return self._waiter.wait(version, timeout_s)

    def close(self) -> None:
        """Close the connections and end every wait; the store cannot be used after."""
        self.link.close()
        self._waiter.close()

    def _in_parts(self, what: str, script: Any, keys: Sequence[str], asked: Sequence[str]) -> int:
        """Run a script that removes some records, until it has removed all; return how many."""
        num_removed = 0
        while True:
            num_old = int(self.link.run(what, script, keys, (*asked, _AT_ONCE)))
            num_removed += num_old
            if num_old < _AT_ONCE:
                return num_removed

    def _check_server(self) -> Durability:
        """Refuse a server that cannot be trusted with placements; return what it promises."""
        info = self.link.ask(self._state, "INFO")

        def reported(name: str) -> str:
            if name not in info:
                raise self._refused(f"reports no {name}, expected a Redis server")
            return str(info[name])

        version = reported("redis_version")
        if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_SERVER:
            raise self._refused(f"is version {version}, expected 6.2 or later")
        if reported("role") != "master":
            raise self._refused(
                f"is a replica of {info['master_host']}:{info['master_port']}, expected the primary"
            )
        policy = reported("maxmemory_policy")
        if policy != "noeviction":
            raise self._refused(
                f"has maxmemory-policy {policy}, expected noeviction: it would drop placements "
                "when memory runs short"
            )
        # Asked before it is written: a full server must still open, so that it can be pruned.
        schema = self.link.read("HGET", self._state, "schema")
        if schema is None:
            self.link.write("HSETNX", self._state, "schema", SCHEMA_VERSION)
            schema = self.link.read("HGET", self._state, "schema")
        if schema != SCHEMA_VERSION.encode():
            shown = None if schema is None else schema.decode(errors="replace")
            raise self._refused(
                f"keeps {self._state} with schema version {shown}, expected {SCHEMA_VERSION}: "
                "another version of this program has written it; to begin anew, name another "
                "prefix (?prefix=NAME)"
            )
        if not int(reported("aof_enabled")):
            return "none"
        try:
            settings = self.link.ask(self._state, "CONFIG GET", "appendfsync")
        except LinkError as exc:
            if exc.trouble in (Trouble.FORBIDDEN, Trouble.OTHER):  # hosted servers have no CONFIG
                return "unknown"
            raise
        (setting,) = (value for _, value in settings.items())
        by_setting: dict[str, Durability] = {"always": "always", "everysec": "everysec", "no": "no"}
        return by_setting[setting.decode() if isinstance(setting, bytes) else setting]

    def _refused(self, words: str) -> StoreError:
        return StoreError(f"Redis store {self.link.address} {words}")

    def _key(self, *parts: object) -> str:
        return self._prefix + ":".join(map(str, parts))


class _Waiter:
    """Lets threads wait for a version; each subscribes over its own connection, which is kept.

    A message is a hint to look, never what is looked at. It may be lost, with a connection or in a
    failover, so a waiting thread looks now and then anyhow.
    """

    def __init__(self, link: RedisLink, channel: str, version: Callable[[], int]) -> None:
        self._link, self._channel, self._version = link, channel, version
        self._lock = Lock()
        self._idle: list[Any] = []
        self._deaf_until = 0.0
        self._closed = Event()

    def wait(self, version: int, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        subscription: Any | None = None
        try:
            while (current := self._version()) == version:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    break
                if subscription is None:
                    subscription = self._subscribed()
                    if subscription is not None:
                        continue  # changes before the subscription sent no notification
                if not self._is_heard(subscription, left_s):
                    subscription = None
            return current
        finally:
            self._give_back(subscription)

    def close(self) -> None:
        """Close unused connections; the others close at the end of their waits."""
        self._closed.set()
        with self._lock:
            idle, self._idle = self._idle, []
        for subscription in idle:
            subscription.close()

    def _subscribed(self) -> Any | None:
        """A subscription; None while none can be had."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
            if time.monotonic() < self._deaf_until:
                return None
        try:
            return self._link.subscribe(self._channel)
        except StoreError as exc:
            self._turn_deaf(exc)
            return None

    def _is_heard(self, subscription: Any | None, left_s: float) -> bool:
        """Wait for a notification, or for the poll interval; False when the connection failed."""
        if subscription is None:
            self._closed.wait(min(left_s, _DEAF_LOOK_S))
            return False
        try:
            self._link.wait_for_message(subscription, min(left_s, _LOOK_S))
        except StoreError as exc:
            self._turn_deaf(exc)
            return False
        return True

    def _turn_deaf(self, exc: StoreError) -> None:
        with self._lock:
            self._deaf_until = time.monotonic() + _DEAF_S
        if not self._link.is_closed:
            log.warning(
                "no change notifications for %g s, polling every %g s: %s",
                _DEAF_S,
                _DEAF_LOOK_S,
                exc,
            )

    def _give_back(self, subscription: Any | None) -> None:
        if subscription is None:
            return
        with self._lock:
            if not self._closed.is_set():
                self._idle.append(subscription)
                return
        subscription.close()


def deployments_at(url: str) -> list[str]:
    """Return the names of the deployments that ran or have a placement in a store, sorted.

    Every key of the server is looked at once; the user needs the command SCAN.

    Raises:
        ConfigError: the URL cannot be used.
        StoreError: the server cannot be reached.
    """
    address = parse_address(url)
    link = RedisLink(address)
    try:
        keys = link.names(re.sub(r"([\\*?\[\]])", r"\\\1", address.prefix) + ":{*}:*")
    finally:
        link.close()
    return sorted({name for key in keys if (name := deployment_of(key, address.prefix))})


def deployment_of(key: str, prefix: str) -> str | None:
    """Return the deployment that a key shows to have run or to have a placement; None: no such."""
    begin = f"{prefix}:{{"
    name, _, table = key.removeprefix(begin).partition("}:")
    is_shown = key.startswith(begin) and table in ("runs", "placements")
    return name if is_shown else None


def _line_of(event_id: int, fields: Mapping[bytes, bytes]) -> JournalLine:
    """The event of an entry; one that is none has a detail that no reader takes."""
    try:
        time_s, kind, detail = (fields[name].decode() for name in (b"time", b"kind", b"detail"))
        return JournalLine(event_id, float(time_s), kind, detail)
    except (KeyError, ValueError):
        return JournalLine(event_id, 0.0, "", "")


def _count_in(text: bytes) -> int:
    return number_in(text.partition(b" ")[0], "the number of samples")


def _number_of(entry_id: bytes) -> int:
    """The number before the dash of a stream's id."""
    return int(entry_id.partition(b"-")[0])


def _close_together(cursors: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and last of rising cursors, wherever more than a read's worth lies between two."""
    first = cursors[0]
    for cursor, following in pairwise(cursors):
        if following - cursor > _AT_ONCE:
            yield first, cursor
            first = following
    yield first, cursors[-1]
