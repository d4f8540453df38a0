"""Rank agents in one process, in lock step: what several test files drive.

A file adds what is its own: the sources, claims after every step, what it reads of the slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch

from eplb.core.load import LoadSample
from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.errors import StoreError
from eplb.migration.build import Migration, Pace, build_migration
from rebalance.assembly.config import RankConfig
from rebalance.assembly.rank import make_slots
from rebalance.protocol.journal import JournalSink
from rebalance.rank import watcher
from rebalance.rank.group import Group
from rebalance.rank.rank import Rank
from rebalance.rank.watcher import MOVER, StoreLoss
from rebalance.stage.stage_settings import StageSettings
from rebalance.types import Record, VoteGroup
from rebalance.weights.sources import WeightSources
from runtime.counters import SlotCounter
from runtime.experts import ExpertBank, ExpertSchema
from runtime.memory import digest
from runtime.routing import RoutingTable
from telemetry.state.runs import RankState
from telemetry.state.store import StateStore
from tests.support.limits import NEVER_S
from tests.support.local_group import LocalHost, LocalVotes, local_slots
from tests.support.simulated_time import SkippingClock
from tests.support.stores import MemoryStore

FAR_OFF = {  # deadlines that no agent reaches, however busy the machine is
    "vote_deadline_s": NEVER_S,
    "plan_deadline_s": NEVER_S,
    "stage": StageSettings(
        preload_deadline_s=NEVER_S, pull_deadline_s=NEVER_S, pause_deadline_s=NEVER_S
    ),
}
AGENT_THREADS = frozenset({"eplb-watcher", MOVER, "eplb-commit-writer"})
LONGEST_WAIT_S = 0.02  # of a watcher that nobody has news for: so long does it take to close


class QuickStore(MemoryStore):
    """A store that has its watchers look again soon."""

    def wait(self, version: int, timeout_s: float) -> int:
        return super().wait(version, min(timeout_s, LONGEST_WAIT_S))


class StepClock:
    """A dispatcher's step counter without a dispatcher."""

    def __init__(self) -> None:
        self.steps = 0


class Sink:
    """Keeps the samples that an agent offers, and reports to the store."""

    def __init__(self, store: StateStore) -> None:
        self.samples: list[LoadSample] = []
        self._store = store

    def offer(self, sample: LoadSample) -> bool:
        self.samples.append(sample)
        return True

    def state(self, state: RankState) -> None:
        with suppress(StoreError):  # as a reporter, which never raises either
            self._store.report(state)


