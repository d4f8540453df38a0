"""New shares for the replicas that are there: tokens move between ranks, and no weight does.

Every expert's tokens are dealt out over its live replicas so that the busiest rank has as little
to do as the placement allows, on average over the windows and in the worst of them. Shares fitted
to the past fit its noise too, so they are drawn back towards an equal split as far as the windows
cannot vouch for them.

    loads -> best shares on these windows -> how far they are warranted -> shares

Shapes:  T windows, L MoE layers, E experts, S slots, R ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eplb.balance import rank_load
from eplb.errors import ConfigError, HistoryError, PlacementError
from eplb.hierarchical import zones_for
from eplb.kernels import Ranks
from eplb.load import LoadHistory, as_history
from eplb.noise import FEWEST_WINDOWS, fluctuation, sampling_noise
from eplb.placement import EMPTY, Placement
from eplb.problem import Problem, scale
from eplb.split import split_layers
from eplb.topology import Topology

# Shares fitted to so many windows are trusted half, at most. Measured on recorded routing: shares
# fitted to 2 to 8 windows and trusted whole made the next window worse by up to 0.04.
HALF_TRUSTED = 16


def resplit(
    history: LoadHistory | ArrayLike,
    placement: Placement,
    topology: Topology,
    *,
    scenarios: ArrayLike | None = None,
    trust: float | None = None,
) -> Placement:
    """Give every live replica the share that makes the ranks most even; no weight moves.

    Args:
        history: LoadHistory, or tokens [L, E] or [T, L, E]. Windows that some rank did not report
            are left out. A single window is a load to meet, but for its sampling noise.
        placement: where the experts are. Replicas on dead ranks get nothing.
        topology: slots, speeds, and which ranks are alive.
        scenarios: [L, E] or [C, L, E] loads that may come; each counts as a window.
        trust: 1.0 for the best shares on these windows, 0.0 for an equal split; by default what
            the number of windows and their noise warrant, layer by layer.

    Returns:
        The same experts and generation with new shares, the same from every source node.

    Raises:
        PlacementError: an expert without a live replica, or a placement of another topology.
        ConfigError: loads of another shape, or a trust outside 0..1.
        HistoryError: load that cannot be planned on.
    """
    if trust is not None and not 0.0 <= trust <= 1.0:
        raise ConfigError(f"trust is {trust}, expected 0..1")
    problem = Problem(as_history(history), topology)
    equal = equal_shares(placement, topology)
    _check_shape("the placement", (placement.num_layers, placement.num_experts), problem)
    work = problem.scaled
    if scenarios is not None:
        work = np.concatenate([work, _scaled(scenarios, problem)], axis=1)
    held = placement.slot_to_expert
    fitted, objective = split_layers(
        np.ascontiguousarray(work), held.astype(np.int64), ranks_of(topology)
    )
    trusted = np.array(trust)
    if trust is None:
        noise = noise_of(problem, placement, equal)
        trusted = warranted(objective[:, 0] - objective[:, 1], noise, work.shape[1])
    share = equal + trusted[..., None] * (fitted - equal)
    # A sum of shares may end a rounding error above 1.
    return Placement(held, placement.num_experts, placement.generation, np.clip(share, 0.0, 1.0))


def equal_shares(placement: Placement, topology: Topology) -> NDArray[np.float64]:
    """[L, S] every expert's tokens split equally over its replicas on live ranks.

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
    count = np.zeros((placement.num_layers, placement.num_experts), dtype=np.int64)
    np.add.at(count, (layer, live[layer, slot]), 1)
    if not count.all():
        where, expert = np.argwhere(count == 0)[0]
        raise PlacementError(
            f"layer {where}: expert {expert} has no slot on a live rank, "
            "expected a replica to give its tokens to"
        )
    share = np.zeros(held.shape)
    share[layer, slot] = 1.0 / count[layer, live[layer, slot]]
    return share


def noise_of(
    problem: Problem, placement: Placement, equal: NDArray[np.float64]
) -> NDArray[np.float64]:
    """[L] imbalance above 1 that one window shows by chance, under an equal split [L, S]."""
    topology = problem.topology
    routed = problem.history.tokens.sum(axis=2).mean(axis=0)
    num_ranks = int(topology.alive.sum())
    by_chance = np.array([sampling_noise(float(tokens), num_ranks) for tokens in routed])
    if len(problem.work) < FEWEST_WINDOWS:
        return by_chance
    split = Placement(placement.slot_to_expert, placement.num_experts, 0, equal)
    load = rank_load(problem.scaled.transpose(1, 0, 2), split, topology)
    noise: NDArray[np.float64] = np.maximum(by_chance, fluctuation(load[..., topology.alive]))
    return noise


def warranted(
    gain: NDArray[np.float64], noise: NDArray[np.float64], num_windows: int
) -> NDArray[np.float64]:
    """[L] how much of the way from an equal split to the fitted shares is worth going.

    A gain that stands out of the noise of the windows' mean is real; one that does not was found
    in it. Maxima of a few windows promise more than they hold, whatever their noise, so their
    number limits trust too. One window is one load to meet, with no maxima to choose between.

    Args:
        gain: [L] by how much the fitted shares improve the objective on these windows.
        noise: [L] as ``noise_of`` gives it.
        num_windows: scenarios included.
    """
    noise_of_mean = noise / num_windows**0.5
    signal: NDArray[np.float64] = np.zeros(len(gain))
    np.divide(gain, gain + noise_of_mean, out=signal, where=gain > 0)
    most = 1.0 if num_windows == 1 else num_windows / (num_windows + HALF_TRUSTED)
    return np.minimum(signal, most)


def ranks_of(topology: Topology) -> Ranks:
    """All live ranks in one zone, as the kernels read a topology."""
    return zones_for(np.zeros((1, 1)), topology, 1).ranks


def _scaled(scenarios: ArrayLike, problem: Problem) -> NDArray[np.float64]:
    """[L, C, E] scenarios in units of a fair rank's load."""
    loads = np.asarray(scenarios, dtype=np.float64)
    loads = loads[None] if loads.ndim == 2 else loads
    if loads.ndim != 3:
        raise ConfigError(
            f"scenarios have shape {loads.shape}, expected [scenarios, layers, experts]"
        )
    _check_shape("a scenario", (loads.shape[1], loads.shape[2]), problem)
    if not (np.isfinite(loads) & (loads >= 0)).all():
        raise HistoryError("a scenario holds a negative or non-finite load, expected 0 or more")
    return scale(loads.transpose(1, 0, 2), problem.topology)


def _check_shape(what: str, found: tuple[int, int], problem: Problem) -> None:
    expected = (problem.history.num_layers, problem.num_experts)
    if found != expected:
        raise ConfigError(
            f"{what} has {found[0]} layers x {found[1]} experts, "
            f"the history has {expected[0]} x {expected[1]}"
        )
