"""Rank agents in one process: what a migration does, step by step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.errors import BrokenGroup, ConfigError, EplbError, GroupChanges, RankError
from eplb.migration.build import Pace
from rebalance.rank.rank import Rank
from rebalance.rank.watcher import Watcher
from rebalance.swap.swapper import StepFigures
from runtime.experts import ExpertSchema
from runtime.streams import Completion
from telemetry.state.live import Control
from tests.support.agent_group import AGENT_THREADS, AgentGroup, held_in, records_of
from tests.support.local_group import LocalVotes

NUM_LAYERS, NUM_EXPERTS = 3, 4
SCHEMA = ExpertSchema.swiglu(hidden=8, intermediate=4)
# Two hosts of two ranks; three slots each for four experts.
TOPOLOGY = Topology.uniform(num_nodes=2, ranks_per_node=2, slots_per_rank=3)
START = Placement(
    np.tile([0, EMPTY, EMPTY, 1, EMPTY, EMPTY, 2, EMPTY, EMPTY, 3, EMPTY, EMPTY], (NUM_LAYERS, 1)),
    NUM_EXPERTS,
)
FULL = Placement(np.tile([0, 1, 2, 1, 0, 3, 2, 3, 0, 3, 2, 1], (NUM_LAYERS, 1)), NUM_EXPERTS)
RECORDS = records_of(SCHEMA, NUM_LAYERS, NUM_EXPERTS)


class Group(AgentGroup):
    """Four ranks whose slots can be read by the bytes in them."""

    def serving(self) -> list[list[int]]:
        """Name the expert in each slot by its bytes."""
        by_rank = [held_in(bank, NUM_EXPERTS) for bank in self.banks]
        return [
            [max(expert, EMPTY) for held in of_layer for expert in held]
            for of_layer in zip(*by_rank, strict=True)
        ]


def new_group(**settings: Any) -> Group:
    made = Group(START, TOPOLOGY)
    made.add_all(SCHEMA, RECORDS, num_staging=4, **settings)
    made.begin()
    return made


@pytest.fixture
def group() -> Iterator[Group]:
    with closing(new_group()) as made:
        yield made


def test_migration_ends_with_every_slot_holding_its_expert(group: Group) -> None:
    group.publish(FULL)

    group.step_until(lambda: group.generation() == 1)

    assert group.serving() == FULL.slot_to_expert.tolist()
    assert [agent.placement.hash for agent in group.agents] == [FULL.hash] * 4
    assert group.store.published() is None


def test_every_moment_of_a_migration_serves_the_placement_it_names(group: Group) -> None:
    # A ring of four entries and two moves a layer and rank: one layer swaps after another.
    migration = group.publish(FULL, Pace(staging_experts=4, transactions_per_commit=1))
    assert [txn.layers for txn in migration.transactions] == [(0,), (1,), (2,)]
    seen = set()

    while group.generation() == 0:
        group.step()
        hashes = {agent.placement.hash for agent in group.agents}
        assert len(hashes) == 1, "two placements served in one step"
        serving = group.agents[0].placement
        assert group.serving() == serving.slot_to_expert.tolist()
        seen.add(serving.hash)

    assert seen == {migration.placement_after(done).hash for done in range(4)}


def test_bytes_come_from_a_peer_on_the_host_or_from_the_host_cache(group: Group) -> None:
    group.publish(FULL)
    group.step_until(lambda: group.generation() == 1)

    by_source = [state.describe().detail["bytes_by_source"] for state in group.agents]

    size = SCHEMA.record_bytes
    # Rank 0 takes expert 1 from rank 1 beside it, and expert 2 from its host, in three layers.
    assert by_source[0]["peer"] == 3 * size
    assert by_source[0]["host"] == 3 * size
    assert sum(source.get("host", 0) + source["peer"] for source in by_source) == 3 * 8 * size


def test_kill_switch_aborts_a_migration_and_serving_continues(group: Group) -> None:
    group.store.set_control(Control(movement=False), reason="test")
    group.publish(FULL)
    for _ in range(20):
        group.step()
    # A rank that reads the migration before the switch drops it.
    at_rest = {"idle", "aborted"}
    assert {agent.describe().phase for agent in group.agents} <= at_rest
    assert group.generation() == 0

    group.store.set_control(Control(movement=True), reason="test")

    def moves() -> bool:
        if group.store.published() is None:  # the rank that dropped it had it withdrawn
            group.publish(FULL)
        return any(agent.describe().phase not in at_rest for agent in group.agents)

    group.step_until(moves)
    group.store.set_control(Control(movement=False), reason="stop")
    group.step_until(lambda: group.store.published() is None)

    # However far it got, all ranks serve one placement, and the store names it.
    committed = group.store.committed()
    assert committed is not None
    assert {agent.placement.hash for agent in group.agents} == {committed.placement.hash}
    assert group.serving() == committed.placement.slot_to_expert.tolist()


def test_wrong_bytes_at_a_peer_are_never_swapped_in(group: Group) -> None:
    # Rank 1's live copy of expert 1 in layer 2 becomes corrupted: rank 0 must take it from the host
    # instead.
    group.banks[1].live(2, 0)[5] ^= 255
    group.publish(FULL)

    group.step_until(lambda: group.generation() == 1)

    assert torch.equal(group.banks[0].live(2, 1), RECORDS[2, 1])
    assert group.agents[0].describe().detail["bytes_by_source"]["rejected"] == SCHEMA.record_bytes


def test_wrong_digest_from_every_source_aborts_with_a_reason(group: Group) -> None:
    for digests in group.rank_digests:
        digests[2, 2] += 1

    group.publish(FULL)
    group.step_until(lambda: group.store.published() is None)

    committed = group.store.committed()
    assert committed is not None
    # Ranks 0 and 3 bring expert 2; whichever asked for the drop says why, the other two do not.
    (dropped,) = [event for event in group.store.events() if event.kind == "abort"]
    assert "layer 2 expert 2: no source is left" in dropped.detail["reason"]
    assert group.serving() == committed.placement.slot_to_expert.tolist()
    assert committed.placement.slot_to_expert[2].tolist() == START.slot_to_expert[2].tolist()


def test_commit_read_before_the_verdict_requests_no_abort(
    group: Group,
) -> None:
    migration = group.publish(FULL)
    last = group.agents[3]

    def is_one_behind() -> bool:
        """Ranks 0 to 2 have read the last verdict, rank 3 not yet."""
        for agent in group.agents[:3]:
            agent.step()
        return group.agents[0].placement.hash == FULL.hash

    while not is_one_behind():
        last.step()
        for clock in group.clocks:
            clock.steps += 1
    version = -1
    while group.generation() == 0:  # until the commit writer has written it down
        version = group.store.wait(version, 1.0)
    last.on_store_update(Control(), group.store.published())

    assert last.describe().plan_id == migration.plan_id
    assert last.phase != "aborted"
    last.step()
    assert last.placement.hash == FULL.hash


def test_ranks_report_times_of_steps_before_and_in_a_migration(group: Group) -> None:
    for _ in range(40):
        group.step()
    migration = group.publish(FULL, Pace(staging_experts=4, transactions_per_commit=1))
    group.step_until(lambda: group.generation() == 1)

    for agent in group.agents:
        found = agent.describe().step_times
        assert found is not None
        assert found.plan_id == migration.plan_id
        assert found.steps_before >= 39
        assert found.steps_moving >= len(migration.transactions)
        assert 0 < found.p50_moving_ms <= found.p95_moving_ms


def test_samples_never_span_a_swap_and_cover_every_step(group: Group) -> None:
    group.publish(FULL)
    group.step_until(lambda: group.generation() == 1)
    for agent in group.agents:
        agent.request_halt()
    while all(group.step()):
        pass

    for sink in group.sinks:
        steps = [step for s in sink.samples for step in range(s.first_step, s.last_step + 1)]
        assert steps == list(range(len(steps)))
        assert [sample.sequence for sample in sink.samples] == list(range(len(sink.samples)))
        held = {tuple(sample.slot_to_expert[2].tolist()) for sample in sink.samples}
        assert len(held) == 2


def test_unknown_expert_ids_end_serving_with_an_error(group: Group) -> None:
    group.step()
    group.tables[1].choose(0, torch.tensor([[0, 4], [9, 1]]), salt=0)
    for _ in range(3):
        group.step()

    with pytest.raises(RankError, match=r"rank 1: 2 expert ids of steps 0 to 3"):
        group.step()


def test_all_ranks_halt_at_one_step_when_one_asks(group: Group) -> None:
    for _ in range(5):
        group.step()
    group.agents[2].request_halt()

    answers = [group.step() for _ in range(5)]

    halted_at = answers.index([False] * 4)
    assert answers[:halted_at] == [[True] * 4] * halted_at
    cast = group.votes.num_votes
    assert [group.step() for _ in range(4)] == [[False] * 4] * 4, "what has ended stays so"
    assert group.votes.num_votes == cast, "nobody votes any more"


def test_rank_that_reads_the_halt_late_halts_at_the_step_of_the_others() -> None:
    with closing(new_group(vote_every=4)) as group:
        group.agents[2].request_halt()
        ahead = [group.step([0]) for _ in range(2)]  # it voted; the others have not

        answers = [group.step() for _ in range(10)]

    steps = [sum(answer[rank] for answer in answers) for rank in range(4)]
    assert ahead == [[True]] * 2
    assert [2 + steps[0], *steps[1:]] == [4] * 4, "the vote of step 0, and one interval"


def test_halt_that_is_asked_for_while_a_rank_enters_a_group_is_heard(group: Group) -> None:
    """A signal comes at any moment, the middle of ``enter`` among them."""
    rank, clock = group.agents[0], group.clocks[0]

    class Signalled(Watcher):
        def __init__(self, *given: Any) -> None:
            rank.request_halt()
            super().__init__(*given)

    rank.leave()
    rank.new_watcher = Signalled
    alone = replace(rank.group, votes=LocalVotes(1).member(0))
    rank.enter(alone, rank.placement, rank.sources, step=clock.steps)
    rank.start()

    assert [group.step([0]) for _ in range(4)][-1] == [False]


def leave(group: Group, ranks: range) -> list[int | None]:
    """Step until a rank leaves the group, or for 20 steps; each rank's step at its leave."""
    left: list[int | None] = [None] * 4
    for _ in range(20):
        for rank in ranks:
            try:
                group.step([rank])
            except GroupChanges:
                left[rank] = group.clocks[rank].steps
        if any(left):
            break
    return left


