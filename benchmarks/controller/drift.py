"""An hour of drifting load: seconds lost to imbalance and to moves, under several triggers.

    python -m benchmarks.controller.drift [--seeds 3] [--loads "drift 1 min"] [--costs 3 10]

Windows of 10 s, in simulated time. A window at imbalance b loses its length times the experts' part
of a step times (b - 1); a rebalance that moves experts stops serving for its cost. The controller
is the live code over its shipped store, and knows the cost (``seconds_per_rebalance``). SGLang and
vLLM plan by their own rules as shipped, greedily on what they record; their moves are made by our
mover, at the same cost.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np

from benchmarks.controller.loads import drifting
from benchmarks.over_time import replay
from benchmarks.over_time.replay import (
    Replayed,
    Tokens,
    replay_controller,
    replay_nothing,
    start_of,
)
from eplb import Placement, Topology, imbalance
from eplb.core.load import LoadHistory
from eplb.core.problem import Problem
from eplb.decision.allowance import moves_per_layer
from eplb.decision.gate import CostModel
from rebalance.controller.loop import ControllerSettings
from simulations.peers.replans import greedy_on_sum
from simulations.peers.triggers import SglangRule, VllmRule

LAYERS, EXPERTS, TOP_K, TOKENS = 16, 64, 6, 400_000
TOPOLOGY = Topology.uniform(num_nodes=2, ranks_per_node=8, slots_per_rank=5)
WINDOW_S, STEP_S, EXPERT_PART = 10.0, 0.05, CostModel.expert_part
STEPS = int(WINDOW_S / STEP_S)
COSTS_S = (0.0, 1.0, 3.0, 10.0)
# Windows after which half of the popularity is another one, and windows between jumps; 0: none.
LOADS = {"drift 10 min": (60.0, 0), "drift 1 min": (6.0, 0), "drift 1 h, jumps": (360.0, 60)}


def plan_on(load: Tokens, first: int, end: int, current: Placement) -> Placement:
    """Greedy on the sum of windows first..end - 1."""
    return greedy_on_sum(Problem(LoadHistory(load[first:end]), TOPOLOGY, current=current))


def replay_sglang(load: Tokens) -> Replayed:
    """Every 1,000 passes, on what was recorded since the plan before."""
    rule, since = SglangRule(), 0
    found, current = Replayed(), start_of(TOPOLOGY, load[0])
    for window, tokens in enumerate(load):
        if window:
            found.imbalance.append(imbalance(tokens, current, TOPOLOGY))
        passes = range(window * STEPS + 1, (window + 1) * STEPS + 1)
        if any(rule.is_due(one, None) for one in passes):
            proposed = plan_on(load, since, window + 1, current)
            since = window + 1
            current = _taken(found, window, current, proposed)
    return found


def replay_vllm(load: Tokens) -> Replayed:
    """Every 3,000 steps, on the last 1,000 of them."""
    rule = VllmRule()
    seen = max(1, rule.window_size // STEPS)
    found, current = Replayed(), start_of(TOPOLOGY, load[0])
    for window, tokens in enumerate(load):
        if window:
            found.imbalance.append(imbalance(tokens, current, TOPOLOGY))
        steps = range(window * STEPS + 1, (window + 1) * STEPS + 1)
        if any(rule.is_due(one) for one in steps):
            proposed = plan_on(load, max(0, window + 1 - seen), window + 1, current)
            current = _taken(found, window, current, proposed)
    return found


def _taken(found: Replayed, window: int, current: Placement, proposed: Placement) -> Placement:
    moves = int(moves_per_layer(current, proposed).sum())
    if moves:
        found.changes.append(replay.Change(window, "MOVE", moves, 0.0, current, proposed))
    return proposed


def lost_seconds(found: Replayed, cost_s: float) -> tuple[float, int, int]:
    """Seconds lost, rebalances that moved experts, and their moves."""
    moving = [change for change in found.changes if change.moves]
    uneven_s = WINDOW_S * EXPERT_PART * float((found.per_window - 1).sum())
    return uneven_s + cost_s * len(moving), len(moving), sum(one.moves for one in moving)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--windows", type=int, default=360)
    parser.add_argument("--loads", nargs="+", default=list(LOADS), choices=list(LOADS))
    parser.add_argument("--costs", nargs="+", type=float, default=list(COSTS_S), help="seconds")
    parser.add_argument("--pay-back", type=float, default=CostModel.pay_back_s, help="seconds")
    given = parser.parse_args()
    replay.WINDOW_SECONDS, replay.WINDOW_STEPS = WINDOW_S, STEPS
    print(
        f"{LAYERS} x {EXPERTS} on {TOPOLOGY.num_ranks} ranks x 5 slots, {given.windows} windows of "
        f"{WINDOW_S:g} s, seeds 0..{given.seeds - 1}, pay_back_s {given.pay_back:g}; lost "
        "seconds (rebalances, moves), means\n"
        "| load | cost of a rebalance | controller | SGLang's rule | vLLM's rule | nothing |\n"
        "|---|---|---|---|---|---|"
    )
    for name in given.loads:
        half_life, jump_every = LOADS[name]
        streams = [
            drifting(
                seed,
                given.windows,
                LAYERS,
                EXPERTS,
                tokens=TOKENS,
                half_life=half_life,
                jump_every=jump_every,
            )
            for seed in range(given.seeds)
        ]
        peers = [[way(load) for load in streams] for way in (replay_sglang, replay_vllm)]
        nothing = [replay_nothing(load, TOPOLOGY) for load in streams]
        for cost_s in given.costs:
            cost = CostModel(
                pay_back_s=given.pay_back, seconds_per_rebalance=cost_s, seconds_per_expert=0.0
            )
            settings = replace(ControllerSettings(), cost=cost)
            own = [replay_controller(load, TOPOLOGY, TOP_K, settings) for load in streams]
            cells = []
            for runs in (own, *peers, nothing):
                figures = np.mean([lost_seconds(found, cost_s) for found in runs], axis=0)
                cells.append(f"{figures[0]:.0f} ({figures[1]:.0f}, {figures[2]:,.0f})")
            print(f"| {name} | {cost_s:g} s | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
