"""The fault matrix on four agents in one process over a real host cache.

After every fault the store names one committed generation, every live slot holds the bytes of the
expert that it names, no two ranks ever served two placements in one step, and the reason is where
an operator looks: in the event that closed the plan, or in what the rank raised or reports.
Processes that die are in ``test_fault_matrix_live.py``.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from api.app import create_app
from eplb.core.load import LoadSample
from eplb.core.model import ModelShape
from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.errors import (
    CheckpointError,
    MigrationError,
    RankError,
    StaleGeneration,
)
from eplb.migration.build import Migration, Move, Pace, build_migration
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from rebalance.assembly.experts import fill_bank
from rebalance.controller.loop import Controller, ControllerSettings
from rebalance.rank.watcher import MOVER
from rebalance.types import Outcome, PendingVote, Record, VoteGroup
from rebalance.weights.cache.address import HostCacheAddress
from rebalance.weights.cache.cache_settings import HostCacheSettings
from rebalance.weights.cache.client import HostCacheClient
from rebalance.weights.cache.server import HostCacheServer
from rebalance.weights.sources import MappedSlots, Place, WeightSources, map_peers
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.experts import ExpertBank, ExpertSchema
from runtime.streams import Completion
from telemetry.state.runs import RunInfo
from tests.support.agent_group import AgentGroup, Notes
from tests.support.http import client_of
from tests.support.limits import NEVER_S

NO_ANSWER = 10**9  # questions to a vote before it answers
MOST_STEPS_ALONE = 4
NUM_LAYERS, NUM_EXPERTS = 2, 8
# Two hosts of two ranks, three slots each: four replicas beside the eight experts.
TOPOLOGY = Topology.uniform(num_nodes=2, ranks_per_node=2, slots_per_rank=3)
START = Placement(np.tile([0, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 0], (NUM_LAYERS, 1)), NUM_EXPERTS)
NEXT = Placement(np.tile([0, 7, 6, 2, 5, 4, 3, 1, 6, 5, 7, 0], (NUM_LAYERS, 1)), NUM_EXPERTS)
names = itertools.count()


class Group(AgentGroup):
    """Four ranks over a real host cache; between steps all serve one placement, byte by byte."""

    def __init__(
        self, checkpoint: Checkpoint, host_cache: HostCacheServer, stranger: HostCacheClient
    ) -> None:
        super().__init__(START, TOPOLOGY)
        self.checkpoint, self.host_cache, self.journal = checkpoint, host_cache, Notes()
        self.stranger = stranger  # reads the same host cache, and is no rank
        self.digests = torch.zeros((NUM_LAYERS, NUM_EXPERTS, 2), dtype=torch.int64)

    def step(self, ranks: Sequence[int] | None = None) -> list[bool]:
        going_on = super().step(ranks)
        assert len({agent.placement.hash for agent in self.agents}) == 1
        self.check_bytes()
        return going_on

    def steps_alone(self, rank: int) -> None:
        """Step one rank for as long as it agrees to."""
        for _ in range(MOST_STEPS_ALONE):
            self.agents[rank].step()
            self.clocks[rank].steps += 1

    def check_bytes(self) -> None:
        """Every live slot of every rank holds the expert that the rank says it holds."""
        for agent, bank in zip(self.agents, self.banks, strict=True):
            for layer, slot, expert in agent.held():
                expected = tuple(self.digests[layer, expert].tolist())
                assert bank.digest(layer, slot) == expected, (layer, slot, expert)

    def moves_to(self, target: Placement) -> None:
        """Bring the group to another placement, whatever it has been through."""
        generation = self.generation()
        self.publish(target)
        self.step_until(lambda: self.generation() > generation)
        self.is_settled(target.slot_to_expert)

    def drops(self, target: Placement, reason: str) -> None:
        """Offer a plan that must be dropped on every rank, and the reason be told."""
        self.publish(target)
        self.step_until(lambda: self.store.published() is None)
        self.step_until(lambda: {agent.phase for agent in self.agents} == {"idle"})
        assert reason in self.reasons_of_events()
        self.is_settled()

    def is_settled(self, expected: object = None) -> None:
        """The store names the one placement that all ranks hold, and nobody is frozen."""
        committed = self.store.committed()
        assert committed is not None
        found = {(agent.placement.generation, agent.placement.hash) for agent in self.agents}
        assert found == {(committed.placement.generation, committed.placement.hash)}
        assert [agent.describe().frozen for agent in self.agents] == [""] * 4
        self.check_bytes()
        if expected is not None:
            assert np.array_equal(committed.placement.slot_to_expert, np.asarray(expected))

    def reasons_of_events(self) -> str:
        ends = ("abort", "reject")
        return "; ".join(e.detail["reason"] for e in self.store.events() if e.kind in ends)

    def doings(self) -> str:
        """What the ranks' threads that have been at one thing for longest are at."""
        return "; ".join(agent.describe().progress_of for agent in self.agents)

    def stage(self, name: str) -> int:
        return sum(int(getattr(agent.mover.figures, name)) for agent in self.agents)


