"""The engine and this planner on the same windows, each window judged before it is planned on.

    window t --> judged under the placements that serve --> known to plans --> served from t + 1

The engine's placements are those of its maps where the source has them. Else its algorithm is
replayed, DeepSeek's EPLB as vLLM and SGLang ship it, on the load since its previous plan; or the
engine stays at its first map. The placements of this planner are never applied: decisions are
made with observation only. Variants with fewer or more redundant slots begin with experts in order.

Shapes:  T windows, L MoE layers, E experts, S slots, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from eplb.core.load import LoadHistory
from eplb.core.model import ModelShape
from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.decision.gate import Decision
from eplb.deepseek import rebalance_experts
from eplb.errors import ConfigError, EplbError
from simulations.course import Course, Terms, as_served
from simulations.shadow.accounts import Account
from simulations.shadow.windows import Observed, Skips
from telemetry.drift.detector import LOOK_BACK

EnginePlans = Literal["auto", "maps", "deepseek", "none"]
WORDS = {
    "maps": "its own maps",
    "deepseek": "its algorithm replayed (DeepSeek's EPLB): the source has no maps",
    "none": "its first map, never rebalanced",
}


@dataclass(frozen=True)
class Group:
    """What is compared on."""

    num_ranks: int
    num_nodes: int
    num_redundant: int | None  # None: as many as the first map has, else none
    terms: Terms  # its topology is that of the engine, and is set with the first window
    policy: str = "auto"
    engine_plans: EnginePlans = "auto"
    engine_every: int = 1  # windows from one replayed plan of the engine to the next
    every: int = 1  # windows from one plan of ours to the next
    also_redundant: tuple[int, ...] = ()  # variants with other numbers of redundant slots
    expert_bytes: int = 0  # without a model
    current: Placement | None = None  # the engine's at the start, where windows have no map


@dataclass
class Ours:
    """One variant of this planner."""

    num_redundant: int
    course: Course
    account: Account
    kept: int = 0
    resplits: int = 0
    last_reason: str = ""


@dataclass
class Comparison:
    """Takes windows one by one; the same windows give the same figures, however they arrive."""

    group: Group
    skips: Skips
    engine: Account | None = None
    ours: list[Ours] = field(default_factory=list)
    plans: EnginePlans = "auto"  # of the engine, as decided with the first window
    num_windows: int = 0
    layers: tuple[int, ...] = ()
    _model: ModelShape | None = None  # of the bytes alone
    _serving: Placement | None = None  # of the engine
    _seen: list[NDArray[np.int64]] = field(default_factory=list)
    _since_plan: NDArray[np.int64] | None = None
    _tokens: float = 0.0  # routed in a layer, all windows

    def add(self, window: Observed) -> bool:
        """Judge a window and plan after it; whether it was used.

        Raises:
            ConfigError: the first window does not fit the ranks, the model or the rule.
        """
        if not self._is_fit(window):
            return False
        tokens = window.tokens
        if self.engine is None:
            self._begin(window)
        assert self.engine is not None, "begun"
        assert self._serving is not None, "begun"
        if self.plans == "maps" and window.held is not None:
            self.engine.change(self._serving, window.held)
            self._serving = window.held
        if self.num_windows:
            self.engine.judge(tokens, self._serving)
            for one in self.ours:
                one.account.judge(tokens, one.course.serving)
        self._seen = [*self._seen[1 - self._most_seen :], tokens]
        self._tokens += float(tokens.sum(axis=1).mean())
        self._plan(self.num_windows)
        self.num_windows += 1
        return True

    @property
    def shape(self) -> tuple[int, int]:
        """L and E."""
        return len(self.layers), self._seen[-1].shape[1]

    @property
    def tokens_per_window(self) -> float:
        """Tokens times experts per token that a layer routes in a window."""
        return self._tokens / max(self.num_windows, 1)

    @property
    def _most_seen(self) -> int:
        return max(self.group.terms.past_windows, LOOK_BACK)

    def _is_fit(self, window: Observed) -> bool:
        """Whether a window is of the model and the group of those before it."""
        if not window.tokens.any():
            self.skips.add(window.where, "no tokens", "all loads are zero, as in profiling")
            return False
        if self.engine is None:
            return True
        shape, expected = window.tokens.shape, self._seen[-1].shape
        if (shape, window.layers.ids) != (expected, self.layers):
            self.skips.add(
                window.where,
                "another model",
                f"{shape[0]} layers ({window.layers.ids[0]}..{window.layers.ids[-1]}) x {shape[1]} "
                f"experts, expected {expected[0]} ({self.layers[0]}..{self.layers[-1]}) x "
                f"{expected[1]} as in the first window",
            )
            return False
        slots = self.engine.terms.topology.num_slots
        if window.held is not None and window.held.num_slots != slots:
            self.skips.add(
                window.where,
                "a map of another width",
                f"the map has {window.held.num_slots} slots, expected {slots}",
            )
            return False
        return window.held is None or self._can_serve(window, window.held)

    def _can_serve(self, window: Observed, held: Placement) -> bool:
        """Whether the engine's rule can serve its map."""
        assert self.engine is not None, "asked after the first window"
        try:
            as_served(held, self.engine.terms)
        except EplbError as exc:
            self.skips.add(window.where, "a map that the rule cannot serve", str(exc))
            return False
        return True

    def _begin(self, window: Observed) -> None:
        group, (_, num_experts) = self.group, window.tokens.shape
        held, redundant = window.held or group.current, group.num_redundant
        model = group.terms.model
        if model is not None and (model.num_layers, model.num_experts) != window.tokens.shape:
            raise ConfigError(
                f"{window.where} has {window.tokens.shape[0]} layers x {num_experts} experts, the "
                f"model {model.num_layers} x {model.num_experts}"
            )
        if held is not None and (held.num_layers, held.num_experts) != window.tokens.shape:
            raise ConfigError(
                f"the map has {held.num_layers} layers x {held.num_experts} experts, "
                f"{window.where} {window.tokens.shape[0]} x {num_experts}"
            )
        if held is not None and redundant is None:
            redundant = held.num_slots - num_experts
        redundant = redundant or 0
        if held is not None and held.num_slots != num_experts + redundant:
            raise ConfigError(
                f"{window.where}: the map has {held.num_slots} slots, expected "
                f"{num_experts + redundant}: {num_experts} experts and {redundant} redundant ones"
            )
        if model is None and group.expert_bytes:
            each = group.expert_bytes
            self._model = ModelShape(window.layers.ids, num_experts, 1, 0, 0, expert_bytes=each)
        terms = self._terms(num_experts, redundant)
        first = held or _in_order(window, redundant)
        plans = group.engine_plans
        if plans == "auto":
            plans = "deepseek" if window.held is None else "maps"
        if plans == "maps" and window.held is None:
            raise ConfigError(
                f"{window.where} has no map, expected --engine-plans deepseek or none"
            )
        self.plans = plans
        self.engine, self._serving, self.layers = Account(terms), first, window.layers.ids
        for number in dict.fromkeys((redundant, *group.also_redundant)):
            own = self._terms(num_experts, number)
            start = first if number == redundant else _in_order(window, number)
            self.ours.append(Ours(number, Course(own, group.policy, start), Account(own)))

    def _terms(self, num_experts: int, redundant: int) -> Terms:
        group = self.group
        if group.num_ranks % group.num_nodes or (num_experts + redundant) % group.num_ranks:
            raise ConfigError(
                f"{num_experts} experts and {redundant} redundant ones on {group.num_ranks} ranks "
                f"of {group.num_nodes} nodes, expected equally many slots on each rank and ranks "
                "on each node"
            )
        topology = Topology.uniform(
            group.num_nodes,
            group.num_ranks // group.num_nodes,
            (num_experts + redundant) // group.num_ranks,
        )
        return replace(group.terms, topology=topology, model=group.terms.model or self._model)

    def _plan(self, window: int) -> None:
        latest = self._seen[-1]
        self._since_plan = latest if self._since_plan is None else self._since_plan + latest
        if self.plans == "deepseek" and (window + 1) % self.group.engine_every == 0:
            self._replay_engine(self._since_plan)
            self._since_plan = None
        if window % self.group.every:
            return
        seen = LoadHistory(np.stack(self._seen))
        for one in self.ours:
            base = one.course.serving
            found = one.course.plan_after(window, seen)
            one.account.change(base, one.course.serving)
            one.kept += found.decision is Decision.KEEP
            one.resplits += found.decision is Decision.RESPLIT
            one.last_reason = f"{found.decision.value}: {found.reason}"

    def _replay_engine(self, load: NDArray[np.int64]) -> None:
        assert self.engine is not None, "begun"
        assert self._serving is not None, "begun"
        terms = self.engine.terms
        groups = 1 if terms.model is None else terms.model.num_expert_groups
        topology = terms.topology
        held, _, _ = rebalance_experts(
            load, topology.num_slots, groups, topology.num_nodes, topology.num_ranks
        )
        new = Placement(held.astype(np.int32), load.shape[1])
        self.engine.change(self._serving, new)
        self._serving = new


def _in_order(window: Observed, redundant: int) -> Placement:
    """Experts in order and then again from the first: where engines start without a map."""
    num_layers, num_experts = window.tokens.shape
    row = np.arange(num_experts + redundant, dtype=np.int32) % num_experts
    return Placement(np.tile(row, (num_layers, 1)), num_experts)
