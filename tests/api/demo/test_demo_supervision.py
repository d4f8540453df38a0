"""What does not serve may hang or be killed, any number of times: serving goes on without it."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from telemetry.state.store import StateStore
from tests.support.demo import events_of
from tests.support.repository import ROOT

TEXT = ("--text", str(ROOT / "LICENSE"), "--text", str(ROOT / "README.md"))

StartDemo = Callable[..., Any]
Found = Callable[[StateStore], Any]


def figure(demo: Any, start: str) -> float:
    lines = demo.get("/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(start))


def is_not_ready(demo: Any, why: str) -> bool:
    answer = demo.get("/readyz")
    return answer.status_code == 503 and why in answer.text


def errors(store: StateStore) -> list[str]:
    found = (event.detail for event in events_of(store, "error"))
    return [f"{detail['where']}: {detail['message']}" for detail in found]


def notes(words: str, times: int = 1) -> Found:
    return lambda store: sum(words in error for error in errors(store)) >= times


def serves(step: int) -> Found:
    def is_there(store: StateStore) -> bool:
        info = store.current_run()
        states = store.rank_states(info.run) if info else []
        return len(states) == 4 and min(state.step for state in states) > step

    return is_there


def step_of(store: StateStore) -> int:
    info = store.current_run()
    assert info is not None
    return min(state.step for state in store.rank_states(info.run))


def commits_from(plan_id: int) -> Found:
    return lambda store: [
        event for event in events_of(store, "commit") if event.detail.get("plan_id", 0) >= plan_id
    ]


def halts_right(demo: Any) -> dict[str, Any]:
    summary: dict[str, Any] = demo.halts_right()
    assert (summary["deaths"], summary["unserved_s"]) == (0, 0)
    return summary


@pytest.mark.slow
def test_hung_controller_is_not_ready_and_is_restarted(
    tmp_path: Path, start_demo: StartDemo
) -> None:
    demo = start_demo(tmp_path, "--serve", *TEXT, hung_after_s=6)
    demo.sees("a commit", commits_from(1))
    demo.kill("controller", signal.SIGSTOP)

    demo.sees("the first note", notes("the controller: no report for "))
    demo.sees("the refusal", lambda _: is_not_ready(demo, "no report from the controller for "))
    assert figure(demo, 'eplb_process_report_age_seconds{deployment="demo",process="contr') >= 3
    assert figure(demo, "eplb_controller_lease_age_seconds") > 0
    demo.sees("its end", notes("killed by SIGKILL; restarting in 0.1 s"))
    plans = demo.sees("plans", lambda store: len(events_of(store, "plan")))
    demo.sees("a new plan", lambda store: len(events_of(store, "plan")) > plans)
    demo.sees("that it is ready", lambda _: demo.get("/readyz").is_success)
    assert figure(demo, 'eplb_process_restarts_total{deployment="demo",process="contr') == 1
    assert halts_right(demo)["controller_restarts"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("reference check", "the reference checker"),
        ("host cache 0", "the host cache of host 0"),
    ],
    ids=["checker", "host cache"],
)
def test_hung_process_that_does_not_serve_is_restarted(
    tmp_path: Path, start_demo: StartDemo, title: str, name: str
) -> None:
    demo = start_demo(tmp_path, "--serve", *TEXT, hung_after_s=4)
    demo.sees("a commit", commits_from(1))
    demo.kill(title, signal.SIGSTOP)

    demo.sees("the note", notes(f"{name}: no report for "))
    demo.sees("its end", notes(f"{name} was killed by SIGKILL; restarting"))
    at = demo.sees("a step", step_of)
    demo.sees("serving on", serves(at + 200))
    halts_right(demo)


@pytest.mark.slow
def test_killed_host_cache_restarts_and_migrations_resume(
    tmp_path: Path, start_demo: StartDemo
) -> None:
    demo = start_demo(tmp_path, "--serve", *TEXT)
    for number in range(1, 4):
        demo.sees("a commit", commits_from(next_plan(demo)))
        demo.sees("a host cache", lambda _: "host cache 0" in demo.processes().values())
        demo.kill("host cache 0")
        demo.sees("its end", notes("was killed by SIGKILL; restarting", number))
        demo.sees("a plan after it", commits_from(next_plan(demo)))
    before = from_host(demo)
    demo.sees("bytes of the new process", lambda _: from_host(demo) > before)

    summary = halts_right(demo)
    assert summary["restarts"]["host_cache"] == 3


def next_plan(demo: Any) -> int:
    def newest(store: StateStore) -> int:
        published = (int(event.detail["plan_id"]) for event in events_of(store, "publish"))
        return 1 + max(published, default=0)

    return int(demo.sees("a plan", newest))


def from_host(demo: Any) -> float:
    return figure(demo, 'eplb_migrated_bytes_total{deployment="demo",link="host"}')


@pytest.mark.slow
def test_killed_checker_is_restarted_and_checks_continue(
    tmp_path: Path, start_demo: StartDemo
) -> None:
    demo = start_demo(tmp_path, "--serve", *TEXT)
    for number in (1, 2):
        demo.sees("a commit", commits_from(next_plan(demo)))
        demo.kill("reference check")
        demo.sees("its end", notes("reference checker was killed by SIGKILL; restarting", number))
        demo.sees("another", lambda _: "reference check" in demo.processes().values())

    demo.sees("a commit", commits_from(next_plan(demo)))
    assert halts_right(demo)["restarts"]["checker"] == 2


@pytest.mark.slow
def test_killed_service_is_restarted_at_its_address(tmp_path: Path, start_demo: StartDemo) -> None:
    demo = start_demo(tmp_path, "--serve", *TEXT)
    demo.sees("a commit", commits_from(1))
    demo.kill("serve")
    demo.sees("its end", notes("the service was killed by SIGKILL; restarting"))
    demo.sees("a plan of the next controller", commits_from(next_plan(demo)))

    assert demo.get("/livez").is_success
    assert halts_right(demo)["restarts"]["serve"] == 1


@pytest.mark.slow
def test_without_a_controller_serving_continues_and_readyz_fails(
    tmp_path: Path, start_demo: StartDemo
) -> None:
    demo = start_demo(tmp_path, "--serve", *TEXT, process_restarts=1)
    for number in (1, 2):
        demo.sees("a controller", lambda _: "controller" in demo.processes().values())
        demo.kill("controller")
        demo.sees("its end", notes("the controller was killed by SIGKILL", number))

    demo.sees("the last note", notes("1 restarts within 3600 s used up, serving continues"))
    at = demo.sees("a step", step_of)
    demo.sees("serving on", serves(at + 200))
    demo.sees("the refusal", lambda _: is_not_ready(demo, "beyond its restart budget"))
    assert figure(demo, 'eplb_process_up{deployment="demo",process="controller"}') == 0
    halts_right(demo)
