"""The vLLM plug-in against vLLM's own policy and its rule of choosing replicas.

    .venv-vllm/bin/python -m benchmarks.engines.vllm_plugin        # after `make test-engines`

Processor time of this process, because vLLM calls its policy on every rank and in its own thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.distributed.eplb.policy.default import DefaultEplbPolicy

import eplb
from rebalance.engines.common.planning import System
from rebalance.engines.common.plugin_settings import PluginSettings
from rebalance.engines.vllm.decisions import (
    MapDecision,
    ServedMap,
    chosen_entries,
    repetitions,
    shares_by,
)
from rebalance.engines.vllm.policy import policy_class
from rebalance.engines.vllm.process import PluginProcess

SEED, RUNS = 20261125, 20
LAYERS, EXPERTS, SLOTS, RANKS, NODES = 58, 256, 288, 32, 4
TOKENS, SIGMA, DRIFT = 2_000_000, 1.0, 0.2  # of a layer in a window; of lognormal loads
FIRST = torch.from_numpy(
    np.tile(np.concatenate([np.arange(EXPERTS), np.arange(SLOTS - EXPERTS)]), (LAYERS, 1))
)


def main() -> None:
    """Print both tables."""
    torch.set_num_threads(1)
    policies()
    shares()


def policies() -> None:
    """One call on vLLM's first map, and one after drift, by each policy in turn."""
    made: dict[str, Any] = {"vLLM 0.33.0": DefaultEplbPolicy}
    made |= {f"plug-in, {ms:g} ms of search": ms for ms in (2.0, 4.0, 8.0, 16.0)}
    found: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    for run in range(RUNS + 1):
        drawn = np.random.default_rng((SEED, run))
        chance = drawn.lognormal(0.0, SIGMA, (LAYERS, EXPERTS))
        before = window(drawn, chance)
        after = window(drawn, chance * drawn.lognormal(0.0, DRIFT, chance.shape))
        for name, what in made.items():
            policy = plugged_in(what) if isinstance(what, float) else what
            held = FIRST
            for call, load in (("first", before), ("after drift", after)):
                new, spent = timed(policy, load, held)
                row = spent, duplicates(new), moved(held, new), imbalance(policy, load, new)
                if run:  # the first one compiles
                    found.setdefault((call, name), []).append(row)
                held = new
    print("| call | policy | ms, median | ms, p99 | faster | duplicates | moved, p95 | imbalance |")
    print("|---|---|---|---|---|---|---|---|")
    for (call, name), rows in sorted(found.items(), key=lambda item: item[0][0] != "first"):
        columns = np.array(rows).T
        own = np.array(found[call, "vLLM 0.33.0"])[:, 0]
        print(
            f"| {call} | {name} | {np.median(columns[0]):.1f} | {np.quantile(columns[0], 0.99):.1f}"
            f" | {np.median(own) / np.median(columns[0]):.1f} x | {columns[1].mean():.0f} "
            f"| {np.quantile(columns[2], 0.95):.1%} | {columns[3].mean():.4f} |"
        )


def plugged_in(plan_time_ms: float) -> Any:
    """The plug-in's policy in a group of one rank."""
    settings = PluginSettings({"engine.plan_time_ms": plan_time_ms})
    process = PluginProcess(settings)
    process.group = SimpleNamespace(rank_in_group=0, world_size=1, ranks=[0], cpu_group=None)
    process.system = System(RANKS, NODES, 1, 44_050_944)
    for part in ("policy", "shares"):
        process._switch(part, is_on=True)
    policy: Any = policy_class(process, DefaultEplbPolicy)
    state = SimpleNamespace(model=SimpleNamespace(num_logical_experts=EXPERTS))
    nothing = np.zeros((LAYERS, SLOTS), dtype=np.int64)
    policy.served = ServedMap(state, nothing, nothing)
    process._served.append(policy.served)
    return policy


def timed(policy: Any, load: torch.Tensor, held: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The map, and the milliseconds of processor time."""
    if hasattr(policy, "served"):
        served = policy.served
        served.held, decided = held.numpy(), served.latest
        if decided is not None and np.array_equal(decided.held, served.held):
            served.repeats, served.is_planned = decided.repeats, decided.is_planned
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


def moved(old: torch.Tensor, new: torch.Tensor) -> float:
    """The part of all slots that hold another expert."""
    return float((new != old).float().mean())


def imbalance(policy: Any, load: torch.Tensor, held: torch.Tensor) -> float:
    """Mean over layers of the busiest rank over the mean, with the policy's shares."""
    placement = eplb.Placement(held.numpy().astype(np.int32), EXPERTS)
    share = placement.slot_share
    if hasattr(policy, "served"):
        decided = policy.served.latest
        share = shares_by(decided.held, decided.repeats)
    of_slot = np.take_along_axis(load.numpy(), held.numpy(), axis=1) * share
    of_rank = of_slot.reshape(LAYERS, RANKS, -1).sum(axis=2)
    return float((of_rank.max(axis=1) / of_rank.mean(axis=1)).mean())


def shares() -> None:
    """Error of the shares of one expert over rows."""
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
                held = np.zeros((1, replicas), dtype=np.int64)
                decision = MapDecision(held, repetitions(held, parts[None]), 1)
                _, entries = decision.lists_of(0)
                own = entries[0] if len(entries) else np.arange(replicas)  # equal shares
                rows = rows_of(drawn)
                chosen = own[chosen_entries(4096, len(own))[rows]]
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
