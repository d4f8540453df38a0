"""The engine and this planner on the same windows, each window judged before it is planned on.

    window t --> judged under the placements that serve --> known to plans --> served from t + 1

The engine's placements are those of its maps where the source has them. Else its algorithm is
replayed, DeepSeek's EPLB as vLLM and SGLang ship it, on the load since its previous plan; or the
engine stays at its first map. The placements of this planner are never applied: decisions are
made with observation only. Variants with fewer or more redundant slots begin with experts in order.
Moves are booked in the first window that their placement serves, so that gains and costs stand in
the same windows.

Shapes:  T windows, L MoE layers, E experts, S slots, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from eplb.core.cost import Decision
from eplb.core.load import LoadHistory
from eplb.core.model import ModelShape
from eplb.core.placement import Placement, changed_slots
from eplb.core.topology import Topology
from eplb.deepseek import rebalance_experts
from eplb.errors import ConfigError, EplbError
from eplb.measure import imbalance
from simulations.replay import in_order
from simulations.schemes import Course, PlanTerms, as_served
from simulations.shadow.sources import ObservedWindow, Skips
from simulations.verdict import Judge
from telemetry.load.drift import LOOK_BACK

EnginePlans = Literal["auto", "maps", "deepseek", "none"]


@dataclass(frozen=True)
class Group:
    """What is compared on."""

    terms: (
        PlanTerms  # of its topology, the slots count only where they are those of the first window
    )
    num_redundant: int | None = None  # None: as many as the first map has, else none
    policy: str = "auto"
    engine_plans: EnginePlans = "auto"
    engine_every: int = 1  # windows from one replayed plan of the engine to the next
    every: int = 1  # windows from one plan of ours to the next
    also_redundant: tuple[int, ...] = ()  # variants with other numbers of redundant slots
    expert_bytes: int = 0  # without a model
    current: Placement | None = None  # the engine's at the start, where windows have no map


@dataclass
class Variant:
    """One variant of this planner."""

    num_redundant: int
    course: Course
    account: Account
    kept: int = 0
    resplits: int = 0
    failed: int = 0  # windows for which there is no plan
    last_reason: str = ""


@dataclass
class EngineSide:
    """The engine's side."""

    account: Account
    plans: EnginePlans  # the first window decides
    serving: Placement
    has_map: bool  # the first window has a map
    redundant: int
    failed: int = 0  # replayed plans
    _since_plan: list[NDArray[np.int64]] = field(default_factory=list)

    def replay(self, tokens: NDArray[np.int64], every: int) -> None:
        """Plan as its algorithm does, after every so many windows, on the load since."""
        self._since_plan.append(tokens)
        if len(self._since_plan) < every:
            return
        load = np.sum(self._since_plan, axis=0)
        self._since_plan.clear()
        topology, model = self.account.terms.topology, self.account.terms.model
        groups = 1 if model is None else model.num_expert_groups
        held, _, _ = rebalance_experts(
            load, topology.num_slots, groups, topology.num_nodes, topology.num_ranks
        )
        self.serving = Placement(held.astype(np.int32), load.shape[1])


