"""Writes samples, maps and events to the store, on threads of its own.

The step path appends to a bounded queue and returns. Opening the store, waiting for a device and
writing happen here; whatever fails is retried or counted, and never reaches the engine.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb.core.load import LoadSample
from eplb.core.placement import Placement
from eplb.errors import EplbError
from rebalance.engines.common.gauge import set_part
from rebalance.engines.switches import why_kept
from rebalance.engines.vllm.replica_lists import Ints
from rebalance.engines.vllm.tap import Counted
from telemetry import open_store
from telemetry.load.reporter import Reporter
from telemetry.load.spool import Spool
from telemetry.state.runs import RunInfo
from telemetry.state.store import StateStore

ENTRIES = 4096  # of the queue: at 16 passes a sample an hour at 20 passes a second
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
LOOK_S = 0.2  # how often the store's errors are looked at while nothing comes
SWITCHES_S = 1.0  # how often the deployment's switches are read

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MapChange:
    """A map that serves on all layers from now on."""

    held: Ints  # [L, P]
    share: NDArray[np.float64]  # [L, P]
    num_experts: int
    generation: int


@dataclass(frozen=True)
class Noted:
    """An event of this rank."""

    kind: str
    detail: dict[str, Any]


@dataclass(frozen=True)
class RecorderIdentity:
    """Whose samples these are."""

    deployment: str
    store: str  # URL
    rank: int
    info: RunInfo
    writes_maps: bool  # rank 0


class Recorder:
    """One rank's samples and events, and on rank 0 the maps.

    Args:
        identity: of the samples.
        make_spool: opens the folder where samples wait on disk; None: they wait in memory.
    """

    def __init__(self, identity: RecorderIdentity, make_spool: Callable[[], Spool] | None) -> None:
        self._identity, self._make_spool = identity, make_spool
        self._queue: queue.Queue[Counted | MapChange | Noted] = queue.Queue(ENTRIES)
        self._is_closing = threading.Event()
        self._sequence = self.num_dropped = self.num_failures = 0
        self._map: MapChange | None = None  # waits to be written
        self._events: deque[Noted] = deque(maxlen=ENTRIES)  # wait to be written
        self._committed: int | None = None
        self.why_kept = ""  # why nothing may move, as last read; on rank 0
        self._next_look = 0.0
        self._thread = threading.Thread(target=self._run, name="eplb-recorder", daemon=True)
        set_part("vllm", "reporting", is_on=False)
        self._thread.start()

    @property
    def run(self) -> str:
        """The run that this rank records."""
        return self._identity.info.run

    def offer(self, what: Counted | MapChange | Noted) -> None:
        """Hand over. Never waits and never raises; what finds no room is counted and dropped."""
        try:
            self._queue.put_nowait(what)
        except queue.Full:
            self.num_dropped += 1

    def close(self, timeout_s: float) -> bool:
        """Write what waits, up to a deadline; whether the thread ended."""
        self._is_closing.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        opened = self._open()
        if opened is None:
            return
        store, reporter = opened
        num_errors = 0
        while True:
            try:
                self._record(self._queue.get(timeout=LOOK_S), reporter)
            except queue.Empty:
                if self._is_closing.is_set():
                    break
            except Exception:
                self.num_failures += 1
                log.exception("a sample was lost")
            self._write_map(store)
            self._write_events(store)
            self._read_switches(store)
            stats = reporter.stats()
            if stats.errors > num_errors or stats.waiting == 0:
                is_well = stats.errors == num_errors and self._map is None and not self._events
                set_part("vllm", "reporting", is_on=is_well)
            num_errors = stats.errors
        try:
            reporter.close(5.0)
        except EplbError as exc:
            log.warning("%s", exc)

    def _open(self) -> tuple[StateStore, Reporter] | None:
        """Open the store; again and again until it opens, or this recorder is closed."""
        pause, identity = FIRST_PAUSE_S, self._identity
        while True:
            try:
                store = open_store(identity.store, identity.deployment)
                if identity.writes_maps:
                    store.begin_run(identity.info)
                spool = None if self._make_spool is None else self._make_spool()
                return store, Reporter(store, spool=spool, seed=identity.rank)
            except Exception as exc:
                self.num_failures += 1
                log.warning("the store cannot be opened, tried again in %g s: %s", pause, exc)
            if self._is_closing.wait(pause):
                return None
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _record(self, what: Counted | MapChange | Noted, reporter: Reporter) -> None:
        if isinstance(what, MapChange):
            self._map = what
            return
        if isinstance(what, Noted):
            self._events.append(what)
            return
        what.wait()
        tokens = what.tokens.numpy()
        experts = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
        identity = self._identity
        reporter.offer(
            LoadSample(
                identity.deployment,
                identity.info.run,
                identity.rank,
                self._sequence,
                time.time(),
                what.first_step,
                what.last_step,
                what.phase,
                what.generation,
                experts,
                tokens,
            )
        )
        self._sequence += 1

    def _write_events(self, store: StateStore) -> None:
        try:
            while self._events:
                store.add_event(self._events[0].kind, self._events[0].detail)
                self._events.popleft()
        except Exception as exc:
            self.num_failures += 1
            log.warning("%d events are not stored yet: %s", len(self._events), exc)
            self._is_closing.wait(FIRST_PAUSE_S)

    def _read_switches(self, store: StateStore) -> None:
        """Rank 0's own: it plans. While the store does not answer, what was last read holds."""
        if not self._identity.writes_maps or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + SWITCHES_S
        try:
            self.why_kept = why_kept(store)
        except Exception as exc:
            self.num_failures += 1
            self._next_look = time.monotonic() + LONGEST_PAUSE_S
            log.warning("the deployment's switches cannot be read: %s", exc)

    def _write_map(self, store: StateStore) -> None:
        if self._map is None or not self._identity.writes_maps:
            self._map = None
            return
        change = self._map
        try:
            if self._committed is None:
                last = store.committed()
                self._committed = -1 if last is None else last.placement.generation
            expected = None if self._committed < 0 else self._committed
            placement = Placement(
                change.held.astype(np.int32), change.num_experts, change.generation, change.share
            )
            store.commit(placement, expected=expected, reason="vLLM committed this map")
        except Exception as exc:
            self._committed = None  # it may have been written; read again
            self.num_failures += 1
            set_part("vllm", "reporting", is_on=False)
            log.warning("the map of generation %d is not stored yet: %s", change.generation, exc)
            self._is_closing.wait(FIRST_PAUSE_S)
            return
        self._committed, self._map = change.generation, None
