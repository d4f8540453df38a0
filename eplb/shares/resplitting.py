"""Re-split: new shares for the replicas of a placement; no weight moves.

Every expert's tokens are divided over its live replicas so that the busiest rank has the least load
that the placement allows, on average over the windows and in the worst of them. Shares fitted to
the past fit its noise too, so they are shrunk towards shares by the speed of ranks, which is an
equal split where speeds are equal, as far as the windows do not support them.

    loads -> best shares on these windows -> part of the way that windows support -> shares

Shapes:  T windows, L MoE layers, E experts, S slots, R ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eplb.core.arrays import on_host
from eplb.core.demand import Scenarios, as_scenarios
from eplb.core.jit import FloatArray
from eplb.core.load import FEWEST_WINDOWS, LoadHistory, as_history, fluctuation
from eplb.core.placement import EMPTY, Placement
from eplb.core.problem import Problem, scale
from eplb.core.topology import Topology
from eplb.core.zones import ranks_of
from eplb.errors import ConfigError, PlacementError
from eplb.measure import rank_load
from eplb.shares.solver import floors, split_layers

# Number of windows at which fitted shares are applied half of the way. Measured on recorded
# routing: shares fitted to 2 to 8 windows and applied in full made the next window worse by up to
# 0.04.
HALF_TRUST_WINDOWS = 16


def resplit(
    history: LoadHistory | ArrayLike,
    placement: Placement,
    topology: Topology,
    *,
    scenarios: Scenarios | ArrayLike | None = None,
    trust: float | None = None,
) -> Placement:
    """Give every live replica the share that balances the ranks best; no weight moves.

    Args:
        history: LoadHistory, or tokens [L, E] or [T, L, E]. Windows that some rank did not report
            are not used. Shares are fitted fully to a single window, apart from its sampling noise.
        placement: experts by slot. Replicas on dead ranks get no share.
        topology: slots, speeds, and which ranks are alive.
        scenarios: possible future loads; in arrays [L, E] or [C, L, E] each weighs as one window.
        trust: 1.0 for the best shares on these windows, 0.0 for shares by speed; by default set by
            the number of windows and their noise, layer by layer.

    Returns:
        The same experts and generation with new shares, the same from every source node.

    Raises:
        PlacementError: an expert without a live replica, or a placement of another topology.
        ConfigError: loads of another shape, or a trust outside 0..1.
        HistoryError: load that cannot be planned on.
    """
    if trust is not None and not 0.0 <= trust <= 1.0:
        raise ConfigError(f"trust is {trust}, expected 0..1")
    windows = as_history(history)
    if scenarios is not None and not isinstance(scenarios, Scenarios):
        loads = np.asarray(on_host(scenarios), dtype=np.float64)
        scenarios = as_scenarios(loads[None] if loads.ndim == 2 else loads, windows.num_windows)
    problem = Problem(windows, topology, scenarios=scenarios)
    found = (placement.num_layers, placement.num_experts)
    expected = (problem.history.num_layers, problem.num_experts)
    if found != expected:
        raise ConfigError(
            f"the placement has {found[0]} layers x {found[1]} experts, "
            f"the history has {expected[0]} x {expected[1]}"
        )
    share = best_shares(problem, placement, np.arange(placement.num_layers), trust)
    return placement.with_shares(share)


def best_shares(
    problem: Problem,
    placement: Placement,
    layers: NDArray[np.intp],
    trust: float | None = None,
) -> FloatArray:
    """[L, S] shares as ``resplit`` gives them for some layers, and shares by speed for the others.

    Args:
        problem: windows and scenarios, and the ranks that are alive.
        placement: where the experts are; its own shares do not matter.
        layers: those that get new shares.
        trust: as in ``resplit``.

    Raises:
        PlacementError: as ``resplit``.
    """
    share = shares_by_speed(placement, problem.topology)
    if not len(layers):
        return share
    work = problem.scaled
    if problem.scenarios is not None:
        work = scale(problem.likely.transpose(1, 0, 2), problem.topology)
    windows, prior = np.ascontiguousarray(work[layers]), problem.weight
    held, start = placement.slot_to_expert[layers], share[layers]
    fitted, objective = split_layers(
        windows, prior, held.astype(np.int64), ranks_of(problem.topology)
    )
    trusted = np.array(trust)
    if trust is None:
        gain = objective[:, 0] - objective[:, 1]
        num_ranks = int(problem.topology.serving.sum())
        chance = problem.over_parts(lambda part: problem.noise_of_windows(part, num_ranks)[layers])
        noise = np.maximum(chance, _fluctuation(problem, placement, start, layers))
        num_windows = problem.num_blocks + len(problem.scenario_work)
        trusted = supported_part(gain, chance, noise, num_windows)
    # A sum of shares may exceed 1 by a rounding error.
    share[layers] = np.clip(start + trusted[..., None] * (fitted - start), 0.0, 1.0)
    return share


def share_floor(problem: Problem, placement: Placement, layers: NDArray[np.intp]) -> FloatArray:
    """[n] lower bound of the mean imbalance over the windows for any shares of these replicas."""
    topology, held = problem.topology, placement.slot_to_expert[layers].astype(np.int64)
    work, weight = np.ascontiguousarray(problem.scaled[layers]), problem.window_weight
    return floors(work, weight, held, ranks_of(topology))


def shares_by_speed(placement: Placement, topology: Topology) -> NDArray[np.float64]:
    """[L, S] every expert's tokens split over its live replicas by the speed of their ranks.

    Raises:
        PlacementError: an expert without a live replica, or a placement of another topology.
    """
    held = placement.slot_to_expert
    if placement.num_slots != topology.num_slots:
        raise PlacementError(
            f"the placement has {placement.num_slots} slots a layer, "
            f"the topology has {topology.num_slots}"
        )
    live = np.where(topology.alive[topology.rank_of_slot], held, EMPTY)
    layer, slot = np.nonzero(live != EMPTY)
    cells = placement.num_layers * placement.num_experts
    places = layer * placement.num_experts + live[layer, slot]
    speed = topology.rank_speed[topology.rank_of_slot[slot]]
    together = np.bincount(places, speed, cells)
    if not together.all():
        where, expert = np.argwhere(together.reshape(placement.num_layers, -1) == 0)[0]
        raise PlacementError(
            f"layer {where}: expert {expert} has no slot on a live rank, "
            "expected a replica to give its tokens to"
        )
    share = np.zeros(held.shape)
    share[layer, slot] = speed / together[places]
    return share


def supported_part(
    gain: FloatArray, chance: FloatArray, noise: FloatArray, num_windows: int
) -> FloatArray:
    """[L] the part of the way from shares by speed to the fitted ones that windows support, 0..1.

    A gain within the sampling noise of one window does not count. The rest counts as real as far as
    it exceeds the noise of the windows' mean. Shares fitted to the maxima of a few windows are
    too optimistic whatever the noise, so the number of windows limits the part too; a single
    window has no such limit.

    Measured on recorded routing with 16 windows: with the first rule new shares never made the
    mean of the next windows worse, without it by up to 0.0006 where requests are mixed
    (``benchmarks/reports/2026-11-20-planner.md``).

    Args:
        gain: [L] by how much the fitted shares improve the objective on these windows.
        chance: [L] imbalance above 1 of one window if tokens are independent samples.
        noise: [L] the same estimated from the windows' differences, at least ``chance``.
        num_windows: blocks of windows, and scenarios.
    """
    real = np.maximum(gain - chance, 0.0)
    noise_of_mean = noise / num_windows**0.5
    signal: FloatArray = np.zeros(len(gain))
    np.divide(real, gain + noise_of_mean, out=signal, where=real > 0)
    most = 1.0 if num_windows == 1 else num_windows / (num_windows + HALF_TRUST_WINDOWS)
    return np.minimum(signal, most)


def _fluctuation(
    problem: Problem, placement: Placement, start: FloatArray, layers: NDArray[np.intp]
) -> FloatArray:
    """[n] imbalance above 1 by fluctuation between windows, under shares [n, S]."""
    if len(problem.work) < FEWEST_WINDOWS:
        return np.zeros(len(layers))
    split = Placement(placement.slot_to_expert[layers], placement.num_experts, 0, start)
    load = rank_load(problem.scaled[layers].transpose(1, 0, 2), split, problem.topology)
    load, tokens = load[..., problem.topology.serving], problem.routed.sum(axis=1)
    return problem.over_parts(lambda part: fluctuation(load[part], tokens[part]))
