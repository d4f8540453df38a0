"""A store as a deployment leaves it: windows of load, a rebalance, a restart, events.

    fill(store, Size(ranks=320), now)

Everything is drawn with one seed; times end at ``now``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from eplb import LoadSample, ModelShape, Placement, Topology, build_migration
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from telemetry.store import REPORT_EVERY_S, LoadStore, RankState, RunInfo

RANKS_PER_NODE = 8
SPARE_SLOTS = 32


@dataclass(frozen=True)
class Size:
    """How large the deployment is, and how much history it has."""

    ranks: int = 32
    layers: int = 58
    experts: int = 256
    windows: int = 120
    window_s: float = 5.0
    events: int = 100
    silent: tuple[int, ...] = ()
    seed: int = 0


class Now:
    """The clock of a store that is filled: the time that was set."""

    def __init__(self, time: float) -> None:
        self.time = time

    def __call__(self) -> float:
        """Return the time that was set."""
        return self.time


def fill(store: LoadStore, size: Size, clock: Now) -> None:
    """Write a run that was restarted half-way, with a rebalance in its second half."""
    rng, now = np.random.default_rng(size.seed), clock.time
    slots = -(-(size.experts + SPARE_SLOTS) // size.ranks)
    topology = Topology.uniform(
        num_nodes=max(1, size.ranks // RANKS_PER_NODE),
        ranks_per_node=min(size.ranks, RANKS_PER_NODE),
        slots_per_rank=slots,
    )
    layers = tuple(range(3, 3 + size.layers))
    model = ModelShape(layers, num_experts=size.experts, top_k=8, hidden=7168, intermediate=2048)
    first, second = (
        _placement(size, slots * size.ranks, shift, generation)
        for shift, generation in ((0, 1), (1, 2))
    )
    shapes = model_to_dict(model), topology_to_dict(topology)
    hot = rng.gamma(2.0, 1.0, (size.layers, size.experts))
    start, half = now - size.windows * size.window_s, size.windows // 2
    clock.time = start
    store.begin_run(RunInfo("run-1", start, *shapes, window_steps=100))
    store.commit(first, expected=None, reason="start")
    store.append(list(_samples(store, size, topology, first, hot, "run-1", range(half), start)))
    clock.time = start + half * size.window_s
    store.begin_run(RunInfo("run-2", start + half * size.window_s, *shapes, window_steps=100))
    third = half + half // 2
    middle = range(third - half)
    at = start + half * size.window_s
    store.append(list(_samples(store, size, topology, first, hot, "run-2", middle, at)))
    clock.time = start + third * size.window_s
    _rebalance(store, first, second, topology)
    last = range(third - half, size.windows - half)
    store.append(list(_samples(store, size, topology, second, hot * 0.3 + 1, "run-2", last, at)))
    between_s = (now - clock.time) / (size.events + 1)
    for number in range(size.events):
        clock.time += between_s
        decided = {"decision": "KEEP", "policy": "auto", "generation": 2, "window": number}
        why = {"reason": f"gain {number % 5}.2% < 5% of the mean load; window {number}"}
        store.add_event("plan", decided | why | {"imbalance_before": 1.2, "imbalance_after": 1.19})
    clock.time = now
    for rank in range(size.ranks):
        age_s = 400.0 if rank in size.silent else 0.0
        # Silent after three minutes: nobody reports again while the page is measured.
        detail = {
            REPORT_EVERY_S: 60.0,
            "step_ms": 41.0 + rank % 3,
            "bytes_by_source": {"peer": 44_000_000 * (rank % 4)},
        }
        detail |= {"experts_moved": rank % 4, "swap_pauses_ms": [0.8 + 0.1 * (rank % 7)]}
        store.report(
            RankState(
                "run-2", rank, now - age_s, 100 * size.windows, 2, "idle", 0, 0, 1, 0, detail=detail
            )
        )
    store.acquire_lease("gpu7:4242:9f31c2aa-8812345-5be012", 3600.0)


def _placement(size: Size, num_slots: int, shift: int, generation: int) -> Placement:
    ids = np.arange(num_slots) % size.experts
    ids[-1] = (ids[-1] + 7 * shift) % size.experts  # one replica more of another expert
    return Placement(np.tile(ids, (size.layers, 1)), size.experts, generation)


def _samples(
    store: LoadStore,
    size: Size,
    topology: Topology,
    placement: Placement,
    hot: np.ndarray,
    run: str,
    windows: range,
    start: float,
) -> Iterator[LoadSample]:
    rng = np.random.default_rng([size.seed, windows.start])
    replicas = placement.replica_count  # [L, E]
    for window in windows:
        load = rng.poisson(hot * 400) / np.maximum(1, replicas)
        of_slot = np.take_along_axis(load, placement.slot_to_expert, axis=1).astype(np.int64)
        for rank in range(size.ranks):
            held = topology.slots_on(rank)
            yield LoadSample(
                store.deployment,
                run,
                rank,
                window,
                start + (window + 1) * size.window_s - 0.5,
                100 * window,
                100 * window + 99,
                "decode",
                placement.generation,
                placement.slot_to_expert[:, held],
                of_slot[:, held],
            )


def _rebalance(store: LoadStore, before: Placement, after: Placement, topology: Topology) -> None:
    store.add_event(
        "plan",
        {
            "decision": "MOVE",
            "reason": "imbalance 1.62 to 1.18 pays its 3.1 s of transfers back within 40 s",
            "policy": "auto",
            "trigger": "load",
            "imbalance_before": 1.62,
            "imbalance_after": 1.18,
            "moves": 64,
            "bytes": 64 * 44_000_000,
            "generation": before.generation,
        },
    )
    migration = build_migration(before, after, topology, plan_id=store.next_plan_id())
    store.publish(migration)
    store.commit(
        after, expected=before.generation, plan_id=migration.plan_id, reason="every rank swapped"
    )
    store.add_event(
        "promise", {"generation": 2, "promised": 0.44, "given": 0.39, "record": [0.44, 0.39]}
    )
