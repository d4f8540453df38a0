"""The reference check of the demo: a process that computes sampled steps of the ranks again.

    rank: CheckerClient.offer --thread, local socket--> checker --> results, a JSON object a line

A slow or dead checker delays no step: samples that it does not take are dropped and counted.
"""

from __future__ import annotations

import json
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

import torch

from api.processes.commands import Notifier, set_title
from eplb.core.model import ModelShape
from rebalance.assembly.plain import from_plain
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.model.moe import Forward
from runtime.model.reference import ReferenceModel

CLOSE_DEADLINE_S = 20.0
MAX_WAITING = 4  # sampled steps of a rank; more are dropped and counted
POLL_S = 0.25
RETRY_S = 0.5  # interval of attempts to reach the checker
CHECKED_AFTER_COMMIT = 4  # steps after a swap that are still sampled densely

# Largest relative error of a right answer: float32 sums in another order stay far below theirs;
# BF16 and FP8 round every activation on the way, where the reference keeps float32.
MAX_RELATIVE_ERROR = {"float32": 1e-4, "bfloat16": 3e-2, "fp8": 4e-2}
# Router logits nearer than this may be chosen either way, for the same reason.
ROUTE_TIE = {"float32": 1e-4, "bfloat16": 0.1, "fp8": 0.5}


@dataclass(frozen=True)
class Checks:
    """What is checked, and where."""

    socket: str  # name of the checker's abstract socket
    key: bytes = field(repr=False)  # ranks and checker prove that they have it
    results: Path  # one line for each checked step
    every: int  # steps between two checks
    model: ModelShape
    weights: Path
    precision: str
    num_threads: int  # threads of the checker


@dataclass(frozen=True)
class CheckedStep:
    """The result of the reference for one rank's step."""

    rank: int
    step: int
    phase: str  # phase of the rank's migration during that step
    max_error: float
    wrong_routes: int

    def is_right(self, precision: str) -> bool:
        """Return whether the output equals the reference within tolerance; NaN does not."""
        return self.max_error <= MAX_RELATIVE_ERROR[precision] and self.wrong_routes == 0


def checks_in(results: Path, offset: int = 0) -> tuple[list[CheckedStep], int]:
    """Read results from a place of the file on; returns them, and the next place."""
    try:
        with results.open("rb") as file:
            file.seek(offset)
            whole = file.read().rpartition(b"\n")
    except FileNotFoundError:
        return [], offset
    found = [CheckedStep(**json.loads(line)) for line in whole[0].splitlines()]
    return found, offset + len(whole[0]) + len(whole[1])


class Sampling:
    """Which steps a rank has checked: ranks take turns, at every step around a migration."""

    def __init__(self, every: int, rank: int, num_ranks: int) -> None:
        self._every, self._rank, self._num_ranks = every, rank, num_ranks
        self._dense_until = 0

    def is_due(self, step: int, phase: str) -> bool:
        """Return whether a step is sampled."""
        if phase != "idle":
            self._dense_until = step + CHECKED_AFTER_COMMIT
        is_dense = step < self._dense_until
        turn = step if is_dense else step // self._every
        return (is_dense or step % self._every == 0) and turn % self._num_ranks == self._rank


class CheckerClient:
    """Sends sampled steps to the checker on a thread, so that a slow checker delays no step."""

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._pipe: Any = None
        self._retry_at = 0.0
        self.num_dropped = 0  # steps dropped because the checker was slow or down
        self._waiting: queue.Queue[tuple[Any, ...] | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._send_all, name="check-feed", daemon=True)
        self._thread.start()

    def offer(
        self,
        rank: int,
        step: int,
        phase: str,
        token_ids: torch.Tensor,
        answer: Forward,
        *,
        is_forced: bool,
    ) -> None:
        """Queue a step, or drop it when the queue is full."""
        # As arrays: a tensor would be sent as shared memory that this process has to keep.
        arrays = token_ids, answer.hidden.float(), answer.experts
        sampled = rank, step, phase, is_forced, *(one.cpu().numpy() for one in arrays)
        try:
            self._waiting.put_nowait(sampled)
        except queue.Full:
            self.num_dropped += 1

    def close(self) -> None:
        """Send the queued steps, and then the end of the stream."""
        with suppress(queue.Full):
            self._waiting.put(None, timeout=CLOSE_DEADLINE_S)
        self._thread.join(CLOSE_DEADLINE_S)

    def _send_all(self) -> None:
        while (sampled := self._waiting.get()) is not None:
            try:
                self._reach()
                self._pipe.send(sampled)
            except (OSError, EOFError, AuthenticationError):  # it exited; another will be started
                self._pipe = None
                self._retry_at = time.monotonic() + RETRY_S
                self.num_dropped += 1
        if self._pipe is not None:
            self._pipe.close()

    def _reach(self) -> None:
        if self._pipe is None:
            if time.monotonic() < self._retry_at:
                raise ConnectionRefusedError
            self._pipe = Client(f"\0{self._checks.socket}", "AF_UNIX", self._checks.key)


def main() -> None:
    """Check what ranks send, until SIGTERM and until every rank has closed its end.

    The only argument is the engine's file; see ``api.demo.engine``.
    """
    given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    checks: Checks = from_plain(Checks, given["checks"])
    set_title("reference check")
    stops: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stops.append(number))
    notifier = Notifier()
    torch.set_num_threads(checks.num_threads)
    reference = ReferenceModel(
        checks.model,
        Checkpoint(checks.weights).reference_weights(),
        tie=ROUTE_TIE[checks.precision],
    )
    ranks: list[Connection] = []
    listener = Listener(f"\0{checks.socket}", "AF_UNIX", backlog=64, authkey=checks.key)

    def accept() -> None:
        while True:
            with suppress(OSError, EOFError, AuthenticationError):  # a client that is no rank
                ranks.append(listener.accept())

    threading.Thread(target=accept, name="accept", daemon=True).start()
    notifier.ready()
    with checks.results.open("a", encoding="utf-8") as results:
        while ranks or not stops:
            notifier.alive()
            for sampled in _received(ranks):
                rank, step, phase, is_forced, token_ids, hidden, experts = sampled
                answer = Forward(torch.from_numpy(hidden), torch.from_numpy(experts))
                found = reference.check(torch.from_numpy(token_ids), answer, forced=is_forced)
                line = CheckedStep(rank, step, phase, found.max_error, found.wrong_routes)
                results.write(json.dumps(asdict(line)) + "\n")
                results.flush()
                notifier.alive()


def _received(ranks: list[Connection]) -> Iterator[tuple[Any, ...]]:
    """Give a message of each rank that has sent one; forget those that have closed their end."""
    if not ranks:
        threading.Event().wait(POLL_S)
    for pipe in wait(list(ranks), POLL_S) if ranks else ():
        assert isinstance(pipe, Connection), "only pipes are waited for"
        try:
            yield pipe.recv()
        except (EOFError, OSError):
            pipe.close()
            ranks.remove(pipe)


if __name__ == "__main__":
    main()
