"""Tiles that follow each slot's rows, against one tile for all: even, drawn and recorded rows.

    python -m benchmarks.ranks.batch_split rows --file rows.json
    python -m benchmarks.experts_uneven [--file rows.json] [--out FILE]

One layer's experts of DeepSeek-V3's shape on one GPU, in replayed CUDA graphs, as
``expert_curve`` has them. The arms of a case take turns, so that drift of the clock meets all
alike. Microseconds of a layer, mean over the case's draws:

    mean      one tile for all slots, chosen for the mean rows
    twice     the same, chosen for twice the mean: what serving took before tiles followed rows
    busiest   the same, chosen for the busiest slot, which the host cannot know
    now       what ``GroupedExperts`` launches when usual rows are twice the mean

*drawn*: Gamma draws of two skews, by a seed that no choice was made on. *recorded*: rows of the
busiest rank on windows that the plan did not see. Needs torch and triton only.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.expert_curve import SHAPES, SKEWS, Launch, Shape, Weights, layer, tiling_for
from runtime.kernels.gemm import Tile, Tiling
from runtime.model.graph_times import captured, times_us

ONE_TILE = {
    "fp8": (
        (16, Tiling((Tile(16, 128, True, 5),), 128, 4, 2)),
        (32, Tiling((Tile(32, 128, True, 5),), 128, 4, 2)),
        (64, Tiling((Tile(64, 128, False, 4),), 128, 4, 2)),
        (2**31, Tiling((Tile(128, 128, False, 5),), 128, 8, 1)),
    ),
    "bf16": (
        (16, Tiling((Tile(16, 128, True, 3),), 128, 4, 2)),
        (32, Tiling((Tile(32, 64, True, 5),), 128, 4, 2)),
        (64, Tiling((Tile(64, 64, False, 4),), 128, 4, 2)),
        (256, Tiling((Tile(128, 64, False, 3),), 128, 8, 2)),
        (2**31, Tiling((Tile(128, 64, False, 4),), 256, 8, 1)),
    ),
}
EVEN_ROWS = (1, 8, 16, 32, 64, 102, 128, 192, 256, 512, 1024, 2048)
DRAWN_ROWS = (8, 32, 64, 102, 192, 320, 512, 1536)
DRAWN_SKEWS = ("mild", "strong")
SLOTS, DRAWS, MOST_RECORDED, SEED = (9, 5), 3, 4, 11
LAUNCHES, REPLAYS = 4, 9
PROCESSES = 12  # that compile at once


@dataclass(frozen=True)
class Case:
    """Rows of slots in several draws of one kind."""

    name: str
    rows: int  # mean of a slot
    draws: tuple[tuple[int, ...], ...]

    @property
    def num_slots(self) -> int:
        """Slots of the rank."""
        return len(self.draws[0])


def one_tile(shape: Shape, rows: int) -> Tiling:
    """The only tile that all slots share, chosen for a number of rows."""
    return next(tiling for most, tiling in ONE_TILE[shape.dtype] if rows <= most)


def arms(shape: Shape, rows: int, counts: tuple[int, ...]) -> dict[str, Tiling]:
    """Tilings to compare."""
    return {
        "mean": one_tile(shape, rows),
        "twice": one_tile(shape, 2 * rows),
        "busiest": one_tile(shape, max(counts)),
        "now": tiling_for(shape, 2 * rows),
    }


def cases(recorded: Path | None) -> Iterator[Case]:
    """Even, drawn, and recorded if there is a file."""
    generator = torch.Generator(device="cpu").manual_seed(SEED)
    for num_slots in SLOTS:
        for rows in EVEN_ROWS:
            yield Case("even", rows, ((rows,) * num_slots,))
        for skew in DRAWN_SKEWS:
            alpha = torch.full((num_slots,), SKEWS[skew], device="cpu")
            for rows in DRAWN_ROWS:
                parts = [torch._standard_gamma(alpha, generator=generator) for _ in range(DRAWS)]
                drawn = [(part / part.sum() * rows * num_slots).round().int() for part in parts]
                yield Case(f"drawn, {skew}", rows, tuple(tuple(one.tolist()) for one in drawn))
    for row in json.loads(recorded.read_text()) if recorded else ():
        planned = tuple(tuple(both[0]) for both in row["busiest"][:MOST_RECORDED])
        yield Case(f"{row['case']}, {row['order']}", row["rows"], planned)


def compiled(task: tuple[Shape, int, Tiling]) -> None:
    """Compile what a case launches, into the cache on disk."""
    shape, num_slots, tiling = task
    torch.set_default_device("cuda")
    layer(Weights(shape, num_slots), torch.ones(num_slots, dtype=torch.int32), tiling)(0)
    torch.cuda.synchronize()


def in_turns(runs: dict[str, Launch]) -> dict[str, float]:
    """Microseconds of a launch: median over replays of each arm's graph, arms by turns."""
    graphs = [
        captured(lambda run=run: [run(number) for number in range(LAUNCHES)])
        for run in runs.values()
    ]
    turns = [[times_us(graph.replay, 1)[0] for graph in graphs] for _ in range(REPLAYS + 1)]
    of_arms = zip(*turns[1:], strict=True)  # the first turn warms up
    times = [statistics.median(found) / LAUNCHES for found in of_arms]
    return dict(zip(runs, times, strict=True))