def test_ranks_leave_their_group_at_one_step_once_all_are_ready_for_the_next(group: Group) -> None:
    for agent in group.agents[:3]:
        agent.voting.next_group = 7
    for _ in range(8):
        assert group.step() == [True] * 4, "one rank is not ready"
    group.agents[3].voting.next_group = 7

    left = leave(group, range(4))

    assert len(set(left)) == 1
    assert left[0] is not None
    assert all(agent.changes_group for agent in group.agents)


def test_open_migration_is_finished_before_the_ranks_leave_their_group(group: Group) -> None:
    group.publish(FULL)
    group.step_until(lambda: all(agent.phase != "idle" for agent in group.agents))
    for agent in group.agents:
        agent.voting.next_group = 7

    with pytest.raises(GroupChanges):
        group.step_until(lambda: False)

    assert [agent.placement.generation for agent in group.agents] == [1] * 4
    assert group.serving() == FULL.slot_to_expert.tolist()


def test_rank_that_is_ready_for_the_next_group_finishes_the_plan_of_the_others(
    group: Group,
) -> None:
    group.agents[0].voting.next_group = 7
    group.publish(FULL)

    group.step_until(lambda: group.generation() == 1)

    assert [agent.placement.generation for agent in group.agents] == [1] * 4


def test_ranks_that_halt_in_mid_migration_end_all_their_threads(group: Group) -> None:
    group.publish(FULL)
    group.step_until(lambda: all(agent.phase != "idle" for agent in group.agents))

    for agent in group.agents:
        agent.leave()

    assert not [thread for thread in threading.enumerate() if thread.name in AGENT_THREADS]


