"""Compile the peers' kernels before a replay waits for them, as ``eplb.precompile`` does."""

from __future__ import annotations

import numpy as np

from eplb.core.load import LoadHistory
from eplb.core.problem import Problem
from eplb.core.topology import Topology
from simulations.peers.deepseek import deepseek_slots
from simulations.peers.flashlb import flashlb


def compile_peers() -> None:
    """Compile all kernels of the peers' planners: one plan for a few experts each."""
    ranks = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=3)
    tokens = np.array([[[8, 4, 2, 1]], [[8, 4, 2, 2]]])  # [T, L, E]
    deepseek_slots(tokens[0], ranks)
    flashlb(Problem(LoadHistory(tokens), ranks))
