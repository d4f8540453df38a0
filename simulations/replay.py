"""Replays windows of load one after another: each is served under what was planned before it.

Every compared scheme sees the same windows in one pass, so that a day of them needs no more memory
than the windows that a plan looks back on. Time is linear in windows. The planner, its gate and
its record of promises are the live ones, so what is simulated is what would run. The compared
schemes by name:

    contiguous, none   consecutive experts, redundant slots empty: no balancing
    in-order           experts in order and again from the first: where engines start
    deepseek, sglang, vllm           simulations/peers/engines.py
    flashlb, greedy_on_sum, ...      simulations/peers, each plan taken
    oracle:...                       simulations/schemes.py
    auto, greedy, ...                the planner's policies, with its gate
    raw:auto, raw:NAME, ...          the same policies, each placement taken as it is, as a peer's

Shapes:  T windows, L MoE layers, S slots, R ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from eplb.core.load import LoadHistory, sampling_noise
from eplb.core.placement import EMPTY, Placement
from eplb.core.problem import Problem
from eplb.core.topology import Topology
from eplb.errors import ConfigError, EplbError, HistoryError
from eplb.measure import imbalance_of
from eplb.policies.table import POLICIES, contiguous_policy, policy_named
from simulations.migration_cost import MigrationCost, Moved, moved_between
from simulations.own_policies import RAW, fault_of
from simulations.peers import PEERS
from simulations.peers.engines import ENGINES
from simulations.schemes import (
    ORACLES,
    AlwaysTaken,
    Ours,
    PlanTerms,
    Scheme,
    SlotLoad,
    WindowShares,
    by_rank,
)
from simulations.step_time import StepModel
from simulations.windows import LatestWindows, Tokens, WindowSeries, mean_by_tokens, of_history

UNBALANCED = ("none", "contiguous")
IN_ORDER = "in-order"
BATCH_POLICY = "auto"  # whose placement ``oracle:shares`` starts from


def check_names(names: tuple[str, ...]) -> None:
    """Refuse names that are unknown or given twice.

    Raises:
        ConfigError: no name, a name twice, or an unknown one; the message lists the known ones.
    """
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"policies are {list(names)}, expected distinct names")
    extra = (*UNBALANCED, IN_ORDER, *ENGINES, *PEERS, *ORACLES)
    for name in names:
        if name in extra:
            continue
        try:
            policy_named(name.removeprefix(RAW))
        except ConfigError as exc:
            known = ", ".join(sorted({*POLICIES, *extra}))
            raise ConfigError(
                f"unknown policy {name!r}, expected one of: {known}, or {RAW} and a policy"
            ) from exc


def scheme_named(name: str, terms: PlanTerms, first: Tokens, every: int) -> Scheme:
    """The scheme of a name.

    Args:
        terms: ranks, model, gate.
        first: [L, E] of the first window, for its shape alone.
        every: windows from one plan to the next.
    """
    start = contiguous(terms, first)
    if name in UNBALANCED:
        return Scheme(terms, start)
    if name == IN_ORDER:
        return Scheme(terms, in_order(terms.topology, first))
    if name in ENGINES:
        return ENGINES[name](terms, in_order(terms.topology, first), every)
    if name in PEERS:
        return AlwaysTaken(terms, start, PEERS[name], every)
    if name.startswith(RAW):
        return AlwaysTaken(terms, start, policy_named(name.removeprefix(RAW)).policy, every)
    if name in ORACLES:
        kind = ORACLES[name]
        if issubclass(kind, WindowShares):
            return kind(terms, start, BATCH_POLICY, every)
        return kind(terms, start)
    return Ours(terms, start, name, every)


def contiguous(terms: PlanTerms, first: Tokens) -> Placement:
    """Consecutive experts on each rank, redundant slots empty."""
    history = LoadHistory(first[None])
    return contiguous_policy(Problem(history, terms.topology, terms.model))


def in_order(topology: Topology, first: Tokens) -> Placement:
    """Experts in order and then again from the first, on live ranks: where engines start."""
    num_layers, num_experts = first.shape
    usable = topology.alive[topology.rank_of_slot]
    row = np.full(topology.num_slots, EMPTY, dtype=np.int32)
    row[usable] = np.arange(int(usable.sum())) % num_experts
    return Placement(np.tile(row, (num_layers, 1)), num_experts)


@dataclass(frozen=True, kw_only=True)
class Scenario(PlanTerms):
    """What all compared policies share: what plans are made with, the load, and what is counted.

    Raises:
        HistoryError: fewer than two windows.
        ConfigError: counts that no replay can use.
    """

    load: WindowSeries | LoadHistory  # a source of windows, or a history of them
    plan_every: int = 1  # windows from one plan to the next
    keep_placements: bool = False  # keep the placement of every change: memory grows with changes
    step_model: StepModel | None = None  # None: imbalance alone, no times
    migration: MigrationCost | None = None  # None: what moves takes no time
    tokens_per_step: float | None = None  # tokens of all ranks, in place of those of the windows
    batches: tuple[float, ...] = ()  # tokens of a step of all ranks, which are timed too

    def __post_init__(self) -> None:
        for name in ("past_windows", "plan_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected at least 1")
        num_windows = self.windows.num_windows
        if num_windows is not None and num_windows < 2:
            raise too_few(num_windows)

    @cached_property
    def windows(self) -> WindowSeries:
        """The load as a source of windows."""
        return of_history(self.load) if isinstance(self.load, LoadHistory) else self.load


def labelled(policy: str, objective: str | None) -> str:
    """A policy whose plans are for time says so: its imbalance of tokens is not what it lowers."""
    return f"{policy} (time)" if "time" in (objective or "") else policy


def too_few(num_windows: int) -> HistoryError:
    """The error of a load that cannot be judged."""
    return HistoryError(f"{num_windows} windows, expected at least 2: one to plan on, one to judge")


@dataclass(frozen=True)
class Rebalance:
    """One plan that was taken."""

    window: int  # planned after this window, serving from the next
    moves: int
    bytes_by_link: dict[str, int]  # empty without a model, which knows the size of an expert
    reason: str
    target: Placement | None  # None: the scenario keeps no placements
    lost_s: float = 0.0  # serving time that it took


@dataclass(frozen=True, eq=False)
class Replay:
    """How one policy did, window by window; the first window is only planned on."""

    policy: str
    is_oracle: bool  # it looks at the window that it serves
    imbalance: NDArray[np.float64]  # [T - 1, L] of windows 1, 2, ...
    rebalances: tuple[Rebalance, ...]
    num_kept: int  # plans that were not worth moving to
    plan_ms: NDArray[np.float64]  # wall time of each plan
    first_load: NDArray[np.float64]  # [L, R] of the last window under the first placement
    last_load: NDArray[np.float64]  # [L, R] of the last window as it was served
    first_placement: Placement
    last_placement: Placement
    tokens: NDArray[np.float64]  # [T - 1] routed tokens of each window, mean over layers
    step_us: NDArray[np.float64]  # [T - 1] of one step of each window; empty without a step model
    parts_us: NDArray[np.float64]  # [T - 1, 4] of it: dispatch, experts, combine, rest
    batch_us: NDArray[np.float64]  # [T - 1, B] as ``step_us``, for the scenario's batches
    bound_us: NDArray[np.float64]  # [T - 1, B] of them, below which no placement comes
    failed: str = ""  # why it ended before the last window
    objective: str = ""  # of its plans: tokens, time, or both; empty where none has an objective

    @property
    def label(self) -> str:
        """The policy, as tables and plots name it."""
        return labelled(self.policy, self.objective)

    @property
    def idle(self) -> NDArray[np.bool_]:
        """[T - 1] windows without any token, which count in no mean."""
        idle: NDArray[np.bool_] = self.tokens == 0
        return idle

    @property
    def per_window(self) -> NDArray[np.float64]:
        """[T - 1] mean over layers."""
        mean: NDArray[np.float64] = self.imbalance.mean(axis=1)
        return mean

    @property
    def mean(self) -> float:
        """Over the windows, each by its tokens, as it costs time."""
        return mean_by_tokens(self.per_window, self.tokens)

    @property
    def placements(self) -> list[Placement]:
        """The placement under which each window 1, 2, ... was judged.

        Raises:
            ConfigError: the scenario keeps no placements.
        """
        serving = [self.first_placement] * (len(self.imbalance) + 1)
        for rebalance in self.rebalances:
            if rebalance.target is None:
                raise ConfigError("the placements were not kept, expected keep_placements")
            later = len(serving) - rebalance.window - 1
            serving[rebalance.window + 1 :] = [rebalance.target] * later
        return serving[1:]

    @property
    def moves(self) -> int:
        """Weights moved in all."""
        return sum(rebalance.moves for rebalance in self.rebalances)

    @property
    def bytes_by_link(self) -> Counter[str]:
        """Bytes moved in all, by kind of link."""
        total: Counter[str] = Counter()
        for rebalance in self.rebalances:
            total.update(rebalance.bytes_by_link)
        return total


class Runner:
    """One scheme, and what it did so far."""

    def __init__(self, scenario: Scenario, name: str, first: Tokens) -> None:
        self.scenario, self.name = scenario, name
        self.scheme: Scheme = scheme_named(name, scenario, first, scenario.plan_every)
        self.first_placement, self.failed = self.scheme.serving, ""
        self._imbalance: list[NDArray[np.float64]] = []
        self._taken: list[Rebalance] = []
        self._plan_ms: list[float] = []
        self._served: SlotLoad | None = None
        self._step_us: list[float] = []
        self._network_part = 0.0  # network's part of the latest step
        self._parts_us: list[tuple[float, ...]] = []
        self._batch_us: list[list[float]] = []
        self._bound_us: list[list[float]] = []

    def plan(self, window: int, tokens: Tokens, past: LatestWindows) -> None:
        """Let the scheme plan after a window; an error ends this scheme and no other."""
        if self.failed:
            return
        begin = perf_counter()
        kept = self.scheme.num_kept
        try:
            taken = self.scheme.plan(window, tokens, past)
        except EplbError as exc:
            self.failed = f"planning after window {window}: {exc}"
            return
        except Exception as exc:
            if (fault := fault_of(self.name, exc)) is None:
                raise
            self.failed = f"planning after window {window}: the policy raised {fault}"
            return
        if taken is not None or self.scheme.num_kept > kept:
            self._plan_ms.append((perf_counter() - begin) * 1000)
        if taken is None:
            return
        moved = moved_between(taken.base, taken.target, self.scenario.topology)
        target = taken.target if self.scenario.keep_placements else None
        price = self.scenario.migration
        lost_s = 0.0
        if price is not None:
            lost_s = price.lost_s(
                moved,
                self.scenario.topology,
                is_async=self.scheme.is_async,
                network_part=self._network_part,
            )
        self._taken.append(
            Rebalance(window, moved.total, self._bytes(moved), taken.reason, target, lost_s)
        )

    def _bytes(self, moved: Moved) -> dict[str, int]:
        model = self.scenario.model
        if model is None:
            return {}
        return {link: count * model.expert_bytes for link, count in moved.by_link.items()}

    def serve(self, window: int, tokens: Tokens) -> None:
        """Serve a window, and judge it."""
        if self.failed:
            return
        try:
            self._served = self.scheme.serve(tokens)
        except EplbError as exc:
            self.failed = f"serving window {window}: {exc}"
            return
        topology = self.scenario.topology
        self._imbalance.append(imbalance_of(by_rank(self._served, topology), topology))
        if (step_model := self.scenario.step_model) is not None:
            routed = np.maximum(tokens.sum(axis=1, keepdims=True), 1)  # [L, 1]
            served, given = self._served, self.scenario.tokens_per_step
            rows = served / self.scenario.windows.steps
            if given is not None:
                rows = served * (given * step_model.model.top_k / routed)
            step = step_model.of(rows)
            self._step_us.append(step.us)
            self._parts_us.append(step.parts_us)
            self._network_part = step.network_part
            parts = [one * step_model.model.top_k / routed for one in self.scenario.batches]
            self._batch_us.append([step_model.of(served * part).us for part in parts])
            self._bound_us.append([step_model.bound(tokens * part).us for part in parts])

    def result(self, last: Tokens, routed: NDArray[np.float64]) -> Replay:
        """Everything together."""
        scenario, topology = self.scenario, self.scenario.topology
        first = scheme_named("contiguous", scenario, last, 1)
        served = self._served if self._served is not None else first.serve(last)
        return Replay(
            policy=self.name,
            is_oracle=self.scheme.is_oracle,
            imbalance=np.array(self._imbalance).reshape(-1, len(last)),
            rebalances=tuple(self._taken),
            num_kept=self.scheme.num_kept,
            plan_ms=np.array(self._plan_ms),
            first_load=by_rank(first.serve(last), topology),
            last_load=by_rank(served, topology),
            first_placement=self.first_placement,
            last_placement=self.scheme.serving,
            tokens=routed[: len(self._imbalance)],
            step_us=np.array(self._step_us),
            parts_us=np.array(self._parts_us).reshape(-1, 4),
            batch_us=np.array(self._batch_us).reshape(len(self._batch_us), len(scenario.batches)),
            bound_us=np.array(self._bound_us).reshape(len(self._bound_us), len(scenario.batches)),
            failed=self.failed,
            objective=", ".join(sorted(self.scheme.objectives)),
        )


def replay_all(scenario: Scenario, policies: Sequence[str]) -> list[Replay]:
    """Replay every policy on the same windows, in one pass.

    Raises:
        ConfigError: no policy, one named twice, or an unknown one.
        HistoryError: fewer than two windows, or windows of different shapes.
    """
    names = tuple(policies)
    check_names(names)
    routed_per_step = None
    if (step := scenario.step_model) is not None:
        scenario = replace(scenario, cost=step.in_prices(scenario.cost))
        if scenario.tokens_per_step is not None:
            routed_per_step = scenario.tokens_per_step * step.model.top_k
    past = LatestWindows(scenario.past_windows, scenario.windows, routed_per_step)
    runners: list[Runner] = []
    routed: list[float] = []
    before: Tokens | None = None
    for window, tokens in enumerate(scenario.windows):
        if before is None:
            runners = [Runner(scenario, name, tokens) for name in names]
        else:
            # Planned only now, because a plan after the last window would serve none.
            for runner in runners:
                runner.plan(window - 1, before, past)
                runner.serve(window, tokens)
            routed.append(float(tokens.sum()) / len(tokens))
        past.add(tokens)
        before = tokens
    if before is None or not routed:
        raise too_few(0 if before is None else 1)
    return [runner.result(before, np.array(routed)) for runner in runners]


def replay(scenario: Scenario, policy: str) -> Replay:
    """Replay one policy.

    Raises:
        EplbError: as ``replay_all``; and what the policy itself raises.
    """
    (found,) = replay_all(scenario, [policy])
    if found.failed:
        raise ConfigError(f"policy {policy!r}: {found.failed}")
    return found


def chosen_of(replays: Sequence[Replay]) -> Replay:
    """The last policy that is no oracle and did not end early, whose placement is to be deployed.

    Raises:
        ConfigError: there is none.
    """
    for one in reversed(replays):
        if not one.is_oracle and not one.failed:
            return one
    raise ConfigError("no policy but oracles came to the end, expected one")


def noise_floor(scenario: Scenario, tokens_per_window: float) -> float:
    """Imbalance that chance alone makes of a window under a perfect placement.

    Args:
        tokens_per_window: routed tokens of a layer, mean over layers and windows.
    """
    return 1.0 + sampling_noise(tokens_per_window, int(scenario.topology.serving.sum()))
