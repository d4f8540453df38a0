"""What a plan is worth on the next window: recorded routing, planned on the past, judged after it.

    python -m benchmarks.planner.heldout [--tests 4] [--seeds 2]

A plan sees up to 16 windows and is judged on the one that follows, for several such windows. The
order of tokens decides how much windows differ, so both ends are shown: requests one after
another, as one long prefill or few decodes would bring them, and tokens of all requests mixed, as
a large batch does. Mean and p95 are imbalance over layers and tested windows.

"chance" is what independent draws would show under a perfect placement. The last two rows look at
the tested window: its shares on the plan from history, and a plan of its own. No plan from history
can get there.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.recorded import DATA, Tokens, windows
from eplb import Placement, Topology, imbalance, plan
from eplb.core.load import sampling_noise
from eplb.shares.resplitting import resplit

MOST_HISTORY = 16
TOKENS_PER_WINDOW = (1024, 4096, 16384)
ORDERS = ("recorded", "shuffled", "mixed")

Planner = Callable[[Tokens, Tokens, Topology], Placement]


@dataclass(frozen=True, eq=False)
class Trace:
    """Recorded routing of one model."""

    name: str
    expert_ids: NDArray[np.int64]  # [L, tokens, K]
    request_len: NDArray[np.int64]
    num_experts: int
    topology: Topology

    def ordered(self, order: str, seed: int) -> NDArray[np.int64]:
        """Tokens as recorded, with requests shuffled, or with single tokens mixed."""
        rng = np.random.default_rng(seed)
        if order == "recorded":
            return self.expert_ids
        if order == "mixed":
            return self.expert_ids[:, rng.permutation(self.expert_ids.shape[1])]
        ends = np.cumsum(self.request_len)
        requests = [
            np.arange(end - size, end) for end, size in zip(ends, self.request_len, strict=True)
        ]
        return self.expert_ids[:, np.concatenate([requests[i] for i in rng.permutation(len(ends))])]


@dataclass(frozen=True, eq=False)
class Test:
    """What a plan may see, and what it is judged on."""

    history: Tokens  # [T, L, E]
    following: Tokens  # [L, E]


def traces(data: Path = DATA) -> list[Trace]:
    """gpt-oss-20b decode on 8 ranks x 5 slots, DeepSeek-V2-Lite prefill on 8 x 9 and 32 x 3."""
    gpt = np.load(data / "gptoss20b_decode.npz")
    gpt_ids = gpt["expert_ids"].astype(np.int64).transpose(1, 0, 2)
    lite = [np.load(data / f"dsv2lite_{domain}.npz") for domain in ("intent", "summary")]
    both_ids = np.concatenate([domain["expert_ids"].astype(np.int64) for domain in lite], axis=1)
    both_len = np.concatenate([domain["request_len"] for domain in lite])
    return [
        Trace("gpt-oss-20b decode", gpt_ids, gpt["request_len"], 32, Topology.uniform(1, 8, 5)),
        Trace("V2-Lite two domains", both_ids, both_len, 64, Topology.uniform(1, 8, 9)),
        Trace("the same, 32 ranks", both_ids, both_len, 64, Topology.uniform(4, 8, 3)),
    ]


def history_of(num_windows: int) -> int:
    """How many windows a plan may see: 16, but a fourth of a short trace is kept for tests."""
    return min(MOST_HISTORY, num_windows - max(1, min(4, num_windows // 4)))


def tests(load: Tokens, most: int) -> Iterator[Test]:
    """Up to ``most`` evenly spaced windows, each with the windows before it."""
    history = history_of(len(load))
    if history < 2:
        return
    spaced = np.linspace(history, len(load) - 1, min(most, len(load) - history))
    for window in np.rint(spaced).astype(int).tolist():
        yield Test(load[window - history : window], load[window])


def planned_by(policy: str) -> Planner:
    return lambda history, _, topology: plan(history, topology, policy=policy).target


def then_resplit(policy: str) -> Planner:
    return lambda history, _, topology: resplit(
        history, plan(history, topology, policy=policy).target, topology
    )


def split_equally(history: Tokens, _: Tokens, topology: Topology) -> Placement:
    target = plan(history, topology).target
    return Placement(target.slot_to_expert, target.num_experts)


def shares_of_the_window(history: Tokens, following: Tokens, topology: Topology) -> Placement:
    return resplit(following, plan(history, topology).target, topology, trust=1.0)


def oracle(_: Tokens, following: Tokens, topology: Topology) -> Placement:
    return plan(following, topology).target


PLANNERS: dict[str, Planner] = {
    "contiguous": planned_by("contiguous"),
    "greedy on the sum": planned_by("greedy"),
    "greedy + resplit": then_resplit("greedy"),
    "auto, equal split": split_equally,
    "auto": planned_by("auto"),
    "auto, the window's own shares": shares_of_the_window,
    "oracle: plan of the window": oracle,
}


def judge(
    trace: Trace, order: str, tokens: int, limits: tuple[int, int]
) -> dict[str, NDArray[np.float64]]:
    """For each planner the imbalance of every layer and tested window; empty without a test.

    Args:
        limits: tested windows of one stream, and streams (seeds) where the order is drawn.
    """
    most, seeds = limits
    found: dict[str, list[NDArray[np.float64]]] = {name: [] for name in PLANNERS}
    for seed in range(seeds if order != "recorded" else 1):
        load = windows(trace.ordered(order, seed), tokens, trace.num_experts)
        for test in tests(load, most):
            for name, planner in PLANNERS.items():
                placement = planner(test.history, test.following, trace.topology)
                found[name].append(imbalance(test.following, placement, trace.topology))
    return {name: np.concatenate(parts) for name, parts in found.items() if parts}


def add_rows(table: Table, trace: Trace, limits: tuple[int, int]) -> None:
    for tokens in TOKENS_PER_WINDOW:
        for order in ORDERS:
            found = judge(trace, order, tokens, limits)
            if not found:
                continue
            num_windows = trace.expert_ids.shape[1] // tokens
            history = history_of(num_windows)
            per_window = (
                tokens / trace.request_len.mean() if order != "mixed" else len(trace.request_len)
            )
            routed = tokens * trace.expert_ids.shape[2]
            chance = 1 + sampling_noise(routed, trace.topology.num_ranks)
            label = f"{trace.name}, {tokens} tokens, {order}"
            about = f"{history} windows of {per_window:.0f} requests, chance {chance:.3f}"
            base = found["greedy on the sum"].mean() - 1
            for name, ratio in found.items():
                excess = (ratio.mean() - 1) / base
                table.add_row(
                    label,
                    name,
                    f"{ratio.mean():.4f}",
                    f"{np.percentile(ratio, 95):.3f}",
                    f"{excess:.2f}",
                )
                label, about = about, ""
            table.add_section()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tests", type=int, default=4, help="tested windows of one stream")
    parser.add_argument("--seeds", type=int, default=2, help="drawn orders")
    arguments = parser.parse_args()
    if not DATA.is_dir():
        sys.exit(f"skipped: real traces are not at {DATA}: set EPLB_DATA")
    console = Console(width=120)
    console.print(
        f"{datetime.now(UTC):%Y-%m-%d} python {sys.version.split()[0]} numpy {np.__version__}"
    )
    table = Table(box=SIMPLE_HEAD, padding=(0, 1))
    for heading in ("trace, window and order", "planner"):
        table.add_column(heading, no_wrap=True)
    for heading in ("mean", "p95", "excess / greedy's"):
        table.add_column(heading, justify="right", no_wrap=True)
    for trace in traces():
        add_rows(table, trace, (arguments.tests, arguments.seeds))
    console.print(table)


if __name__ == "__main__":
    main()
