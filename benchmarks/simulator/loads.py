"""Layers of one skew for calibration: one domain, nothing that drifts, skew fitted by bisection."""

from __future__ import annotations

from eplb import Topology
from simulations.replay import Scenario, replay_all
from simulations.traffic import Traffic, traffic_windows

EXPERTS, TOP_K = 256, 8
PLANNED_ON, JUDGED = 16, 8  # batches


def traffic_of(shape: float, layers: int, tokens: int, dispersion: float) -> Traffic:
    """Layers of one skew, one domain, nothing that drifts."""
    return Traffic(
        layers,
        EXPERTS,
        TOP_K,
        PLANNED_ON + JUDGED,
        tokens=tokens,
        decode=0,
        shape_low=shape,
        shape_high=shape,
        hot_layers=0.0,
        domains=1,
        domain_spread=0.0,
        dispersion=dispersion,
        drift=0.0,
        diurnal=0.0,
        shift_hours=0.0,
    )


def imbalances(traffic: Traffic, topology: Topology, names: list[str], seed: int) -> list[float]:
    """Mean imbalance of each policy on the batches after the first plan."""
    scenario = Scenario(traffic_windows(traffic, seed), topology, plan_every=PLANNED_ON)
    found = replay_all(scenario, names)
    return [float(one.per_window[PLANNED_ON - 1 :].mean()) for one in found]


def fitted(
    wanted: float, topology: Topology, layers: int, tokens: int, dispersion: float, seed: int
) -> float:
    """The Gamma shape whose consecutive experts give the wanted imbalance."""
    low, high = 0.05, 50.0
    for _ in range(14):
        middle = (low * high) ** 0.5
        traffic = traffic_of(middle, layers, tokens, dispersion)
        (found,) = imbalances(traffic, topology, ["none"], seed)
        low, high = (middle, high) if found > wanted else (low, middle)
    return (low * high) ** 0.5
