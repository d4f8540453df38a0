"""Replays windows under the controller itself, and under policies that plan again at every window.

The controller runs with its shipped store: ranks report each window, it decides, and what it
publishes is committed before the next window. So history, gate, price and record of promises are
those of a deployment. A policy that is compared plans after every window and is always taken.

Shapes:  T windows, L MoE layers, E experts.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from benchmarks.recorded import DATA, Tokens, windows
from eplb import Placement, Topology, imbalance
from eplb.core.cost import CostModel
from eplb.core.load import LoadHistory, LoadSample
from eplb.core.model import ModelShape
from eplb.core.placement import changed_slots, moves_per_layer
from eplb.core.problem import Problem
from eplb.migration.serialisation import model_to_dict, topology_to_dict
from eplb.policies.table import contiguous_policy, policy_named
from rebalance.controller.loop import Controller, ControllerSettings
from telemetry.state.runs import RankState, RunInfo
from tests.support.stores import MemoryStore

TUNED_ON = ("gpqa_main", "mmlu_dev")  # the benchmarks of gpt-oss; the others are judged on
HALVES = ("tune", "judge")
GPT, LITE = "gpt-oss-20b", "V2-Lite"
TOP_K = {GPT: 4, LITE: 6}
MOST_WINDOWS = 96
NUM_EXPERTS = {GPT: 32, LITE: 64}
WINDOW_TOKENS = {GPT: 1024, LITE: 512}
RANKS = {
    (GPT, "40/8"): Topology.uniform(num_nodes=1, ranks_per_node=8, slots_per_rank=5),
    (GPT, "48/16"): Topology.uniform(num_nodes=2, ranks_per_node=8, slots_per_rank=3),
    (GPT, "64/32"): Topology.uniform(num_nodes=4, ranks_per_node=8, slots_per_rank=2),
    (LITE, "72/8"): Topology.uniform(num_nodes=1, ranks_per_node=8, slots_per_rank=9),
    (LITE, "96/32"): Topology.uniform(num_nodes=4, ranks_per_node=8, slots_per_rank=3),
}
ORDERS = {
    GPT: ("in order", "shuffled", "shuffled x4"),  # x4: windows of four times as many tokens
    LITE: ("intent", "summary", "switch", "mix"),
}
AT_ONCE, STEPS = 16, 256  # requests of a steady load, and tokens of each in a window


@dataclass(frozen=True)
class Case:
    """One stream on one topology."""

    model: str
    order: str
    slots: str  # slots / ranks
    seed: int

    @property
    def name(self) -> str:
        """As tables show it."""
        return f"{self.model} {self.slots}, {self.order}"

    @property
    def topology(self) -> Topology:
        """Ranks and slots."""
        return RANKS[self.model, self.slots]


def cases(seeds: int) -> Iterator[Case]:
    """All of them; a recorded order needs one seed."""
    for model, slots in RANKS:
        for order in ORDERS[model]:
            for seed in range(1 if order == "in order" else seeds):
                yield Case(model, order, slots, seed)


@cache
def requests(name: str, half: str) -> tuple[NDArray[np.int64], ...]:
    """The requests of a half, each as ids [L, tokens, K]."""
    file = np.load(DATA / f"{name}.npz")
    ids = file["expert_ids"].astype(np.int64)
    length = file["request_len"]
    is_tuned_on = np.arange(len(length)) % 2 == 0
    if "subject" in file:
        ids = ids.transpose(1, 0, 2)
        is_tuned_on = np.array([subject.split("/")[0] in TUNED_ON for subject in file["subject"]])
    parts = np.split(ids, np.cumsum(length)[:-1], axis=1)
    kept = is_tuned_on if half == "tune" else ~is_tuned_on
    return tuple(part for part, is_kept in zip(parts, kept, strict=True) if is_kept)


def stream(case: Case, half: str, most: int) -> Tokens:
    """[T, L, E] windows of a case, at most so many."""
    rng = np.random.default_rng(case.seed)
    tokens = WINDOW_TOKENS[case.model] * (4 if case.order.endswith("x4") else 1)
    if case.model == GPT:
        ids = requests("gptoss20b_decode", half)
        if case.order == "in order":
            return windows(np.concatenate(ids, axis=1), tokens, NUM_EXPERTS[GPT])[:most]
        passes = [ids[index] for _ in range(4) for index in rng.permutation(len(ids))]
        return windows(np.concatenate(passes, axis=1), tokens, NUM_EXPERTS[GPT])[:most]
    part = most // 3
    texts = {"intent": [(0.0, most)], "summary": [(1.0, most)], "mix": _walk(rng, most)}
    texts["switch"] = [(0.0, part), (1.0, part), (0.0, most - 2 * part)]
    spans = [drawn(half, summaries, count * tokens, rng) for summaries, count in texts[case.order]]
    return windows(np.concatenate(spans, axis=1), tokens, NUM_EXPERTS[LITE])


def _walk(rng: np.random.Generator, most: int) -> list[tuple[float, int]]:
    """Part of the tokens that are of summaries, for stretches of four windows: a random walk."""
    steps = rng.normal(0.0, 0.8, most // 4).cumsum()
    return [(float(1 / (1 + np.exp(-step))), 4) for step in steps]


def drawn(half: str, summaries: float, tokens: int, rng: np.random.Generator) -> Tokens:
    """[L, tokens, K] of whole V2-Lite requests, so great a part of the tokens of summaries."""
    intent, summary = (requests(f"dsv2lite_{text}", half) for text in ("intent", "summary"))
    parts, given = [], 0
    of_summaries = 0
    while given < tokens:
        is_behind = of_summaries < summaries * (given + 1)
        source = summary if is_behind and summaries else intent
        part = source[rng.integers(len(source))]
        parts.append(part)
        given += part.shape[1]
        of_summaries += part.shape[1] if source is summary else 0
    return np.concatenate(parts, axis=1)[:, :tokens]


def of_tokens(model: str, half: str, num_windows: int) -> Tokens:
    """[T, L, E] windows of single tokens drawn anew from one load: nothing changes.

    Tokens are drawn whole, so that all layers see the same ones.
    """
    ids, rng = _together(model, half), np.random.default_rng(0)
    drawn = (rng.integers(ids.shape[1], size=WINDOW_TOKENS[model]) for _ in range(num_windows))
    return np.array([_counted(model, ids[:, pick]) for pick in drawn])


def of_requests(model: str, half: str, num_windows: int) -> Tokens:
    """[T, L, E] windows of 16 requests that are served at once, another where one ends.

    Nothing changes, but windows fluctuate, and requests that span two make neighbours alike.
    """
    ids, rng = _together(model, half), np.random.default_rng(0)
    length = np.array([one.shape[1] for one in _requests_of(model, half)])
    end, start = np.cumsum(length), np.cumsum(length) - length
    served = rng.integers(len(length), size=AT_ONCE)
    place = (start[served] + rng.random(AT_ONCE) * length[served]).astype(np.int64)
    counts = []
    for _ in range(num_windows):
        pick = []
        for _ in range(STEPS):
            pick.append(place.copy())
            place += 1
            ended = place == end[served]
            served[ended] = rng.integers(len(length), size=int(ended.sum()))
            place[ended] = start[served[ended]]
        counts.append(_counted(model, ids[:, np.concatenate(pick)]))
    return np.array(counts)


STEADY = {"single tokens": of_tokens, "16 requests at once": of_requests}


def _requests_of(model: str, half: str) -> list[Tokens]:
    names = ("gptoss20b_decode",) if model == GPT else ("dsv2lite_intent", "dsv2lite_summary")
    return [one for name in names for one in requests(name, half)]


def _together(model: str, half: str) -> Tokens:
    return np.concatenate(_requests_of(model, half), axis=1)


def _counted(model: str, ids: Tokens) -> Tokens:
    return windows(ids, ids.shape[1], NUM_EXPERTS[model])[0]


def kill(pool: ProcessPoolExecutor) -> None:
    """End the processes of a pool at once."""
    pool.shutdown(wait=False, cancel_futures=True)
    for process in multiprocessing.active_children():
        process.kill()


MOST_HISTORY = 16  # windows that a compared policy sees
WINDOW_SECONDS = 60.0
WINDOW_STEPS = 1200  # of 50 ms
PROMISE_WINDOWS = 16  # for which a MOVE is held to its promise, at most: until the next change


@dataclass(frozen=True)
class Change:
    """One plan that was taken."""

    window: int  # planned after this one
    decision: str
    moves: int
    promised: float  # mean imbalance that it takes off the history
    old: Placement
    new: Placement


@dataclass(eq=False)
class Replayed:
    """How one way of planning did."""

    imbalance: list[NDArray[np.float64]] = field(default_factory=list)  # [L] of windows 1, 2, ...
    changes: list[Change] = field(default_factory=list)

    @property
    def per_window(self) -> NDArray[np.float64]:
        """[T - 1] mean over layers."""
        return np.array(self.imbalance).mean(axis=1)

    @property
    def moves(self) -> int:
        """Weights moved in all."""
        return sum(change.moves for change in self.changes)


def net_seconds(found: Replayed, topology: Topology, cost: CostModel) -> float:
    """Serving time lost by imbalance and by what moved, by the project's own prices."""
    lost = WINDOW_SECONDS * cost.expert_part * float((found.per_window - 1).sum())
    for change in found.changes:
        per_slot = changed_slots(change.old, change.new).sum(axis=0)
        received = np.bincount(topology.rank_of_slot, per_slot, topology.num_ranks).max()
        lost += cost.seconds_per_rebalance + float(received) * cost.move_seconds(0)
    return lost


