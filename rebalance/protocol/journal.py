"""A rank's journal: what happened, as JSON lines, for the analysis of a failure.

One file per rank in the state folder; the entries of all starts follow each other. The step never
waits for it: entries go into a bounded queue, and a thread writes them. When the queue is full the
oldest entry is dropped and counted: the latest ones matter most after a death.

A line is in the operating system's hands as soon as it is written, so SIGKILL costs only what was
still queued, and at most the last line of a file is torn (power loss).
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from eplb.clock import Clock
from eplb.core.bounded_json import decode_json
from rebalance.protocol.ballot import Ballot, Verdict
from rebalance.protocol.phases import Phase, RankPhase

JOURNAL_FOLDER = "journal"  # in the state folder
CLOSE_DEADLINE_S = 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """One line of a journal."""

    run: str
    rank: int
    number: int  # counts the entries of a start, including dropped ones
    time: float  # seconds since the epoch
    monotonic: float  # seconds; for distances within one process
    step: int  # -1 before the first
    generation: int
    plan_id: int  # 0: no migration
    what: str
    detail: Mapping[str, Any]


class JournalSink(Protocol):
    """Accepts journal entries; never blocks, never raises."""

    def note(self, what: str, where: tuple[int, int, int], detail: Mapping[str, Any]) -> None:
        """Record an event at ``where``: (step, generation, plan id)."""

    def close(self) -> None:
        """Write what waits, and end."""


class NoJournal:
    """Drops all entries: for ranks without a state folder."""

    def note(self, what: str, where: tuple[int, int, int], detail: Mapping[str, Any]) -> None:
        """Drop it."""

    def close(self) -> None:
        """Nothing waits."""


class Journal:
    """A rank's journal file.

    Args:
        folder: created if missing.
        run: name of this start.
        rank: the rank of this journal.
        max_bytes: a larger file is renamed to ``.1``, which replaces the previous one.
        capacity: maximum number of queued entries.
        clock: seconds since the epoch.
        monotonic: of the entries' second time, which never jumps.
    """

    def __init__(
        self,
        folder: Path,
        run: str,
        rank: int,
        *,
        max_bytes: int = 4_000_000,
        capacity: int = 4096,
        clock: Clock = time.time,
        monotonic: Clock = time.monotonic,
    ) -> None:
        self.path = folder / f"rank-{rank:04d}.jsonl"
        self._run, self._rank, self._max_bytes = run, rank, max_bytes
        self.num_dropped = 0  # entries lost to a full queue or a failed write
        self._num_noted = 0
        self._waiting: deque[Entry] = deque()
        self._capacity = capacity
        self._clock, self._monotonic = clock, monotonic
        self._changed = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._write, name="eplb-journal", daemon=True)
        self._thread.start()

    def note(self, what: str, where: tuple[int, int, int], detail: Mapping[str, Any]) -> None:
        """Queue an entry; drop the oldest one if the queue is full."""
        with self._changed:
            self._num_noted += 1
            place = (self._run, self._rank, self._num_noted, self._clock(), self._monotonic())
            if len(self._waiting) == self._capacity:
                self._waiting.popleft()
                self.num_dropped += 1
            self._waiting.append(Entry(*place, *where, what, detail))
            self._changed.notify()

    def close(self) -> None:
        """Write what waits, and end."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(CLOSE_DEADLINE_S)

    def _write(self) -> None:
        while entries := self._next():
            try:
                lines = "".join(json.dumps(asdict(entry), default=str) + "\n" for entry in entries)
                self._append(lines.encode())
            except (OSError, TypeError, ValueError) as exc:  # serving continues; the loss is logged
                self.num_dropped += len(entries)
                log.warning("%s: %d journal entries lost: %s", self.path, len(entries), exc)

    def _next(self) -> list[Entry]:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closing)
            taken = list(self._waiting)
            self._waiting.clear()
            return taken

    def _append(self, lines: bytes) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size > self._max_bytes:
            self.path.replace(self.path.with_suffix(".jsonl.1"))
        with open(self.path, "ab+", buffering=0, opener=_for_this_user) as file:
            if file.tell() and not _ends_whole(self.path):
                lines = b"\n" + lines  # a torn line must not spoil the next
            file.write(lines)


