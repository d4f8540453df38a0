"""After a death survivors and store name one placement: the decision, and agents in one process."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.errors import RankError, StoreError
from eplb.migration.build import Migration, Pace
from eplb.migration.recovery import (
    Recovery,
    SurvivorReport,
    cut_off,
    decide,
    is_minority,
    is_settled,
)
from rebalance.protocol import phases
from rebalance.protocol.ballot import NO_PLAN, Verdict
from rebalance.protocol.phases import PlanRef, RankPhase
from rebalance.rank.rank import Rank as ServingRank
from rebalance.recovery import (
    MINORITY_S,
    Deadlines,
    recover,
)
from rebalance.types import VoteGroup
from runtime.experts import ExpertSchema
from telemetry.state.runs import RunInfo
from telemetry.state.store import StateStore
from tests.support.agent_group import AgentGroup, held_in, records_of
from tests.support.limits import NEVER_S
from tests.support.local_group import LocalVotes
from tests.support.stores import MemoryStore

# -- the decision


def said(rank: int, **changes: Any) -> SurvivorReport:
    """Words of a rank that serves generation 4 and is at no migration."""
    fields: dict[str, Any] = {
        "run": "run-1",
        "membership": 0,
        "generation": 4,
        "weights_version": 0,
        "plan_id": 0,
        "plan_hash": 0,
        "swapped": 0,
        "prepared": 0,
        "closed_plan_id": 0,
        "closed_applied": 0,
        "dead": (),
        "time": float(rank),
    }
    return SurvivorReport(rank=rank, **(fields | changes))


def at_plan(rank: int, swapped: int, prepared: int, **changes: Any) -> SurvivorReport:
    plan = {"plan_id": 7, "plan_hash": 70, "swapped": swapped, "prepared": prepared}
    return said(rank, **(plan | changes))


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (at_plan(1, 0, 0), "rank 1 .*generation 4 with 0 transactions of plan 7"),
        (at_plan(1, 0, 1, plan_hash=71), "1 of plan 7"),
        (said(1), "1 of plan 7"),
        (said(1, generation=2), "rank 0 .*generation 4 with 1 transactions of plan 7"),
        (at_plan(1, 1, 1, weights_version=2), "weights_version 0 and 2"),
        (at_plan(1, 1, 1, run="run-2"), "survivors 0 and 1 .*run-1 and run-2"),
    ],
)
def test_survivor_reports_without_a_common_placement_are_rejected(
    other: SurvivorReport, sentence: str
) -> None:
    with pytest.raises(RankError, match=sentence):
        decide([at_plan(0, 1, 1), other], {2})


def test_recovery_without_survivors_is_an_error() -> None:
    with pytest.raises(RankError, match="ranks 0, 1 died"):
        decide([said(0)], {0, 1})


# -- every verdict, and every set of survivors that have read it

PLAN = PlanRef(7, 70, base_generation=4, num_transactions=3, transactions_per_commit=1)


@dataclass
class Rank:
    """A rank's phase machine, and what it serves: transactions of a plan, by generation."""

    state: RankPhase
    closed: tuple[int, int] = (NO_PLAN, 0)

    def read(self, cast: Any, verdict: Verdict) -> None:
        plan = self.state.plan
        state, order = phases.read_verdict(self.state, cast, verdict)
        if order is not None:
            state = phases.finish_swap(phases.completed(state, 7, order.last))
        if plan is not None and state.generation > self.state.generation:
            self.closed = (plan.plan_id, max(state.swapped, order.last if order else 0))
        self.state = state

    def words(self, rank: int) -> SurvivorReport:
        state = self.state
        plan = state.plan if state.phase is not phases.Phase.ABORTED else None
        return said(
            rank,
            generation=state.generation,
            plan_id=plan.plan_id if plan else 0,
            plan_hash=plan.plan_hash if plan else 0,
            swapped=state.swapped if plan else 0,
            prepared=state.prepared if plan else 0,
            closed_plan_id=self.closed[0],
            closed_applied=self.closed[1],
        )

    def serves(self) -> tuple[int, tuple[int, int]]:
        return self.state.generation, self.closed


def at(swapped: int, prepared: int) -> Rank:
    """A rank in mid-migration that every rank has adopted."""
    state = phases.preloaded(phases.see_plan(RankPhase(generation=4), PLAN), 7)
    state = replace(state, is_adopted=True, phase=phases.Phase.STAGE)
    for number in range(1, prepared + 1):
        state = phases.staged(state, 7, number)
        if number <= swapped:
            state = replace(state, swapped=number, applied=number)
            state = phases.finish_swap(state) if number < 3 else state
    return Rank(state)


