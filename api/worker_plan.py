"""What every process of the demo is told at its start: plain data that crosses to a child."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eplb.model import ModelShape
from eplb.topology import Topology
from rebalance.controller import ControllerSettings
from rebalance.slab import SlabAddress

DEPLOYMENT = "demo"


@dataclass(frozen=True)
class WorkerPlan:
    """The demo as its processes see it."""

    run: str
    store: Path
    weights: Path
    text: Path | None  # an .npz of the domains' tokens; None with a trace
    trace: Path | None  # an .npy of expert ids [L, tokens, K]; None with text
    model: ModelShape
    topology: Topology
    slabs: tuple[SlabAddress, ...]  # one per host
    rendezvous_port: int
    tokens_per_rank: int
    window_steps: int
    sample_steps: int
    check_every: int
    drift_period_s: float
    seed: int
    staging_experts: int
    controller: ControllerSettings