@dataclass
class Comparison:
    """Takes windows one by one; the same windows give the same figures, however they arrive."""

    group: Group
    skips: Skips
    engine: EngineSide | None = None
    ours: list[Variant] = field(default_factory=list)
    num_windows: int = 0
    judge: Judge | None = None
    _first: ObservedWindow | None = None  # later windows must be of its model and group
    _seen: list[NDArray[np.int64]] = field(default_factory=list)
    _tokens: float = 0.0  # routed in a layer, all windows

    def add(self, window: ObservedWindow) -> bool:
        """Judge a window and plan after it; whether it was used.

        Raises:
            ConfigError: the first window does not fit the ranks, the model or the rule.
        """
        tokens = window.tokens
        if not tokens.any():
            why = "all loads are zero, as in profiling"
            self.skips.add(window.where, "no tokens", why)
            return False
        if self._first is None:
            self._begin(window)
        elif refused := self._refusal(window):
            self.skips.add(window.where, *refused)
            return False
        engine = self.engine
        assert engine is not None, "begun"
        assert self.judge is not None, "begun"
        self.judge.add(tokens)
        if engine.plans == "maps" and window.held is not None:
            engine.serving = window.held
        if self.num_windows:
            engine.account.judge(tokens, engine.serving)
            for one in self.ours:
                one.account.judge(tokens, one.course.serving)
        most = max(self.group.terms.past_windows, LOOK_BACK)
        self._seen = [*self._seen[1 - most :], tokens]
        self._tokens += float(tokens.sum(axis=1).mean())
        self._plan(engine, tokens)
        self.num_windows += 1
        return True

    @property
    def shape(self) -> tuple[int, int]:
        """L and E."""
        num_layers, num_experts = self._seen[-1].shape
        return num_layers, num_experts

    @property
    def tokens_per_window(self) -> float:
        """Tokens times experts per token that a layer routes in a window."""
        return self._tokens / max(self.num_windows, 1)

    def _begin(self, window: ObservedWindow) -> None:
        group, num_experts = self.group, window.tokens.shape[1]
        held, redundant = window.held or group.current, group.num_redundant
        if redundant is None:  # a topology that a store tells has its slots, else one a rank
            slots = group.terms.topology.num_slots if held is None else held.num_slots
            redundant = max(slots - num_experts, 0)
        terms = self._terms(window, redundant)
        first = held or in_order(terms.topology, window.tokens)
        if (first.num_layers, first.num_experts) != window.tokens.shape:
            raise ConfigError(
                f"the map has {first.num_layers} layers x {first.num_experts} experts, "
                f"{window.where} {window.tokens.shape[0]} x {num_experts}"
            )
        if first.num_slots != terms.topology.num_slots:
            raise ConfigError(
                f"{window.where}: the map has {first.num_slots} slots, expected "
                f"{num_experts + redundant}: {num_experts} experts and {redundant} redundant ones"
            )
        has_map, plans = window.held is not None, group.engine_plans
        if plans == "auto":
            plans = "maps" if has_map else "deepseek"
        if plans == "maps" and not has_map:
            raise ConfigError(
                f"{window.where} has no map, expected --engine-plans deepseek or none"
            )
        self.engine = EngineSide(Account(terms, first), plans, first, has_map, redundant)
        self._first = window
        for number in dict.fromkeys((redundant, *group.also_redundant)):
            own = self._terms(window, number)
            start = first if number == redundant else in_order(own.topology, window.tokens)
            as_served(start, own)  # refuses a map that the rule cannot serve
            course = Course(own, group.policy, start)
            self.ours.append(Variant(number, course, Account(own, start)))
        num_ranks = terms.topology.num_ranks
        least = -num_experts % num_ranks  # slots that equal ranks have in any case
        more = max((redundant - least) // num_ranks, 1) * num_ranks
        plain, wide = (self._terms(window, number) for number in (least, least + more))
        self.judge = Judge(plain, wide, group.policy, group.every)

    def _refusal(self, window: ObservedWindow) -> tuple[str, str] | None:
        """Why a window is not of the model and the group of the first one: the kind, a sentence."""
        first, engine = self._first, self.engine
        assert first is not None, "begun"
        assert engine is not None, "begun"
        terms = engine.account.terms
        shape, expected = window.tokens.shape, first.tokens.shape
        ids, expected_ids = window.layers.ids, first.layers.ids
        if (shape, ids) != (expected, expected_ids):
            return (
                "another model",
                f"{shape[0]} layers ({ids[0]}..{ids[-1]}) x {shape[1]} experts, expected "
                f"{expected[0]} ({expected_ids[0]}..{expected_ids[-1]}) x {expected[1]} as in the "
                "first window",
            )
        if window.held is None:
            if engine.plans == "maps":
                return "a window without a map", "the map is not known, the first window has one"
            return None
        found, slots = window.held.num_slots, terms.topology.num_slots
        if found != slots:
            return "a map of another width", f"the map has {found} slots, expected {slots}"
        try:
            as_served(window.held, terms)
        except EplbError as exc:
            return "a map that the rule cannot serve", str(exc)
        return None

    def _terms(self, window: ObservedWindow, redundant: int) -> PlanTerms:
        """What plans in so many slots are made with."""
        (num_layers, num_experts), group = window.tokens.shape, self.group
        topology, model = group.terms.topology, group.terms.model
        if model is None and group.expert_bytes:
            each = group.expert_bytes
            model = ModelShape(window.layers.ids, num_experts, 1, 0, 0, expert_bytes=each)
        if model is not None and (model.num_layers, model.num_experts) != window.tokens.shape:
            raise ConfigError(
                f"{window.where} has {num_layers} layers x {num_experts} experts, the model "
                f"{model.num_layers} x {model.num_experts}"
            )
        if topology.num_slots != num_experts + redundant:
            each, rest = divmod(num_experts + redundant, topology.num_ranks)
            if rest:
                raise ConfigError(
                    f"{num_experts} experts and {redundant} redundant ones on "
                    f"{topology.num_ranks} ranks, expected equally many slots on each"
                )
            slots = np.full(topology.num_ranks, each, dtype=np.int32)
            topology = replace(topology, slots_of_rank=slots)
        return replace(group.terms, topology=topology, model=model)

    def _plan(self, engine: EngineSide, tokens: NDArray[np.int64]) -> None:
        """Plan after the latest window; a planner that fails stays at what serves."""
        window = self.num_windows
        if engine.plans == "deepseek":
            try:
                engine.replay(tokens, self.group.engine_every)
            except EplbError:
                if not window:
                    raise
                engine.failed += 1
        if window % self.group.every:
            return
        seen = LoadHistory(np.stack(self._seen))
        for one in self.ours:
            try:
                found = one.course.plan_after(window, seen)
            except EplbError as exc:
                if not window:
                    raise
                one.failed += 1
                one.last_reason = f"no plan: {exc}"
                continue
            one.kept += found.decision is Decision.KEEP
            one.resplits += found.decision is Decision.RESPLIT
            one.last_reason = f"{found.decision.value}: {found.reason}"


Series = NDArray[np.float64]


@dataclass
class Account:
    """Imbalance and moves of each judged window."""

    terms: PlanTerms
    serving: Placement  # the map of the latest judged window; at first, that of the start
    worst: float = 1.0  # one layer in one window
    rebalances: int = 0
    _imbalance: list[float] = field(default_factory=list)  # [T] mean over layers
    _tokens: list[int] = field(default_factory=list)  # [T]
    _received: list[int] = field(default_factory=list)  # [T] experts, from another rank
    _seconds: list[float] = field(default_factory=list)  # [T] of serving that moves take
    _shown: Placement | None = None  # ``serving`` as the engine's rule serves it

    def judge(self, tokens: NDArray[np.int64], placement: Placement) -> None:
        """Note a window [L, E] under what serves, and the price of having come to serve."""
        received, seconds = 0, 0.0
        if placement is not self.serving:
            received, seconds = self._price(placement)
        if self._shown is None or placement is not self.serving:
            self.serving, self._shown = placement, as_served(placement, self.terms)
        found = imbalance(tokens, self._shown, self.terms.topology)
        self.worst = max(self.worst, float(found.max()))
        self._imbalance.append(float(found.mean()))
        self._tokens.append(int(tokens.sum()))
        self._received.append(received)
        self._seconds.append(seconds)

    def _price(self, new: Placement) -> tuple[int, float]:
        """Experts received, and seconds on the rank that receives most; new shares are free."""
        if not changed_slots(self.serving, new).any():
            return 0, 0.0
        self.rebalances += 1
        received = received_by_rank(self.serving, new, self.terms.topology)
        cost = self.terms.cost
        most = int(received.max()) * cost.move_seconds(self.expert_bytes)
        return int(received.sum()), cost.seconds_per_rebalance + most

    @property
    def expert_bytes(self) -> int:
        """Of one expert; 0: not known."""
        return 0 if self.terms.model is None else self.terms.model.expert_bytes

    @property
    def imbalance(self) -> Series:
        """[T] of the judged windows, mean over layers."""
        return np.array(self._imbalance)

    @property
    def tokens(self) -> Series:
        """[T] of the judged windows, of all layers."""
        return np.array(self._tokens, dtype=np.float64)

    @property
    def received(self) -> Series:
        """[T] experts that came from another rank before each window."""
        return np.array(self._received, dtype=np.float64)

    @property
    def seconds(self) -> Series:
        """[T] of serving that the moves before each window take."""
        return np.array(self._seconds)


def received_by_rank(old: Placement, new: Placement, topology: Topology) -> NDArray[np.int64]:
    """[R] experts that each rank receives from another one; a copy within a rank is not counted."""
    layer, slot = np.nonzero(changed_slots(old, new))
    rank = topology.rank_of_slot[slot]
    held = np.zeros((old.num_layers, topology.num_ranks, old.num_experts), dtype=np.bool_)
    rows, slots = np.nonzero(old.slot_to_expert >= 0)
    held[rows, topology.rank_of_slot[slots], old.slot_to_expert[rows, slots]] = True
    expert = new.slot_to_expert[layer, slot]
    arrives = ~held[layer, rank, expert]
    # An expert that fills two slots of one rank is received once.
    key = np.stack([layer[arrives], rank[arrives], expert[arrives]])
    found: NDArray[np.int64] = np.bincount(
        np.unique(key, axis=1)[1], minlength=topology.num_ranks
    ).astype(np.int64)
    return found
