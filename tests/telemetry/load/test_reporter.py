"""The step path hands samples over and goes on, whatever the store does."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from eplb.core.load import LoadSample
from eplb.errors import RankError, StoreError
from telemetry.load.reporter import Reporter
from telemetry.state.runs import RankState
from telemetry.state.store import StateStore
from tests.support.limits import NEVER_S
from tests.support.stores import MemoryStore, make_sample, sequences


class GatedStore(MemoryStore):
    """A memory store whose writes wait at a gate, and fail while ``failing`` is set."""

    def __init__(self) -> None:
        super().__init__("demo")
        self.gate = threading.Event()
        self.gate.set()
        self.arrived = threading.Event()
        self.failing = False
        self.failures = threading.Semaphore(0)

    def append(self, samples: Sequence[LoadSample]) -> int:
        self.arrived.set()
        self.gate.wait()
        if self.failing:
            self.failures.release()
            raise StoreError("the disk is gone")
        return super().append(samples)


def make_state(step: int) -> RankState:
    return RankState("run-1", 0, float(step), step, 1, "idle", 0, 0, step, 0)


@contextmanager
def reporting(store: StateStore, capacity: int = 256) -> Iterator[Reporter]:
    reporter = Reporter(store, capacity=capacity)
    try:
        yield reporter
    finally:
        reporter.close(NEVER_S)


def test_every_sample_is_stored_in_order_once_flushed() -> None:
    store = MemoryStore("demo")
    with reporting(store) as reporter:
        for sequence in range(20):
            assert reporter.offer(make_sample(0, sequence))
        reporter.flush(NEVER_S)

        assert sequences(store) == list(range(20))
        assert reporter.stats().stored == 20
        assert reporter.stats().waiting == 0


def test_offering_does_not_wait_for_a_store_that_hangs() -> None:
    store = GatedStore()
    with reporting(store) as reporter:
        store.gate.clear()
        reporter.offer(make_sample(0, 0))
        store.arrived.wait()
        for sequence in range(1, 10):
            reporter.offer(make_sample(0, sequence))

        assert reporter.stats().waiting == 10
        store.gate.set()
        reporter.flush(NEVER_S)
        assert sequences(store) == list(range(10))


def test_full_queue_drops_the_oldest_samples_and_shows_the_gap() -> None:
    store = GatedStore()
    reporter = Reporter(store, capacity=3)
    store.gate.clear()
    reporter.offer(make_sample(0, 0))
    store.arrived.wait()

    fitted = [reporter.offer(make_sample(0, sequence)) for sequence in range(1, 6)]
    store.gate.set()

    assert fitted == [True, True, True, False, False]
    with pytest.raises(RankError, match=r"2 dropped or refused.*6"):
        reporter.flush(NEVER_S)
    assert sequences(store) == [0, 3, 4, 5]
    assert reporter.stats().dropped == 2
    reporter.close(NEVER_S)


def test_samples_survive_a_store_that_fails_for_a_while() -> None:
    store = GatedStore()
    store.failing = True
    with reporting(store) as reporter:
        reporter.offer(make_sample(0, 0))
        for _ in range(2):
            store.failures.acquire()
        reporter.offer(make_sample(0, 1))
        store.failing = False
        reporter.flush(NEVER_S)

        assert sequences(store) == [0, 1]
        assert reporter.stats().errors >= 2
        assert reporter.stats().last_error == "the disk is gone"
        assert reporter.stats().dropped == 0


def test_flush_with_a_dead_store_reports_the_unstored_samples() -> None:
    store = GatedStore()
    store.failing = True
    reporter = Reporter(store)
    for sequence in range(3):
        reporter.offer(make_sample(0, sequence))

    store.failures.acquire()
    with pytest.raises(RankError, match=r"3 samples.*disk is gone"):
        reporter.flush(0.01)
    with pytest.raises(RankError, match="3 samples"):
        reporter.close(0.01)


def test_only_the_newest_state_is_written() -> None:
    store = MemoryStore("demo")
    with reporting(store) as reporter:
        for step in range(10):
            reporter.state(make_state(step))
        reporter.flush(NEVER_S)

        assert [state.step for state in store.rank_states("run-1")] == [9]


def test_sample_of_another_deployment_is_counted_off_the_step_path() -> None:
    reporter = Reporter(MemoryStore("demo"))

    reporter.offer(make_sample(0, 0, deployment="other"))

    with pytest.raises(RankError, match=r"'other'.*'demo'"):
        reporter.close(NEVER_S)
    assert not reporter.offer(make_sample(0, 1))


def test_sample_offered_after_close_counts_as_dropped() -> None:
    reporter = Reporter(MemoryStore("demo"))
    reporter.close(NEVER_S)
    reporter.close(NEVER_S)

    assert not reporter.offer(make_sample(0, 0))
    assert reporter.stats().dropped == 1
