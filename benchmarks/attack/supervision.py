"""Hangs and kills processes that do not serve: serving continues, and they are restarted."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.attack import Attack, Outcome
from benchmarks.faults.demo_process import FaultyDemo, TooLate

DEADLINE_S = 40.0
KILLS_OF_CONTROLLER, KILLS = 25, 3
HUNG_AFTER_S = 4.0
QUICK = {"restart_delay_s": 0.1, "process_restarts": 100, "hung_after_s": HUNG_AFTER_S}


@contextmanager
def deployment(folder: Path) -> Iterator[FaultyDemo]:
    demo = FaultyDemo(folder, seed=1, settings=QUICK)
    try:
        demo.start()
        yield demo
    finally:
        with suppress(AttributeError):  # it could not even be started
            demo.kill()


def strike(demo: FaultyDemo, title: str, how: signal.Signals) -> None:
    """Signal the oldest process of a title, once there is one."""
    pid = demo.wait_for(title, lambda: demo.pids(title), DEADLINE_S)[0]
    os.kill(pid, how)
    if how is signal.SIGKILL:
        demo.wait_for("its exit", lambda: pid not in demo.processes() or None, DEADLINE_S)


def notes(demo: FaultyDemo, words: str) -> int:
    events = demo.events_after(0)
    return sum(words in e.detail["message"] for e in events if e.kind == "error")


def moves_again(demo: FaultyDemo) -> None:
    """Wait until every rank steps on, and a plan is committed that was published from now on."""
    since, before = demo.last_event(), demo.steps()

    def are_there() -> bool:
        found: dict[str, set[int]] = {"publish": set(), "commit": set()}
        for event in demo.events_after(since):
            if event.kind in found:
                found[event.kind].add(event.detail["plan_id"])
        steps = demo.steps()
        return bool(found["publish"] & found["commit"]) and steps != before

    demo.wait_for("a rebalance", lambda: are_there() or None, DEADLINE_S)


def outcome_of(folder: Path, attack: Callable[[FaultyDemo], str]) -> Outcome:
    """Run an attack on a deployment; held: it serves on, and every answer is right."""
    with deployment(folder) as demo:
        try:
            figure = attack(demo)
            moves_again(demo)
        except TooLate as exc:
            return Outcome(False, str(exc))
        status = demo.halt()
        if status:
            return Outcome(False, f"{figure}; status {status}: {demo.last_output()}")
        summary: dict[str, Any] = json.loads(demo.json_path.read_text())
    checks, wrong = summary["reference_checks"], summary["reference_failures"]
    shown = f"{figure}; {wrong} of {checks} answers wrong, {summary['unserved_s']} s without tokens"
    held = checks > 0 and not wrong and not summary["unserved_s"] and not summary["samples_lost"]
    return Outcome(held, shown)


def hang(title: str) -> Callable[[Path], Outcome]:
    def attack(demo: FaultyDemo) -> str:
        moves_again(demo)  # at its start a process is given longer than when it has had a turn
        stopped = time.monotonic()
        strike(demo, title, signal.SIGSTOP)
        words = "killed by SIGKILL; restarting"
        demo.wait_for("its end", lambda: notes(demo, words) or None, DEADLINE_S)
        return f"killed after {time.monotonic() - stopped:.1f} s, deadline {HUNG_AFTER_S:g} s"

    return lambda folder: outcome_of(folder, attack)


def kill(title: str, times: int) -> Callable[[Path], Outcome]:
    def attack(demo: FaultyDemo) -> str:
        for _ in range(times):
            strike(demo, title, signal.SIGKILL)
        return f"killed {times} times"

    return lambda folder: outcome_of(folder, attack)


ATTACKS = [
    Attack(
        "hung-controller",
        "a controller that hangs is reported, killed and started again; serving goes on",
        hang("controller"),
    ),
    Attack(
        "hung-checker",
        "a reference checker that hangs is killed and started again; serving goes on",
        hang("reference check"),
    ),
    Attack(
        "host-cache-killed",
        "a killed host cache process comes back and moves resume; serving goes on",
        kill("host cache 0", KILLS),
    ),
    Attack(
        "controller-killed",
        "a controller that is killed again and again never ends serving",
        kill("controller", KILLS_OF_CONTROLLER),
    ),
    Attack(
        "checker-killed",
        "a reference checker that is killed again and again never ends serving",
        kill("reference check", KILLS),
    ),
]
