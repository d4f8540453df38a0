"""Events that programs read back are complete, or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from eplb.errors import StoreError
from telemetry.state.events import (
    COMPILE,
    DECIDED,
    ENGINE_PLANS,
    EXCLUDED,
    FACTS,
    FAILED,
    JUDGED,
    MEMBERSHIP,
    RESTART,
    SWITCHED,
    WAITING,
    Compiling,
    EnginePlans,
    Event,
    Failure,
    Judgement,
    OfHost,
    PhaseFigures,
    PlanDecision,
    PlanEnd,
    Restart,
    SampleCounts,
    ServedOn,
    Switched,
    plan_end,
)
from tests.support.plan_events import plan_event
from tests.support.stores import MemoryStore

END = {"generation": 4, "plan_id": 3, "reason": "skew"}


def event(kind: str, detail: dict[str, Any]) -> Event:
    return Event(12, 9.5, kind, detail)


@pytest.mark.parametrize("kind", ["commit", "abort", "reject"])
def test_end_of_a_plan_is_read_from_its_event(kind: str) -> None:
    assert plan_end(event(kind, END)) == PlanEnd(4, 3, "skew")


def test_placement_without_a_plan_ends_no_plan() -> None:
    assert plan_end(event("commit", END | {"plan_id": 0})) is None
    assert plan_end(event("plan", END)) is None


@pytest.mark.parametrize(
    ("detail", "why"),
    [
        ({"generation": 4, "reason": "skew"}, "event 12 .*plan_id"),
        (END | {"plan_id": "3"}, "plan_id is '3', expected int"),
        (END | {"generation": 4.5}, r"generation is 4\.5"),
        (END | {"more": 1}, "more"),
        (END | {"version": 2}, "version"),
    ],
)
def test_unreadable_event_of_a_plan_is_refused(detail: dict[str, Any], why: str) -> None:
    with pytest.raises(StoreError, match=why):
        plan_end(event("commit", detail))


FIGURES = (
    '"policy": "auto", "objective": "tokens", "imbalance_before": null, "imbalance_after": 1.0, '
    '"expected_gain": 0.0, "moves": 0, "bytes": 0, "cost_s": 0.0, "generation": 1, '
    '"target_generation": 2'
)
# What an event's detail was before it had a class, byte for byte.
RECORDED = [
    (DECIDED, plan_event("MOVE", "r"), f'{{"decision": "MOVE", "reason": "r", {FIGURES}}}'),
    (
        DECIDED,
        plan_event(
            phases=(PhaseFigures("decode", 2, 1.5, None),),
            window=4,
            trigger="load",
            actor="controller",
            stage="all",
            plan_seconds=0.5,
            windows=3,
            asked={"num_uncovered": 2},
            expert_curve="constant",
            pace={"layers": 1},
            pace_reason="fixed",
        ),
        f'{{"decision": "KEEP", "reason": "even", {FIGURES}, '
        '"phases": [{"phase": "decode", "windows": 2, "before": 1.5, "after": null}], "window": 4, '
        '"trigger": "load", "actor": "controller", "stage": "all", "plan_seconds": 0.5, '
        '"windows": 3, "asked": {"num_uncovered": 2}, "expert_curve": "constant", '
        '"pace": {"layers": 1}, "pace_reason": "fixed"}',
    ),
    ("commit", PlanEnd(None, 3, "r"), '{"generation": null, "plan_id": 3, "reason": "r"}'),
    (
        JUDGED,
        Judgement(2, 0.5, 0.4, [0.5, 0.4]),
        '{"generation": 2, "promised": 0.5, "given": 0.4, "record": [0.5, 0.4]}',
    ),
    (FAILED, Failure("here", "m"), '{"where": "here", "message": "m"}'),
    (
        FAILED,
        Failure("load", "m", {"late": 3}),
        '{"where": "load", "message": "m", "samples": {"late": 3}}',
    ),
    (
        FAILED,
        Failure("ranks", "m", others_serve=False),
        '{"where": "ranks", "message": "m", "others_serve": false}',
    ),
    (EXCLUDED, SampleCounts({"late": 3}), '{"samples": {"late": 3}}'),
    (
        SWITCHED,
        Switched(False, True, "r", "me", 9.0),
        '{"movement": false, "observe": true, "reason": "r", "actor": "me", "until": 9.0}',
    ),
    (
        SWITCHED,
        Switched(True, False, "r"),
        '{"movement": true, "observe": false, "reason": "r"}',
    ),
    (RESTART, Restart("a", (1, 2), "r"), '{"run": "a", "lost": [1, 2], "reason": "r"}'),
    (WAITING, OfHost(0, "m"), '{"host": 0, "message": "m"}'),
    (COMPILE, Compiling("h", "begun"), '{"holder": "h", "state": "begun"}'),
    (
        COMPILE,
        Compiling("h", "done", 3, 1.5),
        '{"holder": "h", "state": "done", "functions": 3, "seconds": 1.5}',
    ),
]


@pytest.mark.parametrize(("kind", "fact", "text"), RECORDED)
def test_event_is_stored_as_recorded_and_read_by_its_class(
    kind: str, fact: object, text: str
) -> None:
    store = MemoryStore("d")
    store.add_event(kind, fact)

    (line,) = store.backend.journal(limit=2)
    (read,) = store.events()

    assert (line.detail, json.dumps(read.detail)) == (text, text)
    assert (type(read.fact), read.fact) == (FACTS[kind], fact)


@pytest.mark.parametrize(
    ("kind", "detail", "fact"),
    [
        (ENGINE_PLANS, {"run": "a", "rank": 0, "reason": "r"}, EnginePlans("r")),
        (MEMBERSHIP, {"broke_at": 1.0, "seconds": {"agree": 0.5}}, ServedOn({"agree": 0.5})),
        (FAILED, {"where": "here", "message": "m", "of_a_newer_version": 1}, Failure("here", "m")),
        (FAILED, {"where": "here"}, None),
        (DECIDED, {"decision": "KEEP"}, None),
        ("check", {"host": "gpu7"}, None),
    ],
)
def test_fact_leaves_out_what_it_does_not_know_and_misses_nothing(
    kind: str, detail: dict[str, Any], fact: object
) -> None:
    assert event(kind, detail).fact == fact


def test_decision_of_an_engine_without_a_window_is_read_by_the_same_class() -> None:
    figures = json.loads(RECORDED[0][2])
    engine = figures | {"plan_seconds": 0.5, "trigger": "load", "actor": "engine"}

    decision = event(DECIDED, engine).fact

    assert isinstance(decision, PlanDecision)
    assert (decision.moves_experts, decision.actor, decision.window) == (True, "engine", None)


@pytest.mark.parametrize(
    ("detail", "ranks"),
    [
        ({"ranks": [3]}, [3]),
        ({"ranks": 3}, []),
        ({"left": [2], "joined": [3]}, [2, 3]),
        ({"reason": "ranks [1, 3] leave"}, [1, 3]),
        ({"reason": "ranks 1-2 leave"}, [1, 2]),
    ],
)
def test_event_is_about_the_ranks_that_it_names(detail: dict[str, Any], ranks: list[int]) -> None:
    regrouped = event("regrouped", detail)

    assert [rank for rank in range(4) if regrouped.is_about(rank)] == ranks
