"""The shared expert at home or on light ranks: local work of large groups, emulated on one GPU.

    python -m benchmarks.shared.rows --file rows.json
    python -m benchmarks.shared.experts time --file rows.json --out FILE
    python -m benchmarks.shared.experts cost
    python -m benchmarks.shared.experts show --file FILE

One layer's experts of DeepSeek-V3's shape, the shared one included, on the rows of the rank that
each arm waits for (``shared.rows`` has them). "apart": two launches of each product, first of the
routed experts, then of the shared one. Without it: one launch, as ``GroupedExperts`` has it where
both are of one size. "one tensor": the same with all weights in one tensor. Dispatch, combine and
the cost of a split are not in it.

Parts, alone: the "routed" experts of home and of split, the "shared" one's launch, "dense": the
shared expert in BF16 by torch, as a layer computes it at home while results travel back, and "copy"
of its rows (in FP8: quantised) into a slot.

"cost" times the kernels that choose the slots, in a graph of 58 layers; "show" prints what "time"
wrote. Needs torch and triton, and the planner's libraries.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.emulated_ranks import SEED, Rows, Sample, read_rows
from benchmarks.expert_curve import BF16, FP8, SHAPES, Launch, Shape, Weights, layer, tiling_for
from benchmarks.experts_uneven import PROCESSES, in_turns
from benchmarks.ranks.batch_split.device import GRAPH_LAYERS, REPLAYS, drawn, skewed
from benchmarks.ranks.batch_split.recorded import Case
from eplb import Placement, Topology
from runtime.batch_split import BatchSplit
from runtime.kernels.gemm import Tiling
from runtime.kernels.quantise import GROUP, Quantised, quantise_rows
from runtime.model.compute import swiglu
from runtime.model.graph_times import replayed_us
from runtime.routing import RoutingTable
from runtime.shared_spread import SharedSpread

APART = " apart"
ARMS = (
    "home apart",
    "home",
    "split apart",
    "split",
    "spread apart",
    "spread",
    "one tensor",
    "spread any",
    "mean rank apart",
    "mean rank",
    "balanced",
)
PARTS = ("home routed", "split routed", "shared", "dense", "copy")
COSTS = ((256, 8, 8, 288), (256, 8, 32, 288), (256, 8, 64, 320), (256, 8, 144, 288))
SIZES = (32, 128, 512, 1024, 4096)  # tokens of a rank


class Layer:
    """Weights of a rank's routed experts and of the shared one, apart and in one tensor."""

    def __init__(self, shape: Shape, num_slots: int, tiling: Tiling) -> None:
        self.shape, self.tiling, self.cut = shape, tiling, num_slots - 1
        self.routed, self.shared = Weights(shape, self.cut), Weights(shape, 1)
        self.joined = Weights(shape, num_slots)
        self.dense = Weights(replace(shape, dtype="bf16"), 1)

    def runs(self, one: Sample) -> dict[str, Launch]:
        """Launches of each arm."""
        made = {
            "one tensor": layer(self.joined, counts(one["spread"]), self.tiling),
            "home routed": layer(self.routed, counts(one["home"][: self.cut]), self.tiling),
            "split routed": layer(self.routed, counts(one["split"][: self.cut]), self.tiling),
            **self._shared_alone(one["home"][self.cut]),
        }
        for name in (name for name in ARMS if name not in made):
            rows = one[name.removesuffix(APART)]
            made[name] = self._apart(rows) if name.endswith(APART) else self._at_once(rows)
        return made

    def _at_once(self, rows: Rows) -> Launch:
        return layer(self.routed, counts(rows), self.tiling, self.shared)

    def _apart(self, rows: Rows) -> Launch:
        first = layer(self.routed, counts(rows[: self.cut]), self.tiling)
        second = layer(self.shared, counts(rows[self.cut :]), self.tiling)
        return lambda number: (first(number), second(number))[0]

    def _shared_alone(self, num_tokens: int) -> dict[str, Launch]:
        tokens = torch.empty((num_tokens, self.shape.hidden), dtype=BF16).normal_()
        into = torch.empty_like(tokens)
        if self.shape.dtype == "fp8":
            scales = torch.empty((len(tokens), self.shape.hidden // GROUP))
            quantised = Quantised(into.to(FP8), scales)

        def dense(number: int) -> None:
            gate_up, down = self.dense.taken(number)
            swiglu(tokens, gate_up[0], down[0])

        def copy(number: int) -> None:
            if self.shape.dtype == "fp8":
                quantise_rows(tokens, quantised)
            else:
                into.copy_(tokens)

        return {
            "shared": layer(self.shared, counts((num_tokens,)), self.tiling),
            "dense": dense,
            "copy": copy,
        }


def counts(rows: Rows) -> torch.Tensor:
    """Rows of slots on the device."""
    return torch.tensor(rows, dtype=torch.int32)


def compiled(task: tuple[Shape, int, Tiling]) -> None:
    """Compile what a case launches, into the cache on disk."""
    shape, num_slots, tiling = task
    torch.set_default_device("cuda")
    rows = dict.fromkeys((name.removesuffix(APART) for name in ARMS), (1,) * num_slots)
    for run in Layer(shape, num_slots, tiling).runs(rows).values():
        run(0)
    torch.cuda.synchronize()


def timed(shape: Shape, every: list[tuple[Case, str, int, list[Sample]]]) -> Iterator[object]:
    """Medians of each arm and sample."""
    for case, order, rows, found in every:
        weights = Layer(shape, len(found[0]["balanced"]), tiling_for(shape, 2 * rows))
        us = [in_turns(weights.runs(one)) for one in found]
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
        (shape, len(found[0]["balanced"]), tiling_for(shape, 2 * rows))
        for shape in shapes
        for _, _, rows, found in every
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
    titles = ("model", "slots/ranks", "order", "rows", "precision", *ARMS, *PARTS)
    print("| " + " | ".join(titles) + " |")
    for one in medians:
        model, place = one["case"].split(", ")
        precision = one["shape"].rpartition("-")[2].upper()
        cells = [model, place, one["order"], str(one["rows"]), precision]
        print("| " + " | ".join([*cells, *_cells(one)]) + " |", flush=True)
    print("\ngeometric means: share of balanced; one launch over two; spread over split")
    ratios = [(name, name + APART) for name in ("home", "split", "spread", "mean rank")]
    ratios += [("spread", "one tensor"), ("spread", "split"), ("spread apart", "split apart")]
    ratios += [("spread", "split routed")]
    print("| " + " | ".join(["precision", "rows", "order", *ARMS]), end=" | ")
    print(" | ".join(" / ".join(both) for both in ratios) + " | moved |")
    for kind in dict.fromkeys((one["shape"], one["rows"], one["order"]) for one in medians):
        rows = [one for one in medians if (one["shape"], one["rows"], one["order"]) == kind]
        print("| " + " | ".join(str(one) for one in kind), end=" | ")
        shares = [_ratios("balanced", arm, rows) for arm in ARMS]
        print(" | ".join(f"{statistics.geometric_mean(one):.0%}" for one in shares), end=" | ")
        times = [_ratios(*both, rows) for both in ratios]
        print(" | ".join(f"{statistics.geometric_mean(one):.3f}" for one in times), end=" | ")
        print(f"{statistics.mean(one['moved'] for one in rows):.0%} |")
    for one, other in ratios:
        for shape in dict.fromkeys(one["shape"] for one in medians):
            found = _ratios(one, other, [row for row in medians if row["shape"] == shape])
            mean = statistics.geometric_mean(found)
            print(f"{shape}: {one} / {other}: {mean:.3f}, {min(found):.3f} to {max(found):.3f}")


def _cells(one: Any) -> Iterator[str]:
    """Microseconds, share of balanced and rows over balanced, means over samples."""
    us = {name: _mean(one["us"], name) for name in (*ARMS, *PARTS)}
    for name in ARMS:
        rows = "spread" if name == "one tensor" else name.removesuffix(APART)
        yield f"{us[name]:.0f} ({us['balanced'] / us[name]:.0%}, {_mean(one['load'], rows):.2f})"
    yield from (f"{us[name]:.1f}" for name in PARTS)


def _ratios(one: str, other: str, rows: list[Any]) -> list[float]:
    """Time of one arm over that of another, of each case."""
    return [_mean(row["us"], one) / _mean(row["us"], other) for row in rows]


def _mean(samples: list[dict[str, float]], name: str) -> float:
    return statistics.mean(sample[name] for sample in samples)


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
