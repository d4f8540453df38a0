"""A breaker opens after failures in a row, and lets one probe through after its cool-down."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from telemetry.stores.redis.connection.breaker import Breaker


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(3, cool_down_s=10.0, clock=clock)


def fail(breaker: Breaker, times: int) -> None:
    for _ in range(times):
        breaker.fail()


def test_failures_in_a_row_open_it(breaker: Breaker) -> None:
    fail(breaker, 2)
    assert breaker.is_probe() is False

    breaker.fail()

    assert breaker.state == "open"
    assert breaker.is_probe() is None


def test_success_between_failures_resets_the_count(breaker: Breaker) -> None:
    fail(breaker, 2)
    breaker.succeed()
    fail(breaker, 2)

    assert breaker.state == "closed"


def test_after_the_cool_down_one_call_is_the_probe(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now = 10.0

    assert breaker.state == "half open"
    assert [breaker.is_probe() for _ in range(3)] == [True, None, None]


@pytest.mark.parametrize(
    ("outcome", "state", "next_call"),
    [
        (Breaker.succeed, "closed", False),
        (Breaker.fail, "open", None),
        (Breaker.abandon, "half open", True),
    ],
)
def test_probe_decides(
    breaker: Breaker,
    clock: Clock,
    outcome: Callable[[Breaker], None],
    state: str,
    next_call: bool | None,
) -> None:
    fail(breaker, 3)
    clock.now = 10.0
    breaker.is_probe()

    outcome(breaker)

    assert breaker.state == state
    assert breaker.is_probe() is next_call
