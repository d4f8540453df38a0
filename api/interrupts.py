"""Handling of interrupts of the command line: exit with one line, or an exception."""

from __future__ import annotations

import atexit
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event

INTERRUPTED = 130  # 128 + SIGINT, as shells report it
POLL_S = 0.25


def leave_on_signals(*signals: signal.Signals) -> None:
    """End the process on an interrupt: an exception could come up anywhere in an import."""
    for one in (signal.SIGINT, *signals):
        if signal.getsignal(one) is not signal.SIG_IGN:  # nohup, or a shell's background job
            signal.signal(one, leave)


@contextmanager
def leaving_on_interrupt() -> Iterator[None]:
    """End the process on an interrupt meanwhile, then have it raise KeyboardInterrupt again."""
    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if raises:
        signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        if raises:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def raising_on_interrupt() -> Iterator[None]:
    """Have an interrupt raise KeyboardInterrupt meanwhile, where it would end the process."""
    leaves = signal.getsignal(signal.SIGINT) is leave
    if leaves:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if leaves:
            signal.signal(signal.SIGINT, leave)


def interrupt_on_signals() -> None:
    """Have Ctrl-C, a service manager and a terminal that closes all raise KeyboardInterrupt."""
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(one) is not signal.SIG_IGN:
            signal.signal(one, signal.default_int_handler)


class StopSignals:
    """SIGINT, SIGTERM and SIGHUP, noted for a loop that looks at them between two waits."""

    def __init__(self) -> None:
        self.received = 0  # number of the first; 0: none yet
        for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(one) is not signal.SIG_IGN:
                signal.signal(one, self._note)

    @property
    def name(self) -> str:
        """Name of the signal that was received."""
        return signal.Signals(self.received).name

    def wait(self, seconds: float, alive: Callable[[], object] = lambda: None) -> bool:
        """Wait, at most until a signal; returns whether one was received.

        Args:
            seconds: the time to wait.
            alive: called a few times a second.
        """
        until, quiet = time.monotonic() + seconds, Event()
        while not self.received and (left_s := until - time.monotonic()) > 0:
            alive()
            quiet.wait(min(left_s, POLL_S))  # not set by the handler: a wait may hold its lock
        return self.received > 0

    def _note(self, number: int, _: object) -> None:
        self.received = self.received or number


def leave(*_: object) -> None:
    """Print one line and end the process, after its exit handlers."""
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)
    os.write(2, b"eplb: interrupted\n")
    atexit._run_exitfuncs()
    os._exit(INTERRUPTED)
