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
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.deployment.step_pairs import Run, Sides, measure_pairs
from benchmarks.deployment.step_rows import rows_of
from benchmarks.migration.agent import begin_store
from benchmarks.migration.big_rank import Shapes, v3
from benchmarks.result_table import Row, keep, show
from eplb.core.model import ModelShape
from eplb.errors import RankError
from runtime.group.launch import launch

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
