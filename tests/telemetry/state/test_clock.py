"""Ages, load and plans go by the store's clock, however far a rank's own clock is off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from api.monitor.monitor import Monitor
from api.monitor.state import Grade
from eplb.errors import StoreError
from rebalance.controller.load import Arrivals
from telemetry.load.reporter import Reporter
from telemetry.state.clock import MEASURED_EVERY_S, StoreClock
from telemetry.state.store import StateStore
from tests.support.limits import NEVER_S
from tests.support.plan_events import recovery_event
from tests.support.rank_reports import rank_report
from tests.support.stores import MemoryStore
from tests.support.two_ranks import UNEVEN, begin_run, sample

NOW = 50_000.0


class Time:
    """True time, and a host's clock of the day, which is off and may jump."""

    def __init__(self, offset_s: float = 0.0) -> None:
        self.passed, self.offset_s = 0.0, offset_s

    def true(self) -> float:
        return NOW + self.passed

    def wall(self) -> float:
        return NOW + self.passed + self.offset_s

    def monotonic(self) -> float:
        return 7.0 + self.passed


def test_clock_follows_the_store_and_not_the_clock_of_its_host() -> None:
    time = Time(offset_s=-118.0)
    clock = StoreClock(MemoryStore("d", clock=time.true), wall=time.wall, monotonic=time.monotonic)
    before = clock()
    clock.follow()
    time.passed = 3.0
    found = clock(), clock.offset_s
    time.offset_s = 3600.0

    assert before == NOW - 118
    assert found == (NOW + 3, -118.0)
    assert (clock(), clock.offset_s) == (NOW + 3, 3600.0)


def test_clock_asks_again_after_a_while_and_goes_on_while_the_store_fails() -> None:
    time, jump_s = Time(), [0.0]

    def of_store() -> float:
        if jump_s[0] < 0:
            raise StoreError("does not answer")
        return time.true() + jump_s[0]

    store = MemoryStore("d", clock=of_store)
    clock = StoreClock(store, wall=time.wall, monotonic=time.monotonic)
    clock.follow()
    jump_s[0] = 500.0
    clock.follow()
    assert clock() == NOW  # asked a moment ago
    time.passed = MEASURED_EVERY_S
    clock.follow()
    assert clock() == NOW + MEASURED_EVERY_S + 500

    jump_s[0] = -1.0
    time.passed += 60.0
    with pytest.raises(StoreError):
        clock.follow()
    assert clock() == NOW + MEASURED_EVERY_S + 560


def test_answer_that_took_long_moves_no_clock_that_has_one() -> None:
    time, takes_s = Time(), [0.0]

    def slow() -> float:
        time.passed += takes_s[0]
        return time.true()

    clock = StoreClock(MemoryStore("d", clock=slow), wall=time.wall, monotonic=time.monotonic)
    clock.follow()
    time.passed, takes_s[0] = 10.0, 4.0
    clock.follow()

    assert clock() == time.true()  # and not the store's answer at the middle of 4 s


def rank_on(
    store: StateStore, rank: int, time: Time
) -> tuple[Reporter, Callable[[int, str], None]]:
    """A rank of a host with that clock, and what has it serve a window of one step."""
    clock = StoreClock(store, wall=time.wall, monotonic=time.monotonic)
    clock.follow()
    reporter = Reporter(store, clock=clock, seed=rank)

    def serve(window: int, run: str) -> None:
        one = sample(rank, window, UNEVEN[rank], run=run, at=clock())
        reporter.offer(one)
        reporter.state(rank_report(run, rank, time=clock(), step=window, step_ms=1000.0))
        reporter.flush(NEVER_S)

    return reporter, serve


@pytest.mark.parametrize("offset_s", [118.0, -118.0, 3600.0, -3600.0])
@pytest.mark.parametrize("window_seconds", [0.0, 2.0])
@pytest.mark.parametrize("jumps_to_s", [None, 0.0, -3600.0])
def test_rank_whose_clock_is_off_changes_neither_verdict_nor_windows(
    offset_s: float, window_seconds: float, jumps_to_s: float | None
) -> None:
    times = Time(), Time(offset_s)
    store = MemoryStore("d", clock=times[0].true)
    begin_run(store, "a", NOW, window_seconds=window_seconds)
    store.acquire_lease("one", 60.0)
    store.add_event("recovery", recovery_event("rank 1 died before"))
    ranks = [rank_on(store, rank, time) for rank, time in enumerate(times)]
    arrivals = Arrivals(store, StoreClock(store, monotonic=times[0].monotonic))
    for window in range(12):
        for time in times:
            time.passed += 1.0
        if window == 6 and jumps_to_s is not None:
            times[1].offset_s = jumps_to_s
        for _, serve in ranks:
            serve(window, "a")
    group = arrivals.follow()
    monitor = Monitor(store, clock=StoreClock(store, monotonic=times[0].monotonic))
    monitor.refresh()
    seen = monitor.reading()
    for reporter, _ in ranks:
        reporter.close(NEVER_S)

    assert seen.state.verdict is Grade.SERVING, seen.state.problems
    assert (seen.state.token_age_s, seen.state.silent_ranks) == (0.0, ())
    assert group is not None
    counts = group.folder.outcomes.counts
    assert (counts["accepted"], counts["future"], counts["late"]) == (24, 0, 0)
    assert len(group.complete_windows()) >= (5 if window_seconds else 12)
    is_off_s = offset_s if jumps_to_s is None else jumps_to_s
    assert [one.ahead_s for one in seen.state.ranks] == [0.0, is_off_s]
    text = (
        f"the clock of rank 1 is {abs(is_off_s):.0f} s {'ahead of' if is_off_s > 0 else 'behind'}"
    )
    assert (text in seen.state.reason) is bool(is_off_s)
    assert [(one.kind, one.is_ready) for one in seen.findings] == [("clocks-differ", True)] * bool(
        is_off_s
    )


def test_report_keeps_what_the_rank_wrote_beside_the_offset_of_its_clock() -> None:
    time = Time(offset_s=2.5)
    store = MemoryStore("d", clock=time.true)
    reporter, _ = rank_on(store, 0, time)
    given = rank_report("a", 0, time=NOW, experts_moved=3)
    reporter.state(given)
    reporter.close(NEVER_S)

    (found,) = store.rank_states("a")
    assert found == replace(given, detail={"experts_moved": 3, "clock_offset_s": 2.5})
    assert found.clock_offset_s == 2.5
