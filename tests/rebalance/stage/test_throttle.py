"""Budgets and holds say when staging may go on; nothing in them waits."""

from __future__ import annotations

import logging
import math

import pytest

from rebalance.stage.lanes import Hold, TokenBucket
from tests.support.simulated_time import Clock


def test_full_bucket_allows_a_burst_and_then_the_rate() -> None:
    clock = Clock(10.0)
    bucket = TokenBucket(100.0, 50, clock)

    assert bucket.ready_at(50) <= clock.now
    bucket.take(50)
    assert bucket.ready_at(50) == 10.5
    clock.now = 10.5
    assert bucket.ready_at(50) <= clock.now


def test_idle_bucket_accumulates_at_most_the_burst() -> None:
    clock = Clock(10.0)
    bucket = TokenBucket(100.0, 50, clock)
    bucket.take(50)

    clock.now += 1000.0
    bucket.take(50)

    assert bucket.ready_at(20) == pytest.approx(clock.now + 0.2)


def test_more_than_the_burst_is_paid_for_afterwards() -> None:
    clock = Clock(10.0)
    bucket = TokenBucket(100.0, 50, clock)
    assert bucket.ready_at(150) <= clock.now

    bucket.take(150)

    assert bucket.ready_at(10) == pytest.approx(clock.now + 1.1)


def test_bucket_without_a_rate_never_holds_back() -> None:
    clock = Clock(10.0)
    bucket = TokenBucket(math.inf, 50, clock)
    for _ in range(3):
        bucket.take(1000)

    assert bucket.ready_at(1000) <= clock.now


def test_hold_lasts_until_it_is_taken_back() -> None:
    clock = Clock(10.0)
    hold = Hold(clock)
    assert hold.ready_at() <= clock.now

    hold.pause(5.0)
    assert hold.ready_at() == 15.0
    hold.resume()

    assert hold.ready_at() <= clock.now


def test_changed_rate_counts_from_the_change_on() -> None:
    clock = Clock(10.0)
    bucket = TokenBucket(100.0, 50, clock)
    bucket.take(50)
    clock.now += 0.2  # 20 bytes

    bucket.change_rate(10.0)

    assert bucket.ready_at(50) == pytest.approx(clock.now + 3.0)


def test_hold_lasts_until_each_pause_was_taken_back() -> None:
    clock = Clock(10.0)
    hold = Hold(clock)
    hold.pause(5.0, "one")
    hold.pause(9.0, "another")

    hold.resume("one")
    assert hold.ready_at() == 19.0
    hold.resume("one")
    hold.resume("another")

    assert hold.ready_at() <= clock.now


def test_expired_hold_ends_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock(10.0)
    hold = Hold(clock)
    hold.pause(5.0)
    clock.now = 15.0

    with caplog.at_level(logging.WARNING):
        assert [hold.ready_at() <= clock.now for _ in range(2)] == [True, True]

    assert [record.message for record in caplog.records] == [
        "staging resumed: the pause reached its deadline without resume_staging"
    ]
