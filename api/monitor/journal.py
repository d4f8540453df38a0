"""The journal of a deployment: what is new in it, and its latest events for every view."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from eplb.errors import StoreError
from telemetry.state.events import FACTS, Event
from telemetry.state.store import StateStore

KEPT_EVENTS = 1000


class EventFeed:
    """Follows the events of a store. Its owner serialises calls."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._last = 0  # id of the newest that was read
        self.latest: deque[Event] = deque(maxlen=KEPT_EVENTS)  # oldest first

    def news(self) -> Iterator[Event]:
        """Give the events that were not read before; one whose fact cannot be read is counted.

        Raises:
            StoreError: the store cannot be read; the next call goes on where this one ended.
        """
        while new := self._store.events(after=self._last, limit=KEPT_EVENTS):
            for event in new:
                self._last = event.id
                self.latest.append(event)
                if event.fact is None and event.kind in FACTS:  # its words are shown all the same
                    why = StoreError(f"expected the fields of {FACTS[event.kind].__name__}")
                    self._store.backend.unreadable.count("event", event.id, why)
                yield event