def migration_to(base: Placement, target: Placement, plan_id: int) -> Migration:
    pace = Pace(staging_experts=4)
    return build_migration(base, target, TOPOLOGY, plan_id=plan_id, pace=pace)


MakeGroup = Callable[..., Group]
WrapVotes = Callable[[int, VoteGroup], VoteGroup]


def as_they_are(rank: int, votes: VoteGroup) -> VoteGroup:
    return votes


@pytest.fixture
def make_group(
    small_checkpoint: Checkpoint,
    small_model: ModelShape,
    small_schema: ExpertSchema,
    tmp_path: Path,
) -> Iterator[MakeGroup]:
    """Make four agents that serve START: ``make_group(wrap_votes, ...)``."""
    with ExitStack() as stack:

        def make(
            wrap_votes: WrapVotes = as_they_are,
            *,
            sources_of: Callable[..., WeightSources] = WeightSources,
            host_cache_settings: HostCacheSettings | None = None,
        ) -> Group:
            weights = Checkpoint(shutil.copytree(small_checkpoint.path, tmp_path / "weights"))
            address = HostCacheAddress(f"matrix-{os.getpid()}-{next(names)}", os.urandom(16))
            host_cache = HostCacheServer.of_checkpoint(
                address, weights, small_model, small_schema, host_cache_settings
            )
            stack.callback(host_cache.close)
            size = small_schema.record_bytes

            def reader(of: HostCacheAddress) -> HostCacheClient:
                made = HostCacheClient(of, NUM_EXPERTS, size, deadline_s=NEVER_S, ranks_on_host=2)
                stack.callback(made.close)
                return made

            group = Group(weights, host_cache, reader(address))
            group.banks += [
                ExpertBank(small_schema, NUM_LAYERS, 3, num_staging=4) for _ in range(4)
            ]
            for rank, bank in enumerate(group.banks):
                held = START.slot_to_expert[:, TOPOLOGY.slots_on(rank)].tolist()
                filled = fill_bank(bank, held, reader(address), deadline_s=NEVER_S)
                for (layer, expert), found in filled.items():
                    group.digests[layer, expert] = torch.tensor(found)
            handles = {rank: bank.handle for rank, bank in enumerate(group.banks)}
            for rank, bank in enumerate(group.banks):
                peers = map_peers(rank, TOPOLOGY, bank, handles.__getitem__)
                agent = group.add(
                    sources_of(MappedSlots(rank, bank, peers), reader(address)),
                    group.digests,
                    votes=wrap_votes(rank, group.votes.member(rank)),
                    journal=group.journal,
                )
                agent.start()
            stack.callback(group.close)
            return group

        yield make


# -- votes that are late, lost or repeated


