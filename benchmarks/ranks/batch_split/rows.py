"""Times of a rank's experts on recorded rows: the busiest rank's, with and without the split.

``write_rows`` needs the traces and the planner, ``show_experts`` a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.ranks.batch_split.recorded import (
    CASES,
    NUM_HISTORY,
    Case,
    Ints,
    expert_ids,
    windows,
)
from eplb import Placement, plan
from eplb.shares.batch import MOST_WAYS, split_batch, split_layout
from runtime.dispatch.all_to_all import Received
from runtime.experts import ExpertBank, ExpertSchema, PlainArena, bank_bytes
from runtime.model.compute import Experts, GroupedExperts
from runtime.model.graph_times import replayed_us

EXPERT_CASES = (
    (CASES[0], (13, 102, 819, 3277)),
    (CASES[1], (8, 64, 256, 512, 2048)),
    (CASES[2], (43, 171, 683)),
    (CASES[3], (32, 256)),
)
GRAPH_LAYERS = 58
MOST_TIMED = 10  # layers and windows of a row of the table


def busiest(case: Case, rows: int, order: str) -> Iterator[tuple[Ints, ...]]:
    """Rows by slot [C] of the busiest rank with planned shares and with the split."""
    top_k = 4 if case.model == "gpt-oss" else 6
    loads = windows(expert_ids(case), rows * case.num_slots // top_k, order)
    half = min(NUM_HISTORY, len(loads) // 2)
    topology, per_rank = case.topology, case.num_slots // case.num_ranks
    placement = plan(loads[:half].sum(axis=0), topology).target
    rng = np.random.default_rng(rows)
    for _ in range(MOST_TIMED):
        layer = int(rng.integers(placement.num_layers))
        counts = loads[half + int(rng.integers(len(loads) - half)), layer]
        planned, split = rows_of_slots(case, placement, layer, counts)
        yield tuple(
            np.rint(by_rank[by_rank.sum(axis=1).argmax()]).astype(np.int64)
            for by_rank in (planned.reshape(-1, per_rank), split.reshape(-1, per_rank))
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


def write_rows(path: Path) -> None:
    """Write the rows of busiest ranks, planned with and without the split, for ``show_experts``."""
    found = [
        {
            "case": case.name,
            "order": order,
            "rows": rows,
            "busiest": [[one.tolist() for one in both] for both in busiest(case, rows, order)],
        }
        for order in ("recorded", "mixed")
        for case, sizes in EXPERT_CASES
        for rows in sizes
    ]
    path.write_text(json.dumps(found))


def show_experts(path: Path) -> None:
    """Print one line for each case and size."""
    from runtime.kernels.quantise import GROUP

    print(torch.cuda.get_device_name(), torch.__version__)
    print(f"{'case':20}{'order':>10}{'rows a slot':>12}{'planned':>10}{'split':>10}", end="")
    print(f"{'balanced':>10}{'gain':>8}")
    schema, layers = ExpertSchema.swiglu_fp8(7168, 2048), 4
    for row in json.loads(path.read_text()):
        num_slots, rows = len(row["busiest"][0][0]), row["rows"]
        arena = PlainArena(bank_bytes(schema, layers, num_slots, 0), torch.device("cuda"))
        arena.bytes.copy_(torch.randint_like(arena.bytes, 0, 120))
        bank = ExpertBank(schema, layers, num_slots, num_staging=0, arena=arena)
        for layer in range(layers):
            for name, tensor in bank.weights(layer).items():
                if name.endswith("scale"):
                    tensor.fill_(1e-3)
        experts, times = GroupedExperts(bank, usual_rows=rows), []
        for both in row["busiest"]:
            found = []
            for counts in (*both, [rows] * num_slots):
                given = torch.randint(0, 120, (sum(counts), 7168), dtype=torch.uint8, device="cuda")
                received = Received(
                    given.view(torch.float8_e4m3fn),
                    torch.tensor(counts, dtype=torch.int32, device="cuda"),
                    None,
                    torch.full((sum(counts), 7168 // GROUP), 1e-3, device="cuda"),
                )
                run = partial(_run, experts, layers, received)
                found.append(median(replayed_us(run, GRAPH_LAYERS, 7)))
            times.append(found)
        planned, split, even = np.median(np.array(times), axis=0)
        print(
            f"{row['case']:20}{row['order']:>10}{rows:12}{planned:10.1f}{split:10.1f}{even:10.1f}"
            f"{1 - split / planned:8.1%}",
            flush=True,
        )
        del bank, arena, experts


def _run(experts: Experts, num_layers: int, received: Received, layer: int) -> None:
    experts.run(layer % num_layers, received)