@pytest.mark.parametrize(
    ("lost", "is_smaller"),
    [({3}, False), ({2, 3}, False), ({0, 1}, True), ({0, 1, 2}, True), ({1, 2, 3}, True)],
)
def test_ranks_that_lost_most_of_the_group_are_its_minority(
    lost: set[int], is_smaller: bool
) -> None:
    assert is_minority(range(4), lost) is is_smaller


def lost(*views: tuple[int, ...]) -> list[SurvivorReport]:
    """Reports of ranks 0, 1 and so on, by what each takes for dead."""
    return [said(rank, dead=dead) for rank, dead in enumerate(views)]


@pytest.mark.parametrize(
    ("views", "by", "beyond"),
    [
        ([(), (), ()], 0, set()),
        ([(3,), (3,), (3,)], 0, set()),  # it has not reported: nothing says that it is alive
        ([(2, 3), (2, 3), (0, 1), (0, 1)], 0, {2, 3}),
        ([(2, 3), (2, 3), (0, 1), (0, 1)], 3, {0, 1}),
        ([(3,), (), (), ()], 0, {3}),
        ([(3,), (), (), ()], 1, {3}),  # either can be in its group, both cannot
        ([(3,), (), (), ()], 3, {0}),
        ([(1, 2, 3), (0,), (0,), (0,)], 0, {1, 2, 3}),
    ],
)
def test_ranks_that_take_each_other_for_dead_are_not_in_one_group(
    views: list[tuple[int, ...]], by: int, beyond: set[int]
) -> None:
    assert cut_off(lost(*views), by) == beyond


@pytest.mark.parametrize(
    ("views", "by", "is_one"),
    [
        ([(), (), (), ()], 0, True),
        ([(4,), (), (4,), ()], 0, True),  # a dead rank, which not all have noticed
        ([(2, 3), (2, 3), (0, 1), (0, 1)], 0, True),
        ([(2, 3), (3,), (0, 1), (0, 1)], 0, False),
        ([(3,), (), (), ()], 0, False),
        # Rank 2 was cut off. It must not exclude the ranks that noticed that before it did.
        ([(2,), (), (), (2,)], 2, False),
        ([(2,), (2,), (), (2,)], 0, True),
        ([(2,), (2,), (), (2,)], 2, False),
    ],
)
def test_sides_of_a_cut_are_settled_once_each_knows_all_of_the_other(
    views: list[tuple[int, ...]], by: int, is_one: bool
) -> None:
    assert is_settled(lost(*views), by) is is_one


# -- agents in one process

NUM_LAYERS, NUM_EXPERTS, NUM_RANKS = 3, 4, 4
FAR_OFF = Deadlines(reports_s=NEVER_S, store_s=NEVER_S)
SCHEMA = ExpertSchema.swiglu(hidden=8, intermediate=4)
TOPOLOGY = Topology.uniform(num_nodes=2, ranks_per_node=2, slots_per_rank=3)
START = Placement(np.tile([0, 1, 2, 1, 0, 3, 2, 3, 0, 3, 2, 1], (NUM_LAYERS, 1)), NUM_EXPERTS)
OTHER = Placement(np.tile([0, 1, 3, 1, 2, 3, 2, 0, 1, 3, 2, 0], (NUM_LAYERS, 1)), NUM_EXPERTS)
RECORDS = records_of(SCHEMA, NUM_LAYERS, NUM_EXPERTS)


class Group(AgentGroup):
    """Four ranks of which some die and the others recover."""

    def offer(self) -> Migration:
        """Publish the way to OTHER, one layer at a time."""
        migration = self.publish(OTHER, Pace(staging_experts=2))
        assert [txn.layers for txn in migration.transactions] == [(0,), (1,), (2,)]
        return migration

    def recover(
        self,
        ranks: list[int],
        clock: Callable[[], float] = time.monotonic,
        deadlines: Deadlines = FAR_OFF,
    ) -> list[Recovery | str]:
        def one(rank: int) -> Recovery | str:
            agent = self.agents[rank]
            try:
                return recover(agent, self.store, deadlines=deadlines, clock=clock)
            except RankError as exc:
                return str(exc)

        with ThreadPoolExecutor(len(ranks)) as pool:
            return list(pool.map(one, ranks))

    def assert_one_placement(self, ranks: list[int], expected: Placement) -> None:
        committed = self.store.committed()
        assert committed is not None
        assert committed.placement.hash == expected.hash
        assert self.store.published() is None
        for rank in ranks:
            placement = self.agents[rank].placement
            assert (placement.hash, placement.generation) == (
                expected.hash,
                committed.placement.generation,
            )
            held = expected.slot_to_expert[:, TOPOLOGY.slots_on(rank)]
            assert held_in(self.banks[rank], NUM_EXPERTS) == held.tolist()


