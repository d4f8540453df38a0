"""What a cordoned or drained rank costs: time of a plan, moves, and imbalance of what follows.

    python -m benchmarks.operating.cordoned_plans --ranks 32 --slots 9 --repeats 5

Each row plans from the placement of a plan on other load of the same heat, with 16 windows. The
imbalance is of the ranks that may hold experts.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import numpy as np

from eplb.core.constraints import Constraints, room_of
from eplb.core.load import LoadHistory
from eplb.core.topology import Topology
from eplb.fitting.cordons import Cordon, Cordons, fitting_cordons, slots_in_use
from eplb.planner import Plan, plan

WINDOWS, TOKENS = 16, 1000.0


def main() -> None:
    """Print one table."""
    asked = argparse.ArgumentParser()
    for name, value in (("layers", 58), ("experts", 256), ("ranks", 32), ("slots", 9)):
        asked.add_argument(f"--{name}", type=int, default=value)
    asked.add_argument("--nodes", type=int, default=4)
    asked.add_argument("--repeats", type=int, default=5)
    asked.add_argument("--seed", type=int, default=0)
    args = asked.parse_args()
    rng = np.random.default_rng(args.seed)
    shape = (args.layers, args.experts)
    topology = Topology.uniform(args.nodes, args.ranks // args.nodes, args.slots)
    heat = rng.lognormal(size=shape)
    current = plan(_windows(rng, heat), topology).target
    later = _windows(rng, heat * rng.lognormal(sigma=0.3, size=shape))
    last = args.ranks - 1
    rows: tuple[tuple[str, Cordons], ...] = (
        ("none", {}),
        ("1 cordoned", {last: Cordon.CORDON}),
        ("2 cordoned", {last: Cordon.CORDON, 0: Cordon.CORDON}),
        ("1 drained", {last: Cordon.DRAIN}),
        ("2 drained", {last: Cordon.DRAIN, 0: Cordon.DRAIN}),
    )
    print("| cordons | plan, ms, median | moves | imbalance before | after | held when drained |")
    print("|---|---|---|---|---|---|")
    for name, cordons in rows:
        times, found = [], None
        for _ in range(args.repeats + 1):
            begun = time.perf_counter()
            fitting = fitting_cordons(cordons, current, topology)
            if fitting.unmet:
                print(f"| {name} | refused: {fitting.unmet[0]} |")
                break
            slots = None
            if fitting.cordoned:
                slots = fitting.limited(room_of(Constraints(), fitting.topology, shape[0]), current)
            limits = Constraints(slots=slots, pinned=dict(fitting.kept))
            found = plan(later, fitting.topology, current=current, constraints=limits)
            times.append(time.perf_counter() - begun)
        if found is not None:
            print(_row(name, found, times[1:]))  # the first one compiles


def _windows(rng: np.random.Generator, heat: np.ndarray) -> LoadHistory:
    part = heat / heat.sum(axis=1, keepdims=True) * heat.shape[1]
    return LoadHistory(rng.poisson(TOKENS * part, size=(WINDOWS, *heat.shape)))


def _row(name: str, found: Plan, times: list[float]) -> str:
    topology = found.topology
    held = int(slots_in_use(found.target, topology)[:, topology.drained].sum())
    return (
        f"| {name} | {1000 * median(times):.0f} | {found.num_moves} | {found.before:.3f} | "
        f"{found.after:.3f} | {held} |"
    )


if __name__ == "__main__":
    main()
