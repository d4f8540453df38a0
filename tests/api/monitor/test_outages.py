"""The outage clock: from the last token of any run, in every view, and once in the store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from api.metrics.definitions import metrics_of
from api.monitor.history import History
from api.monitor.monitor import Monitor
from api.monitor.state import Grade, Reading
from telemetry.state.events import STOPPED, Outage, outage_of
from telemetry.state.runs import HAS_ENDED
from telemetry.state.store import StateStore
from tests.support.plan_events import recovery_event
from tests.support.rank_reports import rank_report
from tests.support.stores import MemoryStore, StoreClock
from tests.support.two_ranks import UNEVEN, begin_run, sample

START = 120_000.0
KILLED = "rank 1 was killed by SIGKILL; restarting the ranks of host 0"


@pytest.fixture
def clock() -> StoreClock:
    found = StoreClock()
    found.now = START
    return found


@pytest.fixture
def store(clock: StoreClock) -> Iterator[StateStore]:
    opened = MemoryStore("d", clock=clock, monotonic=clock.monotonic)
    begin_run(opened, "a", START)
    yield opened
    opened.close()


def test_stop_on_purpose_is_the_cause_of_the_outage_and_no_anomaly(
    store: StateStore, clock: StoreClock
) -> None:
    monitor, why = monitor_of(store, clock), "the ranks of host 0 were stopped on purpose"
    serve(store, "a", range(3), START)
    clock.now = START + 5
    store.add_event(STOPPED, {"host": 0, "message": why})
    clock.now = START + 10
    one_host = looked(monitor).state  # ranks of another host go on
    for rank in range(2):
        store.report(rank_report("a", rank, time=START + 5, step=2, **{HAS_ENDED: True}))
    state = looked(monitor).state
    begin_run(store, "b", clock.now)
    serve(store, "b", range(1), clock.now)

    assert one_host.verdict is not Grade.STOPPED
    assert (state.verdict, state.death and state.death.is_planned) == (Grade.STOPPED, True)
    assert looked(monitor).counts.total("anomalies", "rank_death") == 0
    assert [reason for *_, reason in outages(store)] == [why]


def monitor_of(store: StateStore, clock: StoreClock) -> Monitor:
    return Monitor(store, history=History(), clock=clock)


def serve(store: StateStore, run: str, windows: range, at: float) -> None:
    """One window a second, whose samples were taken at its end; both ranks report."""
    for rank, received in enumerate(UNEVEN):
        taken = [sample(rank, one, received, run=run, at=at + one) for one in windows]
        store.append(taken)
        last = windows[-1]
        store.report(rank_report(run, rank, time=at + last, step=last, step_ms=1000.0))


def looked(monitor: Monitor) -> Reading:
    monitor.refresh()
    return monitor.reading()


def outages(store: StateStore) -> list[tuple[float, float, float, str]]:
    """On record: start and end since START, seconds, cause."""
    found = [one for event in store.events() if (one := outage_of(event)) is not None]
    return [(one.start - START, one.end - START, one.unserved_s, one.reason) for one in found]


def test_outage_of_14_s_around_a_death_is_told_as_that_in_every_view(
    store: StateStore, clock: StoreClock
) -> None:
    monitor = monitor_of(store, clock)
    serve(store, "a", range(10), START)  # the last token at +9
    clock.now = START + 10
    store.add_event("error", {"where": "ranks", "message": KILLED})
    clock.now = START + 12

    seen = looked(monitor)
    assert (seen.state.verdict, seen.state.token_age_s) == (Grade.STOPPED, 3.0)
    assert seen.state.reason == f"no token for 3 s: {KILLED}"
    (live, *_), _ = monitor.anomalies.page(None, 10, is_open=True)
    assert (live.since, live.until) == (START + 9, None)

    clock.now = START + 18
    begin_run(store, "b", clock.now)
    clock.now = START + 20
    seen = looked(monitor)
    assert (seen.state.token_age_s, seen.counts.unserved_s) == (11.0, 0.0)
    assert seen.state.reason == f"no token for 11 s: {KILLED}"

    serve(store, "b", range(3), START + 23)  # the first token at +23
    clock.now = START + 26
    seen = looked(monitor)
    assert outages(store) == [(9, 23, 14.0, KILLED)]
    assert (seen.counts.unserved_s, seen.state.token_age_s) == (14.0, 1.0)
    figures = {one.name: one.figures for one in metrics_of(seen, drift=None, backend="memory")}
    assert figures["eplb_unserved_seconds_total"] == {(): 14.0}
    assert figures["eplb_token_age_seconds"] == {(): 1.0}
    (ended,) = (one for one in monitor.anomalies.page(None, 10)[0] if one.kind == "no-tokens")
    assert (ended.id, ended.since, ended.until) == (live.id, START + 9, START + 23)


def test_restart_of_all_ranks_is_told_with_the_reason_why_survivors_do_not_serve_on(
    store: StateStore, clock: StoreClock
) -> None:
    monitor, missing = monitor_of(store, clock), "3 slots are left for 4 experts, expected 4"
    told = f"ranks lost: 1; all ranks start again: {missing}"
    serve(store, "a", range(10), START)
    clock.now = START + 10
    store.add_event("recovery", recovery_event("rank 1 died"))
    store.note_restart("a", [1], missing)
    store.add_event("error", {"where": "ranks", "message": KILLED})
    clock.now = START + 12

    assert looked(monitor).state.reason == f"no token for 3 s: {told}"

    clock.now = START + 18
    begin_run(store, "b", clock.now)
    serve(store, "b", range(3), START + 23)
    clock.now = START + 26
    looked(monitor)
    assert outages(store) == [(9, 23, 14.0, told)]
    store.add_event("error", {"where": "ranks", "message": KILLED})  # of another death
    clock.now = START + 27
    assert looked(monitor).state.reason == f"no token for 2 s: {KILLED}"


def test_planned_change_of_the_ranks_is_no_outage_and_no_stop_unless_it_is_long(
    store: StateStore, clock: StoreClock
) -> None:
    monitor = monitor_of(store, clock)
    serve(store, "a", range(10), START)  # the last token at +9
    looked(monitor)
    begin_run(store, "a-member1", START + 10)
    store.report(rank_report("a-member1", 0, time=START + 10))
    store.report(rank_report("a-member1", 1, time=START + 10))
    clock.now = START + 11
    assert "no-tokens" not in {one.kind for one in looked(monitor).findings}

    serve(store, "a-member1", range(10), START + 11)
    clock.now = START + 20
    looked(monitor)
    assert outages(store) == []

    begin_run(store, "a-member2", START + 21)
    serve(store, "a-member2", range(3), START + 80)
    clock.now = START + 83
    looked(monitor)
    assert outages(store) == [(20, 80, 60.0, "the ranks went on as another group")]


def test_launcher_that_starts_ranks_again_beside_others_that_serve_is_no_stop(
    store: StateStore, clock: StoreClock
) -> None:
    monitor = monitor_of(store, clock)
    serve(store, "a", range(10), START)
    clock.now = START + 10
    detail = {"where": "ranks", "message": KILLED, "others_serve": True}
    store.add_event("error", detail)
    clock.now = START + 11
    assert "no-tokens" not in {one.kind for one in looked(monitor).findings}

    store.add_event("error", detail | {"others_serve": False})
    clock.now = START + 12
    assert "no-tokens" in {one.kind for one in looked(monitor).findings}


def test_outages_are_on_record_once_for_all_services_and_after_restarts(
    store: StateStore, clock: StoreClock
) -> None:
    both = monitor_of(store, clock), monitor_of(store, clock)
    for number, run in enumerate("bcd"):
        serve(store, "abc"[number], range(10), START + 100 * number)
        clock.now = START + 100 * number + 90
        begin_run(store, run, clock.now)
    serve(store, "d", range(10), START + 300)
    clock.now = START + 310
    for monitor in both:
        looked(monitor)

    expected = [(100 * n + 9, 100 * n + 100, 91, "the ranks were started again") for n in range(3)]
    assert outages(store) == expected
    again = monitor_of(store, clock)
    assert looked(again).counts.unserved_s == looked(both[0]).counts.unserved_s == 273.0
    dates = [(one.since, one.until) for one in again.anomalies.page(None, 9, is_open=False)[0]]
    assert (START + 109, START + 200) in dates
    assert outages(store) == expected


def test_outage_that_passed_while_no_service_ran_is_on_record_when_one_starts(
    store: StateStore, clock: StoreClock
) -> None:
    serve(store, "a", range(10), START)
    clock.now = START + 10
    store.add_event("error", {"where": "ranks", "message": KILLED})
    begin_run(store, "b", clock.now)
    serve(store, "b", range(10), START + 30)
    clock.now = START + 45
    looked(monitor_of(store, clock))

    assert outages(store) == [(9, 30, 21.0, KILLED)]


def test_viewer_of_a_store_records_nothing_and_knows_the_last_token_of_the_run_before(
    store: StateStore, clock: StoreClock
) -> None:
    serve(store, "a", range(10), START)
    clock.now = START + 20
    begin_run(store, "b", clock.now)
    clock.now = START + 22

    seen = looked(Monitor(store, clock=clock))
    assert seen.state.reason == "no token for 13 s: the ranks were started 2 s ago"
    serve(store, "b", range(3), START + 23)
    viewer = Monitor(store, clock=clock)
    assert looked(viewer).counts.unserved_s == 0.0
    assert outages(store) == []


def test_stall_without_a_restart_is_an_outage_and_lost_or_late_samples_are_none(
    store: StateStore, clock: StoreClock
) -> None:
    monitor = monitor_of(store, clock)
    serve(store, "a", range(10), START)
    serve(store, "a", range(10, 12), START + 60)  # steps 10 and 11 at +70 and +71
    clock.now = START + 72
    looked(monitor)
    assert outages(store) == [(9, 70, 61.0, "no step was completed")]

    serve(store, "a", range(50, 60), START + 60)  # windows 12 to 49 were dropped
    serve(store, "a", range(60, 63), START + 80)  # 20 s: less than the verdict allows
    clock.now = START + 145
    looked(monitor)
    assert len(outages(store)) == 1


def test_outage_ends_with_the_first_token_of_the_sample_after_it(
    store: StateStore, clock: StoreClock
) -> None:
    """Samples of four steps of 0.5 s each, which are dated at the end of the fourth."""

    def serve_four_steps(run: str, numbers: range, at: float) -> None:
        for rank, received in enumerate(UNEVEN):
            dated = [(one, at + 2.0 * (one - numbers[0])) for one in numbers]
            store.append(
                [sample(rank, one, received, run=run, at=time, steps=4) for one, time in dated]
            )

    begin_run(store, "b", START, window_steps=4)
    monitor = monitor_of(store, clock)
    serve_four_steps("b", range(3), START + 2)  # the last token at +6
    begin_run(store, "c", START + 10, window_steps=4)
    serve_four_steps("c", range(2), START + 20)  # the first token at +18.5
    serve_four_steps("c", range(2, 4), START + 92)  # no step from +22 on for 68 s
    clock.now = START + 95
    looked(monitor)

    restarted, stalled = "the ranks were started again", "no step was completed"
    assert outages(store) == [(6, 18.5, 12.5, restarted), (22, 90.5, 68.5, stalled)]


def test_store_whose_clock_is_set_back_has_no_token_of_the_future(
    store: StateStore, clock: StoreClock
) -> None:
    monitor = monitor_of(store, clock)
    serve(store, "a", range(10), START)
    clock.now = START + 10
    looked(monitor)
    clock.now = START - 3600
    assert looked(monitor).state.token_age_s == 0.0
    clock.now += 40

    seen = looked(monitor)
    assert seen.state.token_age_s == 40.0
    store.add_outage(Outage(START - 3600, START - 3550, 50.0, "again"))
    assert looked(monitor).counts.unserved_s == 50.0
