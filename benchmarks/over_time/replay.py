"""Replays windows under the controller itself, and under policies that plan again at every window.

The controller runs with its shipped store: ranks report each window, it decides, and what it
publishes is committed before the next window. So history, gate, price and record of promises are
those of a deployment. A policy that is compared plans after every window and is always taken.

Shapes:  T windows, L MoE layers, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

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

MOST_HISTORY = 16  # windows that a compared policy sees
WINDOW_SECONDS = 60.0
WINDOW_STEPS = 1200  # of 50 ms
PROMISE_WINDOWS = 16  # for which a MOVE is held to its promise, at most: until the next change

Tokens = NDArray[np.int64]


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
