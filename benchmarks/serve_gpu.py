"""Local expert work of large expert-parallel groups, emulated on one GPU.

    python -m benchmarks.emulated_ranks --file rows.json
    python -m benchmarks.serve_gpu --file rows.json [--out FILE]

One GPU runs, for groups of 32, 64 and 144 ranks, the rows that the busiest rank of each arm would
have (``emulated_ranks`` has the arms): a layer's experts of DeepSeek-V3's shape in FP8 and BF16.
Dispatch, combine, attention and the cost of a split are not in it.

Few rows are bound by reading weights, so a slot without rows saves time there: a busiest rank by
rows can then be faster than the balanced one. Needs torch and triton, and the planner's libraries.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.batch_split import Case
from benchmarks.emulated_ranks import SEED, Sample, read_rows
from benchmarks.expert_curve import (
    PROCESSES,
    SHAPES,
    Shape,
    Weights,
    compiled,
    in_turns,
    layer,
    tiling_for,
)


def show(shape: Shape, every: list[tuple[Case, str, int, list[Sample]]]) -> Iterator[object]:
    """Print two lines for each case: microseconds, and rows of the timed rank over the mean."""
    names = list(every[0][3][0])
    print(f"\n{shape.name}\n{'case':24}{'order':>9}{'rows':>6}", end="")
    print("".join(f"{name:>17}" for name in names), flush=True)
    for case, order, rows, found in every:
        weights = Weights(shape, len(found[0]["balanced"]))
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
    """Compile in processes, then measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", type=Path, required=True, help="rows of the timed ranks")
    parser.add_argument("--out", type=Path, help="file of all medians")
    asked = parser.parse_args()
    shapes, every = SHAPES[:2], read_rows(asked.file)
    tasks = {
        (shape, len(found[0]["balanced"]), tiling_for(shape, 2 * rows))
        for shape in shapes
        for _, _, rows, found in every
    }
    with ProcessPoolExecutor(PROCESSES, get_context("spawn")) as pool:
        list(pool.map(compiled, tasks))
    torch.manual_seed(SEED)
    torch.set_default_device("cuda")
    print(torch.cuda.get_device_name(), torch.__version__)
    print("each arm: microseconds, share of balanced, rows over the mean")
    medians = [one for shape in shapes for one in show(shape, every)]
    if asked.out:
        asked.out.write_text(json.dumps(medians))


if __name__ == "__main__":
    main()
