"""Imbalance under SGLang's ``static`` rule of the maps that the plug-in installs.

    python -m benchmarks.planner.sglang_plugin [--seeds 5] [--layers 12] [--pay-back 60]

Questions and answers are the plug-in's own records, as between the engine's rank 0 and its planner
process. The first plan starts from the engine's trivial map, the second from the first after drift
0.2. The effective imbalance is computed from each source rank's choice, with the target's slots
alone. 256 experts, 288 slots, 32 ranks on 4 nodes, lognormal(1.0), tokens starting alike on all
ranks; three dense rows before the layers, as DeepSeek-V3 has them.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from eplb import DispatchRule, Placement, Topology, effective_shares, imbalance
from rebalance.engines.sglang.planning import Terms, answer, answer_of, request_record

EXPERTS, SLOTS, RANKS, NODES, DENSE = 256, 288, 32, 4, 3
TARGET = 1.03
V3_BYTES = 44_050_944  # of one expert in FP8 with its scales


def effective(tokens: np.ndarray, held: np.ndarray) -> np.ndarray:
    """[L] imbalance under the rule, of all rows."""
    topology = Topology.uniform(NODES, RANKS // NODES, SLOTS // RANKS)
    placement = Placement(held.astype(np.int32), EXPERTS)
    shares = np.clip(effective_shares(placement, topology, DispatchRule.SGLANG_STATIC), 0, 1)
    return imbalance(tokens, Placement(held.astype(np.int32), EXPERTS, 0, shares), topology)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--pay-back", type=float, default=60.0)
    parser.add_argument("--goal", type=float, default=1.02)
    arguments = parser.parse_args()
    rows = DENSE + arguments.layers
    movable = np.arange(rows) >= DENSE
    trivial = np.tile(np.arange(SLOTS) % EXPERTS, (rows, 1))
    terms = Terms("static", RANKS, NODES, 1, V3_BYTES, 64, arguments.pay_back, arguments.goal, 1.0)
    print(
        "| seed | trivial map | first plan | worst layer | moved "
        "| drift 0.2, before | second plan | worst layer | moved | CPU s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for seed in range(1, arguments.seeds + 1):
        random = np.random.default_rng(seed)
        load = np.rint(random.lognormal(0, 1.0, (1, rows, EXPERTS)) * 1e4).astype(np.int64)
        load[:, :DENSE] = 0
        drifted = np.rint(load * random.lognormal(0, 0.2, load.shape)).astype(np.int64)
        cells, held, begin = [f"{seed}"], trivial, time.process_time()
        for windows in (load, drifted):
            before = effective(windows[0], held)[DENSE:]
            planned = answer_of(answer(request_record(windows, held, movable, terms)))
            moved = (planned.slot_to_expert != held).mean()
            held = planned.slot_to_expert
            after = effective(windows[0], held)[DENSE:]
            mark = "!" if after.mean() > TARGET else ""
            cells += [
                f"{before.mean():.3f}",
                f"{after.mean():.3f}{mark}",
                f"{after.max():.3f}",
                f"{moved:.1%}",
            ]
        cells.append(f"{time.process_time() - begin:.2f}")
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
