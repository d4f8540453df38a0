"""Events of the store for many clients: read once, held once.

    store -> one thread -> the latest events as text -> a position in them for each client

A client holds nothing but its position, so a slow one costs no memory and delays nobody. One whose
position is no longer among the events that are kept is dropped, and counted. Whoever decides in the
deployment writes to the store alone, and knows of no client.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import asdict

from eplb.errors import EplbError
from telemetry.state.events import Event
from telemetry.state.store import StateStore

KEPT_EVENTS = 1000
KEPT_BYTES = 4 * 2**20  # of the events that are kept
CHUNK_BYTES = 64 * 2**10  # sent to a client at a time; at least one event
WAIT_S = 1.0

log = logging.getLogger(__name__)


class Client:
    """One stream. Used on the event loop alone.

    Args:
        after: id of the last event that it has; None: it begins with the next one.
        drop: ends its stream, whatever it waits for.
    """

    def __init__(self, after: int | None, drop: Callable[[], None]) -> None:
        self.after, self.drop = after, drop
        self.has_missed = False  # events between the one that it has and the oldest kept one


class EventFeed:
    """Follows the events of a store, from the first client until it is closed.

    All methods but ``open`` and ``close`` are called on the event loop of the service.
    """

    def __init__(self, store: StateStore, *, kept_events: int = KEPT_EVENTS) -> None:
        self.dropped = 0  # clients that were too slow
        self._store, self._kept_events = store, kept_events
        self._clients: set[Client] = set()
        self._ids: list[int] = []  # of the events that are kept, rising
        self._texts: list[bytes] = []
        self._num_bytes = 0
        self._floor: int | None = None  # no event past it is missing here; None: nothing was read
        self._news = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def num_clients(self) -> int:
        """Streams that are open."""
        return len(self._clients)

    @property
    def is_closed(self) -> bool:
        """Whether no client is accepted any more."""
        return self._is_closed.is_set()

    def add(self, client: Client) -> None:
        """Accept a client; the first one starts the reader."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # the service was started again, and all of its clients ended
            self._loop, self._news, self._clients = loop, asyncio.Event(), set()
        self._clients.add(client)
        if self._floor is not None:
            self._place(client)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._read, args=(self._is_closed,), name="eplb-events", daemon=True
            )
            self._thread.start()

    def discard(self, client: Client) -> None:
        """Forget a client."""
        self._clients.discard(client)

    async def next(self, client: Client) -> bytes:
        """Wait for events past the client's position, and move it past what is returned.

        Returns:
            Their text; empty once the feed is closed.
        """
        while True:
            news = self._news
            if self._is_closed.is_set():
                return b""
            if client.after is not None and self._floor is not None:
                first = bisect_right(self._ids, client.after)
                if first < len(self._ids):
                    return self._chunk(client, first)
            await news.wait()

    def open(self) -> None:
        """Accept clients again after ``close``. Called while the service does not run."""
        if self._is_closed.is_set():
            self._is_closed, self._thread = threading.Event(), None
            self._ids, self._texts, self._num_bytes, self._floor = [], [], 0, None

    def close(self) -> None:
        """End the reader and all streams. Any thread may call it."""
        self._is_closed.set()
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(lambda: self._news.set())

    def _chunk(self, client: Client, first: int) -> bytes:
        last, size = first, 0
        while last < len(self._ids) and (
            last == first or size + len(self._texts[last]) <= CHUNK_BYTES
        ):
            size += len(self._texts[last])
            last += 1
        client.after = self._ids[last - 1]
        return b"".join(self._texts[first:last])

    def _place(self, client: Client) -> None:
        """Give a client its position among the events that are kept."""
        assert self._floor is not None, "events were read"
        if client.after is None:
            client.after = self._ids[-1] if self._ids else self._floor
        elif client.after < self._floor:
            client.after, client.has_missed = self._floor, True

    def _deliver(self, found: list[tuple[int, bytes]], floor: int | None) -> None:
        """Keep new events, forget the oldest, and drop the clients that had not read those."""
        is_first = self._floor is None
        if floor is not None:
            self._floor = floor
        self._ids += [event_id for event_id, _ in found]
        self._texts += [text for _, text in found]
        self._num_bytes += sum(len(text) for _, text in found)
        self._forget()
        assert self._floor is not None, "the first read gave it"
        for client in list(self._clients):
            if is_first:
                self._place(client)
            elif client.after is not None and client.after < self._floor:
                self.dropped += 1
                self._clients.discard(client)
                log.warning("a client of the event stream was dropped: it reads too slowly")
                client.drop()
        self._news.set()
        self._news = asyncio.Event()

    def _forget(self) -> None:
        old = max(0, len(self._ids) - self._kept_events)
        left = self._num_bytes - sum(map(len, self._texts[:old]))
        while left > KEPT_BYTES and old < len(self._ids) - 1:
            left -= len(self._texts[old])
            old += 1
        if old:
            self._floor = self._ids[old - 1]
            del self._ids[:old], self._texts[:old]
            self._num_bytes = left

    def _read(self, is_closed: threading.Event) -> None:
        """Read the store until the feed is closed; a store that fails is read again."""
        last: int | None = None
        version = -1
        while not is_closed.is_set():
            try:
                if last is None:
                    found = self._store.latest_events(limit=self._kept_events)[::-1]
                    last = found[-1].id if found else 0
                    # The store may have forgotten those before the oldest, or never had them.
                    self._call(is_closed, found, found[0].id - 1 if found else 0)
                while found := self._store.events(after=last, limit=self._kept_events):
                    last = found[-1].id
                    self._call(is_closed, found, None)
                version = self._store.wait(version, WAIT_S)
            except EplbError as exc:
                if not is_closed.is_set():  # else the store may be closed too
                    log.warning("events cannot be read: %s", exc)
                is_closed.wait(WAIT_S)

    def _call(self, is_closed: threading.Event, found: list[Event], floor: int | None) -> None:
        if is_closed.is_set():
            return
        texts = [(one.id, event_text(one)) for one in found]
        assert self._loop is not None, "the thread starts with a loop"
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._deliver, texts, floor)


def event_text(event: Event) -> bytes:
    """Give an event as a message of an event stream: its id, and the JSON of ``GET /events``."""
    data = json.dumps(asdict(event) | {"detail": dict(event.detail)}, separators=(",", ":"))
    return f"id: {event.id}\ndata: {data}\n\n".encode()
