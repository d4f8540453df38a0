"""What a failure costs: a rank, a node or a network link, under the placement that served last.

Every rank and every node is tried; the one whose loss leaves most tokens without a slot, else the
highest imbalance, is planned for again. Ranks that are left serve what they hold until then.

    masked    the survivors' slots as they are: tokens of experts without a slot are not served
    repaired  a plan for the survivors from there, with the live planner

Survivors split tokens by weights: engines' own rules are not defined for dead ranks.

A link at half its rate is judged by steps alone: the other ranks wait for the busiest one, so it
is as if all links of that kind were as slow.

Shapes:  T windows, L MoE layers, E experts, R ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from eplb.core.dispatch import DispatchRule
from eplb.core.load import LoadHistory
from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.errors import EplbError
from eplb.measure import imbalance_of, live_shares
from eplb.planner import plan
from simulations.migration_cost import moved_between
from simulations.replay import Scenario
from simulations.schemes import SlotSplit, by_rank
from simulations.step_time import StepModel
from simulations.windows import Tokens

POLICY, BY_WEIGHTS = "auto", DispatchRule.WEIGHTED
LINK_PART = 0.5  # part of its rate that a failing link keeps


@dataclass(frozen=True)
class Failure:
    """One failure, and what it costs."""

    name: str
    uncovered: int  # experts without a slot, over all layers
    unserved: float  # part of the routed tokens that they get
    imbalance: float  # mean over layers, of what is served
    slower: float | None  # part of a healthy step that steps last longer; None: no step model
    repaired_imbalance: float | None = None  # None: nothing to repair, or it cannot be
    repaired_slower: float | None = None
    moves: int = 0  # weights that the repair loads or copies
    bytes: int = 0  # 0 without a model
    cannot: str = ""  # why no placement serves all experts on what is left

    def sentence(self) -> str:
        """What an operator has to expect."""
        text = f"{self.name}: imbalance {self.imbalance:.3f}"
        if self.uncovered:
            text += (
                f", {self.uncovered} experts of all layers without a slot: {self.unserved:.1%} of "
                "the tokens are not served until they are loaded"
            )
        if self.slower is not None:
            text += f", steps {self.slower:+.1%}"
        if self.cannot:
            return f"{text}; cannot be repaired: {self.cannot}"
        if self.repaired_imbalance is None:
            return text
        text += f"; repaired by {self.moves:,} moves"
        text += f" ({self.bytes / 1e9:.1f} GB)" if self.bytes else ""
        text += f": imbalance {self.repaired_imbalance:.3f}"
        return (
            text if self.repaired_slower is None else f"{text}, steps {self.repaired_slower:+.1%}"
        )


def failures_of(scenario: Scenario, placement: Placement) -> list[Failure]:
    """The worst loss of one rank, that of one node, and links at half their rate.

    Args:
        scenario: its latest windows are judged and planned on.
        placement: that serves when it happens.
    """
    return list(_failures(scenario, placement, _latest(scenario)))


def _failures(scenario: Scenario, placement: Placement, history: LoadHistory) -> Iterator[Failure]:
    topology, tokens = scenario.topology, history.tokens.sum(axis=0)
    case = _Case(scenario, tokens, history.num_windows)
    served = np.flatnonzero(topology.serving).tolist()
    if len(served) > 1:
        lost = [(f"rank {rank} lost", _without(topology, [rank])) for rank in served]
        yield _repaired(case, history, placement, *_worst(case, placement, lost))
    nodes = np.unique(topology.node_of_rank[topology.serving]).tolist()
    if len(nodes) > 1:
        lost = [
            (f"node {node} lost", _without(topology, np.flatnonzero(topology.node_of_rank == node)))
            for node in nodes
        ]
        yield _repaired(case, history, placement, *_worst(case, placement, lost))
    if (step := scenario.step_model) is not None:
        card = step.hardware
        slow = replace(card, node_bytes_s=card.node_bytes_s * LINK_PART)
        name = "a link inside a node"
        yield case.masked(
            f"{name} at half its rate", placement, topology, replace(step, hardware=slow)
        )
        if len(nodes) > 1 or step.is_separate:
            slow = replace(card, network_bytes_s=card.network_bytes_s * LINK_PART)
            name = "a network link"
            yield case.masked(
                f"{name} at half its rate", placement, topology, replace(step, hardware=slow)
            )


@dataclass(frozen=True)
class _Case:
    """The load that failures are judged on."""

    scenario: Scenario
    tokens: Tokens  # [L, E] of the latest windows together
    num_windows: int

    def masked(
        self, name: str, placement: Placement, topology: Topology, step: StepModel | None = None
    ) -> Failure:
        """A placement on what is left of the ranks."""
        terms = replace(self.scenario, topology=topology, dispatch=BY_WEIGHTS)
        _, missing = live_shares(placement, topology)
        rows = SlotSplit(placement, terms).of(self.tokens)
        total = max(int(self.tokens.sum()), 1)
        return Failure(
            name,
            int(missing.sum()),
            float(self.tokens[missing].sum()) / total,
            float(imbalance_of(by_rank(rows, topology), topology).mean()),
            self._slower(rows, topology, placement, step),
        )

    def _slower(
        self,
        rows: NDArray[np.float64],
        topology: Topology,
        placement: Placement,
        step: StepModel | None,
    ) -> float | None:
        """Longer steps for the same tokens; those that are not served are left out."""
        healthy = self.scenario.step_model
        if healthy is None:
            return None
        now = step or replace(healthy, topology=topology)
        steps = self.num_windows * self.scenario.windows.steps
        if self.scenario.tokens_per_step is not None:
            routed = self.tokens.sum() / len(self.tokens)
            steps = routed / (self.scenario.tokens_per_step * healthy.model.top_k)
        terms = replace(self.scenario, dispatch=BY_WEIGHTS)
        before = healthy.of(SlotSplit(placement, terms).of(self.tokens) / steps).us
        return now.of(rows / steps).us / before - 1 if before else 0.0


def _worst(
    case: _Case, placement: Placement, lost: list[tuple[str, Topology]]
) -> tuple[Failure, Topology]:
    """The failure that leaves most tokens unserved, else the least balance."""
    judged = [(case.masked(name, placement, topology), topology) for name, topology in lost]
    worst, topology = max(judged, key=lambda one: (one[0].unserved, one[0].imbalance))
    return replace(worst, name=f"{worst.name}, the worst of {len(lost)}"), topology


def _repaired(
    case: _Case, history: LoadHistory, placement: Placement, failure: Failure, topology: Topology
) -> Failure:
    scenario = case.scenario
    try:
        target = plan(
            history,
            topology,
            model=scenario.model,
            current=placement,
            budget=scenario.budget,
            policy=POLICY,
            cost=scenario.cost,
            seed=scenario.seed,
        ).target
    except EplbError as exc:
        return replace(failure, cannot=str(exc))
    after, moved = case.masked("", target, topology), moved_between(placement, target, topology)
    size = 0 if scenario.model is None else scenario.model.expert_bytes
    return replace(
        failure,
        repaired_imbalance=after.imbalance,
        repaired_slower=after.slower,
        moves=moved.total,
        bytes=moved.total * size,
    )


def _without(topology: Topology, ranks: list[int] | NDArray[np.int64]) -> Topology:
    alive = topology.alive.copy()
    alive[ranks] = False
    return replace(topology, alive=alive)


def _latest(scenario: Scenario) -> LoadHistory:
    """The windows that a plan at the end would look back on."""
    kept: deque[Tokens] = deque(scenario.windows, maxlen=scenario.past_windows)
    return LoadHistory(np.stack(kept))
