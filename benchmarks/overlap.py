"""Two micro-batches in flight against the same two in turn, and against one batch of both.

    torchrun --nproc-per-node 2 -m benchmarks.overlap --file routing.npz [--precision bf16]

Three layers of causal attention and experts (``serve_ranks``: DeepSeek-V3's shape, its routing file
and its placements), under ``contiguous``, ``auto``, and auto with the batch's split:

    one       one forward pass of all tokens
    in turn   two forward passes of half the tokens each
    both      ``MoEStack.forward_two``: rows of one half travel while the other computes

Decode is a CUDA graph over DeepEP's low-latency mode, whose transfers are two launches each;
prefill is eager over its normal mode. *speed* is against "in turn, auto". On one GPU nothing
travels, so only what the interleaving costs is seen. Other dispatchers transfer at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks.migration.decode import VOCABULARY, dense_weights
from benchmarks.routing_file import Routing
from benchmarks.serve_ranks import (
    SEED,
    SMALL_HIDDEN,
    SMALL_INTERMEDIATE,
    Arm,
    Batch,
    Layers,
    arguments,
    join,
    measure,
)
from eplb.core.model import ModelShape
from runtime.batch.split import BatchSplit
from runtime.model.moe import MoEStack

SIZES = {"decode": (64, 128), "prefill": (2048,)}  # tokens of a rank, of both halves
SEQUENCES = 2  # of a half


def dense(layers: Layers) -> tuple[ModelShape, dict[str, torch.Tensor]]:
    """The model, and its weights beside the experts'."""
    group, model = layers.group, layers.model
    if group.is_cuda:
        return model, dense_weights(model, group.device)
    model = replace(model, hidden=SMALL_HIDDEN, intermediate=SMALL_INTERMEDIATE)
    weights = dense_weights(model, group.device)
    return model, {name: tensor.float() for name, tensor in weights.items()}


def arms_of(layers: Layers, tokens: int, routing: Routing) -> dict[str, Arm]:
    """Every way under every placement."""
    model, weights = dense(layers)
    shape = (2 * SEQUENCES, tokens // (2 * SEQUENCES))
    random = torch.Generator().manual_seed(SEED + layers.group.rank)
    words = torch.randint(VOCABULARY, shape, generator=random).to(layers.group.device)
    halves, half = torch.split(words, SEQUENCES), tokens // 2

    def ways(split: BatchSplit | None) -> dict[str, Callable[[Batch], object]]:
        whole, part = (
            MoEStack(model, weights, layers.of(size, layers.table, split))
            for size in (tokens, half)
        )

        def one(batch: Batch) -> None:
            ids, seeds = batch
            whole.forward(words, salt=seeds, forced=ids)

        def in_turn(batch: Batch) -> None:
            ids, seeds = batch
            for mine, chosen in zip(halves, torch.split(ids, half, dim=1), strict=True):
                part.forward(mine, salt=seeds, forced=chosen)

        def both(batch: Batch) -> None:
            ids, seeds = batch
            forced = (ids[:, :half], ids[:, half:])
            part.forward_two(halves[0], halves[1], salts=(seeds, seeds), forced=forced)

        return {"one": one, "both": both, "in turn": in_turn}

    planned, split = ways(None), ways(layers.split)
    tables = {name: layers.prepared(routing.placements[name]) for name in ("contiguous", "auto")}
    found = {
        f"{way}, {placement}": Arm(run, tables[placement])
        for placement in tables
        for way, run in planned.items()
    }
    with_split = {f"{way}, split": Arm(run, tables["auto"]) for way, run in split.items()}
    reference = found.pop("in turn, auto")
    return {**found, **with_split, "in turn, auto": reference}


def main() -> None:
    """Measure every trace at every size."""
    asked = arguments(__doc__).parse_args()
    measure(asked, join(asked.device), SIZES, arms_of)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
