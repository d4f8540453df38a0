"""A rank's end of the connection to its process at the store (``store_link``).

The step appends to a queue: no lock, no wait, and no wait for a device. A thread starts the
process, sends it what waits, reads its rare replies, and starts it again if it dies.

    waiting --sent--> kept until it is safe --report of the process--> forgotten
                          |
                          a process that dies: the next one gets it again, in the same order

The store refuses a sample or a map that it has. An event may be there twice.
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
from math import inf
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Event, Thread
from typing import Any

from eplb.clock import duration_text
from eplb.core.load import LoadSample
from eplb.core.model import ModelShape
from eplb.core.topology import Topology
from eplb.errors import counted
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from rebalance.assembly.config import ReportingConfig
from rebalance.engines.common.fsck.report import PARTS
from rebalance.engines.common.messages import (
    END,
    UNREAD,
    MapChange,
    MoveOutcome,
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
from rebalance.engines.common.plugin_settings import EngineSettings, PluginSettings
from rebalance.engines.common.start import Joined, parts_off, set_part
from rebalance.engines.common.tap import Counted, IntArray
from telemetry.load.spool import DEFAULT_CAPACITY
from telemetry.state.runs import RunInfo, group_name

log = logging.getLogger(__name__)

MOST_WINDOWS = 64  # for the planner, that wait with the samples; each is of all ranks
MOST_WAITING = 1024  # samples and events that are not sent yet; further ones are dropped
MOST_SENT = DEFAULT_CAPACITY  # that are not safe yet: as many samples as the process can keep
END_S = 5.0  # at the end, for a store that does not answer
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
        # By the number of its sending; None for what a new process has no use for.
        self._sent: deque[bytes | None] = deque()
        self._num_forgotten = 0  # messages to this process that are safe, the first of all
        self._num_lost_by_process = 0  # samples for which it had no room
        self._sequence = self.num_dropped = self.num_failures = 0
        self.num_failed_plans = 0  # in a row, of the planner of the process
        self.questions: deque[PlanQuestion] = deque()  # questions of the store's tasks
        self.is_asked = False  # whether the planner of the process has a question of this rank
        self.ready: PlannerAnswer | None = None  # a plan of the process; who begins it sets None
        # Why nothing may move now, by the deployment's switches; on rank 0.
        self.why_kept = UNREAD if identity.is_first else ""
        # The same when they were read last: what a person has switched off stays so.
        self.switched, self._unread_since = "", time.monotonic()
        self._child: subprocess.Popen[bytes] | None = None
        self._has_report = False  # whether a process has reported if it reaches the store
        self._state: dict[str, Any] = {}  # the state of this rank as it was last sent to the store
        self._next_state = 0.0
        self._end = Event()
        self._end_at = inf  # when what is not safe yet holds nothing up any more
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
        self.close_soon()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close_soon(self) -> None:
        """Have the process end once it has written what it has; no wait for it."""
        self._end_at = min(self._end_at, time.monotonic() + END_S)
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
                self._keep(UNREAD)
            if self._end.is_set():
                if num_lost := sum(body is not None for body in self._sent):
                    log.warning("%d samples and events were not written", num_lost)
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
        """Go on with a new process, which gets what is not safe yet."""
        self.questions.clear()  # the new process claims the tasks that are still open
        self.is_asked = False
        self._num_forgotten = self._num_lost_by_process = 0
        again = [body for body in self._sent if body is not None]
        self._sent = deque(again)
        for body in again:
            connection.send_bytes(body)

    def _send_waiting(self, connection: Connection) -> bool:
        """Send what waits and the device has copied; whether that was all, and the end after it."""
        while self._waiting:
            copied, make = self._waiting[0]
            is_full = len(self._sent) >= MOST_SENT and time.monotonic() < self._end_at
            if is_full or (copied is not None and not copied.query()):
                return False
            try:
                message = make()
                body = to_bytes(message)
            except Exception:
                self.num_dropped += 1
                log.exception("a sample was lost")
                self._waiting.popleft()
            else:
                self._send(connection, message, body)
        is_ending = self._end.is_set()
        if self._has_report and (is_ending or time.monotonic() >= self._next_state):
            self._send_state()
        if not (is_ending and self._has_report) or self._waiting:
            return False
        connection.send_bytes(END)
        return True

    def _send(self, connection: Connection, message: ToStore, body: bytes) -> None:
        """Send a message, and keep what the next process has a use for if this one dies."""
        again: bytes | None = None
        if isinstance(message, LoadSample | Noted):
            again = body
        elif isinstance(message, MapChange):  # its question is of this process
            again = to_bytes(replace(message, question=None))
        elif isinstance(message, MoveOutcome) and not message.question.task_id:
            again = body
        self._sent.append(again)
        self._waiting.popleft()
        connection.send_bytes(body)

    def _forget(self, num_safe: int) -> None:
        while self._sent and self._num_forgotten < num_safe:
            self._sent.popleft()
            self._num_forgotten += 1

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
        if reply.num_failed_plans is not None:
            self.num_failed_plans = reply.num_failed_plans
            set_part(self._engine, "planner", is_on=not reply.num_failed_plans)
        self._forget(reply.num_safe)
        self.num_dropped += reply.num_dropped - self._num_lost_by_process
        self._num_lost_by_process = reply.num_dropped
        set_part(self._engine, "store", is_on=reply.is_on)
        self._has_report = True
        self.num_failures = max(self.num_failures, reply.num_failures)
        if reply.why_kept != self.why_kept:
            kept = reply.why_kept
            log.info("the map is kept: %s" if kept else "plans may move experts%s", kept)
        self._keep(reply.why_kept)

    def _keep(self, why_kept: str) -> None:
        if why_kept == UNREAD != self.why_kept:
            self._unread_since = time.monotonic()
        elif why_kept != UNREAD:
            self.switched = why_kept
        self.why_kept = why_kept

    @property
    def unread_s(self) -> float:
        """For how long the deployment's switches could not be read; on rank 0."""
        return time.monotonic() - self._unread_since if self.why_kept == UNREAD else 0.0


def why_engine_plans(
    recorder: StoreProcess | None, num_failed: int, settings: EngineSettings, *, is_so: bool
) -> str:
    """Why the engine's own balancer has to plan; "": this plug-in does, or nobody may.

    Args:
        recorder: of rank 0, if it has one.
        num_failed: plans in a row that failed.
        settings: how long the plug-in may be without a plan, and without a store.
        is_so: whether the engine plans already: until a plan is made and the store answers.
    """
    if recorder is not None and recorder.switched:
        return ""
    if num_failed >= (1 if is_so else settings.failed_plans):
        return f"{counted(num_failed, 'plan')} in a row failed"
    unread_s = 0.0 if recorder is None else recorder.unread_s
    if unread_s > (0.0 if is_so else settings.store_deadline_s):
        return f"the deployment's store has not answered for {duration_text(unread_s)}"
    return ""


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
