"""The map after a death in SGLang: the engine's own against the plug-in's.

    .venv-sglang/bin/python -m benchmarks.engines.sglang_survivors [--ranks 8 32 64]

DeepSeek-V3's 58 layers x 256 experts, a load of each layer drawn from a Gamma distribution. The map
that serves is the engine's own for that load; a rank is lost, each of the first eight in turn.
*loaded*: slots of the survivors that get another expert, of all their slots. *nobody's*: experts
that no survivor holds, so that no map can load fewer. Imbalance is max/mean over the ranks that are
left, the mean over layers, by the engine's even split over replicas.
"""

from __future__ import annotations

import argparse
import time
from statistics import mean, median

import tests.support.engines.cpu_torchvision  # noqa: F401  # isort: skip  # the engine imports it
import numpy as np
import torch
from sglang.srt.eplb.eplb_algorithms import elasticity_aware

from eplb.core.dispatch import DispatchRule
from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.measure import imbalance
from rebalance.engines.sglang.survivors import survivors_map

LAYERS, EXPERTS, SHAPE, SEED = 58, 256, 1.5, 0
# Slots of a rank, by the number of ranks: all ranks but one have room for every expert.
SLOTS = {8: 40, 32: 9, 64: 5}


def of_engine(load: torch.Tensor, num_ranks: int, active: torch.Tensor) -> np.ndarray:
    """The engine's map [L, S]; EMPTY on ranks that are not active."""
    each = SLOTS[num_ranks]
    held, _, _ = elasticity_aware.rebalance_experts(
        load, each * num_ranks, 1, 1, num_ranks, enable_hierarchical=False, active_ranks=active
    )
    found = held.numpy().copy()
    found[:, np.repeat(active.numpy() == 0, each)] = EMPTY
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", choices=SLOTS, default=list(SLOTS))
    asked = parser.parse_args()
    load = np.random.default_rng(SEED).gamma(SHAPE, size=(LAYERS, EXPERTS)) * 1e4
    print("| ranks | map | loaded | nobody's | imbalance before, after | seconds |")
    print("|---:|---|---:|---:|---|---:|")
    for num_ranks in asked.ranks:
        whole = of_engine(
            torch.from_numpy(load), num_ranks, torch.ones(num_ranks, dtype=torch.int32)
        )
        rows: dict[str, list[tuple[float, ...]]] = {"engine": [], "plug-in": []}
        topology = Topology.uniform(1, num_ranks, SLOTS[num_ranks])
        before = float(imbalance(load, Placement(whole, EXPERTS), topology).mean())
        for dead in range(min(num_ranks, 8)):
            active = torch.ones(num_ranks, dtype=torch.int32)
            active[dead] = 0
            on_live = np.repeat(active.numpy() != 0, SLOTS[num_ranks])
            left = Topology(topology.node_of_rank, topology.slots_of_rank, alive=active != 0)
            held = np.where(on_live, whole, EMPTY)
            lost = sum(EXPERTS - len(set(row.tolist()) - {EMPTY}) for row in held)
            for name in rows:
                begun = time.perf_counter()
                if name == "engine":
                    found = of_engine(torch.from_numpy(load), num_ranks, active)
                else:
                    made = survivors_map(whole, load, active.numpy(), DispatchRule.EVEN)
                    found = made.slot_to_expert
                took_s = time.perf_counter() - begun
                moved = float((found != whole)[:, on_live].sum())
                even = imbalance(load, Placement(found.astype(np.int32), EXPERTS), left)
                rows[name].append((moved, float(lost), float(even.mean()), took_s))
        for name, measured in rows.items():
            moved, lost, even, took = zip(*measured, strict=True)
            part = mean(moved) / (LAYERS * SLOTS[num_ranks] * (num_ranks - 1))
            print(
                f"| {num_ranks} | {name} | {mean(moved):.0f} ({part:.0%}) | {mean(lost):.0f} | "
                f"{before:.3f}, {mean(even):.3f} | {median(took):.2f} |"
            )


if __name__ == "__main__":
    main()
