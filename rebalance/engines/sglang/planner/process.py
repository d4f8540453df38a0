"""The planner in a process of its own, and the engine's end of the connection to it.

A plan takes up to seconds and needs the interpreter; beside the forward thread it would slow every
pass. The process ends with the connection, so that it never outlives the engine. One that was
killed is started again with the next question.

    python -m rebalance.engines.sglang.planner.process FD
"""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection

from eplb.errors import EplbError
from rebalance.engines.sglang.planner.planning import answer

log = logging.getLogger(__name__)

REFUSED = b"refused:"  # before the reason why a question has no plan


class PlannerProcess:
    """Asks a child process for plans. One thread uses it, and that is not the forward thread."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._link: Connection | None = None
        self._is_asked = False

    @property
    def pid(self) -> int | None:
        """Process id of the child; None where none runs."""
        alive = self._child is not None and self._child.poll() is None
        return self._child.pid if alive and self._child is not None else None

    def start(self) -> None:
        """Start the child unless it runs."""
        if self.pid is not None and self._link is not None:
            return
        self.close()
        ours, theirs = socket.socketpair()
        with theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._link = Connection(ours.detach())

    def ask(self, question: bytes) -> None:
        """Send a question; the answer to an earlier one that is still open is not read.

        Raises:
            OSError: the process is gone.
        """
        if self._is_asked:
            self.close()
        self.start()
        assert self._link is not None, "start makes the connection"
        self._link.send_bytes(question)
        self._is_asked = True

    def answer(self) -> bytes | None:
        """Return the answer if it is there.

        Raises:
            OSError: the process is gone.
            EOFError: likewise.
            EplbError: it has no plan for that question.
        """
        if self._link is None or not self._is_asked or not self._link.poll():
            return None
        record = self._link.recv_bytes()
        self._is_asked = False
        if record.startswith(REFUSED):
            raise EplbError(record.removeprefix(REFUSED).decode())
        return record

    def close(self, timeout_s: float = 5.0) -> None:
        """End the child."""
        if self._link is not None:
            self._link.close()
        if self._child is not None:
            self._child.kill()
            with suppress(subprocess.TimeoutExpired):
                self._child.wait(timeout_s)
        self._child, self._link, self._is_asked = None, None, False


def serve(link: Connection) -> None:
    """Answer questions until the other end is closed."""
    while True:
        try:
            question = link.recv_bytes()
        except (EOFError, OSError):
            return
        begin = time.monotonic()
        try:
            found = answer(question)
        except EplbError as exc:
            found = REFUSED + str(exc).encode()
        log.info("planned in %.3f s", time.monotonic() - begin)
        try:
            link.send_bytes(found)
        except OSError:
            return


if __name__ == "__main__":
    with Connection(int(sys.argv[1])) as connection:
        serve(connection)