def test_dead_rank_stops_its_peers_instead_of_serving_alone(group: Group) -> None:
    for _ in range(3):
        group.step()
    group.votes.kill(3)

    for survivor in group.agents[:3]:
        with pytest.raises(RankError, match=r"rank \d: rank 3 died before step 3"):
            survivor.step()


class Stuck(Completion):
    """A device that waits for a rank that is gone."""

    def __init__(self) -> None:
        super().__init__(is_cuda=False)

    def is_complete(self) -> bool:
        return False


class Abandoned:
    """An exchange of tokens that waits for a rank which has left it, as long as it is let."""

    def is_completed(self) -> bool:
        return False

    def wait(self, timeout: timedelta = timedelta.max) -> bool:
        raise RuntimeError(f"timed out after {timeout}")


def test_wait_for_a_device_or_an_exchange_ends_when_a_peer_is_dead(group: Group) -> None:
    for survivor in group.agents[:3]:
        survivor.step()
        survivor.wait(Completion(is_cuda=False))
    group.votes.kill(3)  # before it has cast the vote of step 0

    for survivor in group.agents[:3]:
        with pytest.raises(RankError, match=r"rank 3 died.*step 0"):
            survivor.wait(Stuck())
        with pytest.raises(BrokenGroup, match=r"rank 3 died.*step 0"):
            survivor.wait_for_exchange(Abandoned())


