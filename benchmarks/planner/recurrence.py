"""A load that goes there and back between two domains, beside FlashLB and greedy.

    python -m benchmarks.planner.recurrence [--part choose|judge] [--only TEXT] [--json FILE]

Each stream serves domain A for so many windows, then B for as many, and so on. All layers are
planned on the model's windows as the controller plans (``simulations.schemes.Course``): the same
history, gate, prices and record. FlashLB plans after every window, when it is due, and, as greedy,
under the same gate. The next window is judged. Requests of the two parts differ.

Shapes:  T windows, L MoE layers, E experts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.over_time.replay import (
    GPT,
    LITE,
    NUM_EXPERTS,
    WINDOW_TOKENS,
    Change,
    Replayed,
    net_seconds,
    requests,
    start_of,
)
from benchmarks.recorded import DATA, Tokens, windows
from eplb import Topology, imbalance
from eplb.core.cost import CostModel
from eplb.core.load import LoadHistory
from eplb.core.placement import Placement, moves_per_layer
from eplb.policies.table import policy_named
from simulations.peers import register_peers
from simulations.schemes import AlwaysTaken, Course, PlanTerms, Scheme, Taken
from simulations.windows import LatestWindows, of_history

Domain = Callable[[np.random.Generator], Tokens]
PARTS = {"choose": "tune", "judge": "judge"}
PLANNERS = ("auto", "flashlb", "flashlb_when_due", "flashlb gated", "greedy gated")
MOST_SEEN = 16  # windows that a plan looks at
NUM_WINDOWS, EVERY = 72, 3  # windows of a stream; of the layers every third is planned
SUBJECTS = "gpt-oss subjects"  # windows drawn from the measured frequencies of two subjects
RANKS = {
    "64/8": Topology.uniform(1, 8, 8),
    "64/16": Topology.uniform(2, 8, 4),
    "64/32": Topology.uniform(4, 8, 2),
    "80/8": Topology.uniform(1, 8, 10),
    "80/16": Topology.uniform(2, 8, 5),
    "80/20": Topology.uniform(1, 20, 4),
}


@dataclass(frozen=True)
class Stream:
    """A model's load on ranks, in phases of so many windows."""

    model: str
    slots: str
    phase: int
    seed: int

    @property
    def name(self) -> str:
        """As tables show it."""
        return f"{self.model} {self.slots}, phases of {self.phase}"

    def windows(self, part: str) -> Tokens:
        """[T, L, E] of one part's requests."""
        rng = np.random.default_rng([self.seed, list(PARTS).index(part)])
        domains = _domains(self.model, PARTS[part], rng)
        served = [domains[window // self.phase % 2](rng) for window in range(NUM_WINDOWS)]
        return np.array(served)[:, ::EVERY]


STREAMS = tuple(
    Stream(model, slots, phase, seed)
    for seed, (model, slots, phase) in enumerate(
        [
            (LITE, "64/8", 4),
            (LITE, "64/16", 8),
            (LITE, "64/32", 12),
            (LITE, "80/8", 16),
            (LITE, "80/16", 6),
            (LITE, "80/20", 10),
            (LITE, "80/20", 24),
            (GPT, "64/8", 6),
            (GPT, "64/16", 12),
            (GPT, "64/32", 4),
            (GPT, "80/16", 8),
            (GPT, "80/20", 16),
            (SUBJECTS, "64/8", 10),
            (SUBJECTS, "64/32", 24),
            (SUBJECTS, "80/16", 4),
            (SUBJECTS, "80/20", 8),
        ]
    )
)


class _Requests:
    """Windows of whole requests in a drawn order, again from the start once all are served."""

    def __init__(self, parts: list[Tokens], model: str, rng: np.random.Generator) -> None:
        ids = np.concatenate([parts[index] for index in rng.permutation(len(parts))], axis=1)
        self._windows, self._next = windows(ids, WINDOW_TOKENS[model], NUM_EXPERTS[model]), 0

    def __call__(self, rng: np.random.Generator) -> Tokens:
        window = self._windows[self._next % len(self._windows)]
        self._next += 1
        return window


class _Frequencies:
    """Windows drawn from a few subjects' frequencies, another mix in each."""

    def __init__(self, profiles: NDArray[np.float64]) -> None:
        self._profiles = profiles / profiles.sum(axis=2, keepdims=True)  # [subjects, L, E]

    def __call__(self, rng: np.random.Generator) -> Tokens:
        mix = rng.dirichlet(np.ones(len(self._profiles)))
        shares = np.tensordot(mix, self._profiles, axes=1)
        return np.array([rng.multinomial(8192, layer) for layer in shares / shares.sum(1)[:, None]])


def _domains(model: str, half: str, rng: np.random.Generator) -> list[Domain]:
    if model == LITE:
        texts = [requests(f"dsv2lite_{text}", half) for text in ("intent", "summary")]
        return [_Requests(list(text), model, rng) for text in texts]
    if model == GPT:
        return [_Requests(list(text), model, rng) for text in _of_gpt(half)]
    file = np.load(DATA / "gptoss20b_subject_frequency.npz")
    is_first = np.arange(len(file["subject"])) % 2 == (0 if half == "tune" else 1)
    profiles = file["frequency"].astype(np.float64) + 1e-6
    # Two domains: the subjects at both ends of the direction in which subjects differ most.
    order = np.argsort(_first_direction(profiles.reshape(len(profiles), -1))[is_first])
    return [_Frequencies(profiles[is_first][ends]) for ends in (order[:6], order[-6:])]


def _of_gpt(half: str) -> list[list[Tokens]]:
    """Requests of a half in two domains, by the experts that they choose."""
    parts = requests("gptoss20b_decode", half)
    counts = np.array([np.bincount(_flat(part), minlength=24 * 32) for part in parts], float)
    order = np.argsort(_first_direction(counts / counts.sum(axis=1, keepdims=True)))
    third = len(parts) // 3
    return [[parts[index] for index in ends] for ends in (order[:third], order[-third:])]


def _first_direction(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """[N] place of each row in the direction in which rows differ most."""
    score: NDArray[np.float64] = np.linalg.svd(rows - rows.mean(axis=0), full_matrices=False)[0]
    return score[:, 0]


def _flat(ids: Tokens) -> Tokens:
    return (np.arange(ids.shape[0])[:, None, None] * 32 + ids).ravel()


@dataclass(frozen=True)
class Row:
    """How one way of planning did on one stream."""

    stream: str
    planner: str
    excess: float
    moves: int  # after the first plan
    plans: int
    net_s: float
    seconds: float


class Gated(Scheme):
    """A policy with the product's history, gate and record."""

    def __init__(self, terms: PlanTerms, first: Placement, policy: str) -> None:
        super().__init__(terms, first)
        self._course = Course(terms, policy, first)

    def plan(self, window: int, tokens: Tokens, past: LatestWindows) -> Taken | None:
        """Plan after each window, and take what the gate lets through."""
        return self.take(self._course.plan_after(window, past.history).target, "")


def scheme_of(name: str, terms: PlanTerms, first: Placement) -> Scheme:
    """One of PLANNERS, which begins with ``first``."""
    policy, _, gated = name.partition(" ")
    if gated or policy == "auto":
        return Gated(terms, first, policy)
    return AlwaysTaken(terms, first, policy_named(policy), every=1)


def judged(job: tuple[Stream, str, str]) -> Row:
    """Serve a stream under one way of planning."""
    stream, part, name = job
    register_peers()
    load, topology = stream.windows(part), RANKS[stream.slots]
    scheme = scheme_of(name, PlanTerms(topology), start_of(topology, load[0]))
    found, seen, begun = (
        Replayed(),
        LatestWindows(MOST_SEEN, of_history(LoadHistory(load))),
        time.process_time(),
    )
    for window, tokens in enumerate(load):
        if window:
            found.imbalance.append(imbalance(tokens, scheme.serving, topology))
        seen.add(tokens)
        taken = scheme.plan(window, tokens, seen)
        if taken is not None:
            moves = int(moves_per_layer(taken.base, taken.target).sum())
            found.changes.append(Change(window, "MOVE", moves, 0.0, taken.base, taken.target))
    moving = [change.moves for change in found.changes if change.moves] or [0]
    return Row(
        stream.name,
        name,
        float(found.per_window.mean() - 1),
        sum(moving[1:]),
        len(moving),
        net_seconds(found, topology, CostModel()),
        time.process_time() - begun,
    )


def show(rows: list[Row]) -> None:
    """Print a line for each stream: excess and moves of each way of planning."""
    print("| stream |" + "".join(f" {name} |" for name in PLANNERS))
    print("|---" * (len(PLANNERS) + 1) + "|")
    for stream in dict.fromkeys(row.stream for row in rows):
        by = {row.planner: row for row in rows if row.stream == stream}
        cells = (f" {by[one].excess:.4f}, {by[one].moves:,} |" for one in PLANNERS if one in by)
        print(f"| {stream} |" + "".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS, default="choose", help="of the requests")
    parser.add_argument("--only", default="", help="streams whose name has this text")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--json", type=Path, help="write all figures")
    given = parser.parse_args()
    chosen = [stream for stream in STREAMS if given.only in stream.name]
    jobs = [(stream, given.part, name) for stream in chosen for name in PLANNERS]
    with ProcessPoolExecutor(given.workers) as pool:
        rows = list(pool.map(judged, jobs))
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    show(rows)


if __name__ == "__main__":
    main()