def show(shape: Shape, every: list[Case]) -> Iterator[dict[str, object]]:
    """Print one line for each case."""
    names = list(arms(shape, 1, (1,)))
    print(f"\n{shape.name}\n{'case':28}{'slots':>6}{'rows':>6}{'busiest':>9}", end="")
    print(
        "".join(f"{name:>9}" for name in names) + f"{'now/mean':>10}{'now/twice':>10}", flush=True
    )
    for num_slots in sorted({case.num_slots for case in every}):
        weights = Weights(shape, num_slots)
        for case in (case for case in every if case.num_slots == num_slots):
            found = []
            for counts in case.draws:
                rows = torch.tensor(counts, dtype=torch.int32)
                tilings = arms(shape, case.rows, counts)
                distinct = {tiling: layer(weights, rows, tiling) for tiling in tilings.values()}
                measured = in_turns({name: distinct[tilings[name]] for name in names})
                found.append(measured)
                yield {"shape": shape.name, "case": case.name, "counts": counts, "us": measured}
            mean = {name: statistics.mean(one[name] for one in found) for name in names}
            busiest = max(max(counts) for counts in case.draws)
            print(f"{case.name:28}{num_slots:6}{case.rows:6}{busiest:9}", end="")
            print("".join(f"{us:9.1f}" for us in mean.values()), end="")
            ratios = mean["now"] / mean["mean"], mean["now"] / mean["twice"]
            print("".join(f"{ratio:10.3f}" for ratio in ratios), flush=True)
        del weights
        torch.cuda.empty_cache()


def main() -> None:
    """Compile everything at once, then measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", type=Path, help="recorded rows, of benchmarks.ranks.batch_split")
    parser.add_argument("--out", type=Path, help="file of all medians")
    asked = parser.parse_args()
    every, shapes = list(cases(asked.file)), SHAPES[:2]
    tasks = {
        (shape, case.num_slots, tiling)
        for shape in shapes
        for case in every
        for counts in case.draws
        for tiling in arms(shape, case.rows, counts).values()
    }
    with ProcessPoolExecutor(PROCESSES, get_context("spawn")) as pool:
        list(pool.map(compiled, tasks))
    torch.manual_seed(SEED)
    torch.set_default_device("cuda")
    print(torch.cuda.get_device_name(), torch.__version__)
    found = [one for shape in shapes for one in show(shape, every)]
    if asked.out:
        asked.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
