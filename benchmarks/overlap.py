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

import argparse
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.migration.decode import VOCABULARY, dense_weights
from benchmarks.routing_file import NUM_EXPERTS, NUM_LAYERS, TOP_K, Routing, read
from benchmarks.serve_ranks import (
    HIDDEN,
    INTERMEDIATE,
    SEED,
    SMALL_HIDDEN,
    SMALL_INTERMEDIATE,
    STEPS,
    Arm,
    Batch,
    Group,
    Layers,
    Step,
    join,
    show,
)
from eplb.core.model import ModelShape
from runtime.batch_split import BatchSplit
from runtime.dispatch.all_to_all import AllToAllDispatcher
from runtime.model.moe import MoEStack

DECODE, PREFILL = (64, 128), (2048,)  # tokens of a rank, of both halves
SEQUENCES = 2  # of a half


def dense(group: Group) -> tuple[ModelShape, dict[str, torch.Tensor]]:
    """The model, and its weights beside the experts'."""
    sizes = (HIDDEN, INTERMEDIATE) if group.is_cuda else (SMALL_HIDDEN, SMALL_INTERMEDIATE)
    model = ModelShape(
        tuple(range(NUM_LAYERS)), NUM_EXPERTS, TOP_K, hidden=sizes[0], intermediate=sizes[1]
    )
    weights = dense_weights(model, group.device)
    if not group.is_cuda:
        weights = {name: tensor.float() for name, tensor in weights.items()}
    return model, weights


def arms_of(
    layers: Layers,
    tokens: int,
    routing: Routing,
    model: ModelShape,
    weights: dict[str, torch.Tensor],
) -> dict[str, Arm]:
    """Every way under every placement."""
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--file", type=Path, required=True, help="of benchmarks.routing_file")
    parser.add_argument("--precision", choices=("fp8", "bf16"), default="fp8")
    parser.add_argument("--modes", nargs="+", choices=("decode", "prefill"), default=list(STEPS))
    parser.add_argument("--steps", type=int, help="of each line, instead of the usual")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--dispatcher", choices=("auto", "deepep", "all_to_all", "local"), default="auto"
    )
    asked = parser.parse_args()
    group = join(asked.device)
    traces = read(asked.file, group.size)
    model, weights = dense(group)
    if not group.rank:
        print(f"{group.size} ranks, {asked.precision}, dispatcher {asked.dispatcher}")
        print(f"{'mode':9}{'tokens':>7} {'trace':9}{'arm':24}{'us':>9}{'p99':>9}", end="")
        print(f"{'speed':>8}{'rows':>7}", flush=True)
    for mode in asked.modes:
        sizes = DECODE if mode == "decode" else PREFILL
        layers = Layers(group, asked.precision, mode, sizes, asked.dispatcher)
        has_sizes_on_host = isinstance(layers.dispatcher, AllToAllDispatcher)
        in_graph = group.is_cuda and mode == "decode" and not has_sizes_on_host
        for tokens, routing in product(sizes, traces):
            step = Step(layers, tokens, in_graph=in_graph)
            arms = arms_of(layers, tokens, routing, model, weights)
            show(step, mode, routing, arms, asked.steps or STEPS[mode])
        del layers, step, arms
    dist.destroy_process_group()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
