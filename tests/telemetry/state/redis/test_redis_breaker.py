"""A breaker opens after failures in a row, and lets one probe through after its cool-down."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from telemetry.state.redis_link import Breaker
from tests.support.stores import StoreClock


@pytest.fixture
def breaker(store_clock: StoreClock) -> Breaker:
    return Breaker(3, cool_down_s=10.0, clock=store_clock)


def fail(breaker: Breaker, times: int) -> None:
    for _ in range(times):
        breaker.fail()


def test_failures_in_a_row_open_it(breaker: Breaker) -> None:
    fail(breaker, 2)
    breaker.succeed()
    fail(breaker, 2)
    assert (breaker.state, breaker.is_probe()) == ("closed", False)

    breaker.fail()

    assert (breaker.state, breaker.is_probe()) == ("open", None)


@pytest.mark.parametrize(
    ("outcome", "state", "next_call"),
    [
        (Breaker.succeed, "closed", False),
        (Breaker.fail, "open", None),
        (Breaker.abandon, "half open", True),
    ],
)
def test_one_probe_after_the_cool_down_decides(
    breaker: Breaker,
    store_clock: StoreClock,
    outcome: Callable[[Breaker], None],
    state: str,
    next_call: bool | None,
) -> None:
    fail(breaker, 3)
    store_clock.now += 10.0
    assert breaker.state == "half open"
    assert [breaker.is_probe() for _ in range(3)] == [True, None, None]

    outcome(breaker)

    assert (breaker.state, breaker.is_probe()) == (state, next_call)
