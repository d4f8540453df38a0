"""What acts on single batches, part by part, over the links of the GPUs at hand.

    torchrun --nproc-per-node 2 -m benchmarks.link_parts --file routing.npz

Microseconds of a layer in a CUDA graph of three layers, median and 99th percentile over batches,
with the recorded routing and the weights of ``serve_ranks``; nothing is dispatched:

    split, alone    counts, shares of the batch, a replica for each token; every rank takes its own
                    counts for those of the others, so nothing travels
    split, group    the same with counts of all ranks by NCCL's all-gather
    split, memory   the same with counts through GPU memory that the ranks map
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.routing_file import TOP_K, Routing, read
from benchmarks.serve_ranks import (
    Arm,
    Batch,
    Group,
    Layers,
    Step,
    arguments,
    join,
    timed,
)
from runtime.batch.split import BatchSplit
from runtime.batch.split_rule import EVERY_BATCH

TOKENS, NUM_BATCHES = (64, 256, 1024), 60


def runs_of(layers: Layers, memory: BatchSplit) -> dict[str, Callable[[Batch], object]]:
    """Every part, as something to capture."""
    group = layers.group

    def own_counts(counts: torch.Tensor, gathered: torch.Tensor) -> None:
        gathered.copy_(counts.expand_as(gathered))

    alone = BatchSplit(
        layers.table,
        own_counts,
        source=group.rank,
        num_sources=group.size,
        max_pairs=max(TOKENS) * TOP_K,
        rule=EVERY_BATCH,
    )

    def split(split: BatchSplit) -> Callable[[Batch], object]:
        def run(batch: Batch) -> None:
            for layer, ids in enumerate(batch[0]):
                split.slots(layer, ids)

        return run

    return {
        "split, alone": split(alone),
        "split, group": split(layers.split),
        "split, memory": split(memory),
    }


def show(group: Group, step: Step, arms: dict[str, Arm], routing: Routing) -> None:
    """Print one line for each part."""
    times = timed(step, arms, routing, NUM_BATCHES)
    if group.rank:
        return
    for name, column in zip(arms, times.T, strict=True):
        late = np.quantile(column, 0.99)
        print(
            f"{step.tokens:6} {routing.name:9}{name:18}{np.median(column):9.1f}{late:9.1f}",
            flush=True,
        )


def main() -> None:
    """Measure every trace at every size."""
    asked = arguments(__doc__).parse_args()
    group = join("cuda")
    if not group.maps_peers:
        raise SystemExit(f"link_parts: found {group.size} GPU, expected two or more")
    traces = read(asked.file, group.size)
    layers = Layers(group, traces[0].num_experts, asked.precision, "decode", TOKENS, "local")
    assert layers.over_memory is not None
    runs = runs_of(layers, layers.over_memory)
    if not group.rank:
        print(f"{'tokens':>6} {'trace':9}{'part':18}{'us':>9}{'p99':>9}", flush=True)
    for tokens, routing in product(asked.tokens or TOKENS, traces):
        table = layers.prepared(routing.placements["contiguous"])
        arms = {name: Arm(run, table) for name, run in runs.items()}
        show(group, Step(layers, tokens, in_graph=True), arms, routing)
    faults = {name: int(count.item()) for name, count in layers.over_memory.faults.items()}
    if not group.rank:
        print(f"faults that the device counted: {faults}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
