"""How fast new shares are found, and what redundancy by benefit saves: two tables, fixed seeds.

    python benchmarks/shares_and_slots.py

"kernel" finds the best shares; "whole" is all of ``resplit``, with its checks and a placement.
Loads are lognormal(1.0) that drifted by lognormal(0.2) since the placement was planned; windows
differ by lognormal(0.05). Best of several runs, one thread, compilation not counted.

The second table gives slots to 58 layers of a recorded shape (Gamma 4.7), one in fifteen with an
expert of 5 to 50 % of the tokens. Eight windows that fluctuate by lognormal(0.15) are planned on
and eight more are not seen; each layer is planned on the slots that it was given.
"""

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from eplb import Problem, Topology, imbalance, plan
from eplb.load import as_history
from eplb.redundancy import allocate_redundancy, slots_per_layer
from eplb.resplit import ranks_of, resplit
from eplb.split import split_layers

RUNS = 7
SIZES = ((58, 256, 32, 9), (60, 384, 32, 13), (10, 1024, 1024, 2), (10, 1024, 1024, 3))
LAYERS, EXPERTS, RANKS = 58, 256, 32
WIDE = Topology.uniform(num_nodes=4, ranks_per_node=8, slots_per_rank=12)

Load = NDArray[np.int64]


def milliseconds(call: Callable[[], object]) -> float:
    call()
    times = []
    for _ in range(RUNS):
        begin = perf_counter()
        call()
        times.append(perf_counter() - begin)
    return min(times) * 1000


def shares() -> Table:
    table = Table("layers x experts, slots, ranks", "windows", box=SIMPLE_HEAD)
    for heading in ("kernel ms a layer", "whole ms a layer", "equal", "best shares"):
        table.add_column(heading, justify="right")
    for layers, experts, ranks, slots in SIZES:
        topology = Topology.uniform(ranks // 8, 8, slots)
        rng = np.random.default_rng(0)
        load = np.rint(rng.lognormal(0, 1, (layers, experts)) * 1e5).astype(np.int64)
        placement = plan(load, topology, policy="greedy").target
        drifted = load * rng.lognormal(0, 0.2, load.shape)
        for windows in (1, 16):
            tokens = np.rint(drifted * rng.lognormal(0, 0.05, (windows, *load.shape)))
            history = as_history(tokens.astype(np.int64))
            work = np.ascontiguousarray(Problem(history, topology).scaled)
            alike = np.full(windows, 1 / windows)
            held = placement.slot_to_expert.astype(np.int64)
            kernel = (work, alike, held, ranks_of(topology))
            fast = milliseconds(lambda kernel=kernel: split_layers(*kernel)) / layers
            whole = milliseconds(
                lambda history=history, held=placement, on=topology: resplit(history, held, on)
            )
            _, objective = split_layers(*kernel)
            equal, best = objective.mean(axis=0)
            table.add_row(
                f"{layers} x {experts}, {topology.num_slots}, {ranks}",
                *(str(windows), f"{fast:.2f}", f"{whole / layers:.2f}"),
                *(f"{equal:.4f}", f"{best:.4f}"),
            )
    return table


def skewed() -> NDArray[np.float64]:
    rng = np.random.default_rng(0)
    load = rng.gamma(4.7, size=(LAYERS, EXPERTS))
    for layer in range(0, LAYERS, 15):
        load[layer, rng.integers(EXPERTS)] = rng.uniform(0.05, 0.5) * load[layer].sum()
    return load / load.sum(axis=1, keepdims=True) * 1e6


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
    load, rng = skewed(), np.random.default_rng(1)
    seen, unseen = (
        np.rint(load * rng.lognormal(0, 0.15, (8, *load.shape))).astype(np.int64) for _ in range(2)
    )
    table = Table("slots beyond one per expert", "seen", "unseen", box=SIMPLE_HEAD)
    for each, name in ((8, "none"), (9, "32 in every layer")):
        ratios = judged(seen, unseen, np.full((LAYERS, RANKS), each))
        table.add_row(name, *(f"{ratio:.4f}" for ratio in ratios))
    uniform = LAYERS * RANKS
    for part in (1.0, 0.7, 0.5, 0.25):
        slots = allocate_redundancy(seen, WIDE, LAYERS * EXPERTS + int(part * uniform))
        ratios = judged(seen, unseen, slots_per_layer(slots, WIDE))
        used = int(slots.sum()) - LAYERS * EXPERTS
        name = f"{used} of {uniform}, by benefit"
        table.add_row(name, *(f"{ratio:.4f}" for ratio in ratios))
    return table


def main() -> None:
    console = Console(width=118)
    console.print(shares())
    console.print(redundancy())


if __name__ == "__main__":
    main()