@pytest.fixture
def group() -> Iterator[Group]:
    made = Group(START, TOPOLOGY)
    made.add_all(SCHEMA, RECORDS, num_staging=2)
    made.begin()
    yield made
    made.close()


def swapped(agent: ServingRank) -> int:
    return agent.shared.state.swapped


def kill_after_one_has_swapped(group: Group, number: int) -> Migration:
    """Rank 3 dies when rank 0 has swapped transaction ``number``, and ranks 1 and 2 have not."""
    migration = group.offer()
    while True:
        before = swapped(group.agents[0]), group.agents[0].placement.generation
        group.agents[0].step()
        after = swapped(group.agents[0]), group.agents[0].placement.generation
        if after != before and (after[0] == number or after[1] == 1):
            group.votes.kill(3)
            return migration
        group.step()


def test_survivors_that_have_not_swapped_roll_forward(group: Group) -> None:
    migration = kill_after_one_has_swapped(group, 2)
    assert [swapped(agent) for agent in group.agents[:3]] == [2, 1, 1]

    records = group.recover([0, 1, 2])

    assert records == [group.store.recovery()] * 3
    record = group.store.recovery()
    assert record is not None
    assert (record.membership, record.survivors, record.generation) == (1, (0, 1, 2), 1)
    assert (record.plan_id, record.applied, record.reason) == (
        1,
        2,
        "rank 3 died or cannot be reached",
    )
    group.assert_one_placement([0, 1, 2], migration.placement_after(2))
    abort = next(event for event in group.store.events() if event.kind == "abort")
    assert abort.detail == {
        "generation": 1,
        "plan_id": 1,
        "reason": "rank 3 died or cannot be reached",
    }


def test_migration_of_which_one_survivor_has_all_is_ended_on_every_one(group: Group) -> None:
    kill_after_one_has_swapped(group, 3)
    assert [agent.placement.generation for agent in group.agents[:3]] == [1, 0, 0]

    group.recover([0, 1, 2])

    group.assert_one_placement([0, 1, 2], OTHER)
    assert [event.kind for event in group.store.events()][-2:].count("commit") == 1


def test_survivors_go_to_what_a_rank_has_committed_before_it_died(group: Group) -> None:
    kill_after_one_has_swapped(group, 3)
    # Rank 3 lives: it was rank 0 that read the last verdict, told the store, and died.
    group.votes.revive(3)
    group.votes.kill(0)
    while len(group.store.placements()) == 1:
        group.store.wait(group.store.version(), 1.0)
    assert [swapped(agent) for agent in group.agents[1:]] == [2, 2, 2]

    group.recover([1, 2, 3])

    group.assert_one_placement([1, 2, 3], OTHER)


def test_nothing_is_committed_when_nothing_was_swapped(group: Group) -> None:
    group.offer()
    group.step_until(lambda: all(agent.phase != "idle" for agent in group.agents))
    group.votes.kill(0)
    assert {swapped(agent) for agent in group.agents} == {0}

    group.recover([1, 2, 3])

    group.assert_one_placement([1, 2, 3], START)
    assert len(group.store.placements()) == 1


def test_no_step_follows_a_recovery(group: Group) -> None:
    group.votes.kill(1)
    group.recover([0, 2, 3])

    with pytest.raises(RankError, match="rank 0"):
        group.agents[0].step()


def test_rank_without_a_report_counts_as_dead_and_gets_an_error(group: Group) -> None:
    group.votes.kill(3)

    readings = itertools.count()

    def clock() -> float:
        """Time that stands still until both live ranks have reported; then each reading is later.

        A rank may first read it only then.
        """
        return NEVER_S * next(readings) if len(group.store.survivor_reports("run", 0)) == 2 else 0.0

    # No reading reaches the deadline of the other steps.
    records = group.recover([0, 1], clock, replace(FAR_OFF, store_s=1_000_000 * NEVER_S))
    late = group.recover([2])

    assert isinstance(records[0], Recovery)
    assert records[0].survivors == (0, 1)
    assert records[0].reason == "rank 3 died or cannot be reached, rank 2 sent no report in time"
    (refusal,) = late
    assert "rank 2: " in str(refusal)
    assert records[0].reason in str(refusal)


