"""SIGKILL at random moments: of the controller the demo goes on, of the whole the next start does.

The marked tests are the ten kills that the project asks for; the others are one of each.
"""

import os
import random
import signal
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from telemetry import open_store
from telemetry.state.store import StateStore
from tests.support.demo import deaths_in, shared_memory, wait_until_freed
from tests.support.repository import ROOT

TEXT = ("--text", str(ROOT / "LICENSE"), "--text", str(ROOT / "README.md"))
KILLS = 10
LONGEST_LIFE_S = 8.0  # long enough to die in any phase of the start and of serving

StartDemo = Callable[..., Any]


def kill_the_controller(demo: Any, moment: random.Random, times: int) -> None:
    """Kill it ``times`` times, each a little after the one before it has come back."""
    first = demo.sees("the start", lambda store: 1 + errors_in(store)) - 1  # of an earlier run
    for number in range(times):

        def is_back(store: StateStore, number: int = number) -> bool:
            told = errors_in(store) - first
            return told == number and "controller" in demo.processes().values()

        demo.sees("a controller", is_back)
        # No event says "a random moment": this wait is the experiment itself.
        threading.Event().wait(moment.uniform(0.0, 2.0))
        demo.kill("controller")
    demo.sees("news of the last kill", lambda store: errors_in(store) == first + times)


def errors_in(store: StateStore) -> int:
    return len(deaths_in(store))


def a_plan_after_the_last_kill(store: StateStore) -> bool:
    kinds = [event.kind for event in store.events(limit=100_000)]
    last_kill = max(i for i, kind in enumerate(kinds) if kind == "error")
    return "plan" in kinds[last_kill:]


def controller_is_killed(
    folder: Path, start_demo: StartDemo, *flags: str, times: int
) -> dict[str, Any]:
    demo = start_demo(folder, "--serve", *flags, *TEXT)
    kill_the_controller(demo, random.Random(times), times)
    demo.sees("a plan of the new controller", a_plan_after_the_last_kill)

    summary: dict[str, Any] = demo.halts_right()
    assert summary["controller_restarts"] == times
    return summary


def whole_is_killed(folder: Path, start_demo: StartDemo, after_s: float) -> None:
    """Kill the demo's own process ``after_s`` seconds into its life; the others must follow."""
    demo = start_demo(folder, "--serve", *TEXT)
    threading.Event().wait(after_s)
    os.kill(demo.process.pid, signal.SIGKILL)

    demo.leaves_nothing()
    assert demo.process.wait() == -signal.SIGKILL
    assert "Traceback" not in demo.errors, demo.output_text()
    if (folder / "state" / "store.sqlite").exists():
        with closing(open_store(folder / "state" / "store.sqlite", "demo")) as store:
            assert store.version() >= 0


@pytest.mark.slow
def test_killed_demo_is_resumed_and_then_outlives_its_controller(
    tmp_path: Path, start_demo: StartDemo
) -> None:
    before = shared_memory()
    demo = start_demo(tmp_path, "--serve", *TEXT)
    demo.wait_for_line(" ranks, ")  # the start has a deadline of its own
    demo.wait_for_line(" commit plan=1")
    os.kill(demo.process.pid, signal.SIGKILL)
    demo.leaves_nothing()
    wait_until_freed(before)

    summary = controller_is_killed(tmp_path, start_demo, "--resume", times=1)
    assert summary["imbalance_series"][0]["generation"] >= 1


@pytest.mark.slow
def test_controller_may_be_killed_at_ten_random_moments(
    tmp_path: Path, start_demo: StartDemo
) -> None:
    controller_is_killed(tmp_path, start_demo, times=KILLS)


@pytest.mark.slow
def test_demo_survives_kills_at_ten_random_moments(tmp_path: Path, start_demo: StartDemo) -> None:
    moment = random.Random(2)
    before = shared_memory()
    for kill in range(KILLS):
        whole_is_killed(tmp_path, start_demo, moment.uniform(0.0, LONGEST_LIFE_S))
        wait_until_freed(before)
        flags = ("--resume", *TEXT) if kill % 2 else TEXT
        start_demo(tmp_path, *flags, seconds=1).ends_right()
        assert not list(tmp_path.glob("state/**/*.unfinished"))
