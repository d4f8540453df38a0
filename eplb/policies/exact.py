"""The exact policy: optimal placements with proof, for small or offline problems.

Replica counts and positions are solved together by OR-tools' CP-SAT, layer by layer. The objective
is the mean over windows of the busiest rank's load with equal split. Where the effort is not
sufficient for a proof, the layer keeps the best placement found, with its gap to the bound.

Shapes:  L MoE layers, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from eplb.core.arrays import freeze, owned
from eplb.core.kernels import IntArray
from eplb.core.placement import EMPTY, Placement
from eplb.core.problem import Problem
from eplb.errors import ConfigError
from eplb.measure.balance import imbalance
from eplb.policies import exact_model
from eplb.policies.exact_model import UNITS, Layer, layer_of
from eplb.policies.greedy import in_place, refined
from eplb.policies.relabel import with_most_kept

EFFORT = 10.0  # for each layer, in CP-SAT's deterministic seconds: of the order of a real one


@dataclass(frozen=True, eq=False)
class ExactResult:
    """A placement, and its proven distance from the optimum."""

    placement: Placement
    objective: NDArray[np.float64]  # [L] mean imbalance over the windows, with equal split
    bound: NDArray[np.float64]  # [L] no placement with equal split does better
    is_proved: NDArray[np.bool_]  # [L] the placement is optimal

    def __post_init__(self) -> None:
        freeze(self, objective=owned(self.objective, np.float64))
        freeze(self, bound=owned(self.bound, np.float64), is_proved=owned(self.is_proved, np.bool_))

    @property
    def gap(self) -> NDArray[np.float64]:
        """[L] relative distance of the objective above the bound; 0 where it is optimal."""
        distance: NDArray[np.float64] = np.where(
            self.is_proved, 0.0, self.objective / self.bound - 1.0
        )
        return distance


def exact(problem: Problem) -> Placement:
    """The placement of ``solve_exact`` with the default effort, as a policy."""
    return solve_exact(problem).placement


def solve_exact(problem: Problem, *, effort: float = EFFORT) -> ExactResult:
    """Find the best placement, and prove it.

    Moves are not counted: ``current`` only decides between equal ranks of equally good placements.
    Expert groups stay on nodes as in the other policies.

    Args:
        problem: small; see ``eplb.policies.exact_model.MOST_CHOICES``.
        effort: for each layer, in CP-SAT's deterministic seconds, which give the same placement on
            every machine.

    Raises:
        ConfigError: a layer with too many choices, or no effort.
    """
    if not effort > 0:
        raise ConfigError(f"effort is {effort}, expected more than 0")
    start = refined(replace(problem, current=None))
    found, bound, is_proved = start.copy(), np.ones(len(start)), np.ones(len(start), dtype=np.bool_)
    for number in range(len(start)):
        layer = layer_of(problem, number, start[number])
        if len(layer.work):
            solved, bound[number], is_proved[number] = _solve(layer, effort, problem.seed)
            found[number] = solved if solved is not None else start[number]
    worse = _imbalance(problem, found) > _imbalance(problem, start)
    found[worse] = start[worse]
    placement = _nearest_to_current(problem, found)
    objective = _imbalance(problem, placement.slot_to_expert)
    return ExactResult(placement, objective, np.minimum(bound, objective), is_proved)


def _imbalance(problem: Problem, held: IntArray | NDArray[np.int32]) -> NDArray[np.float64]:
    """[L] mean over the windows that are not idle in a layer."""
    placement = Placement(held.astype(np.int32), problem.num_experts)
    ratio = imbalance(problem.work, placement, problem.topology)
    is_busy = problem.work.sum(axis=2) > 0
    mean: NDArray[np.float64] = np.ones(placement.num_layers)
    busy = is_busy.sum(axis=0)
    np.divide((ratio * is_busy).sum(axis=0), busy, out=mean, where=busy > 0)
    return mean


def _solve(layer: Layer, effort: float, seed: int) -> tuple[IntArray | None, float, bool]:
    """[S] the best placement found, the proven bound, and whether they agree."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    on = {choice: model.new_bool_var("") for choice in layer.choices}
    exact_model.place_every_expert(model, on, layer)
    speed = layer.topology.rank_speed[layer.ranks]
    everything_on_one = int(UNITS * speed.sum() / speed.min()) + 1
    busiest = [model.new_int_var(0, everything_on_one, "") for _ in layer.work]
    exact_model.weigh(model, on, busiest, layer)
    exact_model.break_symmetry(model, on, layer)
    exact_model.hint(model, on, layer)
    model.minimize(sum(busiest))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1  # more would race, and the result with them
    solver.parameters.random_seed = seed
    solver.parameters.max_deterministic_time = effort
    status = solver.solve(model)
    assert status != cp_model.MODEL_INVALID, model.validate()
    assert status != cp_model.INFEASIBLE, "the start is a placement, so there is one"
    bound = max(1.0, solver.best_objective_bound / UNITS / len(layer.work))
    if status == cp_model.UNKNOWN:
        return None, bound, False
    held = np.full(layer.topology.num_slots, EMPTY, dtype=np.int64)
    used = dict.fromkeys(layer.ranks, 0)
    for (expert, _, rank), variable in on.items():
        if solver.value(variable):
            held[layer.topology.first_slot[rank] + used[rank]] = expert
            used[rank] += 1
    return held, bound, status == cp_model.OPTIMAL


def _nearest_to_current(problem: Problem, held: IntArray) -> Placement:
    """Exchange the contents of equal ranks so that as few experts as possible move."""
    if problem.current is None:
        return Placement(held.astype(np.int32), problem.num_experts)
    base = problem.current.slot_to_expert
    nearest = with_most_kept(problem, held, base)
    return Placement(
        in_place(nearest, base, problem.topology).astype(np.int32), problem.num_experts
    )
