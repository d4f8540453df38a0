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

END_DEADLINE_S = 90.0  # after a first exit: for survivors to agree and end
REFUSED_DEADLINE_S = 15.0  # after a rank refused to start: for the refusals of the others
HALT_DEADLINE_S = 30.0  # after a signal: for ranks to end at one step
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

    def __init__(self, command: Sequence[str], environs: Mapping[int, Mapping[str, str]]) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for rank, environ in environs.items():
                self._processes[rank] = _started(command, environ)
        except OSError as exc:
            self._kill()
            raise ConfigError(
                f"{command[0]} cannot be started: {exc.strerror}, expected a program"
            ) from exc

    def wait(self, stop: StopSignals) -> str:
        """Wait for all to end; returns how the first failed, "" if none did.

        A rank that has ended on its own gives the others a deadline, and so does a signal, which
        they get too.
        """
        first, deadline, is_told = "", float("inf"), False
        while left := [p for p in self._processes.values() if p.poll() is None]:
            _wait_for_one(left)
            failed = self._first_failure() if not first else ""
            if failed:
                given_s = REFUSED_DEADLINE_S if self.has_refused else END_DEADLINE_S
                first, deadline = failed, min(deadline, time.monotonic() + given_s)
                log.warning("%s; the other ranks have %g s to end", first, given_s)
            if stop.received and not is_told:
                is_told, deadline = True, min(deadline, time.monotonic() + HALT_DEADLINE_S)
                for process in left:
                    process.send_signal(signal.SIGTERM)
            if time.monotonic() >= deadline:
                log.warning("%d ranks did not end in time: killed", len(left))
                self._kill()
        return first or self._first_failure()

    @property
    def has_refused(self) -> bool:
        """Whether a rank ended because it cannot start as things are."""
        return any(process.returncode == REFUSED for process in self._processes.values())

    def _first_failure(self) -> str:
        for rank, process in self._processes.items():
            status = process.returncode
            if status and status < 0:
                return f"rank {rank} was killed by {signal.Signals(-status).name}"
            if status:
                return f"rank {rank} exited with status {status}"
        return ""

    def _kill(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


def _wait_for_one(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until one of these ends, for a moment at most."""
    with ExitStack() as stack:
        poll = select.poll()
        for process in processes:
            descriptor = os.pidfd_open(process.pid)
            stack.callback(os.close, descriptor)
            poll.register(descriptor, select.POLLIN)
        poll.poll(POLL_MS)


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
