"""The engine of a soak: a rank that serves a tiny DeepSeek-V3, and compares every answer.

    eplb launch -- python -m benchmarks.deployment.soak_engine FOLDER --period 0.25 --drift 16

Every rank writes ``FOLDER/rank-N.json`` again and again. The hot tokens change every ``--drift``
steps, so that every load window asks for another placement.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from threading import Event

import torch

from benchmarks.deployment.comparison import TOLERANCE, Comparison, least_visible_swap
from benchmarks.deployment.tiny_model import VOCABULARY, read_model
from eplb.errors import EplbError
from rebalance.build.environment import EmbeddedRank, build_rank_from_env
from runtime.integrations.transformers import find_experts, prove_experts, serve_experts

BATCH = (2, 12)  # sequences of a rank in a step, and their length
HOT_TOKENS = 4  # of the vocabulary, at a time
REPORT_S = 2.0
VISIBLE = 100 * TOLERANCE


def batch(number: int, rank: int, drift: int) -> torch.Tensor:
    """Tokens [B, T]: three of four from a few hot ones, which change every ``drift`` steps."""
    random = torch.Generator().manual_seed(1_000_003 * number + rank)
    few = torch.Generator().manual_seed(number // drift)
    hot = torch.randperm(VOCABULARY, generator=few)[:HOT_TOKENS]
    ids = torch.randint(VOCABULARY, BATCH, generator=random)
    is_hot = torch.rand(BATCH, generator=random) < 0.75
    return torch.where(is_hot, hot[torch.randint(HOT_TOKENS, BATCH, generator=random)], ids)


def build(folder: Path) -> tuple[EmbeddedRank, Comparison]:
    """Build the rank around the model; its slots are filled from the host cache."""
    library = read_model(folder)
    probe = least_visible_swap(copy.deepcopy(library), batch(0, 0, 1))
    if probe < VISIBLE:
        raise EplbError(f"a wrong expert changes an output by {probe:.2g}, expected {VISIBLE:.2g}")
    rank = build_rank_from_env()
    served = copy.deepcopy(library)
    prove_experts(served, rank.bank, rank.agent.held())
    paths = [one.path for one in find_experts(library)]
    serve_experts(served, rank.bank, rank.table, rank.all_to_all(), rank=rank.place.rank)
    return rank, Comparison(served, library, paths)


class Progress:
    """Writes how far a rank has come."""

    def __init__(self, folder: Path, rank: EmbeddedRank, comparison: Comparison) -> None:
        self._path = folder / f"rank-{rank.place.rank}.json"
        self._rank, self._comparison, self._due = rank, comparison, 0.0
        self.steps = self.while_moving = 0

    def report(self, *, is_last: bool = False) -> None:
        """Replace the file if it is time, or at the end."""
        if not is_last and time.monotonic() < self._due:
            return
        self._due = time.monotonic() + REPORT_S
        agent = self._rank.agent
        body = asdict(self._comparison.found) | {
            "pid": os.getpid(),
            "steps": self.steps,
            "while_moving": self.while_moving,
            "generation": agent.placement.generation,
            "rebalances": agent.figures.rebalances,
            "experts_moved": agent.figures.experts_moved,
            "ended": is_last,
        }
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps(body))
        fresh.replace(self._path)


def serve(rank: EmbeddedRank, comparison: Comparison, given: argparse.Namespace) -> None:
    """Serve until a signal; all ranks end at one step."""
    agent, here = rank.agent, rank.place.rank
    progress, due = Progress(given.folder, rank, comparison), time.monotonic()
    while agent.step(progress.steps, "mixed"):
        if progress.steps == given.break_at and here == 0:  # shows that a wrong answer is found
            rank.bank.weights(0)["down_proj"][0] += 1
        where = {"step": progress.steps, "rank": here, "generation": agent.placement.generation}
        comparison.run(batch(progress.steps, here, given.drift), where)
        progress.while_moving += agent.phase != "idle"
        progress.steps += 1
        progress.report()
        due = max(due + given.period, time.monotonic() - given.period)
        Event().wait(max(0.0, due - time.monotonic()))
    progress.report(is_last=True)


def main() -> None:
    """Serve one rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--period", type=float, required=True, help="seconds of a step")
    parser.add_argument("--drift", type=int, required=True, help="steps")
    parser.add_argument("--break-at", type=int, default=-1, help="step with a wrong weight")
    given = parser.parse_args()
    torch.set_num_threads(1)
    try:
        rank, comparison = build(given.folder / "model")
    except EplbError as exc:
        print(f"engine: {exc}", file=sys.stderr)
        sys.exit(2)
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, lambda *_: rank.agent.request_halt())
    rank.agent.start()
    serve(rank, comparison, given)
    rank.close()
    gc.freeze()  # collecting what the library loaded takes the interpreter seconds at its end


if __name__ == "__main__":
    main()
