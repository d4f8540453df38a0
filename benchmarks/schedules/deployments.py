"""Deployments of the schedules: ranks, their slots, and placements to move between.

Building a migration takes longer than a whole schedule, so there is a fixed number of deployments,
and their migrations are cached. Migrations are frozen: schedules share nothing that they change.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, fields
from functools import cache

import numpy as np

from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.errors import MigrationError, PlacementError
from eplb.migration.build import Migration, Mode, Pace, build_migration

NUM_DEPLOYMENTS = 60
NUM_RANKS = 3
HOSTS = ([0, 0, 0], [0, 0, 1], [0, 1, 2])
MOST_CACHED = 4000  # migrations of a deployment


class CachedMigration(Migration):
    """A migration that computes each placement once for all three ranks."""

    def placement_after(self, num_transactions: int) -> Placement:
        """The placement that serves once the first ``num_transactions`` are applied."""
        known: dict[int, Placement] = self.__dict__.setdefault("known", {})
        if num_transactions not in known:
            known[num_transactions] = super().placement_after(num_transactions)
        return known[num_transactions]


@dataclass
class Deployment:
    """One set of ranks, and target placements."""

    topology: Topology
    pace: Pace
    start: Placement
    targets: tuple[Placement, ...]
    known: dict[tuple[object, ...], Migration | None] = field(default_factory=dict)

    def migration(
        self, base: Placement, target: int, plan_id: int, version: int
    ) -> Migration | None:
        """The migration from ``base`` to a target; None where there is nothing to do."""
        key = (base.hash, base.generation, target, plan_id, version)
        if key not in self.known:
            if len(self.known) > MOST_CACHED:
                self.known.clear()
            self.known[key] = self._build(base, self.targets[target], plan_id, version)
        return self.known[key]

    def _build(
        self, base: Placement, target: Placement, plan_id: int, version: int
    ) -> Migration | None:
        try:
            built = build_migration(
                base,
                target,
                self.topology,
                plan_id=plan_id,
                pace=self.pace,
                weights_version=version,
            )
        except (MigrationError, PlacementError):
            return None  # e.g. a mix of layers that the target cannot follow with these spares
        if not built.transactions:
            return None
        return CachedMigration(**{one.name: getattr(built, one.name) for one in fields(built)})


@cache
def deployment(number: int) -> Deployment:
    """One of NUM_DEPLOYMENTS, always the same."""
    rng = random.Random(1000 + number)
    mode: Mode = rng.choice(["copy", "flip"])
    num_layers, num_experts, filled = rng.randint(2, 4), rng.choice([3, 4]), 2
    spares = rng.choice([1, 2]) if mode == "flip" else 0
    num_slots = filled + spares
    pace = Pace(
        staging_experts=0 if mode == "flip" else rng.randint(2, 4),
        transactions_per_commit=rng.choice([1, 1, 2]),
        mode=mode,
        spare_slots=spares,
        layers_per_transaction=rng.choice([0, 1, 1, 2]),
    )
    topology = Topology(
        np.zeros(NUM_RANKS, dtype=np.int32),
        np.full(NUM_RANKS, num_slots, dtype=np.int32),
        host_of_rank=np.array(rng.choice(HOSTS), dtype=np.int32),
    )

    def placement() -> Placement:
        rows = [_row(rng, num_experts, filled, num_slots) for _ in range(num_layers)]
        return Placement(np.array(rows), num_experts)

    return Deployment(topology, pace, placement(), tuple(placement() for _ in range(3)))


def _row(rng: random.Random, num_experts: int, filled: int, num_slots: int) -> list[int]:
    """One layer: every expert somewhere, none twice on a rank."""
    while True:
        held = [rng.sample(range(num_experts), filled) for _ in range(NUM_RANKS)]
        if len({expert for experts in held for expert in experts}) == num_experts:
            spare = [EMPTY] * (num_slots - filled)
            return [expert for experts in held for expert in experts + spare]
