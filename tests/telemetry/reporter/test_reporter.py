"""The step path hands samples over and goes on, whatever the store does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from eplb.core.load import LoadSample
from eplb.errors import RankError, StoreError
from telemetry.reporter.reporter import Reporter
from telemetry.store import RankState
from telemetry.stores.memory import MemoryStore
from telemetry.stores.sqlite.store import SqliteStore
from tests.support.limits import NEVER_S


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
        assert self.gate.wait(), "the test forgot to open the gate"
        if self.failing:
            self.failures.release()
            raise StoreError("the disk is gone")
        return super().append(samples)


def make_sample(sequence: int, deployment: str = "demo") -> LoadSample:
    return LoadSample(
        deployment,
        "run-1",
        0,
        sequence,
        0.0,
        sequence,
        sequence,
        "decode",
        1,
        np.array([[0]]),
        np.array([[1]]),
    )


def make_state(step: int) -> RankState:
    return RankState("run-1", 0, float(step), step, 1, "idle", 0, 0, step, 0)


@contextmanager
def reporting(store: MemoryStore | SqliteStore, capacity: int = 256) -> Iterator[Reporter]:
    reporter = Reporter(store, capacity=capacity)
    try:
        yield reporter
    finally:
        reporter.close(NEVER_S)


def stored_sequences(store: MemoryStore | SqliteStore) -> list[int]:
    return [sample.sequence for _, sample in store.samples("run-1")]


def test_every_sample_is_stored_in_order_once_flushed() -> None:
    store = MemoryStore("demo")
    with reporting(store) as reporter:
        for sequence in range(100):
            assert reporter.offer(make_sample(sequence))
        reporter.flush(NEVER_S)

        assert stored_sequences(store) == list(range(100))
        assert reporter.stats().stored == 100
        assert reporter.stats().waiting == 0


def test_offering_does_not_wait_for_a_store_that_hangs() -> None:
    store = GatedStore()
    with reporting(store) as reporter:
        store.gate.clear()
        reporter.offer(make_sample(0))
        assert store.arrived.wait()
        for sequence in range(1, 10):
            reporter.offer(make_sample(sequence))

        assert reporter.stats().waiting == 10
        store.gate.set()
        reporter.flush(NEVER_S)
        assert stored_sequences(store) == list(range(10))


def test_full_queue_drops_the_oldest_samples_and_shows_the_gap() -> None:
    store = GatedStore()
    reporter = Reporter(store, capacity=3)
    store.gate.clear()
    reporter.offer(make_sample(0))
    assert store.arrived.wait()

    fitted = [reporter.offer(make_sample(sequence)) for sequence in range(1, 6)]
    store.gate.set()

    assert fitted == [True, True, True, False, False]
    with pytest.raises(RankError, match="2 dropped or refused, expected all 6 stored"):
        reporter.flush(NEVER_S)
    assert stored_sequences(store) == [0, 3, 4, 5]
    assert reporter.stats().dropped == 2
    reporter.close(NEVER_S)


def test_samples_survive_a_store_that_fails_for_a_while() -> None:
    store = GatedStore()
    store.failing = True
    with reporting(store) as reporter:
        reporter.offer(make_sample(0))
        for _ in range(2):
            assert store.failures.acquire()
        reporter.offer(make_sample(1))
        store.failing = False
        reporter.flush(NEVER_S)

        assert stored_sequences(store) == [0, 1]
        assert reporter.stats().errors >= 2
        assert reporter.stats().last_error == "the disk is gone"
        assert reporter.stats().dropped == 0


def test_flush_with_a_dead_store_reports_the_unstored_samples() -> None:
    store = GatedStore()
    store.failing = True
    reporter = Reporter(store)
    for sequence in range(3):
        reporter.offer(make_sample(sequence))

    with pytest.raises(RankError, match=r"3 samples not stored within 0\.2 s.*disk is gone"):
        reporter.flush(0.2)
    with pytest.raises(RankError, match="3 samples not stored"):
        reporter.close(0.2)


def test_only_the_newest_state_is_written() -> None:
    store = MemoryStore("demo")
    with reporting(store) as reporter:
        for step in range(50):
            reporter.state(make_state(step))
        reporter.flush(NEVER_S)

        assert [state.step for state in store.rank_states("run-1")] == [49]


def test_state_without_samples_is_written_on_its_own() -> None:
    written = threading.Event()

    class Watched(MemoryStore):
        def report(self, state: RankState) -> None:
            super().report(state)
            written.set()

    with reporting(Watched("demo")) as reporter:
        reporter.state(make_state(7))

        assert written.wait()


def test_sample_of_another_deployment_is_counted_off_the_step_path() -> None:
    reporter = Reporter(MemoryStore("demo"))

    reporter.offer(make_sample(0, deployment="other"))

    with pytest.raises(RankError, match="is of deployment 'other', expected 'demo'"):
        reporter.close(NEVER_S)
    assert not reporter.offer(make_sample(1))


def test_sample_offered_after_close_counts_as_dropped() -> None:
    reporter = Reporter(MemoryStore("demo"))
    reporter.close(NEVER_S)
    reporter.close(NEVER_S)

    assert not reporter.offer(make_sample(0))
    assert reporter.stats().dropped == 1


@pytest.mark.parametrize("num_reporters", [4])
def test_reporters_of_several_ranks_share_one_file(tmp_path: Path, num_reporters: int) -> None:
    store = SqliteStore(tmp_path / "store.sqlite", "demo")

    def report(rank: int) -> Callable[[], None]:
        def work() -> None:
            with reporting(store) as reporter:
                for sequence in range(30):
                    sample = make_sample(sequence)
                    fields = vars(sample) | {"rank": rank}
                    reporter.offer(LoadSample(**fields))
                    reporter.state(make_state(sequence))

        return work

    threads = [threading.Thread(target=report(rank)) for rank in range(num_reporters)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert store.sample_counts("run-1") == dict.fromkeys(range(num_reporters), 30)
    store.close()
