"""Child processes that end with their parent, and whose exit is always reported.

A child holds the reading end of a pipe whose only writing end is the parent's: when the parent
exits for any reason, the child reads end-of-file and exits. Messages of a child come back over a
second pipe; how it exited is reported as a sentence.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import current_process, forkserver, get_context, parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from api.processes.descriptors import raise_descriptor_limit
from api.processes.supervision import REPORT_PERIOD_S
from api.terminal.logs import LogSettings, log_settings, set_up_logging
from eplb.errors import BrokenGroup, ConfigError, EplbError, RankError

ORPHANED = 86  # exit status of a child whose parent exited
FAILED = 1
STOP_DEADLINE_S = 10.0
# Of the 107 that unix(7) allows a socket, multiprocessing takes "/pymp-xxxxxxxx/listener-xxxxxxxx".
_LONGEST_TMPDIR = 107 - 32
TITLE_CHARACTERS = 15  # of a process, TASK_COMM_LEN less its zero (proc_pid_comm(5))

WORKER_MODULES = (  # of the demo's children
    "api.demo.workers.rank",
    "api.demo.workers.checker",
    "api.demo.workers.host_cache",
    "api.processes.controller",
)

Message = tuple[str, Any]  # (kind, body); kind "failed" carries (class name, sentence)


class Parent:
    """A child's side: commands in, messages out."""

    def __init__(self, commands: Connection, messages: Connection) -> None:
        self._commands, self._messages = commands, messages
        self._sending = threading.Lock()

    def send(self, kind: str, body: Any = None) -> None:
        """Send a message. An exited parent is no error: this process is about to exit."""
        with self._sending:
            try:
                self._messages.send((kind, body))
            except OSError:
                _end_orphaned()

    def receive_commands(self, on_command: Callable[[Message], None]) -> None:
        """Receive commands on a thread until the parent exits, and exit with it."""

        def receive() -> None:
            while True:
                try:
                    on_command(self._commands.recv())
                except (EOFError, OSError):
                    _end_orphaned()

        threading.Thread(target=receive, name="commands", daemon=True).start()


class ProgressReports:
    """Reports to the parent that this process makes progress, at most every ``REPORT_PERIOD_S``."""

    def __init__(self, parent: Parent, clock: Callable[[], float] = time.monotonic) -> None:
        self._parent, self._clock, self._reported = parent, clock, -math.inf

    def report(self) -> None:
        """Report progress, unless it was reported less than ``REPORT_PERIOD_S`` ago."""
        now = self._clock()
        if now - self._reported >= REPORT_PERIOD_S:
            self._reported = now
            self._parent.send("progress")


class Child:
    """A parent's side: one process that runs ``main(parent, *args)``."""

    def __init__(
        self, name: str, main: Callable[..., None], *args: Any, rank: int | None = None
    ) -> None:
        context = get_context("forkserver")
        commands, self._commands = context.Pipe(duplex=False)
        self.messages, messages = context.Pipe(duplex=False)
        self.name = name
        self.process = context.Process(
            target=_run_child,
            args=(name, main, commands, messages, args, (log_settings(), rank)),
            name=name,
            daemon=True,
        )
        self.process.start()
        commands.close()
        messages.close()

    def command(self, kind: str, body: Any = None) -> None:
        """Send a command; it is dropped if the child has exited, which is reported elsewhere."""
        try:
            self._commands.send((kind, body))
        except OSError:
            return

    def receive(self) -> Message | None:
        """Return the next message, once ``messages`` is readable; None at the child's exit."""
        try:
            message: Message = self.messages.recv()
        except (EOFError, OSError):
            return None
        return message

    def exit_text(self) -> str:
        """Return how the process exited, as a sentence."""
        status = self.process.exitcode
        if status is None:
            return f"{self.name} is still running"
        if status < 0:
            return f"{self.name} was killed by {signal.Signals(-status).name}"
        return f"{self.name} exited with status {status}"

    def kill(self) -> None:
        """End the process at once, even one that hangs."""
        self.process.kill()

    def stop(self, deadline_s: float = STOP_DEADLINE_S) -> None:
        """Wait for the process to end by itself, then end it."""
        self._commands.close()  # end-of-file ends a child that has no other command
        self.process.join(deadline_s)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(deadline_s)
        self.messages.close()


def _end_orphaned() -> NoReturn:
    """End this process, and remove the temporary folder of a killed parent."""
    parent = parent_process()
    folder = current_process()._config.get("tempdir")  # type: ignore[attr-defined]
    if folder is not None and parent is not None and not parent.is_alive():
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(ORPHANED)


def preload_modules(*names: str) -> None:
    """Import these modules once in the fork server, instead of in each child."""
    get_context("forkserver").set_forkserver_preload(list(names))


def import_for_children() -> None:
    """Import the named modules now, in a process of its own.

    It and its children ignore, from the start, the signals that a terminal sends to all processes:
    the parent alone handles them.

    Raises:
        ConfigError: sockets cannot be made in the folder of temporary files.
    """
    of_terminal = (signal.SIGINT, signal.SIGHUP)
    handlers = [signal.signal(one, signal.SIG_IGN) for one in of_terminal]
    try:
        forkserver.ensure_running()
    except OSError as exc:
        raise ConfigError(
            f"TMPDIR: found the folder {tempfile.gettempdir()}, where the socket of the fork "
            f"server cannot be made ({exc}), expected a writable folder of at most "
            f"{_LONGEST_TMPDIR} characters"
        ) from exc
    finally:
        for one, handler in zip(of_terminal, handlers, strict=True):
            signal.signal(one, handler)


def title_of(name: str) -> str:
    """Give the title under which ``ps`` and ``top`` show a child: as much as Linux keeps."""
    return name.removeprefix("the ")[:TITLE_CHARACTERS]


def _run_child(
    name: str,
    main: Callable[..., None],
    commands: Connection,
    messages: Connection,
    args: tuple[Any, ...],
    logs: tuple[LogSettings, int | None],
) -> None:
    Path("/proc/self/comm").write_text(title_of(name))
    raise_descriptor_limit()
    # Ctrl-C reaches the whole process group; the parent alone handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings, rank = logs
    set_up_logging(settings, process=name.removeprefix("the "), rank=rank)
    parent = Parent(commands, messages)
    try:
        main(parent, *args)
    except EplbError as exc:
        parent.send("failed", (type(exc).__name__, str(exc)))
        os._exit(FAILED)
    os._exit(0)  # daemon threads of libraries must not keep a finished child alive


def refusal(name: str, body: tuple[str, str]) -> EplbError:
    """Make the parent's exception of a child's "failed" message."""
    kind, sentence = body
    of_ranks: dict[str, type[RankError]] = {one.__name__: one for one in (RankError, BrokenGroup)}
    return of_ranks[kind](sentence) if kind in of_ranks else EplbError(f"{name}: {sentence}")
