"""Max/mean over ranks with planned shares, with the batch's split, and the optimum of both.

    python -m benchmarks.batch_split [--tokens 64 256] [--order recorded]

Plans are made on earlier windows and judged on later ones. Windows hold the given tokens of each
rank, in recorded order (one request after another) or with blocks of 32 tokens mixed, as a batch of
many requests. The optimum is that of the batch's linear program.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.recorded import DATA
from benchmarks.recorded import windows as counted
from eplb import Placement, Topology, plan
from runtime.batch.split_rule import MOST_WAYS, SplitRule, split_batch, split_layout

# -- Recorded routing of real models as the load of ranks: cases, their experts, windows of tokens.
#
# 256 experts are made of four layers of 64, or eight of 32, beside each other: each token goes to
# the experts that it had in all of them.

Ints = NDArray[np.int64]
DOMAINS = ("intent", "summary")
NUM_HISTORY = 8  # windows that a plan sees, at most


@dataclass(frozen=True)
class Case:
    """A model's routing on a number of ranks."""

    model: str
    wide: int  # layers that make one
    num_ranks: int
    num_slots: int

    @property
    def name(self) -> str:
        """As tables show it."""
        made = f" x{self.wide}" if self.wide > 1 else ""
        return f"{self.model}{made}, {self.num_slots}/{self.num_ranks}"

    @property
    def topology(self) -> Topology:
        """All ranks in one domain."""
        return Topology.uniform(1, self.num_ranks, self.num_slots // self.num_ranks)


CASES = (
    Case("gpt-oss", 1, 8, 40),
    Case("gpt-oss", 1, 32, 64),
    Case("V2-Lite", 1, 8, 72),
    Case("V2-Lite", 1, 32, 96),
    Case("gpt-oss", 8, 32, 288),
    Case("gpt-oss", 8, 64, 320),
    Case("V2-Lite", 4, 32, 288),
    Case("V2-Lite", 4, 64, 320),
)


def expert_ids(case: Case) -> Ints:
    """[L, tokens, K] in recorded order."""
    if case.model == "gpt-oss":
        found = np.load(DATA / "gptoss20b_decode.npz")["expert_ids"].transpose(1, 0, 2)
    else:
        both = [np.load(DATA / f"dsv2lite_{name}.npz")["expert_ids"] for name in DOMAINS]
        found = np.concatenate(both, axis=1)
    ids: Ints = found.astype(np.int64)
    if case.wide == 1:
        return ids
    one = 32 if case.model == "gpt-oss" else 64
    num_layers = len(ids) // case.wide
    ids = ids[: num_layers * case.wide].reshape(num_layers, case.wide, *ids.shape[1:])
    ids = ids + (np.arange(case.wide) * one)[:, None, None]
    return np.concatenate([ids[:, nth] for nth in range(case.wide)], axis=2)


def windows(ids: Ints, tokens: int, order: str = "mixed") -> Ints:
    """[T, L, E] of runs of tokens: as recorded, or with blocks of 32 tokens mixed."""
    if order == "mixed":
        blocks = ids.shape[1] // 32
        drawn = np.random.default_rng(0).permutation(blocks)
        ids = ids[:, : blocks * 32].reshape(len(ids), blocks, 32, -1)[:, drawn]
        ids = ids.reshape(len(ids), blocks * 32, -1)
    return counted(ids, tokens, int(ids.max()) + 1)


MOST_WINDOWS = 8  # that are judged


def optimum(counts: Ints, ranks: list[Ints], num_ranks: int) -> float:
    """Least tokens of the busiest rank: the linear program on given replicas."""
    return optimal_parts(counts, ranks, num_ranks)[0]


def optimal_parts(
    counts: Ints, ranks: list[Ints], num_ranks: int
) -> tuple[float, list[tuple[int, int]], NDArray[np.float64]]:
    """The optimum, the pairs of expert and rank, and the tokens of each pair."""
    from scipy.optimize import linprog

    pairs = [(expert, rank) for expert, held in enumerate(ranks) for rank in held.tolist()]
    columns = np.arange(len(pairs))
    expert, rank = np.array(pairs).T
    on_rank = np.zeros((num_ranks, len(pairs) + 1))
    on_rank[rank, columns], on_rank[:, -1] = 1.0, -1.0
    of_expert = np.zeros((len(counts), len(pairs) + 1))
    of_expert[expert, columns] = 1.0
    cost = np.zeros(len(pairs) + 1)
    cost[-1] = 1.0
    found = linprog(cost, on_rank, np.zeros(num_ranks), of_expert, counts, method="highs")
    return float(found.fun), pairs, found.x[:-1]


@dataclass(frozen=True)
class Judged:
    """Max/mean over ranks of one layer and window."""

    planned: float
    split: float
    best: float


def judge(case: Case, tokens: int, rounds: int, order: str) -> Iterator[Judged]:
    """Layers of the windows that follow the plan's."""
    loads = windows(expert_ids(case), tokens * case.num_ranks, order)
    half = min(NUM_HISTORY, len(loads) // 2)
    topology = case.topology
    placement = plan(loads[:half].sum(axis=0), topology).target
    rank_of = topology.rank_of_slot
    for layer in range(placement.num_layers):
        held = placement.expert_to_slots[layer]
        layout = split_layout(
            held,
            placement.slot_share[layer],
            rank_of,
            num_split=case.num_slots - placement.num_experts,
            ways=MOST_WAYS,
        )
        ranks = [np.unique(rank_of[slots[slots >= 0]]) for slots in held]
        share = placement.slot_share[layer]
        for counts in loads[half : half + MOST_WINDOWS, layer]:
            mean = counts.sum() / case.num_ranks
            per_slot = counts[placement.slot_to_expert[layer]] * share
            planned = np.bincount(rank_of, per_slot).max()
            split = split_batch(counts, layout, SplitRule(rounds=rounds)).rank_load.max()
            yield Judged(
                planned / mean, split / mean, optimum(counts, ranks, case.num_ranks) / mean
            )


def show_balance(tokens: list[int], rounds: int, order: str) -> None:
    """Print one line for each case and size."""
    print(f"{'case':28}{'tokens':>7}{'layers':>7}{'planned':>9}{'split':>9}{'LP':>9}", end="")
    print(f"{'split/LP':>10}{'p99':>9}{'max':>9}{'excess kept':>12}")
    for case in CASES:
        for size in tokens:
            found = list(judge(case, size, rounds, order))
            planned, split, best = np.array([(j.planned, j.split, j.best) for j in found]).T
            gap = split / best
            kept = (split - 1).mean() / (planned - 1).mean()
            print(
                f"{case.name:28}{size:7}{len(found):7}{planned.mean():9.4f}{split.mean():9.4f}"
                f"{best.mean():9.4f}{gap.mean():10.4f}{np.quantile(gap, 0.99):9.4f}"
                f"{gap.max():9.4f}{kept:12.2f}",
                flush=True,
            )


def rows_of_slots(
    case: Case, placement: Placement, layer: int, counts: Ints
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Rows [S] with planned shares and with the split."""
    layout = split_layout(
        placement.expert_to_slots[layer],
        placement.slot_share[layer],
        case.topology.rank_of_slot,
        num_split=case.num_slots - placement.num_experts,
        ways=MOST_WAYS,
    )
    planned = counts[placement.slot_to_expert[layer]] * placement.slot_share[layer]
    split = planned.copy()
    parts = split_batch(counts, layout).tokens
    used = layout.slot >= 0
    split[layout.slot[used]] = parts[used]
    return planned, split


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256], help="of a rank")
    parser.add_argument("--rounds", type=int, default=SplitRule().rounds)
    parser.add_argument("--order", choices=("recorded", "mixed"), default="mixed")
    given = parser.parse_args()
    show_balance(given.tokens, given.rounds, given.order)


if __name__ == "__main__":
    main()
