"""What the placement check finds in 58 layers of 9 slots a rank, and what it costs.

    python -m benchmarks.engines.fsck [--seeds 5] [--visits 40]

Detection: 4 ranks in one process, records of some bytes, a rebalance that moves every layer, then
one kind of fault in 50 random slots of a seed (a reload: in all). Cost: records of DeepSeek-V3 in
FP8 with block scales (44 MB), on a CPU; passes of 50 ms on a clock that only the visits' own
processor time is added to.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from rebalance.engines.common.fsck.check import PART, PlacementCheck, agreed, digests_of
from rebalance.engines.common.fsck.report import Fault
from rebalance.engines.common.fsck.tensors import EngineView

ROWS, RANKS, EACH, EXPERTS = 58, 4, 9, 32
SLOTS, PLANTED, PASS_S = RANKS * EACH, 50, 0.050
HIDDEN, INTERMEDIATE, BLOCK = 7168, 2048, 128
Place = tuple[int, int]  # layer, slot of all ranks


class Experts(torch.nn.Module):
    """Weights, block scales, a derived factor of each slot and one of the rank."""

    def __init__(self, row: int, held: NDArray[np.int64]) -> None:
        super().__init__()
        salt = torch.from_numpy(1000 * row + held + 1).double()[:, None]
        lanes = torch.arange(64)
        self.w13 = torch.nn.Parameter((salt * 7 + lanes).float(), requires_grad=False)
        self.w2 = torch.nn.Parameter((salt * 11 + lanes).float(), requires_grad=False)
        self.w13_scale = (salt / (lanes[:4] + 3)).float()
        self.w2_scale = (salt / (lanes[:2] + 5)).float()
        self.alpha = (salt[:, 0] / 7).float()
        self.factor = torch.tensor(2.0)


class Rank:
    """One rank; the engine moves weights and scales."""

    def __init__(self, rank: int, maps: NDArray[np.int64]) -> None:
        self.rank, self.maps = rank, maps
        self.load(maps)
        self.view = EngineView(range(ROWS), self.layer, lambda row: maps[row], rank, RANKS)

    def load(self, maps: NDArray[np.int64]) -> None:
        """Load all slots as a map says."""
        own = slice(self.rank * EACH, (self.rank + 1) * EACH)
        self.layers = [Experts(row, maps[row, own]) for row in range(ROWS)]

    def layer(self, row: int) -> tuple[torch.nn.Module, list[torch.Tensor]]:
        """A layer, and what the engine moves of it."""
        layer = self.layers[row]
        return layer, [layer.w13, layer.w2, layer.w13_scale, layer.w2_scale]


def detection(kind: str, seed: int) -> tuple[int, int, int]:
    """Faults that were planted, those found, and others that were reported."""
    random = np.random.default_rng(seed)
    first = np.stack([random.permutation(np.arange(SLOTS) % EXPERTS) for _ in range(ROWS)])
    after = np.stack([random.permutation(row) for row in first])
    ranks = [Rank(rank, first.copy()) for rank in range(RANKS)]
    at_start: set[Place] = set()
    if kind == "factor of one rank":
        at_start = {(int(row), -1) for row in random.choice(ROWS, PLANTED, replace=False)}
        for row, _ in at_start:
            ranks[int(random.integers(RANKS))].layers[row].factor += 1
    references, faults = agreed(ranks[0].view, [digests_of(rank.view) for rank in ranks])
    for rank in ranks:
        rank.maps[:] = after
        rank.load(after)
    planted = at_start or _planted(kind, ranks, first, random)
    checks = [PlacementCheck(rank.view, references, lambda: 0.0, PART) for rank in ranks]
    faults = faults + [fault for check in checks for fault in visited(check)]
    found = {(fault.row, fault.slot) for fault in faults}
    return len(planted), len(planted & found), len(found - planted)


def visited(check: PlacementCheck) -> list[Fault]:
    """What is found when every slot was looked at and judged once."""
    last, faults = check.num_checked + check.num_slots, []
    while check.num_checked < last:
        faults += check.visit(is_idle=True)
    return list(dict.fromkeys(faults))


def _planted(
    kind: str, ranks: list[Rank], first: NDArray[np.int64], random: np.random.Generator
) -> set[Place]:
    if kind == "reload by the first map":
        moved = {(int(row), int(slot)) for row, slot in np.argwhere(first != ranks[0].maps)}
        for rank in ranks:
            rank.load(first)
        return moved
    planted = set()
    for place in random.choice(ROWS * SLOTS, PLANTED, replace=False).tolist():
        row, slot = divmod(place, SLOTS)
        layer, mine = ranks[slot // EACH].layers[row], slot % EACH
        other = (mine + 1) % EACH
        own = ranks[0].maps[row][slot - mine : slot - mine + EACH]
        if kind == "one bit of a weight":
            layer.w2.data[mine].view(torch.uint8)[int(random.integers(256))] ^= 1
        elif own[other] == own[mine]:
            continue  # a replica's scales are right
        elif kind == "scales of another expert":
            layer.w13_scale[mine] = Experts(row, own).w13_scale[other]
        else:
            layer.alpha[mine] = Experts(row, own).alpha[other]
        planted.add((row, slot))
    return planted


class BigLayer(torch.nn.Module):
    """A layer of a rank as DeepSeek-V3 has it in FP8."""

    def __init__(self) -> None:
        super().__init__()
        big = {"w13": (2 * INTERMEDIATE, HIDDEN), "w2": (HIDDEN, INTERMEDIATE)}
        for name, shape in big.items():
            data = torch.randint(0, 256, (EACH, *shape), dtype=torch.uint8)
            self.register_buffer(name, data)
            blocks = (EACH, *(size // BLOCK for size in shape))
            self.register_buffer(f"{name}_scale", torch.rand(blocks))


def cost(visits: int) -> list[tuple[str, str]]:
    """Figures of the check over full-size records."""
    layer = BigLayer()
    held = np.arange(EACH)
    view = EngineView([0], lambda row: (layer, list(layer.buffers())), lambda row: held, 0, 1)
    digests_of(view)  # compiles
    begin = time.thread_time()
    references, _ = agreed(view, [digests_of(view)])
    start_s = (time.thread_time() - begin) * ROWS
    base = 0.0
    clock: Callable[[], float] = lambda: base + time.thread_time()  # noqa: E731
    check = PlacementCheck(view, references, clock, PART)
    begin_s, begin_cpu, passes = clock(), time.thread_time(), 0
    each, quiet = [], []
    while check.num_checked < visits:
        base += PASS_S
        passes += 1
        looked, before = check.num_checked, time.thread_time()
        is_open = check._looked is not None
        check.visit(is_idle=False)
        taken = time.thread_time() - before
        is_visit = check.num_checked != looked or (check._looked is not None) != is_open
        (each if is_visit else quiet).append(taken)
    spent = time.thread_time() - begin_cpu
    sweep_s = (clock() - begin_s) / visits * ROWS * EACH
    looks = np.array(each)
    return [
        ("bytes of a slot", f"{sum(one.record(0).numel() for one in view.tensors(0)[0]):,}"),
        (
            "a look, median / p99 (ms)",
            f"{np.median(looks[looks > 1e-3]) * 1e3:.1f} / {np.quantile(looks, 0.99) * 1e3:.1f}",
        ),
        (
            "a pass without a look, median / p99 (us)",
            f"{np.median(quiet) * 1e6:.1f} / {np.quantile(quiet, 0.99) * 1e6:.1f}",
        ),
        ("part of the passes' time", f"{sum(each) / (passes * PASS_S):.4%}"),
        ("the same with passes that do not look", f"{spent / (passes * PASS_S):.4%}"),
        ("all 522 slots once, in serving (h)", f"{sweep_s / 3600:.1f}"),
        ("references of 522 slots at the start (s)", f"{start_s:.1f}"),
    ]


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--visits", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| planted | faults | found | reported beside them |")
    print("|---|---|---|---|")
    kinds = (
        "scales of another expert",
        "derived factor of another expert",
        "one bit of a weight",
        "reload by the first map",
        "factor of one rank",
    )
    for kind in kinds:
        totals = np.sum([detection(kind, seed) for seed in range(1, arguments.seeds + 1)], axis=0)
        print(f"| {kind} | {totals[0]} | {totals[1]} | {totals[2]} |", flush=True)
    print("\n| cost | |")
    print("|---|---|")
    for name, value in cost(arguments.visits):
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
