"""The input of a policy, checked once.

Shapes:  T windows, L MoE layers, E experts, S slots, R ranks, N nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from eplb.core.arrays import whole
from eplb.core.constraints import Constraints, room_of
from eplb.core.load import LoadHistory, Phase
from eplb.core.model import ModelShape
from eplb.core.placement import Placement
from eplb.core.scenarios import Scenarios
from eplb.core.topology import Topology
from eplb.decision.gate import CostModel
from eplb.decision.gate import Objective as Objective
from eplb.decision.promises import Record
from eplb.declared import Setting
from eplb.dispatch_rules.rules import DispatchRule, check_topology
from eplb.errors import ConfigError, HistoryError, PlacementError
from eplb.packing.zones import keeps_groups

AskedObjective = Literal["tokens", "time", "auto"]  # auto: by the batch, see objective_for


@dataclass(frozen=True)
class Budget:
    """Limits on moves and search time, and the imbalance that is good enough.

    ``time_ms`` is converted to a number of search steps at their cost on an idle core, and no
    clock is read: the same call gives the same plan on a busy machine too.

    Raises:
        ConfigError: a figure that no plan can meet.
    """

    max_moves: Annotated[
        int | None,
        Setting(
            "most experts that one plan moves, over all layers; 0: no limit",
            unit="experts",
            live=True,
        ),
    ] = None
    max_bytes: int | None = None  # the same in bytes; needs a model, which knows expert_bytes
    target_imbalance: Annotated[
        float,
        Setting(
            "max/mean rank load of a layer at or below which the layer is not changed",
            at_least=1,
            live=True,
        ),
    ] = 1.02
    time_ms: float | None = None  # of search; None: while it gains, 200 at most; inf: no limit
    num_threads: int = 1  # of the search; the plan does not depend on it

    def __post_init__(self) -> None:
        for name in ("max_moves", "max_bytes", "time_ms"):
            limit = getattr(self, name)
            if limit is not None and name != "time_ms":
                whole(f"budget: {name}", limit)
            if limit is not None and not limit >= 0:
                raise ConfigError(f"budget: {name} is {limit}, expected 0 or more")
        if self.num_threads < 1:
            raise ConfigError(f"budget: num_threads is {self.num_threads}, expected 1 or more")
        if not self.target_imbalance >= 1.0:
            raise ConfigError(
                f"budget: target_imbalance is {self.target_imbalance}, expected 1.0 or more"
            )


@dataclass(frozen=True, eq=False)
class Problem:
    """A planning problem: load, topology, serving placement, limits, costs and constraints.

    Raises:
        ConfigError: model, history, topology, constraints and current placement do not describe
            one system, or contradict each other.
        PlacementError: fewer slots that may be used than experts need.
        HistoryError: no window that all ranks reported.
    """

    history: LoadHistory
    topology: Topology
    model: ModelShape | None = None
    current: Placement | None = None
    budget: Budget = field(default_factory=Budget)
    cost: CostModel = field(default_factory=CostModel)
    seed: int = 0  # for policies that draw; the same seed gives the same plan
    objective: Objective = "tokens"
    constraints: Constraints = field(default_factory=Constraints)
    scenarios: Scenarios | None = None
    dispatch: DispatchRule = DispatchRule.WEIGHTED
    unseen: int | None = None  # latest windows that ``current`` was not planned on; None: all
    record: Record = field(default_factory=Record)  # of earlier plans
    part: float = 1.0  # of the layers of a whole; see ``of_layers``

    def __post_init__(self) -> None:
        if self.objective not in get_args(Objective):
            raise ConfigError(
                f"unknown objective {self.objective!r}, expected one of: "
                f"{', '.join(get_args(Objective))}"
            )
        if all(self.history.missing_ranks):
            raise HistoryError(
                f"each of the {self.history.num_windows} windows misses ranks "
                f"{sorted(self.history.missing_ranks[-1])} or others, expected a complete one"
            )
        if self.budget.max_bytes is not None and self.model is None:
            raise ConfigError("budget: max_bytes is set without a model, expected max_moves")
        check_topology(self.topology, self.dispatch)
        if self.unseen is not None and not self.unseen >= 0:
            raise ConfigError(f"unseen is {self.unseen} windows, expected 0 or more")
        self._check_shapes()
        self._check_room()
        if self.constraints.keep_groups and not self.groups_stay:
            raise ConfigError(
                f"constraints: keep_groups asks for {self.num_groups} expert groups on "
                f"{self.topology.num_nodes} nodes, expected a model with several groups that "
                "divide by nodes, and room on every node for its part"
            )

    def _check_shapes(self) -> None:
        expected = (self.history.num_layers, self.num_experts)
        if self.model is not None:
            _same("the model", (self.model.num_layers, self.model.num_experts), expected)
        if self.scenarios is not None:
            _, *found = self.scenarios.windows.shape
            _same("the scenarios", (found[0], found[1]), expected)
        if self.current is not None:
            found = [self.current.num_layers, self.current.num_experts]
            _same("the current placement", (found[0], found[1]), expected)
            if self.current.num_slots != self.topology.num_slots:
                raise ConfigError(
                    f"the current placement has {self.current.num_slots} slots a layer, "
                    f"the topology has {self.topology.num_slots}"
                )

    def _check_room(self) -> None:
        usable = self.room.sum(axis=1)
        for layer in np.flatnonzero(usable < self.num_experts)[:1]:
            where = "" if self.constraints.slots is None else f" that layer {layer} may use"
            raise PlacementError(
                f"{usable[layer]} slots on live ranks{where} for {self.num_experts} experts, "
                "expected at least one slot for each expert"
            )

    def of_layers(self, layers: NDArray[np.intp]) -> Problem:
        """The problem of some layers: with their part of the budget, at the price of the whole."""
        history, model, scenarios = self.history, self.model, self.scenarios
        part = len(layers) / history.num_layers
        if model is not None:
            model = replace(model, layer_ids=tuple(model.layer_ids[layer] for layer in layers))
        if scenarios is not None:
            scenarios = Scenarios(scenarios.windows[:, layers], scenarios.weight)
        max_moves = None if self.max_moves is None else int(self.max_moves * part)
        return replace(
            self,
            history=replace(history, tokens=history.tokens[:, layers]),
            model=model,
            current=None if self.current is None else self.current.of_layers(layers),
            budget=replace(self.budget, max_moves=max_moves, max_bytes=None),
            constraints=self.constraints.of_layers(layers),
            scenarios=scenarios,
            part=self.part * part,
        )

    @property
    def num_experts(self) -> int:
        """E."""
        return self.history.num_experts

    @property
    def num_groups(self) -> int:
        """The model's expert groups; 1 without groups, without a model, or if they are not kept."""
        if self.model is None or self.constraints.keep_groups is False:
            return 1
        return self.model.num_expert_groups

    @cached_property
    def groups_stay(self) -> bool:
        """Whether each expert group stays on one node."""
        return keeps_groups(self.topology, self.num_groups, self.num_experts, self.room)

    @cached_property
    def room(self) -> NDArray[np.int64]:
        """[L, R] slots that each layer may use on each rank."""
        return room_of(self.constraints, self.topology, self.history.num_layers)

    @property
    def max_moves(self) -> int | None:
        """The tighter of the two move budgets, counted in weights; None when there is none."""
        limits = [] if self.budget.max_moves is None else [self.budget.max_moves]
        if self.budget.max_bytes is not None and self.model is not None:
            limits.append(self.budget.max_bytes // self.model.expert_bytes)
        return min(limits, default=None)

    @cached_property
    def price(self) -> NDArray[np.float64]:
        """[L] imbalance that each move in a layer must remove to pay back in time.

        Ranks receive in parallel, so a move costs 1 / R of one rank's time. The mean over layers
        gains 1 / L of what one layer gains, weighted by the layer's part of the step. A gain on
        past windows counts by the part of earlier promises that was kept.
        """
        expert_bytes = 0 if self.model is None else self.model.expert_bytes
        seconds = self.cost.move_seconds(expert_bytes) / int(self.topology.alive.sum())
        num_layers = self.history.num_layers / self.part
        worth = self.cost.gain_worth(seconds) * num_layers / self.record.kept
        price = np.full(self.history.num_layers, np.inf)
        np.divide(worth, self.layer_weight, out=price, where=self.layer_weight > 0)
        return price

    @property
    def num_unseen(self) -> int:
        """Complete windows that the current placement was not planned on."""
        latest = self.complete if self.unseen is None else self.complete[-self.unseen :]
        return 0 if self.unseen == 0 else int(latest.sum())

    @cached_property
    def layer_weight(self) -> NDArray[np.float64]:
        """[L] a layer's part of the experts' time at perfect balance, scaled to a mean of 1."""
        time = self.work.sum(axis=(0, 2))
        mean = time.mean()
        weight: NDArray[np.float64] = time / mean if mean > 0 else np.ones(len(time))
        return weight

    @cached_property
    def complete(self) -> NDArray[np.bool_]:
        """[T] windows that every rank reported; the others are not used."""
        return np.array([not missing for missing in self.history.missing_ranks])

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """[T] phase of each complete window."""
        return tuple(self.history.phases[place] for place in np.flatnonzero(self.complete))

    @cached_property
    def parts(self) -> tuple[NDArray[np.intp], ...]:
        """Places in ``work`` of the windows of each phase; one part where all have the same.

        Phases differ by what they serve, so windows are compared, to find noise, within a part.
        """
        return tuple(
            np.array([place for place, found in enumerate(self.phases) if found == phase])
            for phase in get_args(Phase)
            if phase in self.phases
        )

    def over_parts(
        self, figure: Callable[[NDArray[np.intp]], NDArray[np.float64]]
    ) -> NDArray[np.float64]:
        """Mean of a figure of each part, by their numbers of windows."""
        total = sum(len(part) for part in self.parts)
        mean: NDArray[np.float64] = sum(
            (figure(part) * (len(part) / total) for part in self.parts), np.zeros(())
        )
        return mean

    @cached_property
    def work(self) -> NDArray[np.float64]:
        """[T, L, E] tokens times each expert's cost per token; complete windows only."""
        tokens = self.history.tokens[self.complete].astype(np.float64)
        if self.model is not None:
            tokens *= self.model.expert_cost
        tokens.flags.writeable = False
        return tokens

    @cached_property
    def scaled(self) -> NDArray[np.float64]:
        """[L, T, E] work in units of the mean rank load, so that the busiest load is the imbalance.

        Windows have equal weight whatever their tokens; an idle window is zero.
        """
        return scale(self.work.transpose(1, 0, 2), self.topology)


def scale(work: NDArray[np.float64], topology: Topology) -> NDArray[np.float64]:
    """[..., E] work divided by the load of a rank of speed 1 at perfect balance."""
    fair = work.sum(axis=-1, keepdims=True) / topology.rank_speed[topology.serving].sum()
    scaled: NDArray[np.float64] = np.zeros(work.shape)
    np.divide(work, fair, out=scaled, where=fair > 0)
    return scaled


def _same(what: str, found: tuple[int, int], expected: tuple[int, int]) -> None:
    if found != expected:
        raise ConfigError(
            f"{what} has {found[0]} layers x {found[1]} experts, "
            f"the history has {expected[0]} x {expected[1]}"
        )
