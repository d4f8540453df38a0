"""The verdict: what is never green, and what each reason says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from api.metrics.definitions import Figure, metrics_of
from api.monitor.scores import mean_imbalance, relative
from api.monitor.state import Death, Grade, Leadership, RankView, Reading
from api.monitor.verdict import unready
from api.processes.supervision import ProcessState, ProcessView, SupervisionView
from eplb import Topology
from eplb.fitting import Cordon
from telemetry.load.folder import Window
from tests.support.readings import changed, read
from tests.support.stores import MemoryStore

NOW = 1000.0
LEADS = Leadership("one", 9.0, "", 1.0)
EMPTY = read(MemoryStore("d"), NOW)


def rank(number: int, **values: Any) -> RankView:
    idle: dict[str, Any] = {"phase": "idle", "is_alive": True, "age_s": 0.1, "step_ms": 20.0}
    return RankView(**{"rank": number, "step": 7, "generation": 1, "frozen": ""} | idle | values)


SILENT = {"is_alive": False, "age_s": 20.0}
SERVES = changed(
    EMPTY,
    controller=LEADS,
    run="a",
    started=NOW - 600,
    step=7,
    ranks=(rank(0), rank(1)),
    progress_age_s=0.5,
    progress_of="rank 0, step: waiting for the next",
    progress_thread="step",
    token_time=NOW - 2,
    sample_age_s=2.0,
)


def seen(**changes: Any) -> Reading:
    return changed(SERVES, **changes)


def leaderless(turn_age_s: float | None = None) -> dict[str, Any]:
    return {"controller": Leadership("", 0.0, "no leader", turn_age_s)}


def supervised(**values: Any) -> Reading:
    return seen(supervision=SupervisionView(**values))


def process(state: ProcessState) -> ProcessView:
    return ProcessView("the controller", "controller", state, 0.1, False, 3, "exit status 1")


HALF_SILENT = (rank(0), rank(1, **SILENT))
ALL_SILENT = (rank(0, **SILENT), rank(1, **SILENT))
ENDED = (rank(0, has_ended=True, **SILENT), rank(1, has_ended=True, **SILENT))
CORDONED = (rank(0, cordon=Cordon.CORDON), rank(1, cordon=Cordon.DRAIN))
DOWN = (process(ProcessState.BACK_OFF),)
UNHEARD = (rank(0, age_s=44.0), rank(1, age_s=44.0))
HALF_UNHEARD = (rank(0), rank(1, age_s=44.0))
FULL = "Redis store is full, expected room below its maxmemory"
LEADERLESS = leaderless(40.0)
EXITED = ProcessView(
    "the launcher of host 0", "launcher", ProcessState.DOWN, 0.2, True, 0, "", has_exited=True
)
STUCK = {"progress_age_s": 31.0, "progress_of": "rank 1, step: dispatch"}


@pytest.mark.parametrize(
    ("one", "grade", "reason"),
    [
        (seen(), Grade.SERVING, "2 ranks serve, at step 7$"),
        (seen(movement=False), Grade.SERVING, "2 ranks serve, at step 7; movement is of"),
        (
            seen(ranks=CORDONED),
            Grade.SERVING,
            "cordoned by order: rank 0; drained by order: rank 1",
        ),
        (EMPTY, Grade.BLIND, "no run"),
        (seen(unread="not read for 12 s: disk I/O"), Grade.BLIND, "12 s: disk I/O"),
        (seen(ranks=HALF_SILENT), Grade.DEGRADED, "silent ranks: 1, "),
        (seen(ranks=ALL_SILENT, token_time=NOW - 90), Grade.BLIND, "silent ranks: 0, 1, "),
        (seen(ranks=ENDED, token_time=NOW - 90), Grade.STOPPED, "all 2 ranks ended as they were"),
        (seen(token_time=NOW - 56), Grade.STOPPED, "no token for 56 s.* 30 s; no step"),
        (
            seen(token_time=NOW - 56, step_age_s=1.0),
            Grade.BLIND,
            "no token for 56 s.* 30 s, while steps advance",
        ),
        (
            seen(token_time=NOW - 31, step_age_s=30.0, sample_every_s=2.0),
            Grade.STOPPED,
            "no token for 31 s.* 30 s; no step",  # a rank stopped after a step without a sample
        ),
        (seen(token_time=NOW - 56, answered_s=29.0), Grade.SERVING, "2 ranks serve"),
        (
            seen(ranks=UNHEARD, token_time=NOW - 56, answered_s=3.0),
            Grade.BLIND,
            "no report of ranks 0, 1 since the store answers again, 3 s ago: whether they serve",
        ),
        (
            seen(ranks=HALF_UNHEARD, token_time=NOW - 56, answered_s=3.0),
            Grade.DEGRADED,
            "no report of rank 1 since the store answers again",
        ),
        (
            seen(ranks=UNHEARD, token_time=NOW - 56, answered_s=0.0, store_full=FULL, **LEADERLESS),
            Grade.DEGRADED,
            "takes no changes, so nothing that ranks report since is known here: Redis store is fu",
        ),
        (
            supervised(processes=(EXITED,)),
            Grade.STOPPED,
            "the launcher of host 0 has exited, and its ranks with it",
        ),
        (
            supervised(processes=(EXITED, replace(EXITED, has_exited=False))),
            Grade.DEGRADED,
            "the launcher of host 0 has exited, expected",
        ),
        (seen(token_time=NOW - 56, answered_s=31.0), Grade.STOPPED, "no token for 56 s"),
        (seen(token_time=None), Grade.BLIND, "no token.* 600 s ago"),
        (
            seen(token_time=None, sample_age_s=None, started=NOW - 5),
            Grade.DEGRADED,
            "no load.* 5 s ago",
        ),
        (seen(death=Death(NOW - 1, "rank 3 died")), Grade.STOPPED, "no token for 2 s: rank 3 died"),
        (seen(started=NOW - 1), Grade.STOPPED, "for 2 s: the ranks were started 1 s ago"),
        (
            seen(token_time=NOW - 90, started=NOW - 60, step_age_s=1.0),
            Grade.BLIND,
            "for 90 s: the ranks were started 60 s ago; steps advance since: no request came",
        ),
        (seen(**STUCK), Grade.STOPPED, "31.0 s.* 30 s: rank 1, step: dispatch"),
        (
            seen(
                **STUCK
                | {"progress_of": "rank 1, step copier: pulling", "progress_thread": "mover"}
            ),
            Grade.DEGRADED,
            "31.0 s.* 30 s: rank 1, step copier: pulling",
        ),
        (
            seen(ranks=(rank(0, ahead_s=3600.0), rank(1))),
            Grade.SERVING,
            "at step 7; the clock of rank 0 is 3600 s ahead of the store's, ",
        ),
        (seen(ranks=(rank(0), rank(1, ahead_s=-118))), Grade.SERVING, "rank 1 is 118 s behind"),
        (seen(uncounted_ranks=(1,)), Grade.DEGRADED, "rank 1: the counters"),
        (seen(engine_plans="3 plans failed"), Grade.DEGRADED, "own balancer plans.*3 plans fail"),
        (seen(**leaderless()), Grade.DEGRADED, "no leader"),
        (supervised(processes=DOWN), Grade.DEGRADED, "the controller.* exit status 1"),
        (seen(ranks=(rank(0), rank(1, frozen="torn"))), Grade.DEGRADED, "rank 1 .*torn"),
    ],
)
def test_verdict_has_the_grade_and_the_reason_of_the_worst_finding(
    one: Reading, grade: Grade, reason: str
) -> None:
    state = one.state

    assert state.verdict is grade
    assert re.search(reason, state.reason), state.reason
    assert (state.problems == ()) is (grade is Grade.SERVING)
    assert all(found.text for found in one.findings)


def test_worst_finding_comes_first_and_all_are_listed() -> None:
    state = seen(ranks=HALF_SILENT, token_time=NOW - 56, **leaderless()).state

    assert (state.verdict, state.reason) == (Grade.STOPPED, state.problems[0])
    found = [one.split(",")[0] for one in state.problems]
    assert found == ["no token for 56 s", "silent ranks: 1", "no leader"]


def test_ranks_that_were_stopped_on_purpose_are_one_finding_without_silence() -> None:
    stop = Death(NOW - 60, "the ranks of host 0 were stopped on purpose, by SIGTERM", True)

    state = seen(ranks=ALL_SILENT, token_time=NOW - 61, death=stop, **STUCK).state

    assert state.problems == (f"no token for 61 s: {stop.text}",)
    again = seen(ranks=ALL_SILENT, token_time=NOW - 61, death=stop, started=NOW - 30).state
    assert any("silent ranks" in one for one in again.problems)


def test_deployment_is_not_stopped_between_two_samples_or_after_a_later_token() -> None:
    for grade, changes in (
        (Grade.SERVING, {"token_time": NOW - 56, "sample_every_s": 20.0}),
        (Grade.STOPPED, {"token_time": NOW - 61, "sample_every_s": 20.0}),
        (Grade.SERVING, {"death": Death(NOW - 3, "rank 3 died")}),
    ):
        assert seen(**changes).state.verdict is grade, changes


def test_readiness_is_the_worst_of_the_findings_that_keep_requests_away() -> None:
    idle = seen(token_time=NOW - 3600)
    silent = seen(ranks=HALF_SILENT)

    # Without requests there are no tokens: a deployment that is idle must get the first one.
    assert (idle.state.verdict, unready(idle)) == (Grade.STOPPED, None)
    assert unready(silent) == silent.state.reason
    # The gap of one takeover keeps none away, a longer one does.
    assert unready(seen(**leaderless(turn_age_s=11.0))) is None
    assert unready(seen(**leaderless(turn_age_s=31.0))) is not None


def metrics(of: Reading) -> dict[str, Mapping[tuple[str, ...], Figure]]:
    found = metrics_of(of, drift=None, backend="memory")
    return {one.name: one.figures for one in found}


@pytest.mark.parametrize(("ranks", "silent"), [(HALF_SILENT, 1), (ALL_SILENT, 2), (ENDED, 0)])
def test_metric_of_silent_ranks_leaves_out_those_that_ended_as_asked(
    ranks: tuple[RankView, ...], silent: int
) -> None:
    assert metrics(seen(ranks=ranks))["eplb_ranks_silent"] == {(): silent}


def test_metric_of_the_verdict_is_that_of_the_page() -> None:
    stopped = seen(token_time=NOW - 56, **leaderless())
    found = metrics(stopped)

    grades = {labels[0]: figure for labels, figure in found["eplb_verdict"].items()}
    assert grades == {"stopped": 1, "blind": 0, "degraded": 0, "serving": 0}
    assert found["eplb_token_age_seconds"] == {(): 56.0}
    assert found["eplb_controller_leads"] == {(): 0.0}


def test_zero_tokens_are_no_perfect_balance() -> None:
    ranks = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=1)
    none, half = np.zeros((2, 2), dtype=np.int64), np.array([[0, 0], [30, 10]])

    assert mean_imbalance(none, ranks) is None
    assert mean_imbalance(half, ranks) == 1.5  # of the one layer with tokens
    assert np.isnan(relative(half)[0]).all()
    nobody: frozenset[int] = frozenset()
    window = Window("a", 0, 0, 1, "mixed", nobody, nobody, none, none)
    found = metrics(seen(latest=window, scale=ranks))
    assert found["eplb_balancedness"] == {}


def test_many_ranks_are_named_as_stretches() -> None:
    silent = {*range(20, 32), 40}
    ranks = tuple(rank(one, **(SILENT if one in silent else {})) for one in range(64))

    reason = seen(ranks=ranks).state.reason
    assert reason.startswith("silent ranks: 20..31, 40, expected")
