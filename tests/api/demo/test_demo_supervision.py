"""What does not serve may hang or be killed, any number of times: serving goes on without it."""

import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from telemetry.store import LoadStore
from tests.support.repository import ROOT

TEXT = ("--text", str(ROOT / "LICENSE"), "--text", str(ROOT / "README.md"))

StartDemo = Callable[..., Any]
Found = Callable[[LoadStore], Any]


@pytest.fixture(autouse=True)
def ended(start_demo: StartDemo, tmp_path: Path) -> Iterator[None]:
    """A demo that a failed test leaves would slow the next one down."""
    yield
    lock = tmp_path / "state" / "lock"
    with suppress(FileNotFoundError, ProcessLookupError, ValueError):
        os.kill(int(lock.read_text()), signal.SIGKILL)


def url_of(demo: Any) -> str:
    return str(demo.wait_for_line("eplb demo: ").split()[-1])


def ask(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, refused.read().decode()


def figure(text: str, start: str) -> float:
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(start))


def errors(store: LoadStore) -> list[str]:
    return [
        f"{event.detail['where']}: {event.detail['message']}"
        for event in store.events(limit=100_000)
        if event.kind == "error"
    ]


def notes(words: str, times: int = 1) -> Found:
    return lambda store: sum(words in error for error in errors(store)) >= times


def serves(step: int) -> Found:
    def is_there(store: LoadStore) -> bool:
        info = store.current_run()
        states = store.rank_states(info.run) if info else []
        return len(states) == 4 and min(state.step for state in states) > step

    return is_there


def step_of(store: LoadStore) -> int:
    info = store.current_run()
    assert info is not None
    return min(state.step for state in store.rank_states(info.run))


def commits_from(plan_id: int) -> Found:
    def is_there(store: LoadStore) -> bool:
        events = store.events(limit=100_000)
        return any(e.kind == "commit" and e.detail.get("plan_id", 0) >= plan_id for e in events)

    return is_there


def halts_right(demo: Any) -> dict[str, Any]:
    demo.process.send_signal(signal.SIGINT)
    assert demo.ends() == 0, demo.output_text()
    assert "Traceback" not in demo.errors
    summary: dict[str, Any] = demo.summary()
    assert summary["reference_checks"] > 0
    assert (summary["reference_failures"], summary["samples_lost"]) == (0, 0)
    assert (summary["deaths"], summary["unserved_s"]) == (0, 0)
    return summary


@pytest.mark.slow
def test_hung_controller_is_not_ready_and_is_restarted_within_the_deadline(
    tmp_path: Path, start_demo: StartDemo
) -> None:
    demo = start_demo(tmp_path, "--serve", *TEXT, hung_after_s=6)
    demo.sees("a commit", commits_from(1))
    url = url_of(demo)
    demo.kill("controller", signal.SIGSTOP)

    demo.sees("the first note", notes("the controller: no report for "))
    status, text = ask(f"{url}/readyz")
    assert (status, "no report from the controller for " in text) == (503, True), text
    metrics = ask(f"{url}/metrics")[1]
    assert figure(metrics, 'eplb_process_report_age_seconds{deployment="demo",process="contr') >= 3
    assert figure(metrics, "eplb_controller_lease_age_seconds") > 0
    demo.sees("its end", notes("killed by SIGKILL; restarting in 0.1 s"))
    with_plan = len(errors_and_plans(demo))
    demo.sees("a new plan", lambda _: len(errors_and_plans(demo)) > with_plan)
    status, text = ask(f"{url}/readyz")
    assert status == 200, text
    metrics = ask(f"{url}/metrics")[1]
    assert figure(metrics, 'eplb_process_restarts_total{deployment="demo",process="contr') == 1
    assert halts_right(demo)["controller_restarts"] == 1


def errors_and_plans(demo: Any) -> list[Any]:
    url = url_of(demo)
    found = json.loads(ask(f"{url}/api/v1/events?limit=10000")[1])["events"]
    return [event for event in found if event["kind"] in ("plan", "lease")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("reference check", "the reference checker"),
        ("preload process", "the preload process of host 0"),
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
        demo.kill("preload process")
        # Of either host: the one that runs for longest is killed.
        demo.sees("its end", notes("was killed by SIGKILL; restarting", number))
        demo.sees("a plan after it", commits_from(next_plan(demo)))
    before = from_host(demo)
    demo.sees("bytes of the new process", lambda _: from_host(demo) > before)

    summary = halts_right(demo)
    assert summary["restarts"]["host_cache"] == 3


def next_plan(demo: Any) -> int:
    def newest(store: LoadStore) -> int:
        events = store.events(limit=100_000)
        published = (int(e.detail["plan_id"]) for e in events if e.kind == "publish")
        return 1 + max(published, default=0)

    return int(demo.sees("a plan", newest))


def from_host(demo: Any) -> float:
    metrics = ask(f"{url_of(demo)}/metrics")[1]
    return figure(metrics, 'eplb_migrated_bytes_total{deployment="demo",link="host"}')


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
    status, text = ask(f"{url_of(demo)}/readyz")
    assert (status, "its restart budget is used up" in text) == (503, True), text
    metrics = ask(f"{url_of(demo)}/metrics")[1]
    assert figure(metrics, 'eplb_process_up{deployment="demo",process="controller"}') == 0
    halts_right(demo)
