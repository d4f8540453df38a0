"""Commands that a process starts and supervises: they end with it, and report to it.

    parent                                       command
    Commands.add -- exec, NOTIFY_SOCKET -------> Notifier.ready, .status, .alive
    Commands.look <- READY, STATUS, WATCHDOG --+
                  <- exit ----------------------

Reports are those of systemd's ``sd_notify(3)``: a unit of ``Type=notify`` with ``WatchdogSec``
supervises a command as ``eplb serve`` and ``eplb demo`` do. A command whose parent exits for any
reason gets SIGKILL from the kernel.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import resource
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from api.interrupts import StopSignals
from api.processes.supervision import (
    REPORT_PERIOD_S,
    Kill,
    Note,
    Supervised,
    SupervisionSettings,
    SupervisionView,
)
from eplb.errors import ConfigError, EplbError, StoreError

NOTIFY_VARIABLE = "NOTIFY_SOCKET"  # environment variable that sd_notify(3) reads
STOP_DEADLINE_S = 10.0
COLLECT_AT = 700, 10, 10  # objects and collections, Python's own thresholds
STORE_RETRY_S = 0.5  # between two attempts to use a store that fails
REFUSED = 2  # exit status of a command that cannot start, as of every command here
_LONGEST_MESSAGE = 4096
_TITLE_CHARACTERS = 15  # TASK_COMM_LEN less its zero (proc_pid_comm(5))
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid (unix(7))
_LIBRARY = ctypes.CDLL(None)  # found before any fork: a child loads nothing


def raise_descriptor_limit() -> None:
    """Raise the limit of open descriptors to the hard limit.

    Every process of a deployment calls this at its start. With the usual soft limit of 1,024 as
    many idle connections use up all descriptors, and then restarts fail too.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def settle() -> None:
    """Collect cycles soon from now on, and not among what was loaded: the start is over.

    The threshold of the start (``api/cli/main.py``) would let megabytes of them gather first. A
    collection among the loaded modules stops every thread for 0.2 s.
    """
    gc.freeze()
    gc.set_threshold(*COLLECT_AT)


def set_title(name: str) -> None:
    """Set the title under which ``ps`` and ``top`` show this process: as much as Linux keeps."""
    Path("/proc/self/comm").write_text(name[:_TITLE_CHARACTERS])


def own_command(*words: str) -> list[str]:
    """The words that run another command of this installation; the working folder hides none."""
    return [sys.executable, "-P", "-m", "api.cli.main", *words]


def end_with_parent(parent: int) -> None:
    """Have the kernel end this process with its parent, right after a fork."""
    _LIBRARY.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has exited already
        os._exit(1)


def start_with_parent(
    words: Sequence[str], environ: Mapping[str, str], **given: Any
) -> subprocess.Popen[bytes]:
    """Start a process that ends with this one; a terminal's signals reach this one alone.

    Raises:
        ConfigError: the program cannot be started.
    """
    given = {"stdin": subprocess.DEVNULL} | given
    try:
        return subprocess.Popen(  # type: ignore[return-value]  # of bytes: no encoding is given
            list(words),
            env=dict(environ),
            process_group=0,
            preexec_fn=partial(end_with_parent, os.getpid()),
            **given,
        )
    except OSError as exc:
        raise ConfigError(
            f"{words[0]} cannot be started: {exc.strerror}, expected a program"
        ) from exc


