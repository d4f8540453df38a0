"""The watchdog: what grows old, what is said of it, and what follows, with a clock set by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.migration.build import Migration, build_migration
from rebalance.protocol import phases
from rebalance.protocol.ballot import Verdict
from rebalance.protocol.phases import Phase, PlanRef, RankPhase
from rebalance.rank.watcher import DEFERS_S, Watcher
from rebalance.threads.waiting import SharedPhase
from rebalance.threads.watchdog import Watchdog
from telemetry.state.live import Control
from telemetry.state.runs import Details, RankState
from telemetry.state.store import StateStore
from tests.support.simulated_time import Clock
from tests.support.stores import MemoryStore

PULLING = "pulling layer 3 expert 17 from rank 2"
PLAN = phases.see_plan(RankPhase(generation=0), PlanRef(3, 99, 0, 2, 1))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watchdog(clock: Clock) -> Watchdog:
    return Watchdog(plan_deadline_s=30.0, clock=clock)


def test_oldest_is_the_thread_without_progress_for_longest(
    watchdog: Watchdog, clock: Clock
) -> None:
    watchdog.mover.busy(PULLING)
    clock.now += 5
    watchdog.step.busy("in step 7")
    clock.now += 2

    oldest = watchdog.oldest()
    assert (oldest.age_s, str(oldest)) == (7, f"mover: {PULLING}")

    watchdog.mover.busy("pulling layer 3 expert 18 from rank 2")
    assert str(watchdog.oldest()) == "step: in step 7"


def test_watchdog_drops_a_migration_whose_mover_hangs(watchdog: Watchdog, clock: Clock) -> None:
    watchdog.mover.busy(PULLING)
    clock.now += 30
    assert watchdog.objection(PLAN) == ""
    clock.now += 1

    assert f"mover: {PULLING} for 31.0 s" in watchdog.objection(PLAN)


def test_mover_that_gets_on_may_take_as_long_as_it_needs(watchdog: Watchdog, clock: Clock) -> None:
    adopted = replace(PLAN, is_adopted=True)
    for expert in range(100):
        watchdog.mover.busy(f"pulling layer 0 expert {expert} from rank 1")
        clock.now += 29

        assert watchdog.objection(adopted) == ""


def test_plan_that_some_rank_never_takes_up_is_dropped(watchdog: Watchdog, clock: Clock) -> None:
    assert watchdog.objection(PLAN) == ""
    clock.now += 31

    assert "plan 3" in watchdog.objection(PLAN)
    assert watchdog.objection(replace(PLAN, is_adopted=True)) == ""


class Ranked:
    """The rank as a watcher sees it, and where its reports go."""

    def __init__(self) -> None:
        self.membership = 0
        self.reports: list[RankState] = []
        self.fails_with: BaseException | None = None

    def on_store_update(self, control: Control, published: Migration | None) -> bool:
        if self.fails_with is not None:
            raise self.fails_with
        return True

    def describe(self) -> RankState:
        return RankState("run", 0, 0.0, 0, 0, "idle", 0, 0, 0, 0)

    def offer(self, sample: object) -> bool:
        return True

    def state(self, state: RankState) -> None:
        self.reports.append(state)


class Hands:
    """A mover whose work is whatever the test gives it."""

    def __init__(self, watchdog: Watchdog) -> None:
        self.beat = watchdog.mover
        self.threads: list[threading.Thread] = []

    def begin(self) -> None:
        self.threads.append(threading.current_thread())

    def bring(self, migration: Migration, shared: SharedPhase) -> None:
        raise AssertionError("no migration is brought here")

    def wait_for_end(self, shared: SharedPhase, plan_id: int) -> None:
        with shared.changed:
            shared.changed.wait_for(lambda: shared.state.phase is Phase.ABORTED)
            shared.update(phases.aborted)


class SlowStore(MemoryStore):
    """A store that takes an event only when the test lets it."""

    def __init__(self) -> None:
        super().__init__("test")
        self.is_asked, self.may_answer = threading.Event(), threading.Event()

    def add_event(self, kind: str, detail: Details) -> int:
        self.is_asked.set()
        self.may_answer.wait()
        return super().add_event(kind, detail)


Made = tuple[Watcher, Hands, SharedPhase, Ranked, SlowStore]


@pytest.fixture
def made(watchdog: Watchdog) -> Iterator[Made]:
    shared, hands, ranked = SharedPhase(RankPhase(generation=0)), Hands(watchdog), Ranked()
    store = SlowStore()
    watcher = Watcher(store, ranked, hands, shared, ranked, watchdog)  # type: ignore[arg-type]
    watcher.start()
    yield watcher, hands, shared, ranked, store
    store.may_answer.set()
    watcher.close()


def fail() -> None:
    raise ValueError("a torn wire")


def run_on_mover(watcher: Watcher, job: Callable[[], None] = lambda: None) -> None:
    """Have the mover's thread do a job, and wait until it has."""
    done = threading.Event()
    watcher.do(job)
    watcher.do(done.set)
    done.wait()


