"""What every StateStore promises, run over each kind of store: what is decided, once, in memory.

``tests/telemetry/state/test_store_*.py`` hold the decisions themselves.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from eplb.core.topology import Topology
from eplb.errors import FencedOut, StaleGeneration, StaleRevision, StoreError
from eplb.migration.build import Migration, build_migration
from eplb.migration.candidates import Candidates
from eplb.migration.recovery import Recovery, SurvivorReport
from eplb.versions import CONTROLLER, PROTOCOL, Announcement
from telemetry.load.rollup import HOUR, MINUTE, Rollup
from telemetry.state.events import RESTART
from telemetry.state.groups import GroupProposal, Joiner
from telemetry.state.live import Control, LiveChange, LiveState
from telemetry.state.membership import MembershipRefused
from telemetry.state.proposals import KEPT_PROPOSALS, Approval, Content, Proposal
from telemetry.state.runs import RankState, RunInfo
from telemetry.state.store import StateStore
from telemetry.state.tasks import TaskResult, TaskState
from tests.support.limits import NEVER_S
from tests.support.stores import OpenStore, StoreClock, kinds, make_placement, make_sample

TWO_RANKS = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2)
FIRST, TARGET = make_placement(1), make_placement(2, [0, 1, 2, 1])
RUN = RunInfo("run-1", 5.0, {"layer_ids": [3, 4]}, {"alive": [True, False]}, 10, 2.5)
RECORD = Recovery(1, "run-1", (0, 2), 5, 7, 1, "rank 1 died", 9.5)
REPORT = SurvivorReport("run-1", 0, 0, 4, 2, 7, 2**61, 1, 2, 6, 3, (1, 5), 9.5)
PROPOSAL = Proposal(
    time=5.0,
    expires=1e12,
    base_generation=1,
    base_hash=FIRST.hash,
    by="alice",
    trigger="request",
    reason="hot expert",
    target_generation=2,
    decision="MOVE",
    plan_reason="worth it",
    policy="auto",
    imbalance_before=1.6,
    imbalance_after=1.1,
    expected_gain=2.0,
    moves=1,
    bytes=24,
    cost_s=0.5,
)
CONTENT = Content(TARGET, {"explanation": [{"layer": 0, "sentences": ["a", "b"]}]})


def migration(plan_id: int) -> Migration:
    return build_migration(FIRST, TARGET, TWO_RANKS, plan_id=plan_id)


def committed_first(store: StateStore) -> StateStore:
    store.commit(FIRST, expected=None, reason="first")
    return store


def token_of(store: StateStore, holder: str, ttl_s: float = 30.0) -> int:
    lease = store.acquire_lease(holder, ttl_s)
    assert lease is not None
    return lease.token


def same(one: object, other: object) -> bool:
    """Whether records that hold arrays are equal."""
    mine, theirs = vars(one), vars(other)
    return all(np.array_equal(mine[name], theirs[name]) for name in mine)


# -- the first writer wins

Race = Callable[[StateStore, int], object]


def publish(store: StateStore, n: int) -> bool:
    store.publish(migration(n + 1))
    return True


def ask(store: StateStore, n: int) -> bool:
    return store.change_membership(
        str(n), {0}, asked={"to": 1}, alive=[True, True], reason="race", by=""
    ).id == str(n)


RACES: dict[str, Race] = {
    "commit": lambda store, n: store.commit(make_placement(2), expected=1, reason=str(n)),
    "publish": publish,
    "lease": lambda store, n: store.acquire_lease(str(n), 30.0),
    "live": lambda store, n: store.change_live({"max_moves": n}, expected=0, reason="race"),
    "claim": lambda store, n: store.claim(),
    "membership": ask,
    "restore": lambda store, n: store.restore(
        RUN, FIRST, LiveState(), last_plan_id=n, reason="lost"
    ),
}


@pytest.mark.parametrize("race", RACES)
def test_of_many_that_write_at_once_the_first_wins(open_stores: OpenStore, race: str) -> None:
    stores = [open_stores("demo") for _ in range(4)]
    if race != "restore":
        committed_first(stores[0]).submit("rebalance", {})

    def attempt(n: int) -> bool:
        try:
            return bool(RACES[race](stores[n % 4], n))
        except (StaleGeneration, StaleRevision, MembershipRefused):
            return False

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(attempt, range(8)))

    assert won.count(True) == 1


def test_of_recovery_records_written_at_once_one_stands(open_stores: OpenStore) -> None:
    stores = [open_stores("demo") for _ in range(4)]
    records = [replace(RECORD, applied=number) for number in range(8)]

    with ThreadPoolExecutor(8) as pool:
        stand = list(
            pool.map(lambda n: stores[n % 4].recover(records[n], expected_membership=0), range(8))
        )

    assert set(stand) == {stores[0].recovery()}
    assert kinds(stores[0]) == ["recovery"]


def test_ids_are_given_out_and_tasks_claimed_or_cancelled_once(open_stores: OpenStore) -> None:
    stores = [open_stores("demo") for _ in range(3)]
    ids = [stores[0].submit("rebalance", {}).id for _ in range(9)]

    def claimed(store: StateStore) -> list[int]:
        return [task.id for task in iter(store.claim, None)]

    def cancelled(store: StateStore) -> list[int]:
        return [one for one in reversed(ids) if store.cancel(one, reason="race")]

    with ThreadPoolExecutor(3) as pool:
        work = zip((claimed, claimed, cancelled), stores, strict=True)
        ends = list(pool.map(lambda pair: pair[0](pair[1]), work))
        plan_ids = list(pool.map(lambda n: stores[n % 3].next_plan_id(), range(9)))

    assert sorted(one for end in ends for one in end) == ids
    assert sorted(plan_ids) == list(range(1, 10))


# -- generations and fencing tokens


def test_write_on_an_older_state_is_refused_and_changes_nothing(any_store: StateStore) -> None:
    committed_first(any_store).change_live({"max_moves": 1}, reason="first")
    before = any_store.version(), any_store.events(), any_store.live()
    stale: list[Callable[[], object]] = [
        lambda: any_store.commit(make_placement(3), expected=2, reason="late"),
        lambda: any_store.publish(build_migration(make_placement(2), TARGET, TWO_RANKS, plan_id=1)),
        lambda: any_store.propose(replace(PROPOSAL, base_generation=3), CONTENT),
        lambda: any_store.change_live({"max_moves": 2}, expected=0, reason="late"),
        lambda: any_store.add_event("note", {"value": float("nan")}),
    ]

    for write in stale:
        with pytest.raises((StaleGeneration, StaleRevision, StoreError)):
            write()

    assert (any_store.version(), any_store.events(), any_store.live()) == before
    assert (any_store.published(), any_store.proposals()) == (None, [])


def test_token_grows_with_each_takeover_and_older_writers_are_fenced_out(
    open_stores: OpenStore, pass_time: Callable[[float], None]
) -> None:
    store, other = committed_first(open_stores("demo")), open_stores("demo")
    owner = other.acquire_lease("parent", 1000.0, "deployment")
    first = token_of(store, "one", 10.0)
    assert other.acquire_lease("two", 10.0) is None
    pass_time(11.0)
    assert (other.lease(), token_of(store, "one", 10.0)) == (None, first)
    lease = store.lease()
    assert lease is not None
    assert (lease.expires, lease.renewals, other.lease()) == (1021.0, 1, lease)
    assert store.release_lease(lease)
    assert not store.release_lease(lease)
    second = token_of(other, "two")

    assert second == first + 1
    assert store.latest_lease() == other.lease()
    assert store.lease("deployment") == owner
    with pytest.raises(FencedOut):
        store.publish(migration(store.next_plan_id()), fence=first)
    with pytest.raises(FencedOut):
        store.claim(fence=first)
    assert store.published() is None
    store.publish(migration(store.next_plan_id()), fence=second)


def test_token_of_a_store_without_contents_is_none_of_before(open_stores: OpenStore) -> None:
    tokens = [token_of(open_stores(f"emptied-{n}"), "one") for n in range(4)]

    assert len(set(tokens)) == 4
    assert all(token >> 31 == 1000 for token in tokens)  # the clock's seconds


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0], ids=["back", "ahead"])
def test_standby_leads_after_one_ttl_although_the_clock_was_set(
    open_stores: OpenStore,
    store_clock: StoreClock,
    pass_time: Callable[[float], None],
    jump_s: float,
) -> None:
    leader, standby = open_stores("demo"), open_stores("demo")
    token = token_of(leader, "one", 3.0)
    store_clock.now += jump_s
    for _ in range(4):
        assert standby.acquire_lease("two", 3.0) is None
        pass_time(1.0)
        assert token_of(leader, "one", 3.0) == token

    assert standby.acquire_lease("two", 3.0) is None
    pass_time(2.9)
    assert standby.acquire_lease("two", 3.0) is None
    pass_time(0.2)

    assert token_of(standby, "two") == token + 1


# -- what one process writes, another reads


def test_placements_and_the_open_migration_are_read_back(open_stores: OpenStore) -> None:
    store, other = open_stores("demo"), open_stores("demo")
    assert (store.committed(), store.placement(1), store.published()) == (None, None, None)
    committed_first(store)
    open_plan = migration(store.next_plan_id())
    store.publish(open_plan)
    published = other.published()
    assert published is not None
    assert published.hash == open_plan.hash
    assert store.commit(TARGET, expected=1, plan_id=open_plan.plan_id, reason="skew")
    assert not other.commit(TARGET, expected=1, plan_id=open_plan.plan_id, reason="skew")

    committed = other.committed()
    assert committed is not None
    assert (committed.placement.hash, committed.plan_id) == (TARGET.hash, 1)
    assert (committed.time, committed.reason) == (1000.0, "skew")
    assert [line.placement.generation for line in other.placements()] == [2, 1]
    assert [line.placement.generation for line in other.placements(limit=1)] == [2]
    assert [line.placement.generation for line in other.placements(before=2)] == [1]
    first = other.placement(1)
    assert first is not None
    assert (first.placement.hash, other.placement(3)) == (FIRST.hash, None)
    assert other.published() is None
    assert kinds(other) == ["commit", "publish", "commit"]


def test_starts_reports_hints_and_versions_are_read_back(open_stores: OpenStore) -> None:
    store, other = open_stores("demo"), open_stores("demo")
    later = replace(RUN, run="run-2")
    states = [
        RankState("run-1", rank, 9.5, step, 2, "swap", 4, 1, 30, 3, 1, "torn", detail={"b": {}})
        for rank, step in ((1, 5), (0, 6), (1, 7))
    ]
    assert (store.current_run(), store.runs(), store.candidates()) == (None, [], Candidates())

    for run in (RUN, RUN, later):
        store.begin_run(run)
    for state in states:
        store.report(state)
    for protocol in (4, 5):
        store.announce(Announcement(CONTROLLER, "c", "0.5.0", protocol, 4))
    for suggested in (Candidates((((0, 3),), ())), Candidates((((0, 3), (1, 2)), ((0, 0),)))):
        store.suggest(suggested)

    assert (other.current_run(), other.runs()) == (later, [RUN, later])
    assert (other.rank_states("run-1"), other.rank_states("run-2")) == (states[1:], [])
    found = {(one.component, one.name, one.protocol) for one in other.announced()}
    assert found == {
        ("ranks", "run-1", PROTOCOL),
        ("ranks", "run-2", PROTOCOL),
        (CONTROLLER, "c", 5),
    }
    assert other.candidates() == suggested


def test_live_settings_and_their_ends_are_read_back(
    open_stores: OpenStore, pass_time: Callable[[float], None]
) -> None:
    store, other = open_stores("demo"), open_stores("demo")
    assert (store.live(), store.control()) == (LiveState(), Control())
    store.set_static({"pay_back_s": 60.0}, reason="start")
    store.change_live({"max_moves": 3}, reason="slow link")
    paused = store.change_live({"movement": False}, reason="4711", lasts_s=60.0)

    assert other.live() == paused
    assert paused.changes["movement"] == LiveChange(3, 1000.0, "4711")
    assert (paused.until, other.control()) == ({"movement": 1060.0}, Control(movement=False))
    pass_time(60.0)
    resumed = other.expire_live()
    assert store.live() == resumed
    assert resumed.effective == {"pay_back_s": 60.0, "max_moves": 3}


def test_proposals_are_read_back_approved_once_and_forgotten(open_stores: OpenStore) -> None:
    store, other = committed_first(open_stores("demo")), open_stores("demo")
    first, second = (store.propose(PROPOSAL, CONTENT) for _ in range(2))

    assert other.proposals() == [replace(PROPOSAL, id=one.id) for one in (first, second)]
    content = other.proposal_content(first.id)
    assert content is not None
    assert (content.target.hash, content.detail) == (TARGET.hash, CONTENT.detail)
    assert other.proposal_content(second.id + 1) is None
    plan = migration(other.next_plan_id())
    other.publish(plan, approval=Approval(first.id, "bob", "go"))
    store.reject(second.id, by="bob", reason="no")
    ends = [(one.state, one.plan_id, one.ended_by) for one in store.proposals()]
    assert ends == [("approved", plan.plan_id, "bob"), ("rejected", None, "bob")]

    kept = [store.propose(PROPOSAL, CONTENT).id for _ in range(KEPT_PROPOSALS)]
    assert [one.id for one in other.proposals()] == kept
    assert other.proposal_content(first.id) is None


def test_survivor_reports_are_read_by_run_and_membership_and_a_dropped_plan_is_over(
    open_stores: OpenStore,
) -> None:
    store, other = committed_first(open_stores("demo")), open_stores("demo")
    plan = migration(store.next_plan_id())
    store.publish(plan)
    reports = [replace(REPORT, rank=2), REPORT, replace(REPORT, rank=2, swapped=2)]
    for report in (*reports, replace(REPORT, membership=3), replace(REPORT, run="run-2")):
        store.add_survivor_report(report)
    record = replace(RECORD, generation=1, plan_id=plan.plan_id, applied=0)

    assert other.survivor_reports("run-1", 0) == reports[1:]
    assert other.survivor_reports("run-1", 3) == [replace(REPORT, membership=3)]
    assert store.recover(record, expected_membership=0) == record
    assert (other.recovery(), other.published()) == (record, None)
    late = "a dead rank's last write"
    with pytest.raises(StaleGeneration):
        other.commit(TARGET, expected=1, plan_id=plan.plan_id, reason=late, membership=0)


def test_addresses_of_survivors_are_read_by_membership(open_stores: OpenStore) -> None:
    store, other = open_stores("demo"), open_stores("demo")
    store.put_meeting(3, "tokens/0", b"\x00\xff")

    assert other.meeting(3, "tokens/0") == b"\x00\xff"
    assert (other.meeting(3, "tokens/1"), other.meeting(4, "tokens/0")) == (None, None)


def test_reason_of_a_restart_is_one_event_of_each_run(open_stores: OpenStore) -> None:
    one, other = open_stores("d"), open_stores("d")
    for store, why in ((one, "too few slots"), (other, "rank 2: too few slots")):
        store.note_restart("run-1", [1], why)
    other.note_restart("run-2", [2], "agent.serve_on is off")

    found = [event.detail for event in one.events_backwards({RESTART})]
    assert found == [
        {"run": "run-2", "lost": [2], "reason": "agent.serve_on is off"},
        {"run": "run-1", "lost": [1], "reason": "too few slots"},
    ]


def test_membership_operation_ends_with_the_run_of_its_ranks(open_stores: OpenStore) -> None:
    store, other = open_stores("demo"), open_stores("demo")
    assert (store.membership_change(), store.wanted_ranks(), store.epoch()) == (None, None, 0)
    store.begin_run(replace(RUN, topology={"alive": [True, True]}))
    asked = store.change_membership(
        "op-1", [0], asked={"to": 1}, alive=[True, True], reason="save", by="alice"
    )
    assert other.membership_change() == other.change_of_id("op-1") == asked
    assert (asked.ended, store.wanted_ranks(), asked.before, asked.time) == (
        "",
        (0,),
        (0, 1),
        1000.0,
    )

    other.begin_run(replace(RUN, run="run-1-member1", topology={"alive": [True, False]}))

    ended = store.membership_change()
    assert ended == replace(asked, ended="done", why="the wanted ranks serve", ended_at=1000.0)
    assert store.change_of_id("op-1") == ended
    assert not store.end_membership_change("op-1", "cancelled", why="late")
    assert kinds(other) == ["run", "members", "members", "run"]


def test_store_that_lost_its_contents_is_restored_with_all_that_is_needed(
    open_stores: OpenStore,
) -> None:
    store, other = open_stores("demo"), open_stores("demo")
    live = LiveState(4, live={"movement": False})

    assert store.restore(RUN, make_placement(7), live, last_plan_id=41, reason="lost")

    committed = other.committed()
    assert committed is not None
    assert committed.placement.generation == 7
    assert (other.current_run(), other.control()) == (RUN, Control(movement=False))
    assert other.live().revision > 1000
    assert other.next_plan_id() > 1041
    assert not other.restore(RUN, make_placement(7), live, last_plan_id=41, reason="again")
    assert kinds(other) == ["restore"]


def test_first_placement_that_no_run_has_used_is_replaced_by_what_serves(
    open_stores: OpenStore,
) -> None:
    store = open_stores("demo")
    assert store.commit(make_placement(0), expected=None, reason="first placement")

    assert store.restore(RUN, make_placement(7), LiveState(), last_plan_id=41, reason="lost")

    committed = store.committed()
    assert committed is not None
    assert committed.placement.generation == 7


def test_placement_of_a_higher_generation_is_not_replaced(open_stores: OpenStore) -> None:
    store = open_stores("demo")
    assert store.commit(make_placement(1000), expected=None, reason="first placement")

    assert not store.restore(RUN, make_placement(7), LiveState(), last_plan_id=41, reason="lost")


# -- samples and roll-ups


def cursors(found: Iterable[tuple[int, object]]) -> list[int]:
    return [cursor for cursor, _ in found]


def test_acknowledged_samples_are_read_once_each_in_order_of_arrival(
    open_stores: OpenStore,
) -> None:
    store, other = open_stores("demo"), open_stores("demo")
    assert store.append([make_sample(1, 0), make_sample(0, 0)]) == 2
    assert store.append([make_sample(0, 0), make_sample(0, 1), make_sample(0, 1)]) == 1
    assert store.append([]) == 0
    assert other.append([make_sample(1, 0), make_sample(0, 0, run="run-2")]) == 1

    first = other.samples("run-1", limit=2)
    rest = other.samples("run-1", after=first[-1][0])
    assert [(s.rank, s.sequence) for _, s in first + rest] == [(1, 0), (0, 0), (0, 1)]
    assert same(rest[0][1], make_sample(0, 1))
    assert other.samples("run-1", after=rest[-1][0]) == []
    assert [other.backend.cursor_before("run-1", n) for n in (1, 2, 3)] == [
        *cursors(first + rest)[1::-1],
        0,
    ]
    assert other.sample_counts("run-1") == {0: 2, 1: 1}
    assert (other.sample_counts("run-3"), other.refused()) == ({}, {})


def test_range_of_samples_is_read_and_pruned_and_stays_counted(any_store: StateStore) -> None:
    any_store.append([make_sample(0, n) for n in (3, 0, 1, 2)])
    any_store.append([make_sample(0, 1, run="run-2")])
    last = any_store.samples("run-1")[-1][0]

    found = any_store.samples_before(3.0, since=1.0)
    assert [(s.run, s.sequence) for _, s in found] == [("run-1", 1), ("run-1", 2), ("run-2", 1)]
    page = any_store.samples_before(3.0, since=1.0, limit=1)
    assert cursors(page) == cursors(found)[:1]
    rest = any_store.samples_before(3.0, since=1.0, after=page[0][0])
    assert cursors(rest) == cursors(found)[1:]
    assert [any_store.prune(time) for time in (3.0, 3.0, 9.0)] == [4, 0, 1]
    assert any_store.samples_before(9.0) == []
    assert (any_store.sample_counts("run-1"), any_store.sample_counts("run-2")) == ({0: 4}, {0: 1})

    assert any_store.append([make_sample(0, 4)]) == 1
    assert [s.sequence for _, s in any_store.samples("run-1", after=last)] == [4]


def make_rollup(start: float, **changes: Any) -> Rollup:
    fields: dict[str, Any] = {
        "run": "run-1",
        "phase": "decode",
        "seconds": MINUTE,
        "first_step": 10,
        "last_step": 19,
        "num_samples": 4,
        "generations": frozenset({1, 2}),
        "ranks": frozenset({0, 3}),
        "tokens": [[1, 2**40, 0]],
        "received": [[3, 4, 5, 6]],
    }
    return Rollup(start=start, **(fields | changes))


def test_roll_ups_are_kept_once_each_read_in_pages_and_pruned(open_stores: OpenStore) -> None:
    store, other = open_stores("demo"), open_stores("demo")
    others: list[dict[str, Any]] = [{"run": "run-2"}, {"phase": "prefill"}, {"seconds": HOUR}]

    def starts(seconds: int = MINUTE, **page: Any) -> list[float]:
        return [rollup.start for rollup in other.rollups(seconds, **page)]

    assert store.add_rollups([make_rollup(start) for start in (120.0, 0.0, 60.0)]) == 3
    assert store.add_rollups([make_rollup(0.0, num_samples=9)]) == 0
    assert store.add_rollups([make_rollup(180.0, **one) for one in others]) == 3

    assert same(other.rollups(MINUTE)[0], make_rollup(0.0))
    assert (starts(), starts(HOUR)) == ([0.0, 60.0, 120.0, 180.0, 180.0], [180.0])
    assert (starts(after=0.0, limit=2), starts(after=120.0)) == ([60.0, 120.0], [180.0] * 2)
    assert [store.prune_rollups(MINUTE, time) for time in (119.0, 120.0, 120.0)] == [1, 1, 0]
    assert (starts(), starts(HOUR)) == ([120.0, 180.0, 180.0], [180.0])


def test_offers_to_join_stand_for_a_while_and_end_with_their_process(
    open_stores: OpenStore,
) -> None:
    store, other = open_stores("demo"), open_stores("demo")
    first, second = Joiner(2, "host", "a"), Joiner(2, "host", "b")

    store.offer_to_join(first)
    store.offer_to_join(second)
    store.withdraw_offer(first)
    assert [(one.rank, one.process) for one in other.joiners()] == [(2, "b")]

    store.withdraw_offer(second)
    assert other.joiners() == []


def test_proposals_of_a_group_are_numbered_and_void_once_another_group_serves(
    open_stores: OpenStore,
) -> None:
    store, other = committed_first(open_stores("demo")), open_stores("demo")
    proposal = GroupProposal(0, "run-1", (0, 1, 2), {"2": "a"}, "rank 2 joins")
    assert other.proposed_group() is None

    first, second = store.propose_group(proposal), other.propose_group(proposal)
    assert first is not None
    assert second is not None
    assert second.id > first.id
    assert store.proposed_group() == second

    planned = replace(RECORD, generation=1, plan_id=0, applied=0)
    run = replace(RUN, run="run-1-member1")
    store.commit(
        FIRST.with_generation(2),
        expected=1,
        membership=0,
        reason="joined",
        run=run,
        next_group=planned,
    )

    assert other.recovery() == planned
    assert (now := other.current_run()) is not None
    assert now.run == run.run
    assert store.propose_group(proposal) is None
    with pytest.raises(StaleGeneration, match="membership 0 cannot be committed"):
        other.commit(FIRST.with_generation(3), expected=2, membership=0, reason="late")


@pytest.mark.parametrize(
    ("wanted", "following", "unwanted"),
    [((0, 1), (0, 1, 2), [2]), ((0, 1, 2), (0,), [1])],
    ids=["joins", "leaves"],
)
def test_planned_group_is_refused_once_its_operation_has_ended(
    any_store: StateStore, wanted: tuple[int, ...], following: tuple[int, ...], unwanted: list[int]
) -> None:
    store = committed_first(any_store)
    store.begin_run(replace(RUN, topology={"alive": [True, True, False]}))
    alive = [True, True, False]
    store.change_membership("one", wanted, asked=1, alive=alive, reason="", by="")
    planned = replace(RECORD, survivors=following, generation=1, plan_id=0, applied=0)

    with pytest.raises(StaleGeneration, match=rf"found {re.escape(str(unwanted))} to join"):
        store.commit(
            FIRST.with_generation(2),
            expected=1,
            membership=0,
            reason="late",
            run=replace(RUN, run="run-1-member1"),
            next_group=planned,
        )

    assert store.recovery() is None


# -- events and tasks


def test_events_are_read_both_ways_in_pages_and_pruned(any_store: StateStore) -> None:
    ids = [any_store.add_event("note", {"n": n, "nested": {"list": [1, 2.5]}}) for n in range(5)]

    assert ids == sorted(set(ids))
    (second,) = any_store.events(after=ids[0], limit=1)
    assert (second.id, second.kind, second.time) == (ids[1], "note", 1000.0)
    assert second.detail == {"n": 1, "nested": {"list": [1, 2.5]}}
    assert [event.id for event in any_store.latest_events()] == ids[::-1]
    assert [event.id for event in any_store.latest_events(before=ids[3], limit=2)] == ids[2:0:-1]
    assert [any_store.prune_events(keep) for keep in (2, 2, 0)] == [3, 0, 2]
    assert any_store.events() == []
    assert any_store.add_event("note", {}) > ids[-1]
    assert len(any_store.events(after=ids[-1])) == 1


def test_tasks_are_claimed_in_order_ended_once_and_listed_by_state(open_stores: OpenStore) -> None:
    store, other = open_stores("demo"), open_stores("demo")
    ids = [store.submit("rebalance", {"n": n}).id for n in range(6)]
    assert [task.id for task in (other.claim() for _ in range(3)) if task] == ids[:3]
    store.finish(ids[0], "done", TaskResult(plan_id=4, detail={"moves": 3}))
    store.finish(ids[1], "failed", TaskResult("no load"))
    assert store.cancel(ids[3], reason="not now")
    for late in (ids[0], ids[2], ids[5] + 1):
        assert not store.cancel(late, reason="late")
    for ended in (ids[0], ids[5] + 1):
        with pytest.raises(StoreError):
            store.finish(ended, "done", TaskResult())

    def listed(state: TaskState, **page: Any) -> list[int]:
        return [task.id for task in other.tasks(state, **page)]

    assert (listed("done"), listed("failed")) == ([ids[0]], [ids[1], ids[3]])
    assert (listed("running"), listed("queued")) == ([ids[2]], ids[4:])
    assert (listed("queued", limit=1), listed("queued", after=ids[4])) == ([ids[4]], [ids[5]])
    done, cancelled = other.task(ids[0]), other.task(ids[3])
    assert done is not None
    assert cancelled is not None
    assert (done.request, done.result) == ({"n": 0}, TaskResult("", 4, {"moves": 3}))
    assert cancelled.result.error == "cancelled: not now"
    assert other.task(ids[5] + 1) is None


# -- waiting, closing, other deployments

CHANGES: list[Callable[[StateStore], object]] = [
    lambda store: store.begin_run(RUN),
    committed_first,
    lambda store: store.add_event("note", {}),
    lambda store: store.submit("rebalance", {}),
    lambda store: store.claim(),
    lambda store: store.announce(Announcement(CONTROLLER, "c")),
    lambda store: store.set_control(Control(), reason="test"),
    lambda store: store.suggest(Candidates((((0, 3),),))),
    lambda store: store.add_survivor_report(REPORT),
    lambda store: store.recover(RECORD, expected_membership=0),
]
QUIET: list[Callable[[StateStore], object]] = [
    lambda store: store.append([make_sample(0, 0)]),
    lambda store: store.report(RankState("run-1", 0, 0.0, 1, 1, "idle", 0, 0, 1, 0)),
    lambda store: store.add_rollups([make_rollup(0.0)]),
    lambda store: store.next_plan_id(),
    lambda store: store.prune_events(0),
]


def test_change_in_one_process_ends_the_wait_of_another(open_stores: OpenStore) -> None:
    waiting, writing = open_stores("demo"), open_stores("demo")

    with ThreadPoolExecutor(1) as pool:
        for change in CHANGES:
            before = waiting.version()
            woken = pool.submit(waiting.wait, before, NEVER_S)
            change(writing)
            assert woken.result() > before
    before = waiting.version()
    for quiet in QUIET:
        quiet(writing)

    assert waiting.version() == before
    assert waiting.wait(before, timeout_s=0.0) == before


def test_close_ends_a_wait_and_later_calls_are_errors(any_store: StateStore) -> None:
    refused: list[StoreError] = []

    def wait() -> None:
        with pytest.raises(StoreError) as caught:
            any_store.wait(any_store.version(), NEVER_S)
        refused.append(caught.value)

    thread = threading.Thread(target=wait)
    thread.start()
    any_store.close()
    any_store.close()
    thread.join()

    assert "closed" in str(refused[0])
    with pytest.raises(StoreError, match="closed"):
        any_store.add_event("note", {})


def test_deployments_of_one_store_are_kept_apart(open_stores: OpenStore) -> None:
    one, other = committed_first(open_stores("demo")), open_stores("other")
    one.begin_run(RUN)
    one.append([make_sample(0, 0)])
    one.submit("rebalance", {})
    one.next_plan_id()
    one.change_live({"movement": False}, reason="incident 7")
    token_of(one, "one")

    assert (other.version(), other.events(), other.committed()) == (0, [], None)
    assert (other.samples("run-1"), other.runs(), other.claim()) == ([], [], None)
    assert (other.lease(), other.live(), other.next_plan_id()) == (None, LiveState(), 1)
