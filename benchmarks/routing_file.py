"""Routing of 256 experts, top-8, and placements for it: the input of ``benchmarks.serve_ranks``.

    python -m benchmarks.routing_file --file routing.npz [--experts 128] [--ranks 1 2 4 8]

Placements are planned on the first half of each trace; serving runs the second half. No GPU is
needed here, and neither traces nor a planner there. *time* is ``auto`` with ``objective="time"``,
for steps of 64 tokens a rank; the other placements balance tokens. DeepEP's normal mode serves at
most 128 slots of a rank within a host, so two ranks need a file of 128 experts for prefill. Traces:

    gpt-oss, V2-Lite  recorded routing, widened: layers of 32 experts, or of 64, make one of 256
                      The choices of a recorded token are those of several tokens, which take as
                      many from every layer. Experts are numbered anew at random: in order, each
                      layer would be one rank of eight, and every rank would get the same. Blocks
                      of 32 recorded tokens are mixed, as in a batch of many requests.
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

from benchmarks.recorded import DATA
from eplb import LoadHistory, Placement, Topology, plan

NUM_EXPERTS, TOP_K, NUM_LAYERS = 256, 8, 3
SLOTS_OF_EXPERT = 9 / 8  # the mean
POLICIES = ("contiguous", "greedy", "auto", "time")
RECORDED = {"gpt-oss": 32, "V2-Lite": 64}  # experts of a layer
FILES = {
    "gpt-oss": ("gptoss20b_decode.npz",),
    "V2-Lite": ("dsv2lite_intent.npz", "dsv2lite_summary.npz"),
}
MOST_TOKENS = 65_536  # tokens of a trace
TIMED_TOKENS = 64  # tokens of a rank in a step, for the placement "time"
BLOCK, HISTORY_WINDOWS = 32, 8
GAMMA_SHAPE, DRIFT, SEED = 0.7, 0.3, 7

Ids = NDArray[np.uint8]


@dataclass(frozen=True)
class Routing:
    """One trace, as a group of ranks serves it."""

    name: str
    unseen: Ids  # [L, tokens, K] experts of tokens that no placement was planned on
    placements: dict[str, Placement]  # placements by policy

    @property
    def num_experts(self) -> int:
        """Experts of a layer."""
        return next(iter(self.placements.values())).num_experts

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


def topology_of(num_ranks: int, num_experts: int) -> Topology:
    """All ranks on one node; one rank alone has no use for a replica."""
    slots = round(num_experts * SLOTS_OF_EXPERT) if num_ranks > 1 else num_experts
    return Topology.uniform(1, num_ranks, slots // num_ranks)


def recorded(name: str, num_experts: int) -> Ids:
    """[L, tokens, K] of a recorded model, mixed."""
    parts = [np.load(DATA / file)["expert_ids"] for file in FILES[name]]
    if name == "gpt-oss":
        parts = [part.transpose(1, 0, 2) for part in parts]
    ids = np.concatenate(parts, axis=1)  # [recorded layers, recorded tokens, choices]
    num_tokens, wide = ids.shape[1], num_experts // RECORDED[name]  # layers that make one
    rng = np.random.default_rng(SEED)
    number = rng.permutation(num_experts)
    of_layer = (np.arange(wide) * RECORDED[name])[:, None, None]
    ids = number[ids[: NUM_LAYERS * wide].reshape(NUM_LAYERS, wide, num_tokens, -1) + of_layer]
    choices = TOP_K // wide  # choices of a layer by one token
    made = ids.shape[3] // choices  # tokens of each recorded one; choices left over are unused
    by_token = ids[..., : made * choices].reshape(NUM_LAYERS, wide, num_tokens, made, choices)
    tokens = by_token.transpose(0, 2, 3, 1, 4).reshape(NUM_LAYERS, num_tokens, made, TOP_K)
    blocks = num_tokens // BLOCK
    order = rng.permutation(blocks)
    mixed = tokens[:, : blocks * BLOCK].reshape(NUM_LAYERS, blocks, BLOCK * made, TOP_K)[:, order]
    return mixed.reshape(NUM_LAYERS, -1, TOP_K)[:, :MOST_TOKENS].astype(np.uint8)


def drawn(num_experts: int) -> Ids:
    """[L, tokens, K] of seeded loads, by Gumbel top-k; the second half has drifted."""
    rng = np.random.default_rng(SEED)
    load = rng.gamma(GAMMA_SHAPE, 1.0, (NUM_LAYERS, num_experts)) + 1e-3
    halves = []
    for part in (load, load * rng.lognormal(0.0, DRIFT, load.shape)):
        for layer in np.log(part).astype(np.float32):
            noise = rng.gumbel(size=(MOST_TOKENS // 2, num_experts)).astype(np.float32)
            halves.append(np.argpartition(layer + noise, -TOP_K, axis=1)[:, -TOP_K:])
    layers = np.stack(halves).reshape(2, NUM_LAYERS, -1, TOP_K)
    return np.concatenate([layers[0], layers[1]], axis=1).astype(np.uint8)


def loads(ids: Ids, num_experts: int, num_ranks: int) -> LoadHistory:
    """Windows of equal length, in steps of ``TIMED_TOKENS`` a rank."""
    parts = np.array_split(ids, HISTORY_WINDOWS, axis=1)
    tokens = [
        [np.bincount(layer.ravel(), minlength=num_experts) for layer in part] for part in parts
    ]
    steps = max(1, ids.shape[1] // (HISTORY_WINDOWS * TIMED_TOKENS * num_ranks))
    first = np.arange(HISTORY_WINDOWS) * steps
    return LoadHistory(np.array(tokens), first, first + steps - 1)


def write(path: Path, ranks: list[int], num_experts: int) -> None:
    """Write all traces with their placements."""
    arrays: dict[str, Any] = {}
    traces = {name: recorded(name, num_experts) for name in RECORDED}
    for name, ids in {**traces, "gamma": drawn(num_experts)}.items():
        half = ids.shape[1] // 2
        arrays[f"{name}/unseen"] = ids[:, half:]
        for num_ranks in ranks:
            history = loads(ids[:, :half], num_experts, num_ranks)
            topology = topology_of(num_ranks, num_experts)
            for policy in POLICIES:
                made = (
                    plan(history, topology, policy="auto", objective="time")
                    if policy == "time"
                    else plan(history, topology, policy=policy, objective="tokens")
                ).target
                arrays[f"{name}/{num_ranks}/{policy}/experts"] = made.slot_to_expert
                arrays[f"{name}/{num_ranks}/{policy}/shares"] = made.slot_share
    np.savez_compressed(path, num_experts=num_experts, **arrays)


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
                        int(file["num_experts"]),
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
    parser.add_argument("--experts", type=int, choices=(128, 256), default=NUM_EXPERTS)
    asked = parser.parse_args()
    write(asked.file, asked.ranks, asked.experts)


if __name__ == "__main__":
    main()
