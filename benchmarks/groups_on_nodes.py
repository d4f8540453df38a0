"""What expert groups on nodes cost and save: DeepSeek-V3, EP32, 288 slots, H100.

    python -m benchmarks.groups_on_nodes

``auto`` plans with the model's groups kept on nodes, and without groups; both serve the same steps.
The simulator's experts are drawn one by one, so tokens of kept groups would reach as many nodes as
others. Prefill is therefore also timed with the saving that group-limited routing can bring: a
token chooses 4 of 8 groups, and reaches the nodes that hold them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import comb

import numpy as np
from numpy.typing import NDArray

from eplb.core.model import ModelShape, preset
from simulations.inputs import step_model_of, topology_of
from simulations.migration_cost import MigrationCost
from simulations.replay import Replay, Scenario, replay_all
from simulations.step_time import StepModel
from simulations.workloads import windows_named

LAYERS, WINDOWS, RANKS, SLOTS, CHOSEN_GROUPS = 16, 24, 32, 288, 4
TOKENS_OF_RANK = {"decode": 128, "prefill": 8192}
WORKLOADS, SEEDS, WINDOW_S = ("mixed", "tenants", "prefill"), (101, 102, 103), 300.0


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupedStep(StepModel):
    """Times where a token crosses to the nodes of its groups alone."""

    def _copies(
        self, by_rank: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        near, far = super()._copies(by_rank)
        groups, nodes = self.model.num_expert_groups, self.topology.num_nodes
        outside = groups - groups // nodes
        grouped = 1 - comb(outside, CHOSEN_GROUPS) / comb(groups, CHOSEN_GROUPS)
        return near, far * grouped / (1 - (1 - 1 / nodes) ** self.model.top_k)


def rate(found: Replay, tokens: float) -> float:
    """Tokens a second of a rank, less the time that moves take."""
    lost = sum(one.lost_s for one in found.rebalances) / (len(found.imbalance) * WINDOW_S)
    return tokens / RANKS / (float(found.step_us.mean()) / 1e6) * (1 - lost)


def rows(model: ModelShape, mode: str, nodes: int, workload: str, seed: int) -> list[str]:
    """A row for each way to plan."""
    is_prefill, topology = mode == "prefill", topology_of(RANKS, nodes, SLOTS, model.num_experts)
    step = step_model_of(model, topology, "h100", is_prefill=is_prefill)
    tokens = float(TOKENS_OF_RANK[mode] * RANKS)
    base = Scenario(
        topology,
        model,
        seed=seed,
        # Plans for decode alone would leave groups free.
        load=replace(
            windows_named(f"generated:{workload}:windows={WINDOWS}", seed, model), phase="mixed"
        ),
        plan_every=4,
        step_model=step,
        migration=MigrationCost(model, step.hardware),
        tokens_per_step=tokens,
    )
    ways = {
        "kept": base,
        "free": replace(base, model=replace(model, num_expert_groups=1)),
    }
    if is_prefill:
        fields = {name: getattr(step, name) for name in step.__dataclass_fields__}
        ways["kept, saving"] = replace(base, step_model=GroupedStep(**fields))
    found = {}
    for name, scenario in ways.items():
        (found[name],) = replay_all(scenario, ["auto"])
    free = rate(found["free"], tokens)
    return [
        f"| {mode} | {nodes} | {workload} | {seed} | {name} | {one.mean:.3f} | {one.moves} "
        f"| {rate(one, tokens):.0f} | {rate(one, tokens) / free - 1:+.2%} |"
        for name, one in found.items()
    ]


def main() -> None:
    """Print the table."""
    model = replace(preset("deepseek-v3"), layer_ids=tuple(range(3, 3 + LAYERS)))
    print("| steps | nodes | load | seed | groups | imbalance | moved | tokens/s | against free |")
    print("|---|---|---|---|---|---|---|---|---|")
    for seed, mode, nodes, workload in product(SEEDS, TOKENS_OF_RANK, (4, 2), WORKLOADS):
        print(*rows(model, mode, nodes, workload, seed), sep="\n", flush=True)


if __name__ == "__main__":
    main()
