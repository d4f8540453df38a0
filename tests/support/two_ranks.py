"""The smallest run that has load: two ranks of two slots that serve three experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from eplb import LoadSample, ModelShape, Placement, Topology
from eplb.core.load import Phase
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from telemetry.state.runs import RunInfo
from telemetry.state.store import StateStore

MODEL = ModelShape((0,), num_experts=3, top_k=1, hidden=2, intermediate=2)
TOPOLOGY = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2)
FIRST = Placement(np.array([[0, 1, 2, -1]]), num_experts=3, generation=1)
SECOND = Placement(np.array([[0, 1, 0, 2]]), num_experts=3, generation=2)
UNEVEN = ([60, 20], [20, 0])  # tokens in the slots of each rank: imbalance 1.6


def begin_run(
    store: StateStore,
    run: str = "a",
    at: float = 0.0,
    *,
    model: ModelShape = MODEL,
    topology: Topology = TOPOLOGY,
    window_steps: int = 1,
    window_seconds: float = 0.0,
) -> None:
    """Describe a run to its store."""
    shapes = model_to_dict(model), topology_to_dict(topology)
    store.begin_run(RunInfo(run, at, *shapes, window_steps, window_seconds))


def sample(
    rank: int,
    window: int,
    tokens: Any,
    placement: Placement = FIRST,
    *,
    run: str = "a",
    at: float = 0.0,
    steps: int = 1,
    phase: Phase = "mixed",
    topology: Topology = TOPOLOGY,
) -> LoadSample:
    """One rank's load in a window: ``tokens`` of each slot, in one layer or [L, C]."""
    first, held = steps * window, placement.slot_to_expert[:, topology.slots_on(rank)]
    load = np.atleast_2d(tokens)
    when = at, first, first + steps - 1, phase
    return LoadSample("d", run, rank, window, *when, placement.generation, held, load)


def serve(
    store: StateStore, window: int = 0, received: Sequence[Any] = UNEVEN, **others: Any
) -> None:
    """Have every rank report a window."""
    for rank, tokens in enumerate(received):
        store.append([sample(rank, window, tokens, **others)])
