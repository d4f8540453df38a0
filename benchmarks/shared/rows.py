"""Rows of the ranks that a step waits for, with a shared expert at home or on light ranks.

    python -m benchmarks.shared.rows --file rows.json

Cases, windows and plans are those of ``emulated_ranks``, with its policy auto. A layer has a shared
expert besides, of the routed ones' size; each rank has the same number of tokens, an eighth of the
routed rows of the mean rank (top-8). ``benchmarks.shared.experts`` times the rows on one GPU.

    home        planned shares, the shared expert's tokens at home
    split       the shares of the batch itself, tokens at home
    spread      split, then tokens of the shared expert to light ranks (LEAST tokens of a rank)
    spread any  the same for any number of tokens
    mean rank   spread: the rank whose rows are closest to the mean, in place of the slowest
    balanced    the same rows in every slot of every rank, tokens at home
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.emulated_ranks import (
    CASES,
    LEAST_WINDOWS,
    MOST_TIMED,
    ROWS,
    SEED,
    TOP_K,
    Sample,
    by_rank,
    rounded,
    slowest,
)
from benchmarks.ranks.batch_split.recorded import NUM_HISTORY, Case, Ints, expert_ids, windows
from benchmarks.ranks.batch_split.rows import rows_of_slots
from eplb import Placement, plan
from eplb.shares.shared_expert import LEAST, split_shared

ROUTED_TOP_K = 8  # experts of a token


def samples(case: Case, rows: int, order: str) -> list[Sample]:
    """Layers and windows that the plan did not see; none where the trace is too short."""
    tokens = rows * case.num_slots // (case.wide * TOP_K[case.model])
    loads = windows(expert_ids(case), tokens, order)
    if len(loads) < LEAST_WINDOWS:
        return []
    half = min(NUM_HISTORY, len(loads) // 2)
    placement = plan(loads[:half], case.topology).target
    rng, found = np.random.default_rng(SEED), []
    for _ in range(MOST_TIMED):
        number = int(rng.integers(loads.shape[1]))
        counts = loads[half + int(rng.integers(len(loads) - half)), number]
        found.append(sample(case, placement, number, counts))
    return found


def sample(case: Case, placement: Placement, number: int, counts: Ints) -> Sample:
    """Rows of the slots of the rank that each arm waits for, the shared expert's last."""
    home, split = (by_rank(case, one) for one in rows_of_slots(case, placement, number, counts))
    own = np.full(case.num_ranks, round(counts.sum() / (ROUTED_TOP_K * case.num_ranks)))
    spread_rows = np.column_stack([split, spread(split, own, LEAST)])
    of_rank = spread_rows.sum(axis=1)
    even = (round(counts.sum() / case.num_slots),) * home.shape[1]
    return {
        "home": with_shared(home, own),
        "split": with_shared(split, own),
        "spread": rounded(spread_rows[slowest(spread_rows)]),
        "spread any": with_shared(split, spread(split, own, 1)),
        "mean rank": rounded(spread_rows[np.abs(of_rank - of_rank.mean()).argmin()]),
        "balanced": (*even, int(own[0])),
    }


def spread(routed: NDArray[np.float64], own: Ints, least: int) -> Ints:
    """[R] tokens of the shared expert on each rank."""
    found = split_shared(routed.sum(axis=1), own, np.ones(len(own), dtype=bool), least=least)
    return found.kept + found.taken


def with_shared(routed: NDArray[np.float64], shared: Ints) -> tuple[int, ...]:
    """Rows of the slowest rank."""
    rows = np.column_stack([routed, shared])
    return rounded(rows[slowest(rows)])


def write_rows(path: Path) -> None:
    """Plan, and write the samples of all cases."""
    wanted = [
        (case, rows, order) for case in CASES for order in ("mixed", "recorded") for rows in ROWS
    ]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        made = list(pool.map(samples, *zip(*wanted, strict=True)))
    found = [
        {"case": CASES.index(case), "order": order, "rows": rows, "samples": one}
        for (case, rows, order), one in zip(wanted, made, strict=True)
        if one
    ]
    path.write_text(json.dumps(found))


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", type=Path, required=True, help="rows of the timed ranks")
    write_rows(parser.parse_args().file)


if __name__ == "__main__":
    main()