class Notes:
    """The journal of all ranks, read at once."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, Mapping[str, Any]]] = []

    def note(self, what: str, where: tuple[int, int, int], detail: Mapping[str, Any]) -> None:
        self.lines.append((what, detail))

    def of(self, *what: str) -> list[Mapping[str, Any]]:
        return [detail for said, detail in self.lines if said in what]


def record_of(schema: ExpertSchema, layer: int, expert: int, num_experts: int) -> torch.Tensor:
    """Bytes that name the expert they stand for; never zeros."""
    filled = torch.zeros(schema.record_bytes, dtype=torch.uint8)
    filled.view(torch.int32).fill_(1 + layer * num_experts + expert)
    return filled


def records_of(
    schema: ExpertSchema, num_layers: int, num_experts: int
) -> dict[Record, torch.Tensor]:
    """Of all experts of a model."""
    return {
        (layer, expert): record_of(schema, layer, expert, num_experts)
        for layer in range(num_layers)
        for expert in range(num_experts)
    }


def held_in(bank: ExpertBank, num_experts: int) -> list[list[int]]:
    """[L][C] the expert in each live slot, by its bytes; below 0: none."""
    return [
        [
            int(bank.live(layer, slot).view(torch.int32)[-1]) - 1 - layer * num_experts
            for slot in range(bank.num_slots)
        ]
        for layer in range(bank.num_layers)
    ]


def digests_of(records: Mapping[Record, torch.Tensor]) -> torch.Tensor:
    """[L, E, 2] digests of all records."""
    last_layer, last_expert = max(records)
    table = torch.zeros((last_layer + 1, last_expert + 1, 2), dtype=torch.int64)
    for record, data in records.items():
        table[record] = torch.tensor(digest(data))
    return table


class AgentGroup:
    """The agents of one group, from rank 0 on as they are added."""

    def __init__(self, start: Placement, topology: Topology) -> None:
        self.start, self.topology = start, topology
        self.store, self.votes = QuickStore("test"), LocalVotes(topology.num_ranks)
        self.store.commit(start, expected=None, reason="start")
        self.agents: list[Rank] = []
        self.banks: list[ExpertBank] = []
        self.clocks: list[StepClock] = []
        self.time = SkippingClock()  # of all deadlines of the agents
        self.sinks: list[Sink] = []
        self.tables: list[RoutingTable] = []
        self.counters: list[SlotCounter] = []
        self.rank_digests: list[torch.Tensor] = []  # [L, E, 2] that each rank compares with
        self._patch = pytest.MonkeyPatch()
        # The rank that knows why a plan is dropped says so, however late it is.
        self._patch.setattr(watcher, "DEFERS_S", NEVER_S)

    def add(
        self,
        sources: WeightSources,
        digests: torch.Tensor,
        *,
        votes: VoteGroup | None = None,
        journal: JournalSink | None = None,
        **settings: Any,
    ) -> Rank:
        """Make the agent of the next rank; its bank is there already."""
        rank = len(self.agents)
        clock, sink = StepClock(), Sink(self.store)
        membership = settings.pop("membership", 0)
        given = {"sample_steps": 4, "staging_experts": 1} | FAR_OFF | settings
        bank, start = self.banks[rank], self.start
        agent = Rank(
            RankConfig("test", **given),
            make_slots(rank, self.topology, bank, digests, start),
            SlotCounter(start.num_layers, bank.num_slots, bank.device),
            self.store,
            sink,
            passes=clock,
            journal=journal,
            monotonic=self.time,
        )
        agent.enter(
            Group(
                rank,
                "run",
                self.topology,
                votes or self.votes.member(rank),
                membership=membership,
            ),
            start,
            sources,
            loss=StoreLoss(self.store, "run") if self.store.current_run() else None,
        )
        self.agents.append(agent)
        self.clocks.append(clock)
        self.sinks.append(sink)
        self.tables.append(agent.table)
        self.counters.append(agent.counter)
        self.rank_digests.append(digests)
        return agent

    def add_all(
        self,
        schema: ExpertSchema,
        records: Mapping[Record, torch.Tensor],
        *,
        num_staging: int,
        **settings: Any,
    ) -> None:
        """Make all ranks, over memory in which they see each other's slots."""
        digests, num_ranks = digests_of(records), self.topology.num_ranks
        num_layers, num_slots = self.start.slot_to_expert.shape
        shape = num_layers, num_slots // num_ranks
        self.banks += [
            ExpertBank(schema, *shape, num_staging=num_staging) for _ in range(num_ranks)
        ]
        for rank in range(num_ranks):
            self.fill(rank, records)
            slots = local_slots(self.topology, rank, self.banks)
            self.add(WeightSources(slots, LocalHost(records)), digests, **settings)

    def fill(self, rank: int, records: Mapping[Record, torch.Tensor]) -> None:
        """Write into a rank's slots what the start says that they hold."""
        held = self.start.slot_to_expert[:, self.topology.slots_on(rank)].tolist()
        for layer, slots in enumerate(held):
            for slot, expert in enumerate(slots):
                if expert >= 0:
                    self.banks[rank].live(layer, slot).copy_(records[layer, expert])

    def begin(self) -> None:
        for agent in self.agents:
            agent.start()

    def close(self) -> None:
        # At once: each waits for its watcher's turn to end.
        with ThreadPoolExecutor(max(1, len(self.agents))) as pool:
            list(pool.map(Rank.leave, self.agents))
        self._patch.undo()

    def step(self, ranks: Sequence[int] | None = None) -> list[bool]:
        """One step of all ranks, or of some."""
        chosen = range(len(self.agents)) if ranks is None else ranks
        going_on = [self.agents[rank].step() for rank in chosen]
        for rank in chosen:
            self.clocks[rank].steps += 1
        return going_on

    def step_until(self, is_reached: Callable[[], bool]) -> None:
        while not is_reached():
            self.step()

    @property
    def placement(self) -> Placement:
        """What rank 0 serves."""
        return self.agents[0].placement

    def generation(self) -> int:
        """Number of the committed placement."""
        committed = self.store.committed()
        assert committed is not None, "a group starts from a placement"
        return committed.placement.generation

    def publish(self, target: Placement, pace: Pace | None = None) -> Migration:
        """Offer the way from what rank 0 serves to another placement."""
        plan_id, pace = self.store.next_plan_id(), pace or Pace(staging_experts=4)
        migration = build_migration(
            self.placement, target, self.topology, plan_id=plan_id, pace=pace
        )
        self.store.publish(migration)
        return migration