class Reset(Abandoned):
    """An exchange that ended by an error of the transport."""

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: timedelta | None = None) -> bool:
        raise RuntimeError("[../third_party/gloo/pair.cc:534] Connection reset by peer [::1]:4711")


def test_exchange_that_the_transport_breaks_is_a_broken_group_for_any_dispatcher(
    group: Group,
) -> None:
    """The connection may close before the death is known."""
    group.step()
    expected = "^rank 0: the exchange of tokens of step 0 failed, a peer is dead .*: Connection"

    with pytest.raises(BrokenGroup, match=expected):
        group.agents[0].wait_for_exchange(Reset())


def at_once(group: Group, call: Callable[[Rank], object]) -> list[str]:
    """What every rank's call ends with: a refusal in words, or nothing."""

    def words(agent: Rank) -> str:
        try:
            call(agent)
        except (EplbError, RankError) as exc:
            return str(exc)
        return ""

    with ThreadPoolExecutor(len(group.agents)) as pool:
        return list(pool.map(words, group.agents))


def new_record(layer: int, expert: int) -> torch.Tensor:
    """The bytes of an expert after an update."""
    return RECORDS[layer, expert] + 1


def load_new_weights(group: Group, agent: Rank) -> None:
    bank = group.banks[group.agents.index(agent)]
    for layer, slot, expert in agent.held():
        bank.live(layer, slot).copy_(new_record(layer, expert))
    agent.end_update()


def test_new_weights_follow_moved_experts_and_moves_continue(group: Group) -> None:
    group.publish(FULL)
    group.step_until(lambda: group.generation() == 1)

    assert at_once(group, lambda agent: agent.begin_update(1)) == [""] * 4
    assert at_once(group, partial(load_new_weights, group)) == [""] * 4

    for rank, agent in enumerate(group.agents):
        for layer, slot, expert in agent.held():
            assert torch.equal(group.banks[rank].live(layer, slot), new_record(layer, expert))
        assert agent.describe().weights_version == 1


@pytest.mark.parametrize("steps", range(0, 6, 2))
def test_update_in_mid_migration_drops_it_and_no_old_byte_is_swapped_in(
    group: Group, steps: int
) -> None:
    group.publish(FULL)
    group.step_until(lambda: all(agent.phase != "idle" for agent in group.agents))
    for _ in range(steps):
        group.step()

    assert at_once(group, lambda agent: agent.begin_update(1)) == [""] * 4
    assert {agent.phase for agent in group.agents} == {"idle"}
    assert at_once(group, partial(load_new_weights, group)) == [""] * 4
    for _ in range(12):
        group.step()

    serving = group.agents[0].placement
    assert {agent.placement.hash for agent in group.agents} == {serving.hash}
    for rank, agent in enumerate(group.agents):
        for layer, slot, expert in agent.held():
            assert torch.equal(group.banks[rank].live(layer, slot), new_record(layer, expert))