class LateVotes:
    """Votes that are answered late: each tells its value only after some questions."""

    def __init__(
        self,
        votes: VoteGroup,
        draw: Callable[[], int],
        when_asked: Callable[[], object] = int,
    ) -> None:
        self._votes, self._draw, self._when_asked = votes, draw, when_asked

    def cast(self, ballot: Sequence[int]) -> PendingVote:
        return LateVote(self._votes.cast(ballot), self._draw(), self._when_asked)

    def begin_beats(self) -> None:
        self._votes.begin_beats()

    def dead(self) -> frozenset[int]:
        return self._votes.dead()

    def close(self, *, is_failure: bool = False) -> None:
        self._votes.close(is_failure=is_failure)


class LateVote:
    def __init__(self, vote: PendingVote, questions: int, when_asked: Callable[[], object]) -> None:
        self._vote, self._left, self._when_asked = vote, questions, when_asked

    def poll(self, timeout_s: float) -> tuple[Outcome, list[int]]:
        self._left -= 1
        if self._left < 0:
            return self._vote.poll(timeout_s)
        self._when_asked()
        return Outcome.LATE, []


@pytest.mark.parametrize("seed", range(2))
def test_votes_that_every_rank_reads_at_another_time_mix_no_two_placements(
    make_group: MakeGroup, seed: int
) -> None:
    draw = random.Random(seed)
    group = make_group(lambda _, votes: LateVotes(votes, lambda: draw.choice((0, 0, 1, 2, 5))))

    for target in (NEXT, START, NEXT):
        group.moves_to(target)


@pytest.mark.parametrize("vote", [1, 4])
def test_lost_vote_stops_every_rank_before_placements_differ(
    make_group: MakeGroup, vote: int
) -> None:
    """Rank 2 never hears of one vote in mid-migration. It must not serve on, nor may the others."""

    def lose(rank: int, votes: VoteGroup) -> VoteGroup:
        numbers = itertools.count()

        def draw() -> int:
            return NO_ANSWER if rank == 2 and next(numbers) == vote else 0

        return LateVotes(votes, draw, lambda: group.time.skip(NEVER_S))

    group = make_group(lose)
    group.publish(NEXT)

    # Every step that all ranks make is checked; the first that one refuses is no forward pass.
    with pytest.raises(RankError, match=r"rank 2: the vote of step \d+ is late"):
        group.step_until(lambda: False)
    group.votes.kill(2)  # its process ends with that error
    for rank in (0, 1, 3):
        with pytest.raises(RankError, match=f"rank {rank}: rank 2 died"):
            group.steps_alone(rank)
    group.check_bytes()


# -- bytes


def test_host_record_damaged_in_memory_is_read_again_and_never_served(
    make_group: MakeGroup,
) -> None:
    """A byte of each record in the host cache is flipped through its descriptor: a stray write."""
    group = make_group()
    memory = Path(group.host_cache.arena.handle).name
    with Path(f"/proc/self/fd/{memory}").open("r+b", buffering=0) as arena:
        size = os.fstat(arena.fileno()).st_size
        for at in range(17, size, 4096):
            os.pwrite(arena.fileno(), bytes([os.pread(arena.fileno(), 1, at)[0] ^ 255]), at)

    group.moves_to(NEXT)
    assert group.stage("num_wrong_digests") > 0
    assert group.host_cache.stats()["damaged"] == 0  # the disk's bytes were right


class Damaging(WeightSources):
    """Sources on the way from which the first bytes of every record are damaged, once."""

    def __init__(self, *sources: Any) -> None:
        super().__init__(*sources)
        self._seen = set[Record]()

    def pull(self, record: Record, place: Place, offset: int, into: torch.Tensor) -> Completion:
        completion = super().pull(record, place, offset, into)
        if record not in self._seen:
            self._seen.add(record)
            into[7] ^= 255
        return completion


