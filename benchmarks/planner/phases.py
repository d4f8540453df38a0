"""Ranks that serve both phases: one placement by the sum of tokens, or with decode weighed apart.

    python -m benchmarks.planner.phases [--seeds 3] [--windows 8] [--time-ms 200]

No recorded routing has prefill and decode of the same requests, so two kinds of text of one model
stand in: DeepSeek-V2-Lite summaries for prefill and intent classification for decode, and two
halves of gpt-oss-20b's subjects, drawn by the seed. Cosines of their loads are 0.72 and 0.97 to
0.99; published ones of prefill and decode are 0.70 to 0.92. The ratio of tokens is that of
recorded requests: 5.5 prefill tokens to one of decode (Azure conversations, computed below), and 35
(Mooncake conversations).

A plan sees the first windows of both phases, and is judged on tokens that it has not seen: each
phase's imbalance, and their mean. "two placements" has one for each phase, which no group of ranks
can serve: the limit.
"""

import argparse
import csv
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.recorded import DATA, Tokens, windows
from eplb import Budget, Placement, Topology, imbalance, plan
from eplb.core.load import LoadHistory, Phase
from telemetry.load.folder import Apart, Window, weighted

WEIGHTS = (0.25, 0.5, 0.75)
HELD_OUT = 4  # windows of each phase


@dataclass(frozen=True, eq=False)
class Case:
    """What plans see of both phases, and what they are judged on."""

    name: str
    topology: Topology
    seen: Apart
    unseen: dict[Phase, Tokens]  # [windows, L, E]


def cases(seed: int, ratio: float, num_windows: int) -> Iterator[Case]:
    """Both stand-ins, their tokens in an order of the seed."""
    rng = np.random.default_rng(seed)
    lite = [np.load(DATA / f"dsv2lite_{name}.npz")["expert_ids"] for name in ("summary", "intent")]
    both = [rng.permutation(one.transpose(1, 0, 2).astype(int)).transpose(1, 0, 2) for one in lite]
    topology = Topology.uniform(num_nodes=1, ranks_per_node=8, slots_per_rank=9)
    name = "DeepSeek-V2-Lite, summaries and intent"
    yield _case(name, topology, both, 64, ratio, num_windows)
    found = np.load(DATA / "gptoss20b_decode.npz")
    subject_of = np.repeat(found["subject"], found["request_len"])
    first = rng.permutation(np.unique(found["subject"]))[::2]
    is_first = np.isin(subject_of, first)
    ids = found["expert_ids"].astype(int)
    halves = [rng.permutation(ids[chosen]).transpose(1, 0, 2) for chosen in (is_first, ~is_first)]
    topology = Topology.uniform(num_nodes=1, ranks_per_node=8, slots_per_rank=5)
    name = "gpt-oss-20b, two halves of subjects"
    yield _case(name, topology, halves, 32, ratio, num_windows)


def _case(
    name: str,
    topology: Topology,
    both: list[Tokens],  # ids [L, tokens, K] of each phase, in a random order
    num_experts: int,
    ratio: float,
    num_windows: int,
) -> Case:
    phases: tuple[Phase, Phase] = ("prefill", "decode")
    size = both[0].shape[1] // (num_windows + HELD_OUT)
    sizes = (size, max(1, round(size / ratio)))
    seen, unseen = Apart([], []), dict[Phase, Tokens]()
    for part, phase, ids, each in zip(seen, phases, both, sizes, strict=True):
        begin = num_windows * each
        for number, tokens in enumerate(windows(ids[:, :begin], each, num_experts)):
            none = np.zeros((len(tokens), topology.num_ranks), dtype=np.int64)
            steps = (number, number)
            part.append(
                Window("run", number, *steps, phase, frozenset(), frozenset(), tokens, none)
            )
        rest = (ids.shape[1] - begin) // HELD_OUT
        unseen[phase] = windows(ids[:, begin:], rest, num_experts)[:HELD_OUT]
    return Case(name, topology, seen, unseen)


def placements(case: Case, budget: Budget) -> Iterator[tuple[str, dict[Phase, Placement]]]:
    """Each way of planning, and which placement serves each phase."""
    prefill, decode = (np.stack([window.tokens for window in part]) for part in case.seen)

    def one(tokens: LoadHistory | Tokens | None, policy: str = "auto") -> Placement:
        assert tokens is not None, "both phases have windows"
        return plan(tokens, case.topology, budget=budget, policy=policy).target

    def both(found: Placement) -> dict[Phase, Placement]:
        return {"prefill": found, "decode": found}

    yield "contiguous", both(one(prefill + decode, "contiguous"))
    yield "sum of tokens", both(one(prefill + decode))
    for weight in WEIGHTS:
        yield f"decode_weight {weight:g}", both(one(weighted(case.seen, weight)))
    yield "two placements", {"prefill": one(prefill), "decode": one(decode)}


def azure_ratio() -> float:
    """Prefill tokens to decode tokens of the recorded conversations."""
    with (DATA / "azure_2023_conversation.csv").open() as file:
        rows = list(csv.DictReader(file))
    prefill, decode = (
        sum(int(row[name]) for row in rows) for name in ("ContextTokens", "GeneratedTokens")
    )
    return prefill / decode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--time-ms", type=float, default=200.0)
    given = parser.parse_args()
    budget = Budget(time_ms=given.time_ms)
    ratio = azure_ratio()
    print(f"prefill tokens to decode tokens: {ratio:.1f} (Azure conversations), 35 (Mooncake)")
    for asked in (ratio, 35.0):
        found: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for seed in range(given.seeds):
            for case in cases(seed, asked, given.windows):
                for method, served in placements(case, budget):
                    pair = tuple(
                        float(imbalance(case.unseen[phase], served[phase], case.topology).mean())
                        for phase in ("prefill", "decode")
                    )
                    found.setdefault((case.name, method), []).append((pair[0], pair[1]))
        print(f"\n{asked:.1f} prefill tokens to one of decode, medians of {given.seeds} seeds")
        for name in dict.fromkeys(name for name, _ in found):
            print(f"\n{name}")
            print(f"{'plan':<20}{'prefill':>9}{'decode':>9}{'mean of both':>14}")
            for (of, method), pairs in found.items():
                if of == name:
                    prefill, decode, mean = _medians(pairs)
                    print(f"{method:<20}{prefill:>9.3f}{decode:>9.3f}{mean:>14.3f}", flush=True)


def _medians(pairs: list[tuple[float, float]]) -> list[float]:
    columns = [[pair[0] for pair in pairs], [pair[1] for pair in pairs]]
    means = [sum(pair) / 2 for pair in pairs]
    return [statistics.median(column) for column in (*columns, means)]


if __name__ == "__main__":
    main()
