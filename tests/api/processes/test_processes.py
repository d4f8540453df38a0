"""Children end with their parent, whatever it died of, and say in words how they ended."""

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from api.processes.children import FAILED, ORPHANED, Child, Message, Parent, refusal, title_of
from eplb.errors import EplbError, PlacementError, RankError
from tests.support.limits import NEVER_S
from tests.support.repository import ROOT

StartChild = Callable[..., Child]


def count(parent: Parent, last: int) -> None:
    for number in range(last):
        parent.send("number", number)


def refuse(parent: Parent) -> None:
    raise PlacementError("layer 3: expert 5 has no slot")


def crash(parent: Parent) -> None:
    raise SystemExit(7)


def receive_commands(parent: Parent) -> None:
    """Answer each command with itself, for ever."""

    def answer(command: Message) -> None:
        parent.send(*command)

    parent.receive_commands(answer)
    parent.send("ready", Path("/proc/self/comm").read_text().strip())
    threading.Event().wait()


def hear_nothing(parent: Parent) -> None:
    parent.send("ready")
    threading.Event().wait()


@pytest.fixture
def start() -> Iterator[StartChild]:
    children: list[Child] = []

    def started(name: str, main: Callable[..., None], *args: Any) -> Child:
        children.append(Child(name, main, *args))
        return children[-1]

    yield started
    for child in children:
        child.stop(0.0)
        child.process.join()


def next_message(child: Child) -> Message | None:
    return child.receive()


def test_messages_arrive_in_order_and_then_the_end(start: StartChild) -> None:
    child = start("the counter", count, 3)

    heard = [next_message(child) for _ in range(4)]
    child.process.join()

    assert heard == [("number", 0), ("number", 1), ("number", 2), None]
    assert child.exit_text() == "the counter exited with status 0"


def test_refusal_of_a_child_reaches_the_parent_as_its_sentence(start: StartChild) -> None:
    child = start("rank 2", refuse)

    kind, body = next_message(child) or ("", None)
    child.process.join()

    assert (kind, body) == ("failed", ("PlacementError", "layer 3: expert 5 has no slot"))
    assert str(refusal("rank 2", body)) == "rank 2: layer 3: expert 5 has no slot"
    assert child.exit_text() == f"rank 2 exited with status {FAILED}"


def test_rank_names_itself_in_its_own_errors() -> None:
    told = refusal("rank 2", ("RankError", "rank 2: a peer is dead"))

    assert isinstance(told, RankError)
    assert str(told) == "rank 2: a peer is dead"
    assert not isinstance(refusal("rank 2", ("StoreError", "it is full")), RankError)
    assert isinstance(refusal("rank 2", ("StoreError", "it is full")), EplbError)


def test_exit_without_a_message_is_reported_with_its_status(start: StartChild) -> None:
    child = start("rank 1", crash)

    assert next_message(child) is None
    child.process.join()
    assert child.exit_text() == "rank 1 exited with status 7"


def test_killed_child_is_reported_with_its_signal(start: StartChild) -> None:
    child = start("rank 1", receive_commands)
    next_message(child)
    assert child.exit_text() == "rank 1 is still running"

    child.process.kill()

    assert next_message(child) is None
    child.process.join()
    assert child.exit_text() == "rank 1 was killed by SIGKILL"


def test_command_to_an_exited_child_is_dropped(start: StartChild) -> None:
    child = start("the counter", count, 0)
    child.process.join()

    child.command("halt")

    assert next_message(child) is None


def test_interrupts_are_left_to_the_parent(start: StartChild) -> None:
    child = start("rank 0", receive_commands)
    next_message(child)
    pid = child.process.pid
    assert pid is not None

    os.kill(pid, signal.SIGINT)
    child.command("still there?", 1)

    assert next_message(child) == ("still there?", 1)


def test_stop_ends_a_child_by_closing_its_command_pipe(start: StartChild) -> None:
    child = start("rank 0", receive_commands)
    next_message(child)

    child.stop(NEVER_S)

    assert child.process.exitcode == ORPHANED


def test_stop_kills_a_child_that_ignores_commands(start: StartChild) -> None:
    child = start("rank 0", hear_nothing)
    next_message(child)

    child.stop(0.2)
    child.process.join()

    assert child.process.exitcode == -signal.SIGKILL


def test_processes_carry_their_names_as_titles(start: StartChild) -> None:
    child = start("the preload process of host 0", receive_commands)

    assert next_message(child) == ("ready", "preload process")
    assert title_of("rank 17") == "rank 17"


PARENT = """
from api.processes.children import Child
from tests.api.processes.test_processes import receive_commands

if __name__ == "__main__":
    child = Child("rank 0", receive_commands)
    child.receive()
    print(child.process.pid, flush=True)
    child.process.join()
"""


def test_child_exits_when_its_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, text=True, env=environ
    ) as parent:
        assert parent.stdout is not None
        handle = os.pidfd_open(int(parent.stdout.readline()))
        try:
            parent.kill()
            poll = select.poll()
            poll.register(handle, select.POLLIN)

            poll.poll()  # until the child has ended too
        finally:
            os.close(handle)
