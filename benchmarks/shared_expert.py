"""The shared expert at home or on light ranks: local work of large groups, emulated on one GPU.

    python -m benchmarks.shared_rows --file rows.json
    python -m benchmarks.shared_expert time --file rows.json --out FILE
    python -m benchmarks.shared_expert cost
    python -m benchmarks.shared_expert show --file FILE

One layer's experts of DeepSeek-V3's shape, the shared one included, on the rows of the rank that
each arm waits for (``shared_rows`` has the arms). One more arm is "one launch": spread, with the
shared expert in the same launch as the routed ones, where the others have two. Dispatch, combine
and the cost of a split are not in it.

"cost" times the kernels that choose the slots, in a graph of 58 layers; "show" prints what "time"
wrote. Needs torch and triton, and the planner's libraries.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from copy import copy
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.emulated_ranks import SEED, Sample, read_rows
from benchmarks.expert_curve import SHAPES, Launch, Shape, Weights, layer, tiling_for
from benchmarks.experts_uneven import PROCESSES, compiled, in_turns
from benchmarks.ranks.batch_split.device import GRAPH_LAYERS, REPLAYS, drawn, skewed
from benchmarks.ranks.batch_split.recorded import Case
from eplb import Placement, Topology
from runtime.batch_split import BatchSplit
from runtime.kernels.quantise import Quantised
from runtime.model.graph_times import replayed_us
from runtime.routing import RoutingTable
from runtime.shared_spread import SharedSpread

ARMS = ("home", "split", "spread", "spread any", "one launch", "balanced")
COSTS = ((256, 8, 8, 288), (256, 8, 32, 288), (256, 8, 64, 320), (256, 8, 144, 288))
SIZES = (32, 128, 512, 1024, 4096)  # tokens of a rank


def part(weights: Weights, slots: slice) -> Weights:
    """The same weights of some slots."""

    def cut(matrix: Any) -> Any:
        if isinstance(matrix, Quantised):
            return Quantised(matrix.values[slots], matrix.scales[slots])
        return matrix[slots]

    found = copy(weights)
    found.up, found.down = ([cut(one) for one in both] for both in (weights.up, weights.down))
    found.num_slots = len(range(weights.num_slots)[slots])
    return found


def runs(weights: Weights, one: Sample, usual: int) -> dict[str, Launch]:
    """Launches of each arm: routed and shared experts, one after the other."""
    tiling, cut = tiling_for(weights.shape, usual), weights.num_slots - 1
    routed, shared = part(weights, slice(cut)), part(weights, slice(cut, None))

    def both(counts: tuple[int, ...]) -> Launch:
        first = layer(routed, torch.tensor(counts[:cut], dtype=torch.int32), tiling)
        second = layer(shared, torch.tensor(counts[cut:], dtype=torch.int32), tiling)
        return lambda number: (first(number), second(number))[0]

    found = {name: both(counts) for name, counts in one.items()}
    together = torch.tensor(one["spread"], dtype=torch.int32)
    return found | {"one launch": layer(weights, together, tiling)}


def timed(shape: Shape, every: list[tuple[Case, str, int, list[Sample]]]) -> Iterator[object]:
    """Medians of each arm and sample."""
    for case, order, rows, found in every:
        weights = Weights(shape, len(found[0]["balanced"]))
        us = [in_turns(runs(weights, one, 2 * rows)) for one in found]
        load = [{name: sum(one[name]) / sum(one["balanced"]) for name in one} for one in found]
        moved = statistics.mean(one["spread"] != one["split"] for one in found)
        made = {"shape": shape.name, "case": case.name, "order": order, "rows": rows}
        yield made | {"us": us, "load": load, "moved": moved}
        del weights
        torch.cuda.empty_cache()


def time_all(path: Path, out: Path, most: int) -> None:
    """Compile in processes, then measure; what there is is written after each case."""
    shapes = SHAPES[:2]
    every = [(case, order, rows, found[:most]) for case, order, rows, found in read_rows(path)]
    tasks = {
        (shape, num_slots, tiling_for(shape, 2 * rows))
        for shape in shapes
        for _, _, rows, found in every
        for num_slots in (1, len(found[0]["balanced"]) - 1, len(found[0]["balanced"]))
    }
    with ProcessPoolExecutor(PROCESSES, get_context("spawn")) as pool:
        list(pool.map(compiled, tasks))
    torch.manual_seed(SEED)
    torch.set_default_device("cuda")
    print(torch.cuda.get_device_name(), torch.__version__)
    medians = []
    for shape in shapes:
        for one in timed(shape, every):
            medians.append(one)
            out.write_text(json.dumps(medians))
    show(medians)


def show(medians: list[Any]) -> None:
    """Print a line for each case, then geometric means by rows, order and precision."""
    print("| model | slots/ranks | order | rows | precision | " + " | ".join(ARMS) + " |")
    for one in medians:
        model, place = one["case"].split(", ")
        us = {name: statistics.mean(each[name] for each in one["us"]) for name in ARMS}
        load = {
            name: statistics.mean(
                each[name.replace("one launch", "spread")] for each in one["load"]
            )
            for name in ARMS
        }
        cells = [f"{us[n]:.0f} ({us['balanced'] / us[n]:.0%}, {load[n]:.2f})" for n in ARMS]
        precision = one["shape"].rpartition("-")[2].upper()
        print(f"| {model} | {place} | {one['order']} | {one['rows']} | {precision} |", end=" ")
        print(" | ".join(cells) + " |", flush=True)
    print("\ngeometric means: share of balanced; spread over split, least and most of the cases")
    kinds = dict.fromkeys((one["shape"], one["rows"], one["order"]) for one in medians)
    for kind in kinds:
        rows = [one for one in medians if (one["shape"], one["rows"], one["order"]) == kind]

        def ratios(arm: str, over: str, rows: list[Any] = rows) -> list[float]:
            return [
                statistics.mean(each[over] for each in one["us"])
                / statistics.mean(each[arm] for each in one["us"])
                for one in rows
            ]

        shares = [statistics.geometric_mean(ratios(arm, "balanced")) for arm in ARMS]
        gain = ratios("split", "spread")
        moved = statistics.mean(one["moved"] for one in rows)
        print(f"| {kind[0]} | {kind[1]} | {kind[2]} |", end=" ")
        print(" | ".join(f"{share:.0%}" for share in shares), end=" | ")
        mean = statistics.geometric_mean(gain)
        print(f"{mean:.3f} | {min(gain):.3f} to {max(gain):.3f} | {moved:.0%} |")


def show_cost() -> None:
    """Print microseconds of a layer for each shape and size."""
    print(torch.cuda.get_device_name(), torch.__version__)
    print("| ranks, slots | tokens | split | weigh | append | added |")
    for num_experts, top_k, num_ranks, num_slots in COSTS:
        rng = np.random.default_rng(num_slots)
        topology = Topology.uniform(1, num_ranks, num_slots // num_ranks)
        load = skewed(num_experts, rng)
        hot = np.argsort(-load, axis=1)[:, : num_slots - num_experts]
        first = np.arange(num_experts)[None].repeat(len(load), axis=0)
        held = rng.permuted(np.concatenate([first, hot], axis=1), axis=1)
        table = RoutingTable(
            Placement(held, num_experts),
            max_replicas=num_ranks,
            device="cuda",
            topology=topology,
            extra_slots=1,
        )
        for tokens in SIZES:
            times = timed_cost(table, load, tokens, top_k, num_ranks)
            figures = " | ".join(f"{one:.1f}" for one in times)
            print(f"| {num_ranks}, {num_slots} | {tokens} | {figures} |", flush=True)


def timed_cost(
    table: RoutingTable, load: NDArray[np.float64], tokens: int, top_k: int, num_ranks: int
) -> list[float]:
    """Medians: the split, its two kernels of the shared expert, and what they add to it."""
    batches = drawn(load, tokens, top_k, seed=tokens)
    share, others = load / load.sum(axis=1, keepdims=True), np.random.default_rng(tokens)
    counts = np.stack([others.multinomial(tokens * top_k, share) for _ in range(num_ranks)], 1)
    given = torch.from_numpy(counts.astype(np.int32)).cuda()  # [L, R, E]

    def exchange(own: torch.Tensor, gathered: torch.Tensor) -> None:
        gathered.copy_(given[0])  # a copy in place of an all-gather

    split = BatchSplit(table, exchange, source=0, num_sources=num_ranks, max_pairs=tokens * top_k)
    spread = SharedSpread(table, split, top_k=top_k)
    weights = torch.rand((tokens, top_k), device="cuda")
    slots = split.slots(0, batches[0])

    def routed(number: int) -> torch.Tensor:
        return split.slots(number, batches[number])

    def both(number: int) -> None:
        spread.append(number, batches[number], routed(number), weights)

    parts: tuple[Callable[[int], object], ...] = (
        routed,
        spread.weigh,
        lambda number: spread.append_weighed(batches[number], slots, weights),
        both,
    )
    found = [statistics.median(replayed_us(one, GRAPH_LAYERS, REPLAYS)) for one in parts]
    return [*found[:3], found[3] - found[0]]


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("time", "cost", "show"))
    parser.add_argument("--file", type=Path, default=Path("rows.json"))
    parser.add_argument("--out", type=Path, default=Path("medians.json"), help="all medians")
    parser.add_argument("--samples", type=int, default=6, help="of a case, at most")
    asked = parser.parse_args()
    if asked.what == "time":
        time_all(asked.file, asked.out, asked.samples)
    elif asked.what == "cost":
        show_cost()
    else:
        show(json.loads(asked.file.read_text()))


if __name__ == "__main__":
    main()
