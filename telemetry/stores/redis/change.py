"""Changes of the Redis store: decided here, made there, in one go or not at all.

A decision reads the state, applies ``telemetry/stores/commit_rules.py``, and sends its writes with
the revision that it read. Redis makes them if nothing was decided since; otherwise the caller reads
again.
Writes that depend on nothing, such as an event, have no revision.

A server that crashed, or a replica that took over, may have lost what was last acknowledged. So
the revision is the id of the last decision, not a number that could come again; and counters leave
a gap with each start of the server, wider than what can have been given out in the time lost.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from eplb.clock import Clock
from eplb.errors import StoreError
from telemetry.live import LiveState
from telemetry.records.live_codec import live_from_text, with_switches
from telemetry.store import Details, Lease, LeaseOf
from telemetry.stores import commit_rules
from telemetry.stores.redis.connection.link import RedisLink
from telemetry.stores.redis.keys import Keys
from telemetry.stores.redis.scripts import CHANGE, LOOK

GAP = 1000
LEASE_FIELDS: dict[LeaseOf, str] = {"controller": "lease", "deployment": "lease_of_deployment"}

_REMOVALS = ("DEL", "ZREM")  # written after the state, which must never refer to removed data

T = TypeVar("T")


@dataclass(frozen=True)
class State:
    """Snapshot of the state that decisions depend on."""

    time: float  # of that moment, by the store's clock
    server: str  # id of this start of the server
    fields: Mapping[str, str]

    @property
    def revision(self) -> str:
        """Id of the last decision."""
        return self.fields.get("revision", "none")

    @property
    def committed(self) -> tuple[int, str] | None:
        """Generation and hash of the committed placement."""
        return generation_and_hash(self.fields.get("committed"))

    @property
    def open_plan_id(self) -> int | None:
        """The open migration's plan id."""
        found = self.fields.get("open_plan")
        return int(found.split()[0]) if found else None

    def last(self, counter: str) -> int:
        """Return the greatest number of a counter that is known to be given out."""
        return int(self.fields.get(f"last_{counter}", "0"))

    def gap(self, counter: str) -> int:
        """Return how many numbers of a counter to skip, because they may be in use."""
        given_by = self.fields.get(f"server_of_{counter}", self.server)
        return 0 if given_by == self.server else GAP

    @property
    def lease(self) -> Lease | None:
        """The controller's; see ``lease_of``."""
        return self.lease_of("controller")

    def lease_of(self, of: LeaseOf) -> Lease | None:
        """Return the last lease that was given out, be it run out or given up."""
        found = self.fields.get(LEASE_FIELDS[of])
        return commit_rules.lease_from_text(found) if found else None


@dataclass
class Change:
    """Events and writes that belong together."""

    keys: Keys
    events: list[tuple[str, str]] = field(default_factory=list)  # kind, detail
    writes: list[tuple[str, str, tuple[Any, ...]]] = field(default_factory=list)
    state: dict[str, object] = field(default_factory=dict)  # fields to set, in one command
    is_awaited: bool = False  # readers wait for it

    def event(self, kind: str, detail: Details) -> None:
        """Append an event."""
        self.events.append((kind, commit_rules.details_to_text(detail)))
        self.is_awaited = True

    def write(self, command: str, key: str, *words: Any) -> None:
        """Run a command on a key of the deployment."""
        self.writes.append((command, key, words))

    def set_state(self, **fields: object) -> None:
        """Set fields of the state."""
        self.state |= fields

    def give_out(self, counter: str, number: int, state: State) -> None:
        """Note that a number is the greatest of its counter."""
        self.set_state(**{f"last_{counter}": number, f"server_of_{counter}": state.server})

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.events or self.writes or self.state)


class Changes:
    """Makes changes of one deployment."""

    def __init__(self, link: RedisLink, keys: Keys, clock: Clock | None = None) -> None:
        self._link, self._keys, self._clock = link, keys, clock

    def look(self) -> State:
        """Read the state."""
        (seconds, micros), server, flat = self._link.run(
            f"look at {self._keys.state}", LOOK, (self._keys.state,), is_write=False
        )
        now = int(seconds) + int(micros) / 1e6 if self._clock is None else self._clock()
        words = [word.decode() for word in flat]
        return State(now, server.decode(), dict(zip(words[::2], words[1::2], strict=True)))

    def decide(self, what: str, decision: Callable[[State, Change], T]) -> T:
        """Let ``decision`` fill a change, and make it; repeat both after a conflict.

        Raises:
            StoreError: others came first for as long as a call may take.
        """
        limit_s = self._link.address.limits.deadline_s
        deadline = time.monotonic() + limit_s
        while True:
            state, change = self.look(), Change(self._keys)
            result = decision(state, change)
            if change.is_empty or self._made(what, change, state.revision, state.time) is not None:
                return result
            if time.monotonic() > deadline:
                raise StoreError(
                    f"Redis store {self._link.address}: {what} lost to concurrent changes for "
                    f"{limit_s:g} s, expected to be applied"
                )

    def make(self, what: str, change: Change) -> list[int]:
        """Make a change that depends on nothing, and return the ids of its events."""
        made = self._made(what, change, "", self._clock() if self._clock is not None else None)
        assert made is not None, "a change without a revision cannot conflict"
        return made

    def _made(self, what: str, change: Change, guard: str, now: float | None) -> list[int] | None:
        """Ids of the events, or None when another decision came first."""
        # Not seeded: no two changes may ever have the same id.
        change_id = secrets.token_hex(8)
        keys = [self._keys.state, self._keys.events, self._keys.of("receipt", change_id)]
        state_words = [word for pair in change.state.items() for word in pair]
        values: list[Any] = [
            guard,
            change_id,
            "" if self._clock is None or now is None else repr(now),
            int(change.is_awaited),
            self._keys.wake,
            len(change.events),
            *(word for event in change.events for word in event),
            len(state_words),
            *state_words,
        ]
        before, after = list[Any](), list[Any]()
        for command, key, words in change.writes:
            if key not in keys:
                keys.append(key)
            part = after if command in _REMOVALS else before
            part += [command, keys.index(key) + 1, len(words), *words]
        values += [len(values) + 2 + len(before), *before, *after]
        answer, *event_ids = self._link.run(what, CHANGE, keys, values).decode().split()
        return [int(event) for event in event_ids] if answer == "made" else None


def generation_and_hash(text: str | None) -> tuple[int, str] | None:
    """Read the state's field ``committed``."""
    if text is None:
        return None
    generation, _, found_hash = text.partition(" ")
    return int(generation), found_hash


def live_of(live: str | None, control: str | None) -> LiveState:
    """Read the state's fields ``live`` and ``control``.

    A program of the version before writes the switches alone; what it switches off is off.
    """
    state = live_from_text(live) if live else LiveState()
    return with_switches(state, live_from_text(control).control) if control else state
