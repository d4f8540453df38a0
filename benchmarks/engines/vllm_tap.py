"""What the tap of the vLLM plug-in adds to a step on a CPU, while no store can be reached.

python -m benchmarks.engines.vllm_tap
"""

from __future__ import annotations

import time

import numpy as np
import torch

from eplb.migration.serialisation import model_to_dict, topology_to_dict
from rebalance.engines.vllm.recorder import Recorder, RecorderIdentity
from rebalance.engines.vllm.tap import LoadTap
from telemetry.store import RunInfo

LAYERS, EXPERTS, SLOTS, STEPS, SEED = 58, 256, 288, 2000, 20261122


def main() -> None:
    """Print processor and elapsed time of the part of a step that is the plug-in's."""
    from eplb import ModelShape, Topology

    torch.set_num_threads(1)
    drawn = np.random.default_rng(SEED)
    held = torch.from_numpy(drawn.integers(0, EXPERTS, (LAYERS, SLOTS)))
    load = torch.from_numpy(drawn.integers(0, 99, (LAYERS, SLOTS)).astype(np.int32))
    shape = ModelShape(tuple(range(LAYERS)), EXPERTS, 8, 1, 1)
    described = model_to_dict(shape), topology_to_dict(Topology.uniform(4, 8, 9))
    info = RunInfo("benchmark", 0.0, *described, 64)
    recorder = Recorder(RecorderIdentity("d", "redis://127.0.0.1:1", 0, info, False), None)
    tap = LoadTap(LAYERS, EXPERTS, torch.device("cpu"), 16)
    spent, elapsed = [], []
    for _ in range(STEPS):
        began, at = time.thread_time(), time.perf_counter()
        for counted in tap.add(load, held, "decode", 1):
            recorder.offer(counted)
        spent.append(1e3 * (time.thread_time() - began))
        elapsed.append(1e3 * (time.perf_counter() - at))
    recorder.close(10.0)
    print("| ms a step | median | p99 | largest |\n|---|---|---|---|")
    for name, values in (("processor time", spent), ("elapsed", elapsed)):
        print(
            f"| {name} | {np.median(values):.3f} | {np.quantile(values, 0.99):.3f} "
            f"| {max(values):.3f} |"
        )


if __name__ == "__main__":
    main()
