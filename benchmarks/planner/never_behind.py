"""Plans beside easy ones by their own price, and plans over more slots beside those over fewer.

    python -m benchmarks.planner.never_behind [--problems 400] [--first 0] [--only easy|slots]

*easy*: random problems of each dispatch rule, by tokens and by time, with expert groups, a dead or
drained rank, several windows, and something that serves or nothing. ``auto`` is compared with the
fresh and the greedy plan, by imbalance (or time) and the price of moves, as the planner counts.

*slots*: fresh plans over n + 1 slots a rank, compared with the plan over n and the rest empty, by
the windows, which a plan on their sum did not see.

A row has the problems, those behind by more than 0.002 of the price, the worst, and its seed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import inf
from typing import get_args

import numpy as np

from eplb import Constraints, CostModel, Decision, ModelShape, Placement, Topology
from eplb.core.cost import Objective
from eplb.core.dispatch import DispatchRule
from eplb.core.load import LoadHistory
from eplb.core.problem import Problem
from eplb.decision.alternatives import cost_of, option_of
from eplb.decision.score import score_of
from eplb.planner import Plan, plan_for
from eplb.policies.table import contiguous_policy

BEHIND = 0.002  # of the price
TABLE = list(product(DispatchRule, (False, True), ("none", "planned", "contiguous")))
LAYERS, STEPS = 2, 64
Row = tuple[str, int, float]  # kind, seed, part of the price by which the plan is behind


def drawn(seed: int) -> tuple[str, Problem]:
    """A problem, and the row that it belongs to."""
    rule, has_groups, serves = TABLE[seed % len(TABLE)]
    rng = np.random.default_rng([60, seed])
    nodes = int(rng.choice([2, 4]))
    ranks = nodes * int(rng.choice([2, 3, 4]))
    groups = 2 * nodes if has_groups else 1
    experts = groups * int(rng.integers(3, 8)) if has_groups else int(rng.integers(ranks, 65))
    least = -(-experts // ranks) + (2 if has_groups else 1)
    usual = Topology.uniform(nodes, ranks // nodes, least + int(rng.integers(0, 3)))
    gone = np.arange(ranks) == rng.integers(ranks)
    state = str(rng.choice(["all", "dead", "drained"])) if not rule.by_rank else "all"
    fits = usual.num_slots - usual.slots_of_rank[0] >= experts + 2
    if state == "drained" or (rule.by_rank and rng.random() < 0.3):
        topology = replace(usual, drained=gone) if fits else usual
    else:
        topology = replace(usual, alive=~gone) if state == "dead" and fits else usual
    objective = "time" if not rule.by_rank and rng.random() < 0.3 else "tokens"
    shape = ModelShape(tuple(range(LAYERS)), experts, 1, 2048, 1408, num_expert_groups=groups)
    heat = rng.lognormal(0, 1, (LAYERS, experts))
    before = heat * rng.lognormal(0, rng.choice([0.2, 0.8]), heat.shape)
    windows = int(rng.choice([1, 4, 16]))
    load = rng.poisson(heat * rng.lognormal(0, 0.3, (windows, 1, experts)) * 3000.0)
    current = None
    if serves != "none":
        past = Problem(LoadHistory(rng.poisson(before * 3000.0)[None]), usual, shape, dispatch=rule)
        current = plan_for(past, "auto").target if serves == "planned" else contiguous_policy(past)
    first = np.arange(windows) * STEPS
    problem = Problem(
        LoadHistory(load, first, first + STEPS - 1),
        topology,
        shape,
        current,
        cost=CostModel(pay_back_s=float(rng.choice([60.0, 600.0, inf]))),
        objective=objective,
        dispatch=rule,
        seed=seed,
    )
    groups_text = ", groups" if has_groups else ""
    return f"{rule.value}, {objective}{groups_text}, {serves}", problem


def price_of(found: Plan, placement: Placement) -> float:
    """Imbalance and moves of a placement in one figure."""
    serving, option = (option_of(found.problem, it) for it in (found.base, placement))
    return float(cost_of(found.problem, serving, option).mean())


def easy_rows(seeds: range) -> Iterator[Row]:
    """Auto beside the easy plans."""
    for seed in seeds:
        kind, problem = drawn(seed)
        auto, *others = (plan_for(problem, policy) for policy in ("auto", "fresh", "greedy"))
        if auto.decision is Decision.RESPLIT:  # shares alone, as moves do not pay in addition
            continue
        own = price_of(auto, auto.proposal)
        least = min(price_of(auto, other.proposal) for other in others)
        yield kind, seed, own / least - 1.0


def over_slots(seed: int, objective: Objective) -> tuple[Problem, Problem]:
    """Problems over n + 1 slots a rank, and over n of them."""
    rng = np.random.default_rng([61, seed])
    ranks = int(rng.choice([4, 8, 16]))
    experts = ranks * int(rng.integers(1, 6))
    each = experts // ranks + int(rng.integers(0, 3))
    windows = int(rng.choice([1, 4, 16]))
    heat = rng.lognormal(0, 1, (LAYERS, experts))
    heat = heat * rng.lognormal(0, 0.3, (windows, 1, experts))
    load = rng.poisson(heat * STEPS * rng.choice([10.0, 100.0, 1000.0]))
    first = np.arange(windows) * STEPS
    more = Problem(
        LoadHistory(load, first, first + STEPS - 1),
        Topology.uniform(1, ranks, each + 1),
        ModelShape(tuple(range(LAYERS)), experts, 1, 2048, 1408),
        objective=objective,
    )
    return more, replace(more, constraints=Constraints(slots=np.full((LAYERS, ranks), each)))


def slot_rows(seeds: range) -> Iterator[Row]:
    """A plan over one slot more a rank beside that over fewer."""
    for seed, objective in product(seeds, get_args(Objective)):
        pair = over_slots(seed, objective)
        plans = [plan_for(it, "auto") for it in pair]
        own, limit = (float(score_of(pair[0], it.target).mean()) for it in plans)
        on_sum = ", on the sum" if plans[0].problem.on_sum else ""
        yield f"one slot more, {objective}{on_sum}", seed, own / limit - 1.0


def show(rows: list[Row]) -> None:
    """Print a line for each kind."""
    print("| problems | number | behind | worst | seed |\n|---|---|---|---|---|")
    kinds = sorted({kind for kind, _, _ in rows})
    for kind in (*kinds, ""):
        part = [row for row in rows if row[0] == kind or not kind]
        if part:
            worst = max(part, key=lambda row: row[2])
            behind = sum(row[2] > BEHIND for row in part)
            print(f"| {kind or 'all'} | {len(part)} | {behind} | {worst[2]:+.4f} | {worst[1]} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=400)
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--only", choices=("easy", "slots"), default="")
    given = parser.parse_args()
    seeds = range(given.first, given.first + given.problems)
    if given.only != "slots":
        show(list(easy_rows(seeds)))
    if given.only != "easy":
        show(list(slot_rows(seeds)))


if __name__ == "__main__":
    main()
