"""The ranks of one host as processes: start, wait, end."""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from api.interrupts import StopSignals
from eplb.errors import ConfigError
from rebalance.build.places import HALT_FILE_VARIABLE

END_DEADLINE_S = 90.0  # after a first exit: for survivors to agree and end
REFUSED_DEADLINE_S = 15.0  # after a rank refused to start: for the refusals of the others
HALT_DEADLINE_S = 30.0  # after a signal: for ranks to leave their serving loops, at one step
# After a rank has left its loop: for its last reports and the end of its interpreter, which takes
# long on a busy host. Its tokens are served by then, so nothing is lost by waiting.
EXIT_DEADLINE_S = 300.0
POLL_MS = 250
REFUSED = 2  # exit status of a rank that cannot start, as of every command here
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

log = logging.getLogger(__name__)


class LocalRanks:
    """The processes of one start of this host's ranks.

    Args:
        command: the program of each.
        environs: the environment of each, by rank.

    Raises:
        ConfigError: it is no program.
    """

    def __init__(
        self,
        command: Sequence[str],
        environs: Mapping[int, Mapping[str, str]],
        *,
        halt_deadline_s: float = HALT_DEADLINE_S,
        exit_deadline_s: float = EXIT_DEADLINE_S,
    ) -> None:
        self._halt_deadline_s, self._exit_deadline_s = halt_deadline_s, exit_deadline_s
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._notices, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)  # the ranks' numbers
        self._ends = [self._notices, theirs]
        self._halted: set[int] = set()  # ranks that have left their serving loops
        self._late: set[int] = set()  # of these, ranks that were killed because they did not exit
        try:
            named = {HALT_FILE_VARIABLE: f"/proc/{os.getpid()}/fd/{theirs}"}
            for rank, environ in environs.items():
                self._processes[rank] = _started(command, {**environ, **named})
        except OSError as exc:
            self._kill()
            self._close()
            raise ConfigError(
                f"{command[0]} cannot be started: {exc.strerror}, expected a program"
            ) from exc

    def wait(self, stop: StopSignals) -> str:
        """Wait for all to end; returns how the first failed, "" if none did.

        A rank that has ended on its own gives the others a deadline, and so does a signal, which
        they get too. A rank that has left its serving loop has a longer one to exit, and is no
        failure if it misses that.
        """
        first, deadline, is_told, is_exiting = "", float("inf"), False, False
        try:
            while left := {r: p for r, p in self._processes.items() if p.poll() is None}:
                self._wait_for_one(left)
                if not (first or is_exiting) and self._halted >= left.keys():
                    is_exiting, deadline = True, time.monotonic() + self._exit_deadline_s
                failed = self._first_failure() if not first else ""
                if failed:
                    given_s = REFUSED_DEADLINE_S if self.has_refused else END_DEADLINE_S
                    first, deadline = failed, min(deadline, time.monotonic() + given_s)
                    log.warning("%s; the other ranks have %g s to end", first, given_s)
                if stop.received and not is_told:
                    is_told = True
                    if not is_exiting:
                        deadline = min(deadline, time.monotonic() + self._halt_deadline_s)
                    for process in left.values():
                        process.send_signal(signal.SIGTERM)
                if time.monotonic() >= deadline:
                    self._end_late(left)
            return first or self._first_failure()
        finally:
            self._close()

    @property
    def has_refused(self) -> bool:
        """Whether a rank ended because it cannot start as things are."""
        return any(process.returncode == REFUSED for process in self._processes.values())

    def _first_failure(self) -> str:
        for rank, process in self._processes.items():
            status = None if rank in self._late else process.returncode
            if status and status < 0:
                return f"rank {rank} was killed by {signal.Signals(-status).name}"
            if status:
                return f"rank {rank} exited with status {status}"
        return ""

    def _end_late(self, left: Mapping[int, subprocess.Popen[bytes]]) -> None:
        for rank in left:
            if rank in self._halted:
                self._late.add(rank)
                log.warning("rank %d left its serving loop and did not exit: killed", rank)
            else:
                log.warning("rank %d did not leave its serving loop in time: killed", rank)
        self._kill()

    def _kill(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def _wait_for_one(self, left: Mapping[int, subprocess.Popen[bytes]]) -> None:
        """Wait until a process ends or a rank halts, for a moment at most."""
        with ExitStack() as stack:
            poll = select.poll()
            poll.register(self._notices, select.POLLIN)
            for process in left.values():
                descriptor = os.pidfd_open(process.pid)
                stack.callback(os.close, descriptor)
                poll.register(descriptor, select.POLLIN)
            ready = [descriptor for descriptor, _ in poll.poll(POLL_MS)]
        if self._notices in ready:
            self._halted |= {int(line) for line in os.read(self._notices, select.PIPE_BUF).split()}

    def _close(self) -> None:
        while self._ends:
            os.close(self._ends.pop())


def _started(command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a rank that ends with its launcher; a terminal's signals reach the launcher alone."""
    library = ctypes.CDLL(None)

    def end_with_parent() -> None:
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    # The launcher has no threads by now that could hold a lock over the fork.
    return subprocess.Popen(
        list(command),
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        process_group=0,
        preexec_fn=end_with_parent,
    )
