"""Captured decode on one GPU: everything that changes under a graph.

The GPU's slots stand for those of four ranks, so that experts have replicas to choose among.
The agent, its votes, the staging and the swaps are those of a rank that serves.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.errors import ConfigError
from eplb.migration.build import Pace

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip("triton")
pytest.importorskip("zstandard", reason="the store packs samples with it")

from benchmarks.migration.big_rank import emulated_migration, emulated_slots
from benchmarks.simulator.local_dispatch import LocalDispatcher
from rebalance.assembly.config import RankConfig
from rebalance.rank.group import Group
from rebalance.rank.rank import Rank
from rebalance.weights.sources import MappedSlots, WeightSources
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.counters import SlotCounter
from runtime.dispatch.all_to_all import Dispatcher
from runtime.dispatch.deepep import DeepEPLowLatency, DeepEPNormal, DeepEPShape
from runtime.experts import ExpertBank, PlainArena, bank_bytes
from runtime.model.compute import GroupedExperts
from runtime.model.moe import CapturedStack, MoELayer, MoEStack
from runtime.model.reference import ReferenceModel
from tests.gpu.parts import (
    LIMIT,
    MODEL,
    NUM_TOKENS,
    TIE,
    fill,
    needs_deep_ep,
    random_placement,
    schema_of,
    slots_per_rank,
    tokens_of,
    weights_of,
)
from tests.support.agent_group import QuickStore, Sink
from tests.support.launch import launch
from tests.support.limits import NEVER_S
from tests.support.local_group import LocalHost, LocalVotes

pytestmark = pytest.mark.gpu
RANKS = 4  # ranks that the one GPU stands for
GROUP = Topology.uniform(1, RANKS, slots_per_rank(RANKS))
OWN = Topology.uniform(1, 1, GROUP.num_slots)  # what the agent sees
ENDS = (random_placement(RANKS, 0), random_placement(RANKS, 1))
# One layer swaps at a time, so that steps are served from the middle of a migration too.
PACE = Pace(GROUP.num_slots, layers_per_transaction=1, transactions_per_commit=1)
MIGRATIONS, LEAST_STEPS, MOST_STEPS = 6, 40, 2000
weights = pytest.fixture(scope="module")(weights_of)


@dataclass
class OneGpu:
    """A rank that serves, and its store."""

    bank: ExpertBank
    digests: torch.Tensor
    agent: Rank
    stack: MoEStack
    store: QuickStore
    device: torch.device

    def captured(self) -> CapturedStack:
        return CapturedStack(
            self.stack,
            shape=(2, NUM_TOKENS // 2),
            num_layers=MODEL.num_layers,
            device=self.device,
        )

    def publish(self) -> None:
        """Lead to the end where the committed placement does not stand."""
        committed = self.store.committed()
        assert committed is not None
        base, plan_id = committed.placement, self.store.next_plan_id()
        is_first = np.array_equal(base.slot_to_expert, ENDS[0].slot_to_expert)
        target = ENDS[1] if is_first else ENDS[0]
        self.store.publish(emulated_migration(base, target, OWN, plan_id, PACE))


def build(path: Path, precision: str, dispatcher: str) -> OneGpu:
    device, checkpoint, schema = torch.device("cuda", 0), Checkpoint(path), schema_of(precision)
    shape = (schema, MODEL.num_layers, GROUP.num_slots)
    arena = PlainArena(bank_bytes(*shape, GROUP.num_slots), device)
    bank = ExpertBank(*shape, num_staging=GROUP.num_slots, arena=arena)
    start = ENDS[0]
    fill(bank, start.slot_to_expert, checkpoint)
    digests = torch.zeros((MODEL.num_layers, MODEL.num_experts, 2), dtype=torch.int64)
    for layer, slot in np.ndindex(start.slot_to_expert.shape):
        expert = int(start.slot_to_expert[layer, slot])
        digests[layer, expert] = torch.tensor(bank.digest(layer, slot))
    store = QuickStore("test")
    store.commit(start, expected=None, reason="start")
    sources = WeightSources(MappedSlots(0, bank), LocalHost({}))
    agent = Rank(
        RankConfig("test", 4, 1),
        emulated_slots(0, OWN, bank, digests, start, emulated=GROUP),
        SlotCounter(start.num_layers, bank.num_slots, device),
        store,
        Sink(store),
    )
    agent.enter(Group(0, "run", OWN, LocalVotes(1).member(0)), start, sources)
    group = dist.group.WORLD
    assert group is not None
    sends: Dispatcher = LocalDispatcher(GROUP.num_slots, agent.counter)
    if dispatcher == "low_latency":
        deep_ep_shape = DeepEPShape(OWN, MODEL.hidden, MODEL.top_k, NUM_TOKENS)
        sends = DeepEPLowLatency(deep_ep_shape, group, agent.counter)
    experts = GroupedExperts(bank, usual_rows=64)
    layers = [
        MoELayer(layer, MODEL.top_k, experts, agent.table, sends)
        for layer in range(MODEL.num_layers)
    ]
    dense = {name: t.to(device) for name, t in checkpoint.dense_weights().items()}
    return OneGpu(bank, digests, agent, MoEStack(MODEL, dense, layers), store, device)


@dataclass
class Served:
    errors: list[float]  # largest error of each step, against the reference
    wrong_routes: int
    mixed_steps: int  # served from the middle of a migration
    migrations: int
    experts_moved: int
    wrong_slots: int
    captures: int
    strays: int


def serve(rank: int, num_ranks: int, path: Path, precision: str, dispatcher: str) -> Served:
    made = build(path, precision, dispatcher)
    agent = made.agent
    on_device = {n: t.to(made.device) for n, t in Checkpoint(path).reference_weights().items()}
    reference = ReferenceModel(MODEL, on_device, tie=TIE[precision])
    captured = made.captured()
    served = Served([], 0, 0, 0, 0, 0, captured.num_captures, 0)
    agent.start()
    step = 0
    while agent.figures.rebalances < MIGRATIONS or step < LEAST_STEPS:
        assert step < MOST_STEPS, f"{agent.figures.rebalances} migrations, phase {agent.phase}"
        if made.store.published() is None:
            made.publish()
        assert agent.step(step, "decode")
        serving = agent.placement
        ids = tokens_of(0, step).to(made.device)
        answer = captured.forward(ids, salt=step)
        found = reference.check(ids, answer)
        served.errors.append(found.max_error)
        served.wrong_routes += found.wrong_routes
        served.mixed_steps += is_mixed(serving)
        step += 1
    served.captures = captured.num_captures
    served.migrations, served.experts_moved = agent.figures.rebalances, agent.figures.experts_moved
    served.wrong_slots = wrong_slots(made, agent)
    served.strays = int(made.agent.table.strays)
    agent.leave()
    return served


def is_mixed(serving: Placement) -> bool:
    """Whether layers are of both ends."""
    first = [
        np.array_equal(mine, end)
        for mine, end in zip(serving.slot_to_expert, ENDS[0].slot_to_expert, strict=True)
    ]
    return any(first) and not all(first)


def wrong_slots(made: OneGpu, agent: Rank) -> int:
    torch.cuda.synchronize()
    return sum(
        made.bank.digest(layer, slot) != tuple(made.digests[layer, expert].tolist())
        for layer, slot, expert in agent.held()
    )


LOW_LATENCY = pytest.param("low_latency", marks=needs_deep_ep)


@pytest.mark.parametrize("precision", sorted(LIMIT))
@pytest.mark.parametrize("dispatcher", ["local", LOW_LATENCY])
def test_graph_is_right_at_every_step_of_migrations(
    weights: dict[str, Path], precision: str, dispatcher: str
) -> None:
    (served,) = launch(serve, 1, weights[precision], precision, dispatcher, deadline_s=NEVER_S)

    print(
        f"{precision}, {dispatcher}: {len(served.errors)} steps, {served.migrations} migrations, "
        f"{served.experts_moved} experts, {served.mixed_steps} steps in the middle of one, "
        f"largest error {max(served.errors):.2e}"
    )
    assert max(served.errors) <= LIMIT[precision]
    assert served.wrong_routes == served.wrong_slots == served.strays == 0
    assert served.captures == 1
    assert served.migrations >= MIGRATIONS
    assert served.mixed_steps > 0


def refused(rank: int, num_ranks: int) -> str:
    shape, counter = DeepEPShape(OWN, 256, 2, 8), SlotCounter(1, OWN.num_slots, "cuda:0")
    group = dist.group.WORLD
    assert group is not None
    try:
        DeepEPNormal(shape, group, counter)
    except ConfigError as exc:
        return str(exc)
    return "not refused"


@needs_deep_ep
def test_normal_mode_of_deep_ep_refuses_one_rank_with_a_sentence() -> None:
    (why,) = launch(refused, 1, deadline_s=NEVER_S)

    assert why.startswith("deep_ep has no normal mode for a group of 1 (Unsupported number of EP")
