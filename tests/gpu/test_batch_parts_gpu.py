"""The split that the switches name, made on GPUs: right outputs, no fault."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.shares.switches import BatchSwitches
from runtime.batch.split_rule import EVERY_BATCH

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from runtime.batch.split import make_split
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.counters import SlotCounter
from runtime.dispatch.all_to_all import AllToAllDispatcher
from runtime.experts import ExpertBank, bank_bytes
from runtime.memory import SymmetricArena
from runtime.model.compute import GroupedExperts
from runtime.model.moe import MoELayer, MoEStack
from runtime.model.reference import ReferenceModel
from runtime.routing import RoutingTable
from tests.gpu.parts import (
    LIMIT,
    MODEL,
    NUM_TOKENS,
    TIE,
    fill,
    schema_of,
    tokens_of,
    weights_of,
)
from tests.support.launch import launch
from tests.support.limits import NEVER_S

pytestmark = pytest.mark.gpu
RANKS = min(2, torch.cuda.device_count())
SLOTS = MODEL.num_experts // RANKS + 2
TOPOLOGY = Topology.uniform(1, RANKS, SLOTS)
STEPS = 6
SWITCHES = {
    "off": BatchSwitches(),
    "group": BatchSwitches(split=True),
    "peer memory": BatchSwitches(split=True, exchange="peer_memory"),
}
weights = pytest.fixture(scope="module")(weights_of)


def placed() -> Placement:
    """Experts in order; with two ranks each has replicas of two of the other's."""
    held = np.full((RANKS, SLOTS), EMPTY)
    for rank, mine in enumerate(np.array_split(np.arange(MODEL.num_experts), RANKS)):
        held[rank, : len(mine)] = mine
        if RANKS > 1:
            held[rank, len(mine) :] = np.array_split(np.arange(MODEL.num_experts), RANKS)[1 - rank][
                :2
            ]
    return Placement(np.tile(held.ravel(), (MODEL.num_layers, 1)), MODEL.num_experts)


def serve(rank: int, num_ranks: int, path: Path, name: str) -> tuple[list[float], int, list[int]]:
    """Errors of the steps, routes that differ, and faults that the device counted."""
    switches, group, device = SWITCHES[name], dist.group.WORLD, torch.device("cuda", rank)
    assert group is not None
    checkpoint, schema, start = Checkpoint(path), schema_of("bfloat16"), placed()
    arena = SymmetricArena(bank_bytes(schema, MODEL.num_layers, SLOTS, 0), group, device)
    bank = ExpertBank(schema, MODEL.num_layers, SLOTS, num_staging=0, arena=arena)
    mine = start.slot_to_expert[:, TOPOLOGY.slots_on(rank)]
    fill(bank, np.maximum(mine, 0), checkpoint)  # a record in an empty slot is never read
    table = RoutingTable(
        start,
        max_replicas=num_ranks,
        device=device,
        topology=TOPOLOGY if switches.split else None,
    )
    counter = SlotCounter(MODEL.num_layers, SLOTS, device)
    pairs = NUM_TOKENS * MODEL.top_k
    split = make_split(switches, table, rank, group, group, max_pairs=pairs, rule=EVERY_BATCH)
    torch.cuda.synchronize()
    dist.barrier()
    dispatcher = AllToAllDispatcher(TOPOLOGY, group, rank, counter)
    experts = GroupedExperts(bank, usual_rows=64)
    layers = [
        MoELayer(n, MODEL.top_k, experts, table, dispatcher, split=split)
        for n in range(MODEL.num_layers)
    ]
    stack = MoEStack(
        MODEL, {n: t.to(device) for n, t in checkpoint.dense_weights().items()}, layers
    )
    on_device = {n: t.to(device) for n, t in checkpoint.reference_weights().items()}
    reference = ReferenceModel(MODEL, on_device, tie=TIE["bfloat16"])
    errors, wrong = [], 0
    for step in range(STEPS):
        ids = tokens_of(rank, step).to(device)
        found = reference.check(ids, stack.forward(ids, salt=step))
        errors.append(found.max_error)
        wrong += found.wrong_routes
    return errors, wrong, [int(one.item()) for one in (split.faults if split else {}).values()]


@pytest.mark.parametrize("name", sorted(SWITCHES))
def test_ranks_with_the_split_of_the_switches_answer_as_the_reference(
    weights: dict[str, Path], name: str
) -> None:
    for errors, wrong, faults in launch(
        serve, RANKS, weights["bfloat16"], name, deadline_s=NEVER_S
    ):
        assert max(errors) <= LIMIT["bfloat16"]
        assert wrong == 0
        assert not any(faults)
