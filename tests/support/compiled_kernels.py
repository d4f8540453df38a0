"""Calls every compiled kernel once, so that no test pays for compiling inside its time limit.

    python tests/support/compiled_kernels.py [--check]

A fresh clone compiles for 20 to 60 s of CPU; afterwards the kernels come from numba's cache on
disk. ``conftest.py`` runs this before the first test, in one process, before workers start.
``--check`` fails if any kernel of the six packages was not called.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Iterator
from importlib import import_module

import numpy as np
import torch
from numba.core.dispatcher import Dispatcher

import eplb
import runtime
from eplb import Constraints, CostModel, ModelShape, Topology
from runtime.memory.shared import COMPILED_FROM_BYTES, digest

RANKS = Topology.uniform(num_nodes=2, ranks_per_node=2, slots_per_rank=6)
MODEL = ModelShape((0, 1), 16, 2, hidden=16, intermediate=8, num_expert_groups=4)
# More ways to pack groups to nodes than are tried one by one.
FOUR_NODES = Topology.uniform(num_nodes=4, ranks_per_node=1, slots_per_rank=6)
MANY_GROUPS = ModelShape((0, 1), 16, 2, hidden=16, intermediate=8, num_expert_groups=16)


def call_every_kernel() -> None:
    """Plan and re-plan in every mode, on a few experts."""
    draw = np.random.default_rng(0)
    one = draw.poisson(1000 * draw.lognormal(size=(1, 2, 16)), size=(4, 2, 16))
    other = draw.permuted(one, axis=2)
    serving = eplb.plan(one, RANKS).target
    bound = Constraints(min_domains={(0, 0): 2}, pinned={(1, 3): (0,)}, hottest_in_two_domains=2)
    for history in (one[:1], one, other[:1], other):
        for current in (None, serving):
            eplb.plan(history, RANKS, current=current)
            eplb.plan(history, RANKS, current=current, model=MODEL)
            eplb.plan(history, RANKS, current=current, objective="time")
            eplb.plan(history, RANKS, current=current, cost=CostModel(node_traffic=0.5))
            eplb.plan(history, RANKS, current=current, constraints=bound)
            eplb.plan(history, RANKS, current=current, policy="greedy")
    eplb.plan(one, FOUR_NODES, model=MANY_GROUPS)
    eplb.rebalance_experts(one[0], 24, 4, 2, 4)
    digest(torch.zeros(COMPILED_FROM_BYTES, dtype=torch.uint8))


def kernels() -> Iterator[tuple[str, Dispatcher]]:
    """Every compiled function of the packages, with its full name."""
    for package in (eplb, runtime):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if module.name.startswith("runtime.kernels"):  # of triton, for GPUs
                continue
            for name, member in vars(import_module(module.name)).items():
                if isinstance(member, Dispatcher) and member.py_func.__module__ == module.name:
                    yield f"{module.name}.{name}", member


if __name__ == "__main__":
    call_every_kernel()
    if "--check" in sys.argv:
        missing = [name for name, kernel in kernels() if not kernel.signatures]
        sys.exit(f"kernels that no call has compiled: {', '.join(missing)}" if missing else 0)
