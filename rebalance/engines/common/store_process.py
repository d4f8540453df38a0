"""A rank's end of the connection to its process at the store (``store_link``).

The step appends to a queue: no lock, no wait, and no wait for a device. A thread starts the
process, sends it what waits, reads its rare replies, and starts it again if it dies.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Event, Thread
from typing import Any

from eplb.core.model import ModelShape
from eplb.core.topology import Topology
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from rebalance.assembly.config import ReportingConfig
from rebalance.engines.common.fsck.report import PARTS
from rebalance.engines.common.messages import (
    END,
    UNREAD,
    MapChange,
    Noted,
    PassWindow,
    PlannerAnswer,
    PlanQuestion,
    Reply,
    SampleOrigin,
    ToStore,
    from_bytes,
    to_bytes,
)
from rebalance.engines.common.plugin_settings import PluginSettings
from rebalance.engines.common.start import Joined, parts_off, set_part
from rebalance.engines.common.tap import Counted, IntArray
from telemetry.state.runs import RunInfo, group_name

log = logging.getLogger(__name__)

MOST_WINDOWS = 64  # for the planner, that wait with the samples; each is of all ranks
MOST_WAITING = 1024  # samples and events while the process starts; further ones are dropped
LOOK_S = 0.05  # how often the thread sends what waits
STATE_S = 10.0  # from one event with the state of this rank to the next, except to the last
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # before the process is started again
MODULE = "rebalance.engines.common.store_link"

Make = Callable[[], ToStore]


class StoreProcess:
    """Samples, maps and events of one rank, on their way to the store.

    Args:
        engine: name of the gauge, whose part ``store`` is on while samples reach the store.
        identity: of the rank.
    """

    def __init__(self, engine: str, identity: SampleOrigin) -> None:
        self._engine, self._identity = engine, identity
        self._waiting: deque[tuple[Any, Make]] = deque()  # with the device's event, or None
        self._sequence = self.num_dropped = self.num_failures = 0
        self._map: MapChange | None = None  # the latest, which a new process gets first
        self.questions: deque[PlanQuestion] = deque()  # questions of the store's tasks
        self.is_asked = False  # whether the planner of the process has a question of this rank
        self.ready: PlannerAnswer | None = None  # a plan of the process; who begins it sets None
        # Why nothing may move now, by the deployment's switches; on rank 0.
        self.why_kept = UNREAD if identity.is_first else ""
        self._child: subprocess.Popen[bytes] | None = None
        self._has_report = False  # whether a process has reported if it reaches the store
        self._state: dict[str, Any] = {}  # the state of this rank as it was last sent to the store
        self._next_state = 0.0
        self._end = Event()
        set_part(engine, "store", is_on=False)
        self._thread = Thread(target=self._run, name="eplb-store-process", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Process id of the child; None before it has started."""
        return None if self._child is None else self._child.pid

    def add(self, counted: Counted, rows: Any = slice(None), columns: slice = slice(None)) -> None:
        """Hand over a sample of some rows and columns. Never waits and never raises."""
        number = self._sequence
        self._sequence += 1
        origin = self._identity
        self._offer(lambda: counted.sample(origin, number, rows, columns), counted.copied)

    def add_window(self, counted: Counted, weights: IntArray) -> None:
        """Hand over all ranks' tokens by slot for the planner. Never waits and never raises."""
        held = counted.held
        assert held is not None, "counts are of slots"
        if len(self._waiting) < MOST_WINDOWS:
            self._offer(lambda: PassWindow(counted.on_host(), held, weights), counted.copied)

    def ask(self, question: PlanQuestion) -> None:
        """Ask the planner of the process; the answer comes as ``ready``, if it moves anything."""
        self.is_asked = True
        self.send(question)

    def send(self, message: ToStore) -> bool:
        """Hand over anything else; False if it was dropped. Never waits and never raises."""
        if isinstance(message, MapChange):
            self._map = message
        return self._offer(lambda: message, None)

    def note(self, kind: str, detail: dict[str, Any]) -> bool:
        """Hand over an event of this rank, as ``send``."""
        about = {"run": self._identity.info.run, "rank": self._identity.rank}
        return self.send(Noted(kind, about | detail))

    def _offer(self, make: Make, copied: Any) -> bool:
        if len(self._waiting) >= MOST_WAITING:
            self.num_dropped += 1
            return False
        self._waiting.append((copied, make))
        return True

    def close(self, timeout_s: float) -> bool:
        """Have what waits written, up to a deadline; whether the process ended."""
        self._end.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close_soon(self) -> None:
        """Have the process end once it has written what it has; no wait for it."""
        self._end.set()

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                self._serve()
            except Exception as exc:
                self.num_failures += 1
                log.warning("the process at the store: %s: %s", type(exc).__name__, exc)
            set_part(self._engine, "store", is_on=False)
            if self._identity.planner:
                set_part(self._engine, "planner", is_on=False)
            if self._identity.is_first:
                self.why_kept = UNREAD
            if self._end.is_set():
                return
            log.warning("the process at the store ended, started again in %g s", pause_s)
            self._end.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _serve(self) -> None:
        """Start the process, send it what waits, and read its replies until it ends."""
        connection, of_process = Pipe()
        with of_process:
            child = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(of_process.fileno())],
                pass_fds=[of_process.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # an interrupt of the engine does not end it
            )
        self._child = child
        try:
            with connection, suppress(EOFError, ConnectionError):
                connection.send_bytes(to_bytes(self._identity))
                self._begin(connection)
                while not self._send_waiting(connection):
                    if connection.poll(LOOK_S):
                        self._take(from_bytes(connection.recv_bytes()))
                while True:
                    self._take(from_bytes(connection.recv_bytes()))
        finally:
            if not self._end.is_set():
                child.kill()
            child.wait()

    def _begin(self, connection: Connection) -> None:
        """Go on with a new process, which gets the latest map."""
        self.questions.clear()  # the new process claims the tasks that are still open
        self.is_asked = False
        if self._map is not None:
            # Its question was of the process that died.
            connection.send_bytes(to_bytes(replace(self._map, question=None)))

    def _send_waiting(self, connection: Connection) -> bool:
        """Send what waits and the device has copied; whether that was all, and the end after it."""
        while self._waiting:
            copied, make = self._waiting[0]
            if copied is not None and not copied.query():
                return False
            try:
                body = to_bytes(make())
            except Exception:
                self.num_dropped += 1
                log.exception("a sample was lost")
            else:
                connection.send_bytes(body)
            self._waiting.popleft()  # not before: a new process gets what this one did not
        is_ending = self._end.is_set()
        if self._has_report and (is_ending or time.monotonic() >= self._next_state):
            self._send_state()
        if not (is_ending and self._has_report) or self._waiting:
            return False
        connection.send_bytes(END)
        return True

    def _send_state(self) -> None:
        """Write which parts are off, and what was lost, as an event once it has changed.

        The first follows the first report of the process, and the last is the last message.
        """
        state = {
            "off": parts_off(),
            "samples_dropped": self.num_dropped,
            "store_failures": self.num_failures,
        }
        if state != self._state and self.note(PARTS, state):  # else again, once there is room
            self._state, self._next_state = state, time.monotonic() + STATE_S

    def _take(self, reply: Reply) -> None:
        if isinstance(reply, PlanQuestion):
            self.questions.append(reply)
            return
        if isinstance(reply, PlannerAnswer):
            self.is_asked = False
            if reply.record.size:
                self.ready = reply
            return
        if reply.plans is not None:
            set_part(self._engine, "planner", is_on=reply.plans)
        set_part(self._engine, "store", is_on=reply.is_on)
        self._has_report = True
        self.num_failures = max(self.num_failures, reply.num_failures)
        if reply.why_kept != self.why_kept:
            kept = reply.why_kept
            log.info("the map is kept: %s" if kept else "plans may move experts%s", kept)
        self.why_kept = reply.why_kept


def identity_of(
    settings: PluginSettings,
    joined: Joined,
    rank: int,
    model: ModelShape,
    topology: Topology,
    **further: Any,
) -> SampleOrigin:
    """Whose samples a rank writes.

    Args:
        settings: of the plug-in.
        joined: run and group of the rank.
        rank: which.
        model: layers and experts of the samples.
        topology: slots of all ranks.
        further: fields of ``SampleOrigin``.
    """
    described = model_to_dict(model), topology_to_dict(topology)
    info = RunInfo(joined.run, time.time(), *described, settings.telemetry.window_steps)
    folder, group = settings[ReportingConfig].spool_dir, joined.group
    spool = "" if folder is None else str(folder / group.name / f"rank-{rank:04d}")
    whole, url = settings.deployment.name, settings.deployment.store_url
    if group.name:
        further |= {"whole": whole, "engine": group.engine}
        further["groups"] = tuple(group_name(whole, one) for one in group.all)
    return SampleOrigin(group_name(whole, group.name), url, rank, info, spool, **further)