def test_second_death_during_recovery_leaves_the_others_agreed(group: Group) -> None:
    migration = kill_after_one_has_swapped(group, 1)
    group.store.add_survivor_report(group.agents[0].survivor_report())
    group.votes.kill(0)

    records = group.recover([1, 2])

    assert isinstance(records[0], Recovery)
    assert records[0].survivors == (1, 2)
    # Rank 0 alone had swapped the first layer, and what it held is gone with it.
    assert records[0].applied == 0
    group.assert_one_placement([1, 2], migration.base)


@pytest.mark.parametrize("has_reported", [False, True], ids=["dead", "cut off"])
def test_half_without_the_lowest_rank_waits_long_only_for_a_half_that_reports(
    group: Group, has_reported: bool
) -> None:
    for rank in range(4) if has_reported else (2, 3):
        group.store.add_survivor_report(group.agents[rank].survivor_report())
    group.votes.kill(0)
    group.votes.kill(1)
    now = itertools.count(step=0.05)

    (record,) = group.recover([2], lambda: next(now))

    assert isinstance(record, Recovery)
    assert record.survivors == (2, 3)
    assert (next(now) > MINORITY_S) is has_reported


class CutVotes(LocalVotes):
    """Votes over a network that is being cut: each rank has noticed the loss of its own ranks."""

    def __init__(self, lost: dict[int, set[int]]) -> None:
        super().__init__(len(lost))
        self.lost = lost

    def member(self, rank: int) -> VoteGroup:
        made = super().member(rank)
        made.dead = lambda: frozenset(self.lost[rank])  # type: ignore[method-assign]
        return made


def test_record_names_one_side_of_a_cut_that_ranks_notice_one_after_the_other() -> None:
    votes = CutVotes({0: {3}, 1: {2}, 2: {0}, 3: {1}})
    group = Group(START, TOPOLOGY)
    group.votes = votes
    group.add_all(SCHEMA, RECORDS, num_staging=2)
    group.begin()

    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(group.recover, [0, 1, 2, 3], lambda: 0.0)  # no wait ends by its time
        version = -1
        while len(group.store.survivor_reports("run", 0)) < 4:
            version = group.store.wait(version, NEVER_S)
        votes.lost = {0: {2, 3}, 1: {2, 3}, 2: {0, 1}, 3: {0, 1}}
        records = told.result()

    assert isinstance(records[0], Recovery)
    assert records[0].survivors == (0, 1)
    assert records[1] == records[0]
    assert all("excluded it" in str(one) for one in records[2:])
    group.close()


def test_store_outage_ends_a_recovery_with_an_error_in_time(group: Group) -> None:
    group.votes.kill(3)
    group.store.close()
    seconds = itertools.count()

    (told,) = group.recover([0], lambda: NEVER_S * next(seconds))

    assert str(told).startswith("rank 0 cannot write its survivor report: ")


class FailingStore(MemoryStore):
    """A store that fails twice before each call that a recovery makes first."""

    failures = 2

    def add_survivor_report(self, report: SurvivorReport) -> None:
        self.failures -= 1
        if self.failures >= 0:
            raise StoreError("the disk is full")
        super().add_survivor_report(report)


def test_store_that_fails_for_a_moment_is_tried_again_and_named_once(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    failing = FailingStore("test")
    failing.commit(START, expected=None, reason="start")
    group.votes.kill(3)
    for agent in group.agents:
        agent.survivor_report()
    for rank in (1, 2):
        StateStore.add_survivor_report(failing, group.agents[rank].survivor_report())

    record = recover(group.agents[0], failing, deadlines=FAR_OFF)

    assert record == failing.recovery()
    assert failing.failures < 0
    warnings = [one.message for one in caplog.records if one.levelname == "WARNING"]
    assert sum("cannot write its survivor report" in one for one in warnings) == 1


def test_survivor_of_an_older_start_changes_nothing(group: Group) -> None:
    migration = group.offer()
    for name in ("run", "later"):
        group.store.begin_run(RunInfo(name, 0.0, {}, {"alive": [True] * 4}, 1))
    group.votes.kill(3)

    told = group.recover([0, 1, 2])

    assert all("a group of membership 1 recorded or started" in str(one) for one in told)
    assert (group.store.recovery(), group.store.epoch()) == (None, 1)
    open_plan = group.store.published()
    assert open_plan is not None
    assert open_plan.plan_id == migration.plan_id


def test_survivor_of_an_older_group_is_excluded(group: Group) -> None:
    group.votes.kill(3)
    later = Recovery(5, "run-9", (0, 1), 0, NO_PLAN, 0, "rank 2 died", 1.0)
    group.store.recover(later, expected_membership=4)

    (told,) = group.recover([0])

    assert "membership 0; found membership 5 of run 'run-9'" in str(told)
