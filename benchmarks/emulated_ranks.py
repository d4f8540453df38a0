"""Rows of the ranks that a step of a large expert-parallel group waits for, from recorded routing.

    python -m benchmarks.emulated_ranks --file rows.json

A step lasts as long as its slowest rank: ``benchmarks.serve_gpu`` runs its rows on one GPU. One
layer of 256 experts on 32, 64 or 144 ranks (``batch_split`` has the traces, how 256 experts
are made of them, and the windows). Placements are planned on earlier windows than those that are
timed.

    contiguous   experts in order, replicas of the first ones
    greedy, auto the planner's policies, shares as planned
    time         auto with objective="time": the experts' time by a measured curve, not tokens
    split        auto's replicas with the shares of the batch itself
    LP           the same, by the optimum of the batch's linear program
    MoonEP, UltraEP  first copies in order, all redundant slots filled for the batch, by their rules
                 (simulations/oracles), transfer without time
    mean rank    auto: the rank whose rows are closest to the mean
    balanced     the same rows in every slot of every rank: what no placement can beat for sure
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.batch_split import (
    NUM_HISTORY,
    Case,
    Ints,
    expert_ids,
    optimal_parts,
    rows_of_slots,
    windows,
)
from eplb import Placement, plan
from eplb.core.cost import CostModel
from eplb.core.placement import EMPTY
from simulations.oracles import EXACT, ULTRA_EP_LEAST, ULTRA_EP_TOLERANCE, give, lowest

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
LEAST_WINDOWS, MOST_TIMED, SEED = 2, 6, 3


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
    history = loads[:half]
    plans = {name: plan(history, case.topology, policy=name).target for name in POLICIES}
    plans["time"] = plan(history, case.topology, objective="time").target
    rng = np.random.default_rng(SEED)
    found = []
    for _ in range(MOST_TIMED):
        number = int(rng.integers(loads.shape[1]))
        counts = loads[half + int(rng.integers(len(loads) - half)), number]
        found.append(sample(case, plans, number, counts))
    return found


def sample(case: Case, plans: dict[str, Placement], number: int, counts: Ints) -> Sample:
    """Rows of the rank that each arm waits for."""
    made = {
        name: by_rank(case, rows_of_slots(case, placement, number, counts)[0])
        for name, placement in plans.items()
    }
    auto = plans["auto"]
    made["split"] = by_rank(case, rows_of_slots(case, auto, number, counts)[1])
    made["LP"] = by_rank(case, optimal_rows(case, auto, number, counts))
    made["MoonEP"] = in_order(case, counts, 0, EXACT)
    made["UltraEP"] = in_order(case, counts, ULTRA_EP_LEAST, ULTRA_EP_TOLERANCE)
    found = {name: rounded(ranks[slowest(ranks)]) for name, ranks in made.items()}
    of_rank = made["auto"].sum(axis=1)
    found["mean rank"] = rounded(made["auto"][np.abs(of_rank - of_rank.mean()).argmin()])
    found["balanced"] = (round(counts.sum() / case.num_slots),) * len(found["auto"])
    slots = max(len(rows) for rows in found.values())  # the weights of one more lie there for all
    return {name: rows + (0,) * (slots - len(rows)) for name, rows in found.items()}


def in_order(case: Case, counts: Ints, least: int, tolerance: float) -> NDArray[np.float64]:
    """[R, C] rows with first copies in order and all other slots filled for these counts."""
    held = np.full((case.num_ranks, case.num_slots // case.num_ranks), EMPTY, dtype=np.int32)
    for rank, experts in enumerate(np.array_split(np.arange(len(counts)), case.num_ranks)):
        held[rank, : len(experts)] = experts
    load = np.where(held != EMPTY, counts[held], 0).astype(np.float64).ravel()
    pieces = lowest(load, held.ravel(), case.topology, least, tolerance)
    give(pieces, load, held.ravel(), case.topology)
    return by_rank(case, load)


def slowest(rows: NDArray[np.float64]) -> int:
    """The rank of rows [R, C] that takes longest by the planner's curve."""
    at, us = np.array(CostModel().timed.curve).T
    beyond = np.maximum(rows / at[-1], 1.0)  # the last point, in proportion
    times = np.where(rows > 0, np.interp(rows, at, us) * beyond, 0.0)
    return int(times.sum(axis=1).argmax())


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


def write_rows(path: Path) -> None:
    """Plan, and write the samples of all cases."""
    wanted = [
        (case, rows, order) for case in CASES for order in ("mixed", "recorded") for rows in ROWS
    ]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        made = list(pool.map(samples, *zip(*wanted, strict=True)))
    path.write_text(
        json.dumps(
            [
                {"case": CASES.index(case), "order": order, "rows": rows, "samples": found}
                for (case, rows, order), found in zip(wanted, made, strict=True)
                if found
            ]
        )
    )


def read_rows(path: Path) -> list[tuple[Case, str, int, list[Sample]]]:
    """What ``write_rows`` wrote."""
    return [
        (
            CASES[one["case"]],
            one["order"],
            one["rows"],
            [{name: tuple(rows) for name, rows in arms.items()} for arms in one["samples"]],
        )
        for one in json.loads(path.read_text())
    ]


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", type=Path, required=True, help="rows of the timed ranks")
    write_rows(parser.parse_args().file)


if __name__ == "__main__":
    main()
