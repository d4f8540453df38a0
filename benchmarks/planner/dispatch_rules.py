"""What plans are worth under an engine's dispatch rule, and what redundancy is worth at all.

    python -m benchmarks.planner.dispatch_rules [--layers 12] [--seed 1]

*none* is one slot for each expert in order, *booked* and *unaware* the published balancer's
algorithm (replicate the hottest, pack heaviest first; for vllm-ascend this project's greedy, which
puts no expert on a rank twice) by an equal split and under the rule, *aware* a plan made for the
rule. Lognormal loads of fixed seeds, tokens starting alike on all ranks; means
of max / mean over layers, and milliseconds of the calling thread's work for each layer, after one
call that is not counted. A target that is missed is marked with "!".
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from time import thread_time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.planner.plan import numpy_greedy
from eplb import (
    DispatchRule,
    Placement,
    Topology,
    effective_shares,
    imbalance,
    plan,
    redundancy_price,
)

Load = NDArray[np.int64]
AHEAD = 0.03  # of booked imbalance, at most, unless the bound says more
EP32 = 1.03  # of 256 experts in 288 slots on 32 ranks, lognormal(1.0)
V3_BYTES = 44_050_944  # of one expert in FP8 with its scales
KV_CACHE = 40 * 2**30  # of a rank without redundancy


class Case(NamedTuple):
    """A deployment, and how uneven its load is."""

    experts: int
    slots: int
    ranks: int
    per_node: int
    sigma: float

    @property
    def topology(self) -> Topology:
        """Nodes of equal ranks of equal slots."""
        nodes = max(1, self.ranks // self.per_node)
        return Topology.uniform(nodes, self.ranks // nodes, self.slots // self.ranks)

    def draw(self, layers: int, seed: int) -> Load:
        """Lognormal tokens of each expert."""
        drawn = np.random.default_rng(seed).lognormal(0, self.sigma, (layers, self.experts))
        return np.rint(drawn * 1e4).astype(np.int64)


CASES = (
    Case(128, 144, 8, 8, 0.6),
    Case(128, 144, 8, 8, 1.0),
    Case(128, 144, 8, 8, 1.4),
    Case(256, 288, 16, 8, 1.0),
    Case(256, 288, 32, 8, 0.6),
    Case(256, 288, 32, 8, 1.0),
    Case(256, 288, 32, 8, 1.4),
    Case(256, 288, 32, 32, 1.0),
    Case(256, 320, 64, 8, 1.0),
)


class Columns(NamedTuple):
    """What a placement that knows nothing of the rule makes of a load."""

    none: float
    booked: float
    unaware: float


def under(rule: DispatchRule, load: Load, placement: Placement, topology: Topology) -> float:
    """Mean imbalance under a rule."""
    shares = effective_shares(placement, topology, rule)
    held = Placement(placement.slot_to_expert, placement.num_experts, slot_share=shares)
    return float(imbalance(load, held, topology).mean())


def columns(case: Case, rule: DispatchRule, load: Load) -> Columns:
    """No balancing, and the published algorithm booked and under the rule."""
    once = Topology.uniform(1, case.ranks, case.experts // case.ranks)
    in_order = Placement(np.tile(np.arange(case.experts), (len(load), 1)), case.experts)
    if rule is DispatchRule.ASCEND_MOD:  # whose engine refuses an expert twice on a rank
        published = plan(load, case.topology, policy="greedy").target
    else:
        published = Placement(numpy_greedy(load, case.slots, case.ranks), case.experts)
    return Columns(
        float(imbalance(load, in_order, once).mean()),
        float(imbalance(load, published, case.topology).mean()),
        under(rule, load, published, case.topology),
    )


def rows(rule: DispatchRule, layers: int, seed: int) -> Iterator[str]:
    """One line for each case."""
    for case in CASES:
        load = case.draw(layers, seed)
        none, booked, unaware = columns(case, rule, load)
        plan(load[:1], case.topology, dispatch=rule)
        begin = thread_time()
        found = plan(load, case.topology, dispatch=rule)
        ms = (thread_time() - begin) * 1000 / layers
        bound = float(found.lower_bound.mean())
        goal = max(booked + AHEAD, bound)
        if case == Case(256, 288, 32, 8, 1.0):
            goal = min(goal, EP32)
        mark = "!" if found.effective > goal else ""
        name = f"{case.experts}/{case.slots}/{case.ranks}/{case.per_node} sigma {case.sigma}"
        yield (
            f"| {name} | {none:.2f} | {booked:.3f} | {unaware:.3f} | {found.effective:.3f}{mark} "
            f"<= {goal:.3f} | {found.after_per_layer.max():.3f} | {found.booked:.3f} | {bound:.3f} "
            f"| {ms:.1f} |"
        )


def replan_rows(rule: DispatchRule, layers: int, seed: int) -> Iterator[str]:
    """After drift, from a plan made for the rule."""
    for case in CASES[1::4]:
        load = case.draw(layers, seed)
        serving = plan(load, case.topology, dispatch=rule).target
        drift = np.random.default_rng(seed + 1).lognormal(0, 0.2, load.shape)
        drifted = np.rint(load * drift).astype(np.int64)
        found = plan(drifted, case.topology, current=serving, dispatch=rule)
        moved = found.num_moves / serving.slot_to_expert.size
        name = f"{case.experts}/{case.slots}/{case.ranks}/{case.per_node} sigma {case.sigma}"
        yield f"| {name} | {found.before:.3f} | {found.after:.3f} | {moved:.1%} |"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    layers, seed = arguments.layers, arguments.seed
    for rule in (DispatchRule.SGLANG_STATIC, DispatchRule.ASCEND_MOD):
        print(f"\n{rule.value}\n")
        print(
            "| E/slots/EP/ranks per node | none | booked | unaware | aware | worst layer "
            "| aware, booked | bound | ms a layer |\n|---|---|---|---|---|---|---|---|---|"
        )
        for row in rows(rule, layers, seed):
            print(row, flush=True)
        print("\n| after drift 0.2 | before | after | slots moved |\n|---|---|---|---|")
        for row in replan_rows(rule, layers, seed):
            print(row, flush=True)
    print(
        "\n| one slot for each expert | none | fresh | bound "
        "| drift 0.2, before | after | bound | moved |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for experts in (128, 256):
        case = Case(experts, experts, 8, 8, 1.0)
        load = case.draw(layers, seed)
        fresh = plan(load, case.topology)
        drift = np.random.default_rng(seed + 1).lognormal(0, 0.2, load.shape)
        again = plan(np.rint(load * drift).astype(np.int64), case.topology, current=fresh.target)
        moved = again.num_moves / load.size
        print(
            f"| {experts} on 8 | {fresh.before:.3f} | {fresh.after:.4f} "
            f"| {fresh.lower_bound.mean():.4f} | {again.before:.3f} "
            f"| {again.after:.4f} | {again.lower_bound.mean():.4f} | {moved:.1%} |"
        )
    print("\n| redundancy of 256 on 32, a rank | imbalance | GB | KV cache left | speed | net |")
    print("|---|---|---|---|---|---|")
    case = Case(256, 288, 32, 8, 1.0)
    for level in redundancy_price(
        case.draw(layers, seed),
        case.topology,
        slot_bytes=V3_BYTES * 58 // layers,  # as if the model had its 58 layers
        kv_cache_bytes=KV_CACHE,
    ):
        print(
            f"| {level.slots_per_rank} | {level.imbalance:.3f} | {level.bytes_per_rank / 1e9:.1f} "
            f"| {level.kv_cache_left:.1%} | {level.speed:.3f} | {level.net:.3f} |"
        )


if __name__ == "__main__":
    main()