def _for_this_user(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"


def read_journals(folder: Path) -> tuple[list[Entry], int]:
    """Return the entries of all ranks in the order of their time, and the number of torn lines."""
    entries, num_torn = [], 0
    for path in sorted(folder.glob("rank-*.jsonl*")):
        for line in path.read_bytes().split(b"\n"):
            if line:
                entry = _entry_of(line)
                entries += [entry] if entry else []
                num_torn += entry is None
    return sorted(entries, key=lambda one: (one.time, one.rank, one.number)), num_torn


def _entry_of(line: bytes) -> Entry | None:
    try:
        return Entry(**decode_json(line))
    except (ValueError, TypeError):  # torn: the process or the power went while it was written
        return None


class JournalRecorder:
    """Records the events of a rank. Votes are recorded only when they change."""

    def __init__(self, sink: JournalSink) -> None:
        self._sink, self.step = sink, -1  # the step that was begun last; -1 before the first
        self._last_ballot: Ballot | None = None
        self._last_verdict: Verdict | None = None

    def note(self, what: str, state: RankPhase, **detail: Any) -> None:
        """Record an event in this state."""
        plan_id = state.plan.plan_id if state.plan else 0
        self._sink.note(what, (self.step, state.generation, plan_id), detail)

    def note_change(self, before: RankPhase, after: RankPhase) -> None:
        """Record a change of the phase machine."""
        for what, detail in changes(before, after):
            self.note(what, after if after.plan else before, **detail)

    def note_ballot(self, ballot: Ballot) -> None:
        """Record a ballot that differs from the last one."""
        news = _differences(self._last_ballot, ballot)
        self._last_ballot = ballot
        if news:
            self._sink.note("vote cast", self._place(ballot), news)

    def note_verdict(self, cast: Ballot, verdict: Verdict) -> None:
        """Record a verdict that differs from the last one."""
        news = _differences(self._last_verdict, verdict)
        self._last_verdict = verdict
        if news:
            self._sink.note("verdict", self._place(cast), {"of_step": cast.step} | news)

    def _place(self, ballot: Ballot) -> tuple[int, int, int]:
        return self.step, ballot.generation, ballot.plan_id


def changes(before: RankPhase, after: RankPhase) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name what changed in a state of the phase machine."""
    plan = after.plan or before.plan
    if before.plan is None and after.plan is not None:
        yield "plan seen", {"transactions": after.plan.num_transactions}
    if after.is_preloaded > before.is_preloaded:
        yield "preloaded", {}
    if after.is_adopted > before.is_adopted:
        yield "adopted by all", {}
    if after.prepared > before.prepared:
        yield "staged", {"transactions": after.prepared}
    if after.swapped > before.swapped:
        yield "swap ordered", {"first": before.swapped, "last": after.swapped}
    if after.applied > before.applied:
        yield "applied", {"transactions": after.applied}
    if after.abort_reason and not before.abort_reason and after.phase is not Phase.ABORTED:
        yield "abort requested", {"reason": after.abort_reason}
    if after.phase is Phase.ABORTED and before.phase is not Phase.ABORTED:
        yield "aborted", {"reason": after.abort_reason, "kept": after.swapped}
    if before.phase is Phase.ABORTED and after.phase is Phase.IDLE:
        yield "drained", {}
    if plan is not None and after.plan is None and before.phase is not Phase.ABORTED:
        yield "committed", {"generation": after.generation}
    if after.frozen_reason and not before.frozen_reason:
        yield "frozen", {"reason": after.frozen_reason}


def _differences(before: Ballot | Verdict | None, after: Ballot | Verdict) -> dict[str, Any]:
    """Return the changed fields; a new step alone is not a change."""
    found = vars(after)
    known = vars(before) if before is not None else {}
    return {
        name: value for name, value in found.items() if name != "step" and known.get(name) != value
    }
