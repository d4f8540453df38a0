"""Published figures beside what the simulator gives, fitted figures named as fitted.

    python -m benchmarks.simulator.calibration [--part trt,...] [--layers 200] [--seed 0]

TensorRT-LLM's table (DeepSeek-R1, translation, 1,024 rows a rank): the skew of generated layers is
fitted to the imbalance without balancing alone; the rows with its balancer are then predicted, on
batches that come after those that were planned on. The dispersion of requests is that of recorded
prefill (2 to 5), not fitted; every value of that range is shown.

Per-batch plans (UltraEP's set-up: 64 ranks, 4 slots and 2 redundant ones, 8,192 tokens a rank):
skew fitted to each of its three imbalances, and what a fresh plan for each batch leaves.

Training throughput (UltraEP): the linear law from imbalance to time alone, without the step model.

The other parts have modules of their own: ``throughput`` (SGLang's gains), ``static_rule`` (its
dispatch), ``arms`` (balancing on three kinds of hardware).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from benchmarks.simulator import arms, static_rule, throughput
from benchmarks.simulator.loads import TOP_K, fitted, imbalances, traffic_of
from eplb import Topology

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


def training_rows(layers: int, seed: int) -> None:
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


def trt_rows(layers: int, seed: int) -> None:
    """DeepSeek's balancer on the past, at each dispersion of recorded prefill."""
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


def batch_rows(layers: int, seed: int) -> None:
    """What plans for each batch leave, by the way they are made."""
    print(f"| imbalance without, fitted | shape | {' | '.join(PER_BATCH)} |")
    few, tokens = min(layers, 12), 64 * 8192
    for wanted in ULTRA_EP:
        shape = fitted(wanted, Topology.uniform(8, 8, 4), few, tokens, 4.0, seed)
        traffic = traffic_of(shape, few, tokens, 4.0)
        found = imbalances(traffic, Topology.uniform(8, 8, 6), list(PER_BATCH), seed)
        cells = " | ".join(f"{one:.4f}" for one in found)
        print(f"| {wanted} | {shape:.3f} | {cells} |", flush=True)


PER_BATCH = ("oracle:re-plan", "oracle:moonep", "oracle:ultraep", "deepseek")
PARTS: dict[str, Callable[[int, int], None]] = {
    "trt": trt_rows,
    "batch": batch_rows,
    "training": training_rows,
    "throughput": throughput.main,
    "static": static_rule.main,
    "arms": arms.main,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", default=",".join(PARTS), help="of: " + ", ".join(PARTS))
    parser.add_argument("--layers", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for name in arguments.part.split(","):
        print(f"\n## {name}\n", flush=True)
        PARTS[name](arguments.layers, arguments.seed)


if __name__ == "__main__":
    main()
