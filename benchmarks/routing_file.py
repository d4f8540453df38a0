"""Routing of 256 experts, top-8, and placements for it: the input of ``benchmarks.serve_ranks``.

    python -m benchmarks.routing_file --file routing.npz [--ranks 1 2 4 8]

Placements are planned on the first half of each trace; serving runs the second half. No GPU is
needed here, and neither traces nor a planner there. Traces:

    gpt-oss, V2-Lite  recorded routing, widened: eight layers of 32 experts, or four of 64, make one
                      of 256 (``batch_split``). A recorded token is four tokens, or three,
                      which take one choice of every layer each, or two. Experts are numbered
                      anew at random: in order, each layer would be one rank of eight, and every
                      rank would get the same. Blocks of 32 recorded tokens are mixed, as in a
                      batch of many requests.
    gamma             seeded draws: an expert's part of a layer is Gamma(0.7), the strong skew of
                      ``expert_curve``; after the plan it drifts by a lognormal factor of 0.3.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.batch_split import Case, expert_ids
from eplb import Placement, Topology, plan

NUM_EXPERTS, TOP_K, NUM_LAYERS, REDUNDANT = 256, 8, 3, 32
POLICIES = ("contiguous", "greedy", "auto")
RECORDED = {"gpt-oss": Case("gpt-oss", 8, 1, 256), "V2-Lite": Case("V2-Lite", 4, 1, 256)}
MOST_TOKENS = 65_536  # of a trace
BLOCK, HISTORY_WINDOWS = 32, 8
GAMMA_SHAPE, DRIFT, SEED = 0.7, 0.3, 7

Ids = NDArray[np.uint8]


@dataclass(frozen=True)
class Routing:
    """One trace, as a group of ranks serves it."""

    name: str
    unseen: Ids  # [L, tokens, K] experts of tokens that no placement was planned on
    placements: dict[str, Placement]  # by policy

    def window(self, number: int, rank: int, num_ranks: int, tokens: int) -> Ids:
        """[L, tokens, K] of one rank in a step; steps go round over the trace.

        Raises:
            ValueError: the trace is shorter than one step.
        """
        steps = self.unseen.shape[1] // (num_ranks * tokens)
        if not steps:
            raise ValueError(
                f"trace {self.name} has {self.unseen.shape[1]} unseen tokens, expected "
                f"{num_ranks * tokens} or more for {tokens} tokens on {num_ranks} ranks"
            )
        begin = (number % steps * num_ranks + rank) * tokens
        return self.unseen[:, begin : begin + tokens]


def topology_of(num_ranks: int) -> Topology:
    """All ranks on one node; one rank alone has no use for a replica."""
    slots = NUM_EXPERTS + (REDUNDANT if num_ranks > 1 else 0)
    return Topology.uniform(1, num_ranks, slots // num_ranks)


def recorded(case: Case) -> Ids:
    """[L, tokens, K] of a recorded model, mixed."""
    rng = np.random.default_rng(SEED)
    number = rng.permutation(NUM_EXPERTS)
    ids = number[expert_ids(case)[:NUM_LAYERS]]  # [L, recorded tokens, wide * choices of a layer]
    num_layers, num_tokens, _ = ids.shape
    by_layer = ids.reshape(num_layers, num_tokens, case.wide, -1)
    made = by_layer.shape[3] * case.wide // TOP_K  # tokens of each recorded one
    parts = by_layer.reshape(num_layers, num_tokens, case.wide, made, TOP_K // case.wide)
    tokens = parts.transpose(0, 1, 3, 2, 4).reshape(num_layers, num_tokens, made, TOP_K)
    blocks = num_tokens // BLOCK
    order = rng.permutation(blocks)
    mixed = tokens[:, : blocks * BLOCK].reshape(num_layers, blocks, BLOCK * made, TOP_K)[:, order]
    return mixed.reshape(num_layers, -1, TOP_K)[:, :MOST_TOKENS].astype(np.uint8)


def drawn() -> Ids:
    """[L, tokens, K] of seeded loads, by Gumbel top-k; the second half has drifted."""
    rng = np.random.default_rng(SEED)
    load = rng.gamma(GAMMA_SHAPE, 1.0, (NUM_LAYERS, NUM_EXPERTS)) + 1e-3
    halves = []
    for part in (load, load * rng.lognormal(0.0, DRIFT, load.shape)):
        for layer in np.log(part).astype(np.float32):
            noise = rng.gumbel(size=(MOST_TOKENS // 2, NUM_EXPERTS)).astype(np.float32)
            halves.append(np.argpartition(layer + noise, -TOP_K, axis=1)[:, -TOP_K:])
    layers = np.stack(halves).reshape(2, NUM_LAYERS, -1, TOP_K)
    return np.concatenate([layers[0], layers[1]], axis=1).astype(np.uint8)


def loads(ids: Ids) -> NDArray[np.int64]:
    """[T, L, E] tokens of each expert in windows of equal length."""
    return np.array(
        [
            [np.bincount(layer.ravel(), minlength=NUM_EXPERTS) for layer in part]
            for part in np.array_split(ids, HISTORY_WINDOWS, axis=1)
        ]
    )


def write(path: Path, ranks: list[int]) -> None:
    """Write all traces with their placements."""
    arrays: dict[str, Any] = {}
    for name, ids in {**{n: recorded(c) for n, c in RECORDED.items()}, "gamma": drawn()}.items():
        half = ids.shape[1] // 2
        history, arrays[f"{name}/unseen"] = loads(ids[:, :half]), ids[:, half:]
        for num_ranks in ranks:
            for policy in POLICIES:
                made = plan(history, topology_of(num_ranks), policy=policy).target
                arrays[f"{name}/{num_ranks}/{policy}/experts"] = made.slot_to_expert
                arrays[f"{name}/{num_ranks}/{policy}/shares"] = made.slot_share
    np.savez_compressed(path, **arrays)


def read(path: Path, num_ranks: int) -> list[Routing]:
    """What ``write`` wrote for a number of ranks.

    Raises:
        ValueError: it was not written for that number.
    """
    with np.load(path) as file:
        names = [key.removesuffix("/unseen") for key in file if key.endswith("/unseen")]
        if f"{names[0]}/{num_ranks}/auto/experts" not in file:
            raise ValueError(f"{path} has no placements for {num_ranks} ranks: write it anew")
        return [
            Routing(
                name,
                file[f"{name}/unseen"],
                {
                    policy: Placement(
                        file[f"{name}/{num_ranks}/{policy}/experts"],
                        NUM_EXPERTS,
                        slot_share=file[f"{name}/{num_ranks}/{policy}/shares"],
                    )
                    for policy in POLICIES
                },
            )
            for name in names
        ]


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    asked = parser.parse_args()
    write(asked.file, asked.ranks)


if __name__ == "__main__":
    main()
