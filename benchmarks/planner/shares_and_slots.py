"""How fast new shares are found, and what redundancy by benefit saves: two tables, fixed seeds.

    python -m benchmarks.planner.shares_and_slots

"kernel" finds the best shares; "whole" is all of ``resplit``, with its checks and a placement.
Loads are lognormal(1.0) that drifted by lognormal(0.2) since the placement was planned; windows
differ by lognormal(0.05). Medians of the calling thread's own time, compilation not counted;
"ratio" is the whole call over the numpy greedy of ``benchmarks/planner/plan.py`` in the same run.

The second table gives slots to 58 layers of 256 experts on 32 ranks, skewed as recorded ones are:
gamma profiles of shape 0.7 to 4.8, and in 3 layers one expert that 5 to 50 % of the tokens choose
among their eight. A window mixes four domains, each lognormal(0.15) off the profile, and is a draw
of 16,384 tokens. Eight windows are planned on and eight more are not seen; each layer is planned on
the slots that it was given. Means over three seeds.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.planner.plan import median_ms, numpy_greedy
from eplb import Problem, Topology, imbalance, plan
from eplb.core.load import as_history
from eplb.core.zones import ranks_of
from eplb.decision.redundancy import allocate_redundancy, slots_per_layer
from eplb.shares.resplitting import resplit
from eplb.shares.solver import split_layers

RUNS = 7
SIZES = ((58, 256, 32, 9), (60, 384, 32, 13), (10, 1024, 1024, 2), (10, 1024, 1024, 3))
LAYERS, EXPERTS, RANKS, TOP_K, TOKENS, SEEDS = 58, 256, 32, 8, 16_384, 3
WIDE = Topology.uniform(num_nodes=4, ranks_per_node=8, slots_per_rank=12)

Load = NDArray[np.int64]


def shares() -> Table:
    table = Table("layers x experts, slots, ranks", "windows", box=SIMPLE_HEAD)
    for heading in ("kernel ms a layer", "whole ms a layer", "ratio", "equal", "best shares"):
        table.add_column(heading, justify="right")
    for layers, experts, ranks, slots in SIZES:
        topology = Topology.uniform(ranks // 8, 8, slots)
        rng = np.random.default_rng(0)
        load = np.rint(rng.lognormal(0, 1, (layers, experts)) * 1e5).astype(np.int64)
        placement = plan(load, topology, policy="greedy").target
        plain = median_ms(
            lambda load=load, on=topology: numpy_greedy(load, on.num_slots, on.num_ranks), 1
        )
        drifted = load * rng.lognormal(0, 0.2, load.shape)
        for windows in (1, 16):
            tokens = np.rint(drifted * rng.lognormal(0, 0.05, (windows, *load.shape)))
            history = as_history(tokens.astype(np.int64))
            work = np.ascontiguousarray(Problem(history, topology).scaled)
            alike = np.full(windows, 1 / windows)
            held = placement.slot_to_expert.astype(np.int64)
            kernel = (work, alike, held, ranks_of(topology))
            fast = median_ms(lambda kernel=kernel: split_layers(*kernel), RUNS) / layers
            whole = median_ms(
                lambda history=history, held=placement, on=topology: resplit(history, held, on),
                RUNS,
            )
            _, objective = split_layers(*kernel)
            equal, best = objective.mean(axis=0)
            table.add_row(
                f"{layers} x {experts}, {topology.num_slots}, {ranks}",
                *(str(windows), f"{fast:.2f}", f"{whole / layers:.2f}"),
                *(f"{whole / plain:.3f}", f"{equal:.4f}", f"{best:.4f}"),
            )
    return table


def skewed(rng: np.random.Generator) -> NDArray[np.float64]:
    """[L, E] part of the layer's choices that each expert gets."""
    shape = rng.uniform(0.7, 4.8, (LAYERS, 1))
    load = rng.gamma(np.broadcast_to(shape, (LAYERS, EXPERTS))) + 1e-6
    load /= load.sum(axis=1, keepdims=True)
    for layer in rng.choice(LAYERS, 3, replace=False):
        part = rng.uniform(0.05, 0.5) / TOP_K
        load[layer] *= 1 - part
        load[layer, rng.integers(EXPERTS)] = part
    return load


def windows(rng: np.random.Generator, load: NDArray[np.float64]) -> tuple[Load, Load]:
    """Eight windows that are seen and eight that are not, [T, L, E] each."""
    bend = rng.lognormal(0, 0.15, (4, *load.shape))
    drawn = []
    for _ in range(16):
        profile = load * np.tensordot(rng.dirichlet(np.full(4, 2.0)), bend, 1)
        profile = np.minimum(profile / profile.sum(axis=1, keepdims=True), 1 / TOP_K)
        profile /= profile.sum(axis=1, keepdims=True)
        drawn.append(rng.multinomial(TOKENS * TOP_K, profile))
    return np.array(drawn[:8]), np.array(drawn[8:])


def judged(seen: Load, unseen: Load, usable: NDArray[np.int64]) -> tuple[float, float]:
    """Mean imbalance of seen and unseen windows when every layer is planned on its own slots."""
    ratios = []
    for layer, slots in enumerate(usable):
        own = replace(WIDE, slots_of_rank=slots.astype(np.int32))
        target = plan(seen[:, layer : layer + 1], own).target
        ratios.append(
            [imbalance(load[:, layer : layer + 1], target, own).mean() for load in (seen, unseen)]
        )
    before, after = np.mean(ratios, axis=0)
    return float(before), float(after)


def redundancy() -> Table:
    uniform = LAYERS * RANKS
    found: dict[str, list[tuple[float, float, int]]] = {}
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        seen, unseen = windows(rng, skewed(rng))
        for each, name in ((8, "none"), (9, "32 in every layer")):
            usable = np.full((LAYERS, RANKS), each)
            used = int(usable.sum()) - LAYERS * EXPERTS
            found.setdefault(name, []).append((*judged(seen, unseen, usable), used))
        for part in (1.0, 0.7, 0.5, 0.25):
            slots = allocate_redundancy(seen, WIDE, LAYERS * EXPERTS + int(part * uniform))
            ratios = judged(seen, unseen, slots_per_layer(slots, WIDE))
            used = int(slots.sum()) - LAYERS * EXPERTS
            found.setdefault(f"by benefit, at most {part:.0%}", []).append((*ratios, used))
    table = Table("slots beyond one per expert", box=SIMPLE_HEAD)
    for heading in ("used", "seen", "unseen"):
        table.add_column(heading, justify="right")
    for name, rows in found.items():
        before, after, used = np.mean(rows, axis=0)
        table.add_row(name, f"{used:.0f}", f"{before:.4f}", f"{after:.4f}")
    return table


def main() -> None:
    console = Console(width=118)
    console.print(shares())
    console.print(redundancy())


if __name__ == "__main__":
    main()