def test_mover_that_failed_is_started_again_once_and_then_frozen(
    made: Made,
) -> None:
    watcher, hands, shared, *_ = made

    run_on_mover(watcher, fail)
    assert (watcher.num_mover_failures, shared.state.frozen_reason) == (1, "")
    assert len(hands.threads) == 2

    watcher.do(fail)
    with shared.changed:
        shared.changed.wait_for(lambda: shared.state.frozen_reason)
    assert "ValueError: a torn wire" in shared.state.frozen_reason
    assert watcher.num_mover_failures == 2


def test_plan_that_the_failed_mover_never_saw_is_still_let_go(made: Made) -> None:
    watcher, _, shared, *_ = made
    run_on_mover(watcher, fail)
    shared.update(phases.see_plan, PlanRef(3, 99, 0, 2, 1))
    watcher.do(fail)
    with shared.changed:
        shared.changed.wait_for(lambda: shared.state.abort_reason)
        cast = phases.ballot(shared.state, step=0, membership=0, halt=False)
        shared.state, _ = phases.read_verdict(shared.state, cast, Verdict.decode(cast.encode()))
        shared.changed.notify_all()
        shared.changed.wait_for(lambda: shared.state.phase is Phase.IDLE)

    assert shared.state.frozen_reason.endswith("a torn wire")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_watcher_names_threads_that_exited_unexpectedly(
    made: Made,
) -> None:
    watcher, hands, _, ranked, _ = made
    run_on_mover(watcher)
    assert watcher.ended() == []

    watcher.do(lambda: (_ for _ in ()).throw(SystemExit))  # the only way to end a thread unheard
    hands.threads[0].join()
    assert watcher.ended() == ["eplb-mover"]

    ranked.fails_with = SystemExit()
    for thread in threading.enumerate():
        if thread.name == "eplb-watcher":
            thread.join()
    assert watcher.ended() == ["eplb-mover", "eplb-watcher"]


FROM = Placement(np.array([[0, 1, 0, 1]]), num_experts=2)
TO = Placement(np.array([[1, 0, 0, 1]]), num_experts=2)


@pytest.fixture
def open_plan() -> Migration:
    topology = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2)
    return build_migration(FROM, TO, topology, plan_id=1)


@pytest.fixture
def watchers(clock: Clock, open_plan: Migration) -> Iterator[tuple[Watcher, Watcher, StateStore]]:
    """Watchers of two ranks, and their store, where a plan is open."""
    store = MemoryStore("test")
    store.commit(FROM, expected=None, reason="start")
    store.publish(open_plan)
    started = []
    for _ in range(2):
        shared, ranked, watchdog = (
            SharedPhase(RankPhase(generation=0)),
            Ranked(),
            Watchdog(30, clock),
        )
        started.append(
            Watcher(store, ranked, Hands(watchdog), shared, ranked, watchdog)  # type: ignore[arg-type]
        )
        started[-1].start()
    yield started[0], started[1], store
    for watcher in started:
        watcher.close()


def reasons(store: StateStore) -> list[str]:
    """Why the plan was dropped, once it is."""
    while store.published() is not None:
        threading.Event().wait(0.001)
    return [event.detail["reason"] for event in store.events() if event.kind == "abort"]


def test_abort_reason_is_that_of_the_requesting_rank(
    watchers: tuple[Watcher, Watcher, StateStore], open_plan: Migration
) -> None:
    another, knowing, store = watchers
    another.commit(open_plan, open_plan.base, "aborted", phases.ELSEWHERE)
    knowing.commit(open_plan, open_plan.base, "aborted", "rank 2: the disk is gone")

    assert reasons(store) == ["rank 2: the disk is gone"]
    another.close()
    assert reasons(store) == ["rank 2: the disk is gone"]


def test_end_of_a_plan_is_written_when_the_aborting_rank_is_dead(
    watchers: tuple[Watcher, Watcher, StateStore], open_plan: Migration, clock: Clock
) -> None:
    another, _, store = watchers
    another.commit(open_plan, open_plan.base, "aborted", phases.ELSEWHERE)
    clock.now += DEFERS_S

    assert reasons(store) == ["requested by another rank"]


def test_rejected_write_is_no_progress(made: Made, watchdog: Watchdog, clock: Clock) -> None:
    watcher, *_, store = made
    watcher.report_event("scrub", {})
    store.is_asked.wait()
    clock.now += 40

    standing = watchdog.commit_writer.standing()

    assert (standing.age_s, standing.doing) == (40, "writing an event of kind 'scrub'")


def test_writes_not_stored_before_the_end_are_logged_as_cancelled(
    watchdog: Watchdog, caplog: pytest.LogCaptureFixture
) -> None:
    store, shared, ranked = MemoryStore("test"), SharedPhase(RankPhase(generation=0)), Ranked()
    hands = Hands(watchdog)
    watcher = Watcher(store, ranked, hands, shared, ranked, watchdog)  # type: ignore[arg-type]
    watcher.start()
    store.close()
    watcher.report_event("scrub", {})

    watcher.close()

    assert "writing an event of kind 'scrub' cancelled" in caplog.text
