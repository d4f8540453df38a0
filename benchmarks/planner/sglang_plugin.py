"""Imbalance under SGLang's ``static`` rule of the maps that the plug-in installs.

    python -m benchmarks.planner.sglang_plugin [--first-seed 101] [--seeds 20] [--layers 12]

Questions and answers are the plug-in's own records, as between the engine's rank 0 and its planner
process. A plan sees 8 windows and is judged on the next one, which it has not seen, by the slot
that each source rank uses. The first plan starts from the engine's trivial map, re-plans from the
first one after a drift of each expert's popularity (lognormal 0.2). *engine's draws* is a fresh
plan made for the draws of SGLang's own ``static`` rule, as `eplb plan` makes it for a file;
*engine* the published algorithm under that rule. 256 experts, 288 slots, 32 ranks on 4 nodes,
lognormal(1.0), 1,000,000 token choices in a layer and window, tokens starting alike on all ranks;
three dense rows before the layers, as DeepSeek-V3 has them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.planner.plan import numpy_greedy
from eplb import DispatchRule, Placement, Topology, effective_shares, imbalance, plan
from rebalance.engines.sglang.planner.planning import (
    Observed,
    Planned,
    Terms,
    answer,
    answer_of,
    request_record,
)

EXPERTS, SLOTS, RANKS, NODES, DENSE = 256, 288, 32, 4, 3
WINDOWS, CHOICES, DRIFT = 8, 1_000_000, 0.2
TARGET = 1.03
V3_BYTES = 44_050_944  # of one expert in FP8 with its scales
TOPOLOGY = Topology.uniform(NODES, RANKS // NODES, SLOTS // RANKS)
TERMS = Terms("static", RANKS, NODES, 1, V3_BYTES, 64, 60.0, 1.02, 1.0)
REPLANS = {
    "re-plan, default": replace(TERMS, max_moved=0.1),
    "re-plan, max_moved 0.2": replace(TERMS, max_moved=0.2),
    "re-plan, no limit": TERMS,
    "default again, same load": replace(TERMS, max_moved=0.1),
}


def by_share(held: NDArray[np.int64], share: NDArray[np.float64], tokens: NDArray[np.int64]):
    """[L] imbalance of the layers."""
    placement = Placement(held.astype(np.int32), EXPERTS, 0, share)
    return imbalance(tokens, placement, TOPOLOGY)[DENSE:]


def by_sources(planned: Planned, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """[L] imbalance of the layers, by the slot that each source rank uses."""
    rank = planned.sources // (SLOTS // RANKS)  # [L, E, R]
    loads = np.zeros((len(tokens), RANKS))
    rows = np.broadcast_to(np.arange(len(tokens))[:, None, None], rank.shape)
    np.add.at(loads, (rows, rank), tokens[..., None] / RANKS)
    return (loads.max(axis=1) / np.maximum(loads.mean(axis=1), 1e-9))[DENSE:]


def near(slots: NDArray[np.int64], tokens: NDArray[np.int64]) -> float:
    """Part of the tokens whose slot is on their own node, from slots [L, E, R]."""
    node = slots // (SLOTS // NODES)
    own = node == np.arange(RANKS) // (RANKS // NODES)
    return float((own.mean(axis=2) * tokens).sum() / tokens.sum())


def nearest(held: NDArray[np.int64], tokens: NDArray[np.int64]) -> float:
    """The same where each source uses a slot of its own node whenever there is one."""
    is_on = np.zeros((*tokens.shape, NODES), dtype=np.bool_)
    rows, node = np.arange(len(held))[:, None], np.arange(SLOTS) // (SLOTS // NODES)
    is_on[rows, held, node] = True
    return float((is_on.mean(axis=2) * tokens).sum() / tokens.sum())


def cells(values: Iterable[NDArray[np.float64]]) -> str:
    """Median, p99 and largest over seeds of the mean over layers; and the worst layer."""
    layers = np.stack(list(values))
    means = layers.mean(axis=1)
    mark = "!" if means.max() > TARGET else ""
    numbers = (np.median(means), np.quantile(means, 0.99), means.max())
    return " | ".join(f"{number:.3f}" for number in numbers) + f"{mark} | {layers.max():.3f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first-seed", type=int, default=101)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--layers", type=int, default=12)
    arguments = parser.parse_args()
    rows = DENSE + arguments.layers
    movable = np.arange(rows) >= DENSE
    trivial = np.tile(np.arange(SLOTS) % EXPERTS, (rows, 1))
    found: dict[str, list[NDArray[np.float64]]] = {}
    moved: dict[str, list[float]] = {}
    seconds: dict[str, list[float]] = {}
    local: list[tuple[float, float]] = []
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        random = np.random.default_rng(seed)
        popularity = random.lognormal(0, 1.0, (rows, EXPERTS))
        drifted = popularity * random.lognormal(0, DRIFT, popularity.shape)
        loads = []
        for weight in (popularity, drifted):
            mean = weight / weight.sum(axis=1, keepdims=True) * CHOICES
            load = random.poisson(mean, (WINDOWS + 1, *mean.shape))
            load[:, :DENSE] = 0
            loads.append(load)

        def note(name: str, score: NDArray[np.float64], part: float, begin: float) -> None:
            found.setdefault(name, []).append(score)
            moved.setdefault(name, []).append(part)
            seconds.setdefault(name, []).append(time.process_time() - begin)

        def rule(held: NDArray[np.int64]) -> NDArray[np.float64]:
            placement = Placement(held.astype(np.int32), EXPERTS)
            share = effective_shares(placement, TOPOLOGY, DispatchRule.SGLANG_STATIC)
            return share.clip(0, 1)

        seen, unseen = loads[0][:-1], loads[0][-1]
        begin = time.process_time()
        note("trivial map", by_share(trivial, rule(trivial), unseen), 0.0, begin)
        begin = time.process_time()
        published = numpy_greedy(seen.sum(axis=0) + 1, SLOTS, RANKS)
        note("engine", by_share(published, rule(published), unseen), 1.0, begin)
        begin = time.process_time()
        aware = plan(seen, TOPOLOGY, dispatch=DispatchRule.SGLANG_STATIC).target.slot_to_expert
        note("engine's draws", by_share(aware, rule(aware), unseen), 1.0, begin)
        begin = time.process_time()
        zeros = np.zeros_like(trivial)
        first = answer_of(answer(request_record(Observed(seen, trivial, zeros, movable), TERMS)))
        part = float((first.slot_to_expert != trivial)[DENSE:].mean())
        note("first plan", by_sources(first, unseen), part, begin)
        rest = unseen[DENSE:]
        local.append((near(first.sources[DENSE:], rest), nearest(aware[DENSE:], rest)))
        seen, unseen = loads[1][:-1], loads[1][-1]
        note("after drift 0.2", by_sources(first, unseen), 0.0, time.process_time())
        replanned = {}
        for name, terms in REPLANS.items():
            begin = time.process_time()
            last = replanned["re-plan, default"] if "again" in name else first
            observed = Observed(seen, last.slot_to_expert, last.weights, movable)
            planned = replanned[name] = answer_of(answer(request_record(observed, terms)))
            part = float((planned.slot_to_expert != last.slot_to_expert)[DENSE:].mean())
            note(name, by_sources(planned, unseen), part, begin)
    print("| | median | p99 | largest | worst layer | slots changed | CPU s, median |")
    print("|---|---|---|---|---|---|---|")
    for name, values in found.items():
        figures = f"{np.mean(moved[name]):.1%} | {np.median(seconds[name]):.2f}"
        print(f"| {name} | {cells(values)} | {figures} |")
    ours, engines = np.mean(local, axis=0)
    print(f"tokens to their own node: first plan {ours:.1%}, engine's draws {engines:.1%}")


if __name__ == "__main__":
    main()
