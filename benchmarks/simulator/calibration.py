"""Published figures beside what the simulator gives, fitted figures named as fitted.

    python -m benchmarks.simulator.calibration [--layers 200] [--seed 0]

TensorRT-LLM's table (DeepSeek-R1, translation, 1,024 rows a rank): the skew of generated layers is
fitted to the imbalance without balancing alone; the rows with its balancer are then predicted, on
batches that come after those that were planned on. The dispersion of requests is that of recorded
prefill (2 to 5), not fitted; every value of that range is shown.

Per-batch plans (UltraEP's set-up: 64 ranks, 4 slots and 2 redundant ones, 8,192 tokens a rank):
skew fitted to each of its three imbalances, and what a fresh plan for each batch leaves.

Training throughput (UltraEP): the linear law from imbalance to time alone, without the step model.
"""

from __future__ import annotations

import argparse

from eplb import Topology
from simulations.replay import Scenario, replay_all
from simulations.traffic import Traffic, traffic_windows

EXPERTS, TOP_K = 256, 8
PLANNED_ON, JUDGED = 16, 8  # batches
TRT = {
    "EP32 x 9 slots": (Topology.uniform(4, 8, 9), 0.109),
    "EP36 x 8 slots": (Topology.uniform(9, 4, 8), 0.115),
}
TRT_WITHOUT = 1.564
ULTRA_EP = (1.51, 2.01, 3.03)
# TFLOPS in training as UltraEP publishes them: ideal, and (imbalance, TFLOPS) by balancer.
TRAINING = {
    "GLM4.5-106B": (
        785.4,
        {"none": (2.23, 545), "EPLB": (1.34, 646), "LPLB": (1.29, 618), "UltraEP": (1.02, 757)},
    ),
    "Qwen3-235B": (
        574.7,
        {"none": (2.86, 315), "EPLB": (1.34, 449), "LPLB": (1.58, 385), "UltraEP": (1.03, 524)},
    ),
    "DeepSeek-V3": (
        637.6,
        {"none": (1.30, 509), "EPLB": (1.28, 505), "LPLB": (1.09, 516), "UltraEP": (1.01, 613)},
    ),
}


def traffic_of(shape: float, layers: int, tokens: int, dispersion: float) -> Traffic:
    """Layers of one skew, one domain, nothing that drifts."""
    return Traffic(
        layers,
        EXPERTS,
        TOP_K,
        PLANNED_ON + JUDGED,
        tokens=tokens,
        decode=0,
        shape_low=shape,
        shape_high=shape,
        hot_layers=0.0,
        domains=1,
        domain_spread=0.0,
        dispersion=dispersion,
        drift=0.0,
        diurnal=0.0,
        shift_hours=0.0,
    )


def imbalances(traffic: Traffic, topology: Topology, names: list[str], seed: int) -> list[float]:
    """Mean imbalance of each policy on the batches after the first plan."""
    scenario = Scenario(traffic_windows(traffic, seed), topology, plan_every=PLANNED_ON)
    found = replay_all(scenario, names)
    return [float(one.per_window[PLANNED_ON - 1 :].mean()) for one in found]


def fitted(
    wanted: float, topology: Topology, layers: int, tokens: int, dispersion: float, seed: int
) -> float:
    """The Gamma shape whose consecutive experts give the wanted imbalance."""
    low, high = 0.05, 50.0
    for _ in range(14):
        middle = (low * high) ** 0.5
        traffic = traffic_of(middle, layers, tokens, dispersion)
        (found,) = imbalances(traffic, topology, ["none"], seed)
        low, high = (middle, high) if found > wanted else (low, middle)
    return (low * high) ** 0.5


def training_rows() -> None:
    """Time in proportion to imbalance, one slope for each model, fitted to the row "none"."""
    print("| model | slope, fitted | EPLB | LPLB | UltraEP |")
    for model, (ideal, rows) in TRAINING.items():
        imbalance, tflops = rows["none"]
        slope = (ideal / tflops - 1) / (imbalance - 1)
        cells = []
        for name in ("EPLB", "LPLB", "UltraEP"):
            imbalance, tflops = rows[name]
            found = ideal / (1 + slope * (imbalance - 1))
            cells.append(f"{found:.0f} of {tflops} ({found / tflops - 1:+.0%})")
        print(f"| {model} | {slope:.2f} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    layers, seed = arguments.layers, arguments.seed
    print("| dispersion | shape, fitted | " + " | ".join(TRT) + " |")
    plain = Topology.uniform(4, 8, 8)
    for dispersion in (1.0, 2.0, 3.0, 4.0, 5.0):
        shape = fitted(1 + TRT_WITHOUT, plain, layers, 4096, dispersion, seed)
        cells = []
        for topology, published in TRT.values():
            traffic = traffic_of(shape, layers, topology.num_ranks * 1024 // TOP_K, dispersion)
            (found,) = imbalances(traffic, topology, ["deepseek"], seed)
            cells.append(f"{found - 1:.3f} ({(found - 1) / published - 1:+.0%})")
        print(f"| {dispersion:g} | {shape:.3f} | " + " | ".join(cells) + " |", flush=True)
    print(
        "\n| imbalance without, fitted | shape | per-batch plan | deepseek, planned on the past |"
    )
    wide = Topology.uniform(8, 8, 6)
    for wanted in ULTRA_EP:
        few, tokens = min(layers, 32), 64 * 8192
        shape = fitted(wanted, Topology.uniform(8, 8, 4), few, tokens, 4.0, seed)
        traffic = traffic_of(shape, few, tokens, 4.0)
        fresh, past = imbalances(traffic, wide, ["oracle:re-plan", "deepseek"], seed)
        print(f"| {wanted} | {shape:.3f} | {fresh:.4f} | {past:.4f} |", flush=True)
    print()
    training_rows()


if __name__ == "__main__":
    main()
