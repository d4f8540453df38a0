"""A shared expert at home, over DeepEP's low-latency mode in a group of one rank.

    python -m benchmarks.shared.home

One layer of DeepSeek-V3's shape: 9 routed experts in FP8, the shared one in BF16. Nothing travels
in such a group, so this is what the order of launches costs. What it hides is the time of travel.

    without   no shared expert
    after     the shared expert after the combine
    within    between the halves of the combine, as ``MoELayer`` has it
    alone     the shared expert
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.expert_curve import SHAPES, Weights
from benchmarks.experts_uneven import in_turns
from benchmarks.serve_ranks import (
    HIDDEN,
    NUM_LAYERS,
    SEED,
    TOP_K,
    Group,
    join,
    made_up_bank,
    made_up_tokens,
)
from eplb import Placement, Topology
from runtime.counters import SlotCounter
from runtime.dispatch.deepep import DeepEPLowLatency, DeepEPShape
from runtime.experts import ExpertBank
from runtime.model.compute import GroupedExperts, swiglu
from runtime.model.moe import MoELayer
from runtime.routing import RoutingTable

SLOTS, TOKENS = 9, (16, 64, 128)


class Home:
    """A rank's layers."""

    def __init__(self, group: Group, bank: ExpertBank) -> None:
        held = np.arange(SLOTS, dtype=np.int32)[None].repeat(NUM_LAYERS, axis=0)
        self.table = RoutingTable(Placement(held, SLOTS), max_replicas=1, device="cuda")
        shape = DeepEPShape(Topology.uniform(1, 1, SLOTS), HIDDEN, TOP_K, max(TOKENS))
        counter = SlotCounter(NUM_LAYERS, SLOTS, group.device)
        self.dispatcher = DeepEPLowLatency(shape, group.world, counter, use_fp8=True)
        self.dense = Weights(replace(SHAPES[0], dtype="bf16"), 1)
        self.seeds = torch.zeros(NUM_LAYERS, dtype=torch.int64)
        self.group, self.bank = group, bank

    def timed(self, tokens: int) -> dict[str, float]:
        """Microseconds of a layer for so many tokens."""
        hidden, weights = made_up_tokens(self.group, tokens)
        chosen = torch.rand((tokens, SLOTS)).topk(TOP_K).indices
        experts = GroupedExperts(self.bank, usual_rows=2 * tokens * TOP_K // SLOTS)

        def shared(number: int) -> tuple[torch.Tensor, torch.Tensor]:
            gate_up, down = self.dense.taken(number)
            return gate_up[0], down[0]

        def layer(number: int, at_home: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
            place = number % NUM_LAYERS
            made = MoELayer(place, TOP_K, experts, self.table, self.dispatcher, at_home)
            return made.forward(hidden, chosen, weights, salt=self.seeds)

        return in_turns(
            {
                "without": lambda number: layer(number, None),
                "after": lambda number: layer(number, None) + swiglu(hidden, *shared(number)),
                "within": lambda number: layer(number, shared(number)),
                "alone": lambda number: swiglu(hidden, *shared(number)),
            }
        )


def main() -> None:
    """Print a line for each size."""
    group = join("cuda")
    torch.set_default_device("cuda")
    torch.manual_seed(SEED)
    print(torch.cuda.get_device_name(), torch.__version__)
    home = Home(group, made_up_bank(group, "fp8", SLOTS))
    for tokens in TOKENS:
        times = home.timed(tokens)
        if tokens == TOKENS[0]:
            print("| tokens | " + " | ".join(times) + " |")
        print(
            f"| {tokens} | " + " | ".join(f"{us:.1f}" for us in times.values()) + " |", flush=True
        )
    home.dispatcher.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
