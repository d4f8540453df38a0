"""Commands end with their parent, whatever it died of, report to it, and come back as asked."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from api.processes.commands import Command, CommandEnded, Commands, Notifier
from api.processes.supervision import ProcessState, SupervisionSettings
from eplb.errors import ConfigError
from tests.support.limits import NEVER_S
from tests.support.repository import ROOT

ENVIRON = dict(os.environ) | {"PYTHONPATH": str(ROOT)}
REPORTS = """
import signal, sys, threading
from api.processes.commands import Notifier, set_title
set_title("a long title of a process")
notifier = Notifier()
notifier.status("half  way")
notifier.ready()
"""
WAITS = "while True: signal.pause()"


class Scene:
    """A few commands, and what was noted of them."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        settings = SupervisionSettings(restart_delay_s=0.0, hung_after_s=NEVER_S)
        self.commands = Commands(settings, lambda where, what: self.notes.append(what))

    def add(self, code: str, *, comes_back: bool = True) -> Command:
        words = [sys.executable, "-c", code]
        return self.commands.add("the engine", "engine", words, ENVIRON, comes_back=comes_back)

    def look_until(self, is_reached: Callable[[], object]) -> None:
        while not is_reached():
            self.commands.look(1.0)


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.commands.end_all()


def test_reports_of_a_command_reach_its_supervisor(scene: Scene) -> None:
    command = scene.add(REPORTS + WAITS)
    assert command.supervised.state is ProcessState.STARTING

    scene.look_until(lambda: command.supervised.is_running)

    assert command.status == "half way"
    assert command.process is not None
    title = Path(f"/proc/{command.process.pid}/comm").read_text()
    assert title == "a long title of\n"


def test_killed_command_is_started_again(scene: Scene) -> None:
    command = scene.add(REPORTS + WAITS)
    scene.look_until(lambda: command.supervised.is_running)
    first = command.process
    assert first is not None

    first.kill()
    scene.look_until(lambda: scene.notes)
    scene.look_until(lambda: command.supervised.is_running)

    assert scene.notes == ["the engine was killed by SIGKILL; restarting in 0.0 s"]
    assert command.process is not None
    assert command.process.pid != first.pid


def test_command_that_refuses_to_start_ends_the_start_with_its_words(scene: Scene) -> None:
    scene.add(
        "from api.processes.commands import Notifier; Notifier().status('no such port'); exit(2)"
    )

    with pytest.raises(CommandEnded, match=r"^the engine exited with status 2 \(no such port\)$"):
        scene.look_until(lambda: False)


def test_command_that_fails_while_it_serves_is_started_again(scene: Scene) -> None:
    command = scene.add(REPORTS + "sys.exit(2)")

    scene.look_until(lambda: command.supervised.restarts)

    assert scene.notes == ["the engine exited with status 2 (half way); restarting in 0.0 s"]


def test_command_that_does_not_come_back_raises_at_its_end(scene: Scene) -> None:
    scene.add(REPORTS + "sys.exit(0)", comes_back=False)

    with pytest.raises(CommandEnded, match="the engine exited with status 0"):
        scene.look_until(lambda: False)


def test_end_asks_a_command_and_kills_one_that_does_not_end(scene: Scene) -> None:
    ends = scene.add(REPORTS + WAITS)
    ignores = scene.add("import signal; signal.signal(15, signal.SIG_IGN)\n" + REPORTS + WAITS)
    scene.look_until(lambda: ends.supervised.is_running and ignores.supervised.is_running)
    processes = [ends.process, ignores.process]

    scene.commands.end([ends, ignores], deadline_s=0.5)

    assert [one and one.returncode for one in processes] == [-signal.SIGTERM, -signal.SIGKILL]
    assert scene.notes == []


def test_interrupts_of_a_terminal_are_left_to_the_parent(scene: Scene) -> None:
    command = scene.add(REPORTS + WAITS)
    scene.look_until(lambda: command.supervised.is_running)

    assert command.process is not None
    assert os.getpgid(command.process.pid) == command.process.pid != os.getpgid(0)


def test_program_that_is_not_there_is_refused(scene: Scene) -> None:
    with pytest.raises(ConfigError, match="no-such-program cannot be started: No such file"):
        scene.commands.add("the engine", "engine", ["no-such-program"])


def test_command_without_a_supervisor_reports_nothing() -> None:
    notifier = Notifier({})

    notifier.ready()
    notifier.alive()


SIGNALLED = """
import os
import signal
import sys
from api.interrupts import StopSignals
from api.processes.commands import Commands
from api.processes.supervision import SupervisionSettings

stop = StopSignals()
commands = Commands(SupervisionSettings(), lambda where, what: print("noted:", what), stop)
waits = [sys.executable, "-c", "import signal; signal.pause()"]
command = commands.add("the child", "child", waits)
os.kill(os.getpid(), signal.SIGTERM)  # as a service manager does, to the child too
command.process.terminate()
while command.process is not None:
    commands.look(1.0)
print(command.supervised.state.value)
"""


def test_exit_of_a_command_after_a_signal_to_both_is_no_failure() -> None:
    words = [sys.executable, "-c", SIGNALLED]
    ran = subprocess.run(words, capture_output=True, text=True, env=ENVIRON, check=True)

    assert ran.stdout == "down\n"


MAKES_CYCLES = """
import gc, weakref
from api.processes.commands import settle

class Cycle:
    def __init__(self):
        self.me = self

gc.set_threshold(50_000)  # as of a start
settle()
alive = weakref.WeakSet()
for _ in range(20_000):
    alive.add(Cycle())
print(len(alive))
"""


def test_settled_process_keeps_few_cycles() -> None:
    words = [sys.executable, "-c", MAKES_CYCLES]
    ran = subprocess.run(words, capture_output=True, text=True, env=ENVIRON, check=True)

    assert int(ran.stdout) < 1000


PARENT = """
import sys
from api.processes.commands import Commands
from api.processes.supervision import SupervisionSettings

commands = Commands(SupervisionSettings(), print)
waits = [sys.executable, "-c", "import signal; signal.pause()"]
command = commands.add("the child", "child", waits)
print(command.process.pid, flush=True)
command.process.wait()
"""


def test_command_exits_when_its_parent_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=ENVIRON
    ) as parent:
        assert parent.stdout is not None
        handle = os.pidfd_open(int(parent.stdout.readline()))
        try:
            parent.kill()
            poll = select.poll()
            poll.register(handle, select.POLLIN)

            poll.poll()  # until the command has ended too
        finally:
            os.close(handle)
