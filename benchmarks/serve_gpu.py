"""Local expert work of large expert-parallel groups, emulated on one GPU.

    python -m benchmarks.serve_gpu [--out FILE]

A step lasts as long as its busiest rank. So one GPU runs, for a group of 32, 64 or 144 ranks, the
rows that the busiest rank of each arm would have: a layer's experts of DeepSeek-V3's shape in FP8
and BF16, 256 experts, driven by recorded routing (``ranks.batch_split`` has the traces, how 256
experts are made of them, and the windows). Placements are planned on earlier windows than those
that are timed. Dispatch, combine, attention and the cost of a split are not in it.

    contiguous   experts in order, replicas of the first ones
    greedy, auto the planner's policies, shares as planned
    split        auto's replicas with the shares of the batch itself
    LP           the same, by the optimum of the batch's linear program
    mean rank    auto: the rank whose rows are closest to the mean
    balanced     the same rows in every slot of every rank: what no placement can beat for sure

Few rows are bound by reading weights, so a slot without rows saves time there: a busiest rank by
rows can then be faster than the balanced one. Needs torch, triton, numpy, scipy and the traces.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.expert_curve import SHAPES, Shape, Weights, layer, tiling_for
from benchmarks.experts_uneven import PROCESSES, compiled, in_turns
from benchmarks.ranks.batch_split import (
    NUM_HISTORY,
    Case,
    Ints,
    expert_ids,
    optimal_parts,
    rows_of_slots,
    windows,
)
from eplb import Placement, plan

CASES = (
    Case("gpt-oss", 8, 32, 288),
    Case("gpt-oss", 8, 64, 320),
    Case("gpt-oss", 8, 144, 288),
    Case("V2-Lite", 4, 32, 288),
    Case("V2-Lite", 4, 64, 320),
    Case("V2-Lite", 4, 144, 288),
)
TOP_K = {"gpt-oss": 4, "V2-Lite": 6}  # of each of the layers that make one
ROWS = (16, 64, 256, 768)  # mean of a slot
POLICIES = ("contiguous", "greedy", "auto")
LEAST_WINDOWS, MOST_TIMED, SEED = 2, 4, 3

Rows = tuple[int, ...]
Sample = dict[str, Rows]  # rows of the timed rank's slots, by arm


def samples(case: Case, rows: int, order: str) -> list[Sample]:
    """Layers and windows that the plans did not see; none where the trace is too short."""
    loads = windows(
        expert_ids(case), rows * case.num_slots // (case.wide * TOP_K[case.model]), order
    )
    if len(loads) < LEAST_WINDOWS:
        return []
    half = min(NUM_HISTORY, len(loads) // 2)
    history = loads[:half].sum(axis=0)
    plans = {name: plan(history, case.topology, policy=name).target for name in POLICIES}
    rng = np.random.default_rng(SEED)
    found = []
    for _ in range(MOST_TIMED):
        number = int(rng.integers(loads.shape[1]))
        counts = loads[half + int(rng.integers(len(loads) - half)), number]
        found.append(sample(case, plans, number, counts))
    return found


def sample(case: Case, plans: dict[str, Placement], number: int, counts: Ints) -> Sample:
    """Rows of the rank that each arm waits for."""
    made = {}
    for name, placement in plans.items():
        planned, split = rows_of_slots(case, placement, number, counts)
        made[name] = by_rank(case, planned)
    made["split"] = by_rank(case, split)  # of auto, the last
    made["LP"] = by_rank(case, optimal_rows(case, placement, number, counts))
    found = {name: rounded(ranks[ranks.sum(axis=1).argmax()]) for name, ranks in made.items()}
    of_rank = made["auto"].sum(axis=1)
    found["mean rank"] = rounded(made["auto"][np.abs(of_rank - of_rank.mean()).argmin()])
    found["balanced"] = (round(counts.sum() / case.num_slots),) * len(found["auto"])
    return found


def by_rank(case: Case, rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """[R, slots of a rank] of rows [S]."""
    return rows.reshape(case.num_ranks, -1)


def rounded(rows: NDArray[np.float64]) -> Rows:
    """Whole rows."""
    return tuple(np.rint(rows).astype(int).tolist())


def optimal_rows(
    case: Case, placement: Placement, number: int, counts: Ints
) -> NDArray[np.float64]:
    """[S] rows of the linear program; several slots of an expert on one rank count as one."""
    rank_of = case.topology.rank_of_slot
    held = placement.expert_to_slots[number]
    ranks = [np.unique(rank_of[slots[slots >= 0]]) for slots in held]
    _, pairs, tokens = optimal_parts(counts, ranks, case.num_ranks)
    rows = np.zeros(case.num_slots)
    for (expert, rank), part in zip(pairs, tokens, strict=True):
        slots = held[expert][held[expert] >= 0]
        rows[slots[rank_of[slots] == rank][0]] = part
    return rows


def show(shape: Shape, every: list[tuple[Case, str, int, list[Sample]]]) -> Iterator[object]:
    """Print two lines for each case: microseconds, and rows of the timed rank over the mean."""
    names = list(every[0][3][0])
    print(f"\n{shape.name}\n{'case':24}{'order':>9}{'rows':>6}", end="")
    print("".join(f"{name:>17}" for name in names), flush=True)
    for case, order, rows, found in every:
        weights = Weights(shape, case.num_slots // case.num_ranks)
        times = []
        for one in found:
            tiling = tiling_for(shape, 2 * rows)
            runs = {
                name: layer(weights, torch.tensor(counts, dtype=torch.int32), tiling)
                for name, counts in one.items()
            }
            times.append(in_turns(runs))
        mean = {name: statistics.mean(one[name] for one in times) for name in names}
        load = {
            name: statistics.mean(sum(one[name]) / sum(one["balanced"]) for one in found)
            for name in names
        }
        print(f"{case.name:24}{order:>9}{rows:6}", end="")
        print(
            "".join(
                f"{us:7.0f}{mean['balanced'] / us:5.0%}{load[name]:5.2f}"
                for name, us in mean.items()
            ),
            flush=True,
        )
        yield {"shape": shape.name, "case": case.name, "order": order, "rows": rows, "us": times}
        del weights, runs
        torch.cuda.empty_cache()


def main() -> None:
    """Plan and compile in processes, then measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file of all medians")
    asked = parser.parse_args()
    shapes = SHAPES[:2]
    wanted = [
        (case, rows, order) for case in CASES for order in ("mixed", "recorded") for rows in ROWS
    ]
    tasks = {
        (shape, case.num_slots // case.num_ranks, tiling_for(shape, 2 * rows))
        for shape in shapes
        for case, rows, _ in wanted
    }
    with ProcessPoolExecutor(PROCESSES, get_context("spawn")) as pool:
        done = pool.map(compiled, tasks)
        made = list(pool.map(samples, *zip(*wanted, strict=True)))
        list(done)
    every = [
        (case, order, rows, found)
        for (case, rows, order), found in zip(wanted, made, strict=True)
        if found
    ]
    torch.manual_seed(SEED)
    torch.set_default_device("cuda")
    print(torch.cuda.get_device_name(), torch.__version__)
    print("each arm: microseconds, share of balanced, rows over the mean")
    found = [one for shape in shapes for one in show(shape, every)]
    if asked.out:
        asked.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
