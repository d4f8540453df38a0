"""Random migrations of a few experts, one after the other, for ranks that serve meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from api.demo.workers.plan import DEPLOYMENT, WorkerPlan
from benchmarks.publishing import Publisher
from benchmarks.ranks.workers import random_placement
from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.migration.build import Migration, Pace, build_migration
from telemetry import open_store
from telemetry.store import LoadStore

MOVES_PER_LAYER = 4  # into one rank
LAYERS_PER_MIGRATION = 2
POLL_S = 0.01


def publisher_of(plan: WorkerPlan, steps: Callable[[], int], swap_every: int) -> Publisher:
    """Publish random migrations, each once ``steps`` says that it is due."""
    store = open_store(plan.store, DEPLOYMENT)
    return Publisher(store, RandomPlans(store, plan, steps, swap_every).next, poll_s=POLL_S)


class RandomPlans:
    """Makes migrations of two swaps, seeded; one is due ``swap_every`` steps a swap after another.

    Args:
        store: numbers the plans.
        steps: how many were served so far.
    """

    def __init__(
        self, store: LoadStore, plan: WorkerPlan, steps: Callable[[], int], swap_every: int
    ) -> None:
        self._store, self._plan, self._steps = store, plan, steps
        self._swap_every, self._due = swap_every, swap_every
        self._random = np.random.default_rng(plan.seed)

    def next(self, base: Placement) -> Migration | None:
        """Lead from ``base``, which is committed, to a random placement near it, when it is due."""
        if self._steps() < self._due:
            return None
        plan, topology = self._plan, self._plan.topology
        fresh = in_place(base, random_placement(plan, self._random), topology)
        # Two layers at a time, and in place where an expert stays: a few moves, as a plan has.
        layers = self._random.choice(
            plan.model.num_layers, size=LAYERS_PER_MIGRATION, replace=False
        )
        target = base.with_layers(fresh, layers.tolist())
        # As much as one layer needs: each layer is a transaction, and a swap, of its own.
        pace = Pace(max(1, most_moves(base, target, topology)))
        plan_id = self._store.next_plan_id()
        made = build_migration(base, target, topology, plan_id=plan_id, pace=pace)
        self._due = self._steps() + LAYERS_PER_MIGRATION * self._swap_every
        return made


def most_moves(base: Placement, target: Placement, topology: Topology) -> int:
    """Experts that one layer brings into one rank, at most."""
    is_new = base.slot_to_expert != target.slot_to_expert
    per_rank = [
        is_new[:, topology.slots_on(rank)].sum(axis=1) for rank in range(topology.num_ranks)
    ]
    return int(np.max(per_rank))


def in_place(base: Placement, fresh: Placement, topology: Topology) -> Placement:
    """``MOVES_PER_LAYER`` changed experts a rank at most; the others stay where they are."""
    held = base.slot_to_expert.copy()
    for layer, wanted in zip(held, fresh.slot_to_expert, strict=True):
        for rank in range(topology.num_ranks):
            span = topology.slots_on(rank)
            new = np.setdiff1d(wanted[span], layer[span])[:MOVES_PER_LAYER]
            for expert in new.tolist():
                slot = replaceable(layer, span, base.num_experts)
                if slot is not None:
                    layer[slot] = expert
    return Placement(held, base.num_experts, base.generation)


def replaceable(layer: NDArray[np.int32], span: slice, num_experts: int) -> int | None:
    """The first slot in ``span`` that is EMPTY, or whose expert another slot holds too."""
    count = np.bincount(layer[layer != EMPTY], minlength=num_experts)
    for slot in range(span.start, span.stop):
        if layer[slot] == EMPTY or count[layer[slot]] > 1:
            return slot
    return None