def start_of(topology: Topology, window: Tokens) -> Placement:
    """What serves before anything is planned: consecutive experts."""
    return contiguous_policy(Problem(LoadHistory(window[None]), topology))


class Deployment:
    """Ranks that report what they are given, and commit what is published.

    Args:
        top_k: experts of a token.
        settings: of the controller; None: its defaults.
        window_steps: steps of a window.
    """

    def __init__(
        self,
        topology: Topology,
        first: Tokens,
        top_k: int,
        settings: ControllerSettings | None = None,
        window_steps: int = WINDOW_STEPS,
    ) -> None:
        num_layers, num_experts = first.shape
        model = ModelShape(tuple(range(num_layers)), num_experts, top_k, 2048, 1408)
        self.now, self.window, self.topology = 0.0, 0, topology
        self.window_steps = window_steps
        self.store = MemoryStore("over-time", clock=lambda: self.now)
        described = model_to_dict(model), topology_to_dict(topology)
        self.store.begin_run(RunInfo("run", 0.0, *described, window_steps))
        for rank in range(topology.num_ranks):
            idle = RankState("run", rank, 0.0, 0, 0, "idle", 0, 0, 0, weights_version=0)
            self.store.report(idle)
        self.placement = start_of(topology, first)
        self.store.commit(self.placement, expected=None, reason="start")
        self.controller = Controller(
            self.store, settings or ControllerSettings(), clock=lambda: self.now
        )
        self._seen = 0  # events

    def serve(self, tokens: Tokens) -> Change | None:
        """Report a window, let the controller decide, and commit what it publishes."""
        self.store.append([self._sample(rank, tokens) for rank in range(self.topology.num_ranks)])
        self.now += WINDOW_SECONDS
        window, self.window = self.window, self.window + 1
        self.controller.turn()
        noted = self.store.events(after=self._seen, limit=100)
        self._seen = noted[-1].id if noted else self._seen
        errors = [one.detail for one in noted if one.kind == "error"]
        if errors:
            raise RuntimeError(f"window {window}: the controller reports {errors}")
        open_migration = self.store.published()
        if open_migration is None:
            return None
        old, self.placement = self.placement, open_migration.target
        base, plan_id = open_migration.base.generation, open_migration.plan_id
        self.store.commit(self.placement, expected=base, plan_id=plan_id, reason="swapped")
        self.store.prune(self.now - 10 * WINDOW_SECONDS)
        detail = [one.detail for one in noted if one.kind == "plan"][-1]
        promised = detail["expected_gain"]
        moves = int(moves_per_layer(old, self.placement).sum())
        return Change(window, detail["decision"], moves, promised, old, self.placement)

    def _sample(self, rank: int, tokens: Tokens) -> LoadSample:
        """All of an expert's tokens are reported by its first replica: windows add replicas up."""
        held = self.placement.slot_to_expert
        first = np.zeros(held.shape, dtype=bool)
        for layer, row in enumerate(held):
            experts, slots = np.unique(row, return_index=True)
            first[layer, slots[experts >= 0]] = True
        counted = np.where(first, np.take_along_axis(tokens, np.maximum(held, 0), axis=1), 0)
        here = self.topology.slots_on(rank)
        begin = self.window * self.window_steps
        return LoadSample(
            "over-time",
            "run",
            rank,
            self.window,
            self.now,
            begin,
            begin + self.window_steps - 1,
            "mixed",
            self.placement.generation,
            held[:, here],
            counted[:, here],
        )


