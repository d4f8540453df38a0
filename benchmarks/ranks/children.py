"""Child processes of a benchmark: they end with it, take commands, and send messages.

A child holds the reading end of a pipe whose only writing end is the benchmark's: when that exits
for any reason, the child reads end-of-file and exits.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from eplb.errors import EplbError

FAILED = 1
STOP_DEADLINE_S = 10.0

Message = tuple[str, Any]  # (kind, body); kind "failed" carries (class name, sentence)


class Parent:
    """A child's side: commands in, messages out."""

    def __init__(self, commands: Connection, messages: Connection) -> None:
        self._commands, self._messages = commands, messages
        self._sending = threading.Lock()

    def send(self, kind: str, body: Any = None) -> None:
        """Send a message."""
        with self._sending:
            try:
                self._messages.send((kind, body))
            except OSError:  # the benchmark has exited
                os._exit(FAILED)

    def receive_commands(self, on_command: Callable[[Message], None]) -> None:
        """Receive commands on a thread until the benchmark exits, and exit with it."""

        def receive() -> None:
            while True:
                try:
                    on_command(self._commands.recv())
                except (EOFError, OSError):
                    os._exit(FAILED)

        threading.Thread(target=receive, name="commands", daemon=True).start()


class Child:
    """A benchmark's side: one process that runs ``main(parent, *args)``."""

    def __init__(self, name: str, main: Callable[..., None], *args: Any) -> None:
        context = get_context("forkserver")
        commands, self._commands = context.Pipe(duplex=False)
        self.messages, messages = context.Pipe(duplex=False)
        self.name = name
        self.process = context.Process(
            target=_run_child, args=(main, commands, messages, args), name=name, daemon=True
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


def preload_modules(*names: str) -> None:
    """Import these modules once in the fork server, instead of in each child."""
    get_context("forkserver").set_forkserver_preload(list(names))


def _run_child(
    main: Callable[..., None], commands: Connection, messages: Connection, args: tuple[Any, ...]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = Parent(commands, messages)
    try:
        main(parent, *args)
    except EplbError as exc:
        parent.send("failed", (type(exc).__name__, str(exc)))
        os._exit(FAILED)
    os._exit(0)  # daemon threads of libraries must not keep a finished child alive
