"""A planning problem: checked once, and prepared once for every step of the planner.

What the steps read (load, zones, constraints, prices) is computed at its first use and kept.

Shapes:  T windows, K scenarios, L MoE layers, E experts, S slots, R ranks, N nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isfinite
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from eplb.core.arrays import of_type, whole
from eplb.core.constraints import ConstraintArrays, Constraints, constraint_arrays, room_of
from eplb.core.cost import CostModel, Objective
from eplb.core.demand import Demand, Scenarios, demand_of
from eplb.core.dispatch import DispatchRule, check_topology
from eplb.core.jit import BoolArray, FloatArray, IntArray
from eplb.core.load import LoadHistory, Phase, blocks, sampling_noises
from eplb.core.model import ModelShape, slot_shortage
from eplb.core.placement import Placement, check_sources
from eplb.core.topology import Topology
from eplb.core.zones import Zones, keeps_groups, with_groups_kept, zones_for
from eplb.declared import Setting
from eplb.errors import ConfigError, HistoryError, PlacementError

PRIOR = 0.5  # part of a promise that is realised, without a record
PRIOR_GAIN = 0.1  # weight of the prior, as promised imbalance
FORGOTTEN = 0.9  # factor on the record for each further plan
LEAST, MOST = 0.1, 1.0
SETTLED_WINDOWS = 4  # without a sudden change, after which the whole pay-back time counts


@dataclass(frozen=True)
class Record:
    """Gains in imbalance, or time, of earlier plans, summed with decreasing weight.

    Raises:
        ConfigError: a sum that is not finite, or a promise below 0.
    """

    promised: float = 0.0
    given: float = 0.0

    def __post_init__(self) -> None:
        if not (isfinite(self.given) and isfinite(self.promised) and self.promised >= 0):
            raise ConfigError(
                f"record: promised {self.promised} and given {self.given}, expected finite sums, "
                "promised 0 or more"
            )

    @property
    def kept(self) -> float:
        """Part of a promise that is realised, 0.1 to 1."""
        part = (PRIOR * PRIOR_GAIN + self.given) / (PRIOR_GAIN + self.promised)
        return min(max(part, LEAST), MOST)

    def with_plan(self, promised: float, given: float) -> Record:
        """The record with one more judged plan."""
        return Record(FORGOTTEN * self.promised + promised, FORGOTTEN * self.given + given)


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
            "most experts that one plan moves, over all layers; 0 (None in Python): no limit",
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
    time_ms: float | None = None  # search time; None: while it gains, 200 at most; inf: no limit
    num_threads: int = 1  # threads of the search; the plan does not depend on it

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


class Frame(NamedTuple):
    """Where the experts of each layer may go, as the kernels read it."""

    zones: Zones
    constraints: ConstraintArrays


_TYPES: dict[str, tuple[type[Any], ...]] = {
    "topology": (Topology,),
    "model": (ModelShape, NoneType),
    "current": (Placement, NoneType),
    "budget": (Budget,),
    "cost": (CostModel,),
    "constraints": (Constraints,),
    "scenarios": (Scenarios, NoneType),
    "dispatch": (DispatchRule,),
    "record": (Record,),
}
MOST_SEED = 2**63 - 1


@dataclass(frozen=True, eq=False)
class Problem:
    """A planning problem: load, topology, serving placement, limits, costs and constraints.

    Raises:
        ConfigError: model, history, topology, constraints and current placement do not describe
            one system, or contradict each other.
        PlacementError: fewer slots that may be used than experts need, or a current placement
            with shares for other source nodes.
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
    record: Record = field(default_factory=Record)  # gains of earlier plans
    part: float = 1.0  # its part of a larger problem's layers; see ``of_layers``
    on_sum: bool = False  # searched on the sum of the windows, as their differences do not last

    def __post_init__(self) -> None:
        for name, kinds in _TYPES.items():
            of_type(name, getattr(self, name), *kinds)
        if not 0 <= whole("seed", self.seed) <= MOST_SEED:
            raise ConfigError(f"seed is {self.seed}, expected 0..{MOST_SEED}")
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
            check_sources(self.current, self.topology)

    def _check_room(self) -> None:
        usable = self.room.sum(axis=1)
        for layer in np.flatnonzero(usable < self.num_experts)[:1]:
            where = "" if self.constraints.slots is None else f"layer {layer}: "
            able = np.flatnonzero(self.room[layer]).tolist()
            raise PlacementError(where + slot_shortage(able, int(usable[layer]), self.num_experts))

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
    def layer_ids(self) -> tuple[int, ...]:
        """[L] numbers of the layers in the model; without a model 0, 1, 2, ..."""
        return self.model.layer_ids if self.model else tuple(range(self.history.num_layers))

    @property
    def num_groups(self) -> int:
        """The model's expert groups; 1 without groups, without a model, or if they are not kept.

        In decode each copy of a token crosses the network alone, so kept groups save nothing.
        """
        keep = self.constraints.keep_groups
        if self.model is None or keep is False or (keep is None and self.history.phase == "decode"):
            return 1
        return self.model.num_expert_groups

    @property
    def expert_bytes(self) -> int:
        """Size of one expert's weights; 0 when no model was given."""
        return 0 if self.model is None else self.model.expert_bytes

    @property
    def max_moves(self) -> int | None:
        """The tighter of the two move budgets, counted in weights; None when there is none."""
        limits = [] if self.budget.max_moves is None else [self.budget.max_moves]
        if self.budget.max_bytes is not None and self.model is not None:
            limits.append(self.budget.max_bytes // self.model.expert_bytes)
        return min(limits, default=None)

    @property
    def num_unseen(self) -> int:
        """Complete windows that the current placement was not planned on."""
        latest = self.complete if self.unseen is None else self.complete[-self.unseen :]
        return 0 if self.unseen == 0 else int(latest.sum())

    # ---- load

    @cached_property
    def complete(self) -> BoolArray:
        """[T] windows that every rank reported; the others are not used."""
        return np.array([not missing for missing in self.history.missing_ranks])

    @cached_property
    def tokens(self) -> NDArray[np.int64]:
        """[T, L, E] tokens of the complete windows."""
        return self.history.tokens[self.complete]

    @cached_property
    def routed(self) -> NDArray[np.int64]:
        """[T, L] tokens of all experts together, in the complete windows."""
        return np.asarray(self.tokens.sum(axis=2))

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

    @cached_property
    def window_weight(self) -> FloatArray:
        """[T] weight of each window, 1 together: by tokens within a phase.

        Phases differ in time per token, so each weighs by its number of windows.
        """
        return self._weight_by(self.work.sum(axis=(1, 2)))

    def _weight_by(self, spent: FloatArray) -> FloatArray:
        """[T] weights by the time that each window took, within its phase."""
        weight = np.zeros(len(spent))
        for part in self.parts:
            if together := float(spent[part].sum()):
                weight[part] = spent[part] * (len(part) / together)
        if not weight.any():
            weight[:] = 1.0
        weight /= weight.sum()
        return weight

    def mean_over_windows(self, figure: FloatArray) -> FloatArray:
        """[...] mean of a figure [T, ...] of the windows, by their weights."""
        return weighted_mean(figure, self.window_weight)

    def mean_of_part(self, figure: FloatArray, part: NDArray[np.intp]) -> FloatArray:
        """[...] mean of a figure [T, ...] over some windows, by their weights."""
        weight = self.window_weight[part]
        return weighted_mean(figure[part], weight / max(float(weight.sum()), 1e-300))

    def blocks_of(self, part: NDArray[np.intp]) -> NDArray[np.intp]:
        """[B] place in ``part`` of the first window of each block; see ``eplb.core.load``."""
        return blocks(self.routed[part].sum(axis=1))

    @property
    def num_blocks(self) -> int:
        """How many windows the complete ones are worth: those with few tokens count together."""
        return sum(len(self.blocks_of(part)) for part in self.parts)

    def over_parts(self, figure: Callable[[NDArray[np.intp]], FloatArray]) -> FloatArray:
        """Mean of a figure of each part, by their numbers of windows."""
        total = sum(len(part) for part in self.parts)
        mean: FloatArray = sum(
            (figure(part) * (len(part) / total) for part in self.parts), np.zeros(())
        )
        return mean

    @cached_property
    def noise(self) -> FloatArray:
        """[L] imbalance above 1 that chance makes in the sum of all windows, mean over phases."""
        num_ranks = int(self.topology.serving.sum())
        return self.over_parts(
            lambda part: sampling_noises(self.routed[part].sum(axis=0), num_ranks)
        )

    def noise_of_windows(self, part: NDArray[np.intp], num_ranks: int) -> FloatArray:
        """[L] imbalance above 1 that chance makes in a window of a phase, mean by weight."""
        return self.mean_of_part(sampling_noises(self.routed, num_ranks), part)

    @cached_property
    def work(self) -> FloatArray:
        """[T, L, E] tokens times each expert's cost per token; complete windows only."""
        work = self._times_cost(self.tokens.astype(np.float64))
        work.flags.writeable = False
        return work

    @cached_property
    def scaled(self) -> FloatArray:
        """[L, T, E] work in units of the mean rank load, so that the busiest load is the imbalance.

        An idle window is zero.
        """
        return scale(self.work.transpose(1, 0, 2), self.topology)

    @property
    def mean_scaled(self) -> FloatArray:
        """[L, E] ``scaled``, mean over windows."""
        return np.ascontiguousarray(self.mean_over_windows(self.scaled.transpose(1, 0, 2)))

    @property
    def weighed(self) -> FloatArray:
        """[L, T, E] ``scaled`` times the weight of each window, as a multiple of the mean weight.

        The plain mean over windows of a figure in proportion to load is the weighted mean then.
        """
        return np.ascontiguousarray(self.scaled * (len(self.work) * self.window_weight[:, None]))

    @cached_property
    def heat(self) -> FloatArray:
        """[L, E] part of a layer's tokens, mean over windows; zeros in an idle layer."""
        total = self.routed[..., None]
        part = np.divide(self.tokens, total, out=np.zeros(self.tokens.shape), where=total > 0)
        busy = self.mean_over_windows((self.routed > 0).astype(np.float64))
        return self.mean_over_windows(part) / np.maximum(busy, 1e-300)[:, None]

    @cached_property
    def scenario_work(self) -> FloatArray:
        """[K, L, E] work of the scenarios."""
        windows = np.zeros((0, *self.work.shape[1:]))
        return self._times_cost(windows if self.scenarios is None else self.scenarios.windows)

    @cached_property
    def likely(self) -> FloatArray:
        """[T + K, L, E] work of the windows and the scenarios."""
        return np.concatenate([self.work, self.scenario_work]) if self.scenarios else self.work

    @cached_property
    def weight(self) -> FloatArray:
        """[T + K] weight of each window and scenario, by the objective; 1 together."""
        is_timed = self.objective == "time"
        weight = self.timed_demand.weight if is_timed else self.window_weight
        if self.scenarios is None:
            return weight
        likely = self.scenarios.weight
        return np.concatenate([weight * (1 - likely.sum()), likely])

    @cached_property
    def total(self) -> FloatArray:
        """[L, E] work of the windows and the scenarios together, each scenario by its weight."""
        total: FloatArray = self.work.sum(axis=0)
        if self.scenarios is None:
            return total
        weight = self.scenarios.weight / (1 - self.scenarios.weight.sum())
        # The size of a scenario is unrelated to its probability: all are scaled to the past's.
        size = total.sum(axis=1) / np.maximum(self.scenario_work.sum(axis=2), 1e-300)  # [K, L]
        extra = self.scenario_work * (weight[:, None] * size)[:, :, None]
        return np.asarray(total + extra.sum(axis=0))

    @cached_property
    def demand(self) -> Demand:
        """The load to balance by the objective: windows and scenarios.

        Windows keep their noise: the next one has as much, and replicas reduce what it costs.
        """
        if self.on_sum:
            return self.total_demand
        steps, num_likely = self._steps, len(self.scenario_work)
        if num_likely:
            steps = np.concatenate([steps, np.full(num_likely, steps.mean())])
        timed = self.cost.timed if self.objective == "time" else None
        return demand_of(self.likely, steps, self.weight, self.topology, timed, self.model)

    @cached_property
    def timed_demand(self) -> Demand:
        """The windows as recorded, by the curve whatever the objective: times are judged on it.

        Each weighs by its time at perfect balance, over its steps and layers.
        """
        steps, timed = self._steps, self.cost.timed
        weight = np.full(len(self.work), 1.0 / len(self.work))
        demand = demand_of(self.work, steps, weight, self.topology, timed, self.model)
        time = np.divide(1.0, demand.rate, out=np.zeros(demand.rate.shape), where=demand.rate > 0)
        return demand._replace(weight=self._weight_by(steps * time.sum(axis=0)))

    @cached_property
    def total_demand(self) -> Demand:
        """All windows and scenarios as one window, by tokens whatever the objective."""
        return demand_of(self.total[None], np.ones(1), np.ones(1), self.topology)

    @property
    def _steps(self) -> FloatArray:
        """[T] steps of each complete window."""
        return self.history.steps_per_window[self.complete].astype(np.float64)

    def _times_cost(self, windows: FloatArray) -> FloatArray:
        return windows if self.model is None else windows * self.model.expert_cost

    # ---- ranks and constraints

    @cached_property
    def room(self) -> IntArray:
        """[L, R] slots that each layer may use on each rank."""
        return room_of(self.constraints, self.topology, self.history.num_layers)

    @cached_property
    def groups_stay(self) -> bool:
        """Whether each expert group stays on one node."""
        return keeps_groups(self.topology, self.num_groups, self.num_experts, self.room)

    @cached_property
    def frame(self) -> Frame:
        """Where experts may go: zones by the load.

        A cordoned rank keeps its experts, so with pins each group stays on the node that it is on.
        """
        if self.current is not None and (self.constraints.pinned or not self.groups_stay):
            return self.serving_frame
        return self._framed(self._zones)

    @cached_property
    def serving_frame(self) -> Frame:
        """Where experts may go if each group stays on its node in the current placement."""
        return self._framed(self._serving_zones[0])

    @property
    def ungrouped(self) -> BoolArray:
        """[L] layers of the current placement with an expert group that is not on one node."""
        return self._serving_zones[1]

    @cached_property
    def _zones(self) -> Zones:
        return zones_for(self.total, self.topology, self.num_groups, self.room)

    @cached_property
    def _serving_zones(self) -> tuple[Zones, BoolArray]:
        assert self.current is not None, "groups are where a placement has them"
        held = self.current.slot_to_expert
        if not self.groups_stay:
            return self._zones, np.zeros(len(held), dtype=np.bool_)
        return with_groups_kept(self._zones, held, self.topology, self.num_groups)

    def _framed(self, zones: Zones) -> Frame:
        arrays = constraint_arrays(self.constraints, self.topology, self.total, zones)
        return Frame(zones, arrays)

    # ---- prices

    @cached_property
    def priced(self) -> CostModel:
        """The cost model with the time that this load is expected to last as pay-back time.

        A load that has lasted for n windows is expected to last as long again: the history begins
        at the latest sudden change, and the operator's time is the bound. Windows with few tokens
        do not show what lasts.
        """
        shown = self.history.num_windows - len(self.work) + self.num_blocks
        part = min(shown / SETTLED_WINDOWS, 1.0)
        return replace(self.cost, pay_back_s=self.cost.pay_back_s * part)

    @cached_property
    def price(self) -> FloatArray:
        """[L] imbalance that each move in a layer must remove to pay back in time.

        The mean over layers gains 1 / L of what one layer gains, weighted by the layer's part of
        the step.
        """
        price = np.full(self.history.num_layers, np.inf)
        np.divide(self.move_price, self.layer_weight, out=price, where=self.layer_weight > 0)
        return price

    @cached_property
    def move_price(self) -> float:
        """``price`` of a layer with the mean part of the step.

        Ranks receive in parallel, so a move costs 1 / R of one rank's time. A gain on past windows
        counts by the part of earlier promises that was kept.
        """
        seconds = self.cost.move_seconds(self.expert_bytes) / int(self.topology.alive.sum())
        num_layers = self.history.num_layers / self.part
        return self.priced.gain_worth(seconds) * num_layers / self.record.kept

    @cached_property
    def layer_weight(self) -> FloatArray:
        """[L] a layer's part of the experts' time at perfect balance, scaled to a mean of 1."""
        time = self.work.sum(axis=(0, 2))
        mean = time.mean()
        weight: FloatArray = time / mean if mean > 0 else np.ones(len(time))
        return weight

    @cached_property
    def tokens_of_node(self) -> FloatArray:
        """[N] part of the tokens that starts on each node; 1 together.

        Raises:
            ConfigError: the cost model names another number of nodes, or no tokens at all.
        """
        topology, given = self.topology, self.cost.tokens_of_node
        if given and (len(given) != topology.num_nodes or not sum(given) > 0):
            raise ConfigError(
                f"cost: tokens_of_node is {given}, expected a part for each of "
                f"{topology.num_nodes} nodes, and one above 0"
            )
        parts = np.array(given or self._live_ranks_of_node, dtype=np.float64)
        return np.asarray(parts / parts.sum())

    @cached_property
    def tokens_of_rank(self) -> FloatArray:
        """[R] part of the tokens that starts on each rank: that of its node, divided equally."""
        each = self.tokens_of_node / np.maximum(self._live_ranks_of_node, 1)
        return np.where(self.topology.alive, each[self.topology.node_of_rank], 0.0)

    @property
    def _live_ranks_of_node(self) -> FloatArray:
        topology = self.topology
        live = np.bincount(topology.node_of_rank, topology.alive, topology.num_nodes)
        return np.asarray(live, dtype=np.float64)


def scale(work: FloatArray, topology: Topology) -> FloatArray:
    """[..., E] work divided by the load of a rank of speed 1 at perfect balance."""
    fair = work.sum(axis=-1, keepdims=True) / topology.rank_speed[topology.serving].sum()
    scaled: FloatArray = np.zeros(work.shape)
    np.divide(work, fair, out=scaled, where=fair > 0)
    return scaled


def weighted_mean(figure: FloatArray, weight: FloatArray) -> FloatArray:
    """[...] mean of a figure [T, ...] of windows by weights [T], 1 together."""
    by_window = weight.reshape(-1, *[1] * (figure.ndim - 1))
    return np.asarray((figure * by_window).sum(axis=0))


def _same(what: str, found: tuple[int, int], expected: tuple[int, int]) -> None:
    if found != expected:
        raise ConfigError(
            f"{what} has {found[0]} layers x {found[1]} experts, "
            f"the history has {expected[0]} x {expected[1]}"
        )