def test_staged_expert_damaged_in_transfer_is_staged_again(
    make_group: MakeGroup,
) -> None:
    group = make_group(sources_of=Damaging)

    group.moves_to(NEXT)
    size = group.banks[0].schema.record_bytes
    rejected = [agent.describe().detail["bytes_by_source"]["rejected"] for agent in group.agents]
    # Ranks 0 and 2 get two other experts in each of two layers, ranks 1 and 3 one.
    assert [found // size for found in rejected] == [4, 2, 4, 2]


def test_weights_truncated_while_serving_abort_the_plan_until_repaired(
    make_group: MakeGroup,
) -> None:
    # A host that keeps eight of sixteen records has to go back to the disk for some.
    group = make_group(host_cache_settings=HostCacheSettings(records=8))
    contents = {path: path.read_bytes() for path in group.checkpoint.path.glob("*.safetensors")}
    for path in contents:
        os.truncate(path, 10)

    group.drops(NEXT, "is truncated: 10 bytes, expected")
    for path, content in contents.items():
        path.write_bytes(content)
    group.moves_to(NEXT)


# -- a host that has no answer for as long as somebody else holds all of its entries

CROWDED = HostCacheSettings(records=8)


def meets_a_crowd(group: Group, target: Placement) -> list[Record]:
    """Offer a plan that all ranks adopt and no host answers for; return what keeps it waiting."""
    held = [(0, expert) for expert in range(NUM_EXPERTS)]
    group.stranger.load(held, deadline_s=NEVER_S)
    group.publish(target)
    group.step_until(lambda: len(group.journal.of("adopted by all")) == 4)
    group.step_until(lambda: "preload" in group.doings())
    return held


def test_update_of_the_weights_does_not_wait_for_a_host_without_an_answer(
    make_group: MakeGroup,
) -> None:
    group = make_group(host_cache_settings=CROWDED)
    held = meets_a_crowd(group, NEXT)

    with ThreadPoolExecutor(4) as pool:
        for begun in [pool.submit(agent.begin_update, 1) for agent in group.agents]:
            begun.result()
        for ended in [pool.submit(agent.end_update) for agent in group.agents]:
            ended.result()

    group.step_until(lambda: group.store.published() is None)
    assert "the weights are updated to version 1" in group.reasons_of_events()
    group.is_settled(START.slot_to_expert)
    group.stranger.release(held)


def test_plan_withdrawn_during_a_preload_leaves_no_lease(
    make_group: MakeGroup,
) -> None:
    group = make_group(host_cache_settings=CROWDED)
    held = meets_a_crowd(group, NEXT)

    found = group.store.published()
    assert found is not None
    group.store.withdraw(found.plan_id, outcome="aborted", reason="a fault: withdrawn")
    group.step_until(lambda: {agent.phase for agent in group.agents} == {"idle"})
    group.is_settled(START.slot_to_expert)

    group.stranger.release(held)
    group.moves_to(NEXT)
    group.step_until(lambda: group.host_cache.stats()["leased"] == 0)


def test_ranks_that_end_do_not_wait_for_a_host_without_an_answer(make_group: MakeGroup) -> None:
    group = make_group(host_cache_settings=CROWDED)
    meets_a_crowd(group, NEXT)

    group.close()  # a wait that is not called off lasts longer than any test

    assert not [thread for thread in threading.enumerate() if thread.name == MOVER]


def test_deleted_weights_are_still_read_by_a_host_that_has_them_open(
    make_group: MakeGroup,
) -> None:
    group = make_group(host_cache_settings=CROWDED)
    held = meets_a_crowd(group, NEXT)
    generation, read = group.generation(), group.host_cache.stats()["checkpoint"]
    for path in group.checkpoint.path.glob("*.safetensors"):
        path.unlink()

    group.stranger.release(held)
    group.step_until(lambda: group.generation() > generation)
    group.is_settled(NEXT.slot_to_expert)
    assert group.host_cache.stats()["checkpoint"] > read
    with pytest.raises(CheckpointError):
        Checkpoint(group.checkpoint.path)  # as the next start would


# -- where the reason of an abort is told

HOT = [1, 20, 1, 1, 1, 1, 1, 20]  # experts 1 and 7, of which one rank each has a replica


def begins_to_report(group: Group, model: ModelShape) -> None:
    """The store has a run, and a window of load that a plan is worth its moves for."""
    described = model_to_dict(model), topology_to_dict(TOPOLOGY)
    group.store.begin_run(RunInfo("run", 1.0, *described, window_steps=1, window_seconds=0.0))
    load = (10_000 * np.array(HOT)[START.slot_to_expert] * START.slot_share).astype(np.int64)
    for rank in range(4):
        slots = TOPOLOGY.slots_on(rank)
        seen = START.slot_to_expert[:, slots], load[:, slots]
        group.store.append([LoadSample("test", "run", rank, 0, 0.0, 0, 0, "mixed", 0, *seen)])


def test_abort_reason_is_found_from_the_task_and_counted(
    make_group: MakeGroup, small_model: ModelShape
) -> None:
    group = make_group(host_cache_settings=CROWDED)
    begins_to_report(group, small_model)
    for path in group.checkpoint.path.glob("*.safetensors"):
        os.truncate(path, 10)
    asked = group.store.submit("rebalance", {"dry_run": False, "policy": "greedy"})

    with client_of(create_app(group.store)) as client:
        controller = Controller(group.store, ControllerSettings(pace=Pace(staging_experts=4)))
        controller.turn()
        group.step_until(lambda: group.store.published() is None)
        task = client.get(f"/api/v1/tasks/{asked.id}").json()
        events = client.get("/api/v1/events").json()["events"]
        metrics = client.get("/metrics").text

    assert (task["state"], task["result"]["published"]) == ("done", True)
    (abort,) = [event["detail"] for event in events if event["kind"] == "abort"]
    assert abort["plan_id"] == task["result"]["plan_id"]
    assert "is truncated: 10 bytes, expected" in abort["reason"]
    assert task["plan_end"] == {
        "outcome": "aborted",
        "reason": abort["reason"],
        "time": next(event["time"] for event in events if event["kind"] == "abort"),
    }
    ends = [line for line in metrics.splitlines() if line.startswith("eplb_rebalances_total{")]
    counted = [line for line in ends if 'outcome="aborted"' in line and 'trigger="request"' in line]
    assert [line.split()[-1] for line in counted] == ["1.0"]


# -- plans that must not be


def test_plan_with_a_stale_base_is_refused_by_the_store_and_moves_nothing(
    make_group: MakeGroup,
) -> None:
    group = make_group()
    stale = migration_to(START, NEXT, plan_id=7)
    group.moves_to(NEXT)

    with pytest.raises(StaleGeneration, match=r"plan 7.*generation 0"):
        group.store.publish(stale)
    for agent in group.agents:
        agent.on_store_update(group.store.control(), stale)  # as from a store that let it pass
    for _ in range(6):
        group.step()
    group.is_settled(NEXT.slot_to_expert)


def forged(migration: Migration, change: Callable[[Move], Move | None]) -> Migration:
    """A migration whose moves are not the way to its target: by a bug, or another maker."""
    first, *others = migration.transactions
    rounds = tuple(
        tuple(changed for move in one if (changed := change(move))) for one in first.rounds
    )
    return replace(migration, transactions=(replace(first, rounds=rounds), *others))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda m: replace(m, expert=99), id="unknown"),
        pytest.param(lambda m: replace(m, expert=(m.expert + 1) % NUM_EXPERTS), id="another"),
        pytest.param(lambda m: None if m.dst_slot == 1 else m, id="missing"),
    ],
)
def test_moves_that_do_not_lead_to_the_target_are_no_migration(
    change: Callable[[Move], Move | None],
) -> None:
    with pytest.raises(MigrationError, match="plan 1"):
        forged(migration_to(START, NEXT, 1), change)