def replay_controller(
    load: Iterable[Tokens],
    topology: Topology,
    top_k: int,
    settings: ControllerSettings | None = None,
    window_steps: int = WINDOW_STEPS,
) -> Replayed:
    """Serve windows one after another under the controller."""
    found, deployment = Replayed(), None
    for tokens in load:
        if deployment is None:
            deployment = Deployment(topology, tokens, top_k, settings, window_steps)
        else:
            found.imbalance.append(imbalance(tokens, deployment.placement, topology))
        change = deployment.serve(tokens)
        if change is not None:
            found.changes.append(change)
    return found


def replay_policy(load: Tokens, topology: Topology, policy: str) -> Replayed:
    """Serve windows while a policy plans after each, on the latest 16 and what serves."""
    found, current = Replayed(), start_of(topology, load[0])
    for window in range(len(load)):
        if window:
            found.imbalance.append(imbalance(load[window], current, topology))
        past = LoadHistory(load[max(0, window + 1 - MOST_HISTORY) : window + 1])
        proposed = policy_named(policy)(Problem(past, topology, current=current))
        moves = int(moves_per_layer(current, proposed).sum())
        if moves:
            found.changes.append(Change(window, "MOVE", moves, 0.0, current, proposed))
            current = proposed
    return found


def replay_nothing(load: Tokens, topology: Topology) -> Replayed:
    """Serve windows under the placement at the start."""
    start = start_of(topology, load[0])
    return Replayed([imbalance(tokens, start, topology) for tokens in load[1:]])


def realised(load: Tokens, topology: Topology, found: Replayed) -> list[tuple[float, float]]:
    """Of each MOVE, what it promised and what it brought until the next change, per window."""
    ends = [change.window for change in found.changes[1:]] + [len(load) - 1]
    result = []
    for change, end in zip(found.changes, ends, strict=True):
        served = load[change.window + 1 : min(end, change.window + PROMISE_WINDOWS) + 1]
        if change.decision == "MOVE" and len(served):
            old, new = (imbalance(served, one, topology).mean() for one in (change.old, change.new))
            result.append((change.promised, float(old - new)))
    return result