class Notifier:
    """Reports of a command to whoever supervises it; without a supervisor, nothing."""

    def __init__(
        self,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        address = environ.get(NOTIFY_VARIABLE)
        self._address = address and ("\0" + address[1:] if address[0] == "@" else address)
        self._clock, self._reported = clock, -math.inf

    @property
    def is_heard(self) -> bool:
        """Whether a supervisor has started this command."""
        return bool(self._address)

    def ready(self) -> None:
        """Report that the start is over."""
        self._send("READY=1")

    def status(self, words: str) -> None:
        """Report the progress of the start, or why the command ends."""
        self._send(f"STATUS={' '.join(words.split())}")

    def alive(self) -> None:
        """Report progress, unless it was reported less than ``REPORT_PERIOD_S`` ago."""
        now = self._clock()
        if now - self._reported >= REPORT_PERIOD_S:
            self._reported = now
            self._send("WATCHDOG=1")

    def _send(self, message: str) -> None:
        if not self._address:
            return
        kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
        # An error: the supervisor has exited, or has not read for long.
        with socket.socket(socket.AF_UNIX, kind) as end, suppress(OSError):
            end.sendto(message.encode()[:_LONGEST_MESSAGE], self._address)


Result = TypeVar("Result")


def once_reached(
    act: Callable[[], Result], stop: StopSignals, notifier: Notifier, say: Callable[[str], None]
) -> Result | None:
    """Act on a store at the start of a process; None: a signal ended the wait for the store.

    Args:
        act: opens and uses the store; it is tried again after each ``StoreError``.
        stop: the signals of this process.
        notifier: gets the reason of the wait.
        say: prints a line for operators.
    """
    told = ""
    while True:
        try:
            return act()
        except StoreError as exc:
            if str(exc) != told:  # once, however long it takes
                told = str(exc)
                say(f"{told}; waiting for the store")
                notifier.status(told)
        if stop.wait(STORE_RETRY_S, notifier.alive):
            return None


@dataclass
class Command:
    """One command that is started, and started again after an exit.

    Args:
        words: the program and its arguments.
        supervised: its state.
        comes_back: whether it is started again after an exit status; a signal's end always is.
    """

    words: Sequence[str]
    environ: Mapping[str, str]
    comes_back: bool
    supervised: Supervised = field(init=False)
    process: subprocess.Popen[bytes] | None = None
    status: str = ""  # its latest words
    _reports: socket.socket = field(init=False)
    _address: str = field(init=False)

    def __post_init__(self) -> None:
        self._address = f"eplb-notify-{os.getpid()}-{secrets.token_hex(8)}"
        self._reports = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._reports.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._reports.bind(f"\0{self._address}")

    def start(self) -> Kill:
        """Start it; returns what ends it at once."""
        self.status = ""
        environ = {**self.environ, NOTIFY_VARIABLE: f"@{self._address}"}
        self.process = start_with_parent(self.words, environ, stdout=subprocess.DEVNULL)
        return self.process.kill

    def descriptors(self) -> list[int]:
        """What becomes readable with a report or the exit; the last is to be closed."""
        if self.process is None:
            return []
        return [self._reports.fileno(), os.pidfd_open(self.process.pid)]

    def reports(self) -> list[str]:
        """Reports that wait; those of other users are dropped."""
        found: list[str] = []
        while True:
            try:
                data, control, _, _ = self._reports.recvmsg(_LONGEST_MESSAGE, 64)
            except BlockingIOError:
                return found
            for level, kind, body in control:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                    _, uid, _ = _CREDENTIALS.unpack(body[: _CREDENTIALS.size])
                    if uid == os.getuid():
                        found += data.decode(errors="replace").splitlines()

    def exit_text(self) -> str:
        """How the process exited."""
        assert self.process is not None, "it was started"
        status = self.process.returncode
        if status < 0:
            return f"{self.supervised.name} was killed by {signal.Signals(-status).name}"
        return f"{self.supervised.name} exited with status {status}"

    def close(self) -> None:
        """Close what its reports come over."""
        self._reports.close()


class CommandEnded(EplbError):
    """A command ended that is not started again."""

    def __init__(self, command: Command) -> None:
        words = f" ({command.status})" if command.status else ""
        super().__init__(f"{command.exit_text()}{words}")
        self.command = command


class Commands:
    """The commands of one process: ``look`` handles reports and exits, and restarts what is due.

    Args:
        settings: of their restarts.
        note: stores an event.
        stop: the signals of this process. A terminal and a service manager send them to commands
            too, whose exits then are no failures; None: commands do not get them.
    """

    def __init__(
        self, settings: SupervisionSettings, note: Note, stop: StopSignals | None = None
    ) -> None:
        self._settings, self._note, self._stop = settings, note, stop
        self._commands: list[Command] = []
        self._is_ending = False

    def add(
        self,
        name: str,
        kind: str,
        words: Sequence[str],
        environ: Mapping[str, str] = os.environ,
        *,
        comes_back: bool = True,
    ) -> Command:
        """Start a command and supervise it.

        Raises:
            ConfigError: it cannot be started.
        """
        command = Command(words, environ, comes_back)
        command.supervised = Supervised(name, kind, command.start, self._note, self._settings)
        self._commands.append(command)
        command.supervised.begin()
        return command

    def look(self, timeout_s: float) -> None:
        """Handle reports and exits of commands, for ``timeout_s`` at most.

        Raises:
            CommandEnded: one refused to start, or ended by itself and is not started again.
        """
        poll, opened = select.poll(), []
        for command in self._commands:
            for descriptor in (found := command.descriptors()):
                poll.register(descriptor, select.POLLIN)
            opened += found[1:]
        poll.poll(timeout_s * 1e3)
        for descriptor in opened:
            os.close(descriptor)
        for command in self._commands:
            self._handle(command)
        if not self._is_ending:
            for command in self._commands:
                command.supervised.check()

    def view(self) -> SupervisionView:
        """Return the present state of each; any thread may ask."""
        return SupervisionView(tuple(one.supervised.view() for one in list(self._commands)))

    def _handle(self, command: Command) -> None:
        if command.process is None:
            return
        has_ended = command.process.poll() is not None  # first: what it reported last counts
        is_ending = self._is_ending or (self._stop is not None and self._stop.received > 0)
        for report in command.reports():
            kind, _, text = report.partition("=")
            if kind == "STATUS":
                command.status = text
                command.supervised.starting(text)
            elif kind in ("READY", "WATCHDOG"):
                command.supervised.reported()
        if not has_ended:
            return
        supervised = command.supervised
        how, status = command.exit_text(), command.process.returncode
        try:
            if status >= 0 and not is_ending:
                is_refusal = status == REFUSED and not supervised.was_ready
                if is_refusal or not command.comes_back:
                    raise CommandEnded(command)
        finally:
            command.process = None
        if is_ending:
            supervised.retire()
        else:
            supervised.ended(f"{how} ({command.status})" if status > 0 and command.status else how)

    def end(self, commands: Sequence[Command], deadline_s: float = STOP_DEADLINE_S) -> None:
        """Have commands end by themselves, and kill those that do not in time."""
        self._is_ending = True
        deadline = time.monotonic() + deadline_s
        for command in commands:
            if command.process is not None:
                command.process.terminate()
        while any(one.process is not None for one in commands) and time.monotonic() < deadline:
            self.look(0.1)
        for command in commands:
            if command.process is not None:
                command.process.kill()
                command.process.wait(STOP_DEADLINE_S)
                command.process = None
        self._is_ending = False

    def end_all(self, deadline_s: float = STOP_DEADLINE_S) -> None:
        """End every command that still runs."""
        self.end(self._commands, deadline_s)
        for command in self._commands:
            command.close()