def test_swap_at_begin_update_counts_the_last_step_by_its_placement(
    group: Group,
) -> None:
    def step() -> None:
        group.step()
        # A token for every slot that serves, in each step.
        for agent, counter in zip(group.agents, group.counters, strict=True):
            for layer, slot, _ in agent.held():
                counter.received[layer, slot] += 1

    group.publish(FULL)
    pending = [agent.voter for agent in group.agents]
    while not all(one.pending and one.pending[0].prepared for one in pending):
        step()

    assert at_once(group, lambda agent: agent.begin_update(1)) == [""] * 4
    assert all(agent.figures.experts_moved > 0 for agent in group.agents)
    assert at_once(group, partial(load_new_weights, group)) == [""] * 4
    for _ in range(9):
        step()
    for sink in group.sinks:
        for sample in sink.samples:
            num_steps = sample.last_step - sample.first_step + 1
            assert np.array_equal(sample.tokens, num_steps * (sample.slot_to_expert != EMPTY))


def test_step_between_begin_and_end_of_an_update_is_refused_and_versions_grow(
    group: Group,
) -> None:
    with pytest.raises(ConfigError, match="version 0 follows 0"):
        group.agents[0].begin_update(0)
    group.step()
    assert at_once(group, lambda agent: agent.begin_update(3)) == [""] * 4

    with pytest.raises(RankError, match="rank 0: step 1"):
        group.agents[0].step()
    with pytest.raises(ConfigError, match="version 3"):
        group.agents[0].begin_update(4)


def test_updates_to_different_versions_are_an_error(group: Group) -> None:
    group.step()

    told = at_once(group, lambda agent: agent.begin_update(1 + group.agents.index(agent) // 3))

    for rank, version in enumerate((1, 1, 1, 2)):
        assert f"rank {rank}: " in told[rank]
        assert f"version {version} after step 0" in told[rank]


def test_update_that_one_rank_begins_a_step_early_is_refused_everywhere(group: Group) -> None:
    group.step()
    for agent, clock in zip(group.agents[1:], group.clocks[1:], strict=True):
        agent.step()
        clock.steps += 1

    def update_or_step(agent: Rank) -> None:
        agent.begin_update(1) if agent is group.agents[0] else agent.step()
        agent.voting.read(3, must_finish=True)

    told = at_once(group, update_or_step)

    assert ["ranks are at different steps" in words for words in told] == [True] * 4


def test_experts_that_an_update_left_as_they_were_are_reported(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    def load(agent: Rank) -> None:
        if agent is group.agents[2]:
            agent.end_update()  # forgets to load
        else:
            load_new_weights(group, agent)

    at_once(group, lambda agent: agent.begin_update(1))
    assert at_once(group, load) == [""] * 4

    # Ranks are threads here; one process drops a message that it has just logged.
    assert f"version 1: {NUM_LAYERS} of {NUM_LAYERS * NUM_EXPERTS} experts" in caplog.text
    assert "first layer 0 expert 2" in caplog.text


def test_rank_that_closes_after_its_own_error_is_a_death_for_the_others(group: Group) -> None:
    group.step()
    group.clocks[1].steps += 1
    with pytest.raises(RankError, match="rank 1: step 2 follows step 0"):
        group.agents[1].step()

    group.agents[1].leave()

    with pytest.raises(BrokenGroup):
        group.agents[0].step()


def test_replicas_that_were_loaded_with_different_bytes_are_refused(group: Group) -> None:
    group.publish(FULL)
    group.step_until(lambda: group.generation() == 1)
    at_once(group, lambda agent: agent.begin_update(1))
    group.banks[3].live(1, 0)[7] ^= 255

    told = at_once(group, lambda agent: agent.end_update())

    expert = int(FULL.slot_to_expert[1, 9])
    assert all(words.startswith(f"layer 1 expert {expert}: ranks hold diff") for words in told)


def test_pauses_of_the_latest_swaps_are_kept_and_no_more() -> None:
    figures = StepFigures()
    for number in range(5000):
        figures.swapped(2, pause_ms=float(number))

    assert figures.swap_pauses_ms == [float(number) for number in range(904, 5000)]
    assert figures.experts_moved == 10_000
