"""New shares travel like any plan: controller, vote and swap, with real agents and no weight."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from eplb import Budget, CostModel, ModelShape, Placement, Topology
from eplb.core.load import LoadSample
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from rebalance.assembly.config import RankConfig
from rebalance.assembly.rank import make_slots
from rebalance.controller.loop import Controller, ControllerSettings
from rebalance.rank.group import Group
from rebalance.rank.rank import Rank
from rebalance.weights.sources import WeightSources
from runtime.counters import SlotCounter
from runtime.experts import ExpertBank, ExpertSchema
from runtime.memory import digest
from runtime.routing import SHARE_ONE
from telemetry.state.runs import RankState, RunInfo
from telemetry.state.store import StateStore
from tests.support.limits import NEVER_S
from tests.support.local_group import LocalHost, LocalVotes, local_slots
from tests.support.stores import MemoryStore

SCHEMA = ExpertSchema.swiglu(hidden=8, intermediate=4)
MODEL = ModelShape((0,), 3, top_k=1, hidden=8, intermediate=4)
# Ranks hold experts {0, 1} and {0, 2}.
TOPOLOGY = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2)
START = Placement(np.array([[0, 1, 0, 2]]), num_experts=3)
# At equal split 6000 and 4000; with a third of expert 0 on the first rank 5000 and 5000.
TOKENS = torch.tensor([0] * 6000 + [1] * 3000 + [2] * 1000)[:, None]
WINDOW_STEPS = 4


class Sink:
    """Puts what the agent offers into the store at once."""

    def __init__(self, store: StateStore) -> None:
        self._store = store

    def offer(self, sample: LoadSample) -> bool:
        self._store.append([sample])
        return True

    def state(self, state: RankState) -> None:
        self._store.report(state)


@dataclass
class Serving:
    """Two ranks that route the same tokens in every step."""

    store: StateStore
    agents: list[Rank]
    banks: list[ExpertBank]
    num_steps: int = 0

    def step(self) -> list[int]:
        """One step of every rank; tokens that each received."""
        assert all(agent.step(self.num_steps) for agent in self.agents)
        slots = self.agents[0].table.choose(0, TOKENS, salt=self.num_steps)
        received = torch.bincount(slots.flatten(), minlength=4).view(2, 2).to(torch.int32)
        for agent, mine in zip(self.agents, received, strict=True):
            agent.counter.add(0, mine)
        self.num_steps += 1
        return [int(each) for each in received.sum(dim=1)]


def settings(**cost: float) -> ControllerSettings:
    return ControllerSettings(budget=Budget(max_moves=0), cost=CostModel(**cost))


@pytest.fixture
def serving() -> Iterator[Serving]:
    store, votes = MemoryStore("test"), LocalVotes(2)
    store.commit(START, expected=None, reason="start")
    store.begin_run(
        RunInfo("run", 1.0, model_to_dict(MODEL), topology_to_dict(TOPOLOGY), WINDOW_STEPS)
    )
    records = {}
    for expert in range(3):
        records[0, expert] = torch.full((SCHEMA.record_bytes,), expert, dtype=torch.uint8)
    digests = torch.tensor([[digest(records[0, expert]) for expert in range(3)]])
    banks = [ExpertBank(SCHEMA, 1, 2, num_staging=2) for _ in range(2)]
    made = Serving(store, [], banks)
    config = RankConfig("test", WINDOW_STEPS, 2, vote_deadline_s=NEVER_S)
    for rank, bank in enumerate(banks):
        for slot, expert in enumerate(START.slot_to_expert[0, TOPOLOGY.slots_on(rank)].tolist()):
            bank.live(0, slot).copy_(records[0, expert])
        sources = WeightSources(local_slots(TOPOLOGY, rank, banks), LocalHost(records))
        slots = make_slots(rank, TOPOLOGY, bank, digests, START)
        agent = Rank(config, slots, SlotCounter(1, 2), store, Sink(store))
        agent.enter(Group(rank, "run", TOPOLOGY, votes.member(rank)), START, sources)
        made.agents.append(agent)
    for agent in made.agents:
        agent.start()
    yield made
    with ThreadPoolExecutor(2) as pool:  # at once: each waits for its watcher's turn to end
        list(pool.map(lambda agent: agent.leave(), made.agents))


def test_new_shares_serve_under_a_new_generation_and_no_weight_moves(serving: Serving) -> None:
    controller = Controller(serving.store, settings())
    before = [serving.step() for _ in range(WINDOW_STEPS + 1)][-1]
    assert before == [6000, 4000]

    while serving.agents[0].placement.generation == 0:
        controller.turn()
        serving.step()

    (event,) = [event for event in serving.store.events() if event.kind == "plan"]
    assert (event.detail["decision"], event.detail["moves"]) == ("RESPLIT", 0)
    placement = serving.agents[1].placement
    assert placement.slot_to_expert.tolist() == START.slot_to_expert.tolist()
    assert serving.step() == pytest.approx([5000, 5000], abs=100)
    assert [agent.figures.experts_moved for agent in serving.agents] == [0, 0]
    assert [int(bank.live(0, 1)[0]) for bank in serving.banks] == [1, 2]
    for agent in serving.agents:
        share = float(agent.table.cumulative[0, 0, 0]) / SHARE_ONE
        assert share == pytest.approx(placement.slot_share[0, 0], abs=1e-4)


def test_shares_that_bring_too_little_are_kept(serving: Serving) -> None:
    controller = Controller(serving.store, settings(min_share_gain=0.5))
    for _ in range(2 * WINDOW_STEPS):
        serving.step()

    controller.turn()

    (event,) = [event for event in serving.store.events() if event.kind == "plan"]
    assert event.detail["decision"] == "KEEP"
    assert serving.store.published() is None
