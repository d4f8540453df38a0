"""The vLLM plug-in against vLLM's own policy and its rule of choosing replicas.

    .venv-vllm/bin/python -m benchmarks.engines.vllm_plugin        # after `make test-engines`

Processor time of this process, because vLLM calls its policy on every rank and in its own thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.distributed.eplb.policy.default import DefaultEplbPolicy

import eplb
from rebalance.engines.plugin_settings import EngineSettings, PluginSettings
from rebalance.engines.vllm.policy import policy_class
from rebalance.engines.vllm.process import PluginProcess
from rebalance.engines.vllm.replica_lists import chosen_replicas, layer_lists, repetitions

SEED, RUNS = 20261122, 15
LAYERS, EXPERTS, SLOTS, RANKS, NODES = 58, 256, 288, 32, 4
TOKENS, SIGMA, DRIFT = 2_000_000, 1.0, 0.2  # of a layer in a window; of lognormal loads


def main() -> None:
    """Print both tables."""
    torch.set_num_threads(1)
    policies()
    shares()


def policies() -> None:
    """One call after a first plan, and one after drift, by both policies."""
    drawn = np.random.default_rng(SEED)
    chance = drawn.lognormal(0.0, SIGMA, (LAYERS, EXPERTS))
    before = window(drawn, chance)
    after = window(drawn, chance * drawn.lognormal(0.0, DRIFT, chance.shape))
    spare = np.arange(SLOTS - EXPERTS)
    first = torch.from_numpy(np.tile(np.concatenate([np.arange(EXPERTS), spare]), (LAYERS, 1)))
    print("| policy | call | ms, median | ms, p99 | duplicates | moved | imbalance |")
    print("|---|---|---|---|---|---|---|")
    for name, make in (("vLLM 0.33.0", lambda: DefaultEplbPolicy), ("plug-in", plugged_in)):
        times: dict[str, list[float]] = {"first": [], "after drift": []}
        for run in range(RUNS + 1):
            policy = make()
            held, spent = timed(policy, before, first)
            first_balance = imbalance(policy, before, held)
            moved, spent_later = timed(policy, after, held)
            if run:  # the first one compiles
                times["first"].append(spent)
                times["after drift"].append(spent_later)
        for call, new, old, balance in (
            ("first", held, first, first_balance),
            ("after drift", moved, held, imbalance(policy, after, moved)),
        ):
            p99 = float(np.quantile(times[call], 0.99))
            print(
                f"| {name} | {call} | {statistics.median(times[call]):.1f} | {p99:.1f} "
                f"| {duplicates(new)} | {float((new != old).float().mean()):.1%} "
                f"| {balance:.4f} |"
            )


def plugged_in() -> Any:
    """The plug-in's policy in a group of one rank."""
    settings = PluginSettings("benchmark", "memory:", EngineSettings())
    process = PluginProcess(settings)
    process.group = SimpleNamespace(rank_in_group=0, world_size=1, ranks=[0], cpu_group=None)
    process.num_experts, process.list_width, process.expert_bytes = EXPERTS, 1024, 44_050_944
    for part in ("policy", "shares"):
        process._switch(part, is_on=True)
    policy: Any = policy_class(process, DefaultEplbPolicy)
    policy.process = process
    return policy


def timed(policy: Any, load: torch.Tensor, held: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The map, and the milliseconds of processor time."""
    began = time.process_time()
    found = policy.rebalance_experts(load, SLOTS, 1, NODES, RANKS, held)
    return found, 1e3 * (time.process_time() - began)


def window(drawn: np.random.Generator, chance: Any) -> torch.Tensor:
    """[L, E] tokens of a window."""
    rows = [drawn.multinomial(TOKENS, row / row.sum()) for row in chance]
    return torch.from_numpy(np.stack(rows).astype(np.int64))


def duplicates(held: torch.Tensor) -> int:
    """Replicas beside another one of their expert on a rank."""
    by_rank = held.reshape(LAYERS * RANKS, -1).tolist()
    return sum(len(one) - len(set(one)) for one in by_rank)


def imbalance(policy: Any, load: torch.Tensor, held: torch.Tensor) -> float:
    """Mean over layers of the busiest rank over the mean, with the policy's shares."""
    placement = eplb.Placement(held.numpy().astype(np.int32), EXPERTS)
    share = placement.slot_share
    if hasattr(policy, "process"):
        decision = policy.process.decisions.of_map(held.numpy(), EXPERTS)
        share = decision.shares()
    of_slot = np.take_along_axis(load.numpy(), held.numpy(), axis=1) * share
    of_rank = of_slot.reshape(LAYERS, RANKS, -1).sum(axis=2)
    return float((of_rank.max(axis=1) / of_rank.mean(axis=1)).mean())


def shares() -> None:
    """Error of the shares of one expert over rows, by this project's lists and by plain ones."""
    cases: list[tuple[str, Callable[[np.random.Generator], Any]]] = [
        ("64 consecutive rows", lambda drawn: np.arange(64)),
        ("4,096 consecutive rows", lambda drawn: np.arange(4096)),
        *((f"{m:,} of 4,096 rows", chosen_of(m)) for m in (32, 128, 512)),
    ]
    print("\n| rows | replicas | error, mean | error, largest | sqrt(p(1-p)/m), mean |")
    print("|---|---|---|---|---|")
    for name, rows_of in cases:
        for replicas in (2, 3, 5):
            drawn, errors, noise = np.random.default_rng(SEED), [], []
            for _ in range(200):
                parts = drawn.dirichlet([3.0] * replicas)
                held = np.zeros(replicas, dtype=np.int64)
                entries, lengths = layer_lists(held, repetitions(held, parts), 1, 1024)
                rows = rows_of(drawn)
                chosen = chosen_replicas(rows, entries[0, : lengths[0]])
                part = np.bincount(chosen, minlength=replicas) / len(rows)
                errors.append(float(np.abs(part - parts).max()))
                noise.append(float(np.sqrt(parts * (1 - parts) / len(rows)).max()))
            print(
                f"| {name} | {replicas} | {np.mean(errors):.4f} | {max(errors):.4f} "
                f"| {np.mean(noise):.4f} |"
            )


def chosen_of(count: int) -> Callable[[np.random.Generator], Any]:
    """Draw so many of 4,096 rows: what an expert gets of a batch."""
    return lambda drawn: np.sort(drawn.choice(4096, count, replace=False))


if __name__ == "__main__":
    main()
