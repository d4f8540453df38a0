"""What an agent costs a step: steps with and without it, in alternating pairs of one run.

    python3 -m benchmarks.deployment.step_cost --device cuda        # 2 GPUs, below a minute
    python -m benchmarks.deployment.step_cost --ranks 1,4           # CPU ranks

*With*: a whole agent, ``step`` before every pass, its threads, votes, samples into a store. Nothing
migrates. *Without*: no agent and none of its threads; the host waits for the device alike. Every
block *with* builds a new agent over the same experts, table and counters, so that both kinds of
blocks run the same passes. A pair is one block of each, in turns of order. Prints one table.
Seeded.

On GPUs a pass is a CUDA graph of DeepSeek-V3's layers over ``deep_ep``; where that is not
installed, an eager pass over NCCL (``--dispatcher all-to-all``).
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.deployment.step_pairs import Block, Run, Sides, measure_pairs
from benchmarks.migration.big_rank import Shapes, begin_store, v3
from benchmarks.result_table import Row, keep, show
from eplb.core.model import ModelShape
from eplb.errors import RankError
from tests.support.launch import launch

# -- Rows of the pairs that ``step_cost`` measured.

TARGET = "<= 0.5 % at p50"


def rows_of(ranks: Sequence[Sides], what: str, *, is_cuda: bool) -> list[Row]:
    """Ratios of whole steps, pair by pair, and the processor time of the agent's parts.

    A step ends when the slowest rank has ended: of the ranks' times of one step the largest counts.
    """
    without = [slowest(blocks) for blocks in zip(*(r.without for r in ranks), strict=True)]
    with_agent = [slowest(blocks) for blocks in zip(*(r.with_agent for r in ranks), strict=True)]
    rows: list[Row] = [
        (
            f"{what}: step without, p50 / p99",
            "{:.1f} / {:.1f} us, {} pairs of 2 x {} steps, store in {}".format(
                *_p50_p99(without), len(without), len(without[0]), ranks[0].store
            ),
            "-",
        ),
        ("  step with, p50 / p99", "{:.1f} / {:.1f} us".format(*_p50_p99(with_agent)), "-"),
    ]
    for percent in (50, 99):
        target = (TARGET if percent == 50 else "reported") if is_cuda else "-"
        pairs = zip(without, with_agent, strict=True)
        found = ratios(((a, b) for a, b in pairs), percent)
        rows.append((f"  with / without, p{percent} of each pair", _spread(found), target))
    neighbours = ratios(itertools.pairwise(without), 50)
    rows.append(("  noise: without / without, p50 of neighbours", _spread(neighbours), "-"))
    calls = np.concatenate([block.call_us for r in ranks for block in r.with_agent])
    threads = [block.threads_us for r in ranks for block in r.with_agent]
    p50, p99 = np.percentile(calls, (50, 99))
    rows += [
        (
            "  step(), processor time of a call: p50 / p99 / mean",
            f"{p50:.1f} / {p99:.1f} / {calls.mean():.1f} us",
            "-",
        ),
        (
            "  the agent's threads, processor time of a step, a rank",
            f"{np.median(threads):.1f} us ({min(threads):.1f} to {max(threads):.1f})",
            "-",
        ),
    ]
    return rows


def slowest(blocks: Iterable[Block]) -> NDArray[np.float64]:
    """Times [steps] of one block: of all ranks the largest."""
    times: NDArray[np.float64] = np.array([block.step_us for block in blocks]).max(axis=0)
    return times


def ratios(
    pairs: Iterable[tuple[NDArray[np.float64], NDArray[np.float64]]], percent: int
) -> NDArray[np.float64]:
    """Second over first at a percentile, less 1."""
    return np.array([np.percentile(b, percent) / np.percentile(a, percent) - 1 for a, b in pairs])


def _spread(found: NDArray[np.float64]) -> str:
    low, middle, high = np.percentile(found, (25, 50, 75))
    return f"{middle:+.2%} median of pairs (quartiles {low:+.2%}, {high:+.2%})"


def _p50_p99(blocks: Sequence[NDArray[np.float64]]) -> tuple[float, float]:
    p50, p99 = np.percentile(np.concatenate(blocks), (50, 99))
    return float(p50), float(p99)


SMALL = ModelShape(tuple(range(4)), 16, 4, hidden=128, intermediate=64)
DEADLINE_S = 150.0  # of the ranks; a run ends long before
WIDTH = 66


def run_of(given: argparse.Namespace, num_ranks: int, dispatcher: str, path: Path) -> Run:
    """What the ranks of one run are given."""
    if given.device == "cpu":
        slots = SMALL.num_experts // num_ranks + (2 if num_ranks > 1 else 0)
        shapes = Shapes(SMALL, slots, precision="float32")
        return Run(shapes, "all-to-all", 1, given.block or 60, given.seconds, path, given.load)
    shapes = v3(4, 16 * num_ranks, slots_per_rank=18, precision=given.precision)
    layer_runs = 14 if dispatcher == "deepep" else 4
    return Run(shapes, dispatcher, layer_runs, given.block or 100, given.seconds, path, given.load)


def measure(given: argparse.Namespace, num_ranks: int, dispatcher: str) -> list[Sides]:
    """Run the ranks over a store of their own."""
    with tempfile.TemporaryDirectory() as folder:
        run = run_of(given, num_ranks, dispatcher, Path(folder) / "bench.sqlite")
        begin_store(run.store, run.shapes, num_ranks)
        found: list[Sides] = launch(measure_pairs, num_ranks, run, deadline_s=DEADLINE_S)
        return found


def measure_with_any(given: argparse.Namespace, num_ranks: int) -> tuple[str, list[Sides]]:
    """Measure with ``deep_ep`` if it is there and works, else with NCCL's all-to-all."""
    wanted = given.dispatcher or ("deepep" if find_spec("deep_ep") else "all-to-all")
    if given.device == "cpu":
        wanted = "all-to-all"
    try:
        return wanted, measure(given, num_ranks, wanted)
    except RankError as exc:
        if wanted == "all-to-all" or given.dispatcher:
            raise
        print(f"deep_ep cannot be used here, all-to-all is: {str(exc)[-600:]}", file=sys.stderr)
        return "all-to-all", measure(given, num_ranks, "all-to-all")


def main() -> None:
    """Measure, and print one table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", default="", help="numbers of ranks; 2 on cuda, 1,4 on the cpu")
    parser.add_argument("--load", choices=("full", "idle", "none"), default="full")
    parser.add_argument("--dispatcher", choices=("deepep", "all-to-all"))
    parser.add_argument("--precision", choices=("fp8", "bfloat16"), default="fp8", help="on cuda")
    parser.add_argument("--block", type=int, default=0, help="steps that are measured in a block")
    parser.add_argument("--seconds", type=float, default=20.0, help="of all pairs of one run")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    is_cuda = given.device == "cuda"
    numbers = [int(text) for text in (given.ranks or ("2" if is_cuda else "1,4")).split(",")]
    if is_cuda and torch.cuda.device_count() < max(numbers):
        raise SystemExit(f"found {torch.cuda.device_count()} GPUs, expected {max(numbers)}")
    rows: list[Row] = []
    for num_ranks in numbers:
        dispatcher, found = measure_with_any(given, num_ranks)
        part = rows_of(found, f"{num_ranks} {given.device} ranks, {dispatcher}", is_cuda=is_cuda)
        show(part, WIDTH)
        rows += part
    keep(rows, given.json)


if __name__ == "__main__":
    main()
