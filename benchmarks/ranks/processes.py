"""The processes of a soak: start, messages, end. All end before their folder is removed."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from types import FrameType, TracebackType
from typing import Any, NoReturn

from api.processes.children import Child, import_for_children

POLL_S = 0.5
GRACE_S = 2.0  # after a first failure, for reports of the others
END_DEADLINE_S = 30.0  # a rank hands its last samples over first
KILL_DEADLINE_S = 5.0
LAST_MESSAGE = "served"  # after it a child may end

OnMessage = Callable[[Child, str, Any], None]


class Interrupts:
    """Records SIGINT and SIGTERM, for an orderly end.

    Processes that are started in its ``with`` block ignore SIGTERM (and SIGINT, by
    ``api.processes.children``): ``timeout`` and service managers send it to the whole group, and
    ranks that exit by it could report nothing.
    """

    def __init__(self) -> None:
        self.found: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        import_for_children()  # the server that forks them starts now, and what it ignores they do
        signal.signal(signal.SIGTERM, self._note)
        self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, at: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # The first one counts: a group is often sent the same twice.
        self.found = self.found or signal.Signals(number)


class BenchmarkProcesses:
    """The child processes of a benchmark."""

    def __init__(self) -> None:
        self._children: list[Child] = []
        self._done: set[str] = set()  # children that need say no more

    def start(self, name: str, main: Callable[..., None], *args: Any) -> Child:
        """Start one."""
        self._children.append(Child(name, main, *args))
        return self._children[-1]

    def wait_for(
        self,
        kind: str,
        children: Sequence[Child],
        *,
        silence_s: float,
        on_message: OnMessage,
        at_each_turn: Callable[[], None],
    ) -> list[Any]:
        """Wait for a message ``kind`` of each child, and return the bodies.

        Args:
            silence_s: longest time without any message of a child.
            on_message: called with other messages.
            at_each_turn: called twice a second or more often.

        Raises:
            SystemExit: the error of a child that failed, or names of children without messages.
        """
        said: dict[str, Any] = {}
        heard_at = {child.name: time.monotonic() for child in children}
        while len(said) < len(children):
            at_each_turn()
            for child, message in self._messages(POLL_S):
                if message is None or message[0] == "failed":
                    self._give_up(child, message)
                heard_at[child.name] = time.monotonic()
                if message[0] == LAST_MESSAGE:
                    self._done.add(child.name)
                if message[0] == "progress":
                    continue  # a process that is supervised elsewhere shows that it goes on
                if message[0] == kind:
                    said[child.name] = message[1]
                else:
                    on_message(child, *message)
            limit = time.monotonic() - silence_s
            silent = [n for n, at in heard_at.items() if n not in said and at < limit]
            if silent:
                names = ", ".join(silent)
                raise SystemExit(f"{names}: no message for {silence_s:.0f} s, expected {kind!r}")
        return [said[child.name] for child in children]

    def let_end(self, children: Sequence[Child]) -> None:
        """Wait until these have ended by themselves.

        Raises:
            SystemExit: one has not, or not well.
        """
        self._done |= {child.name for child in children}
        for child in children:
            child.process.join(END_DEADLINE_S)
            if child.process.exitcode != 0:
                raise SystemExit(f"at the end, {child.exit_text()}")

    def end(self) -> None:
        """End every process that still runs; after this none does."""
        for child in self._children:
            child.kill()  # all at once: each would report the end of those before it
        for child in self._children:
            child.stop(KILL_DEADLINE_S)

    def _messages(self, timeout_s: float) -> list[tuple[Child, Any]]:
        pipes: dict[Connection, Child] = {
            child.messages: child for child in self._children if child.name not in self._done
        }
        ready = wait(list(pipes), timeout_s)
        return [(child, child.receive()) for pipe, child in pipes.items() if pipe in ready]

    def _give_up(self, child: Child, message: tuple[str, Any] | None) -> NoReturn:
        """Report the first cause: peers of a failed child fail too, and may report first."""
        words = {child.name: self._words(child, message)}
        deadline = time.monotonic() + GRACE_S
        while (left_s := deadline - time.monotonic()) > 0:
            self._done |= words.keys()
            for other, said in self._messages(left_s):
                if said is None or said[0] == "failed":
                    words[other.name] = self._words(other, said)
        causes = [one for one in words.values() if "BrokenGroup" not in one]
        raise SystemExit("\n".join(causes or words.values()))

    def _words(self, child: Child, message: tuple[str, Any] | None) -> str:
        if message is None:
            child.process.join(GRACE_S)
            return child.exit_text()
        kind, sentence = message[1]
        return f"{child.name} failed: {kind}: {sentence}"
