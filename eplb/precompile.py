"""Compile the planner's kernels before a deadline waits for them.

A kernel that is not compiled is interpreted at first, see ``eplb/core/jit.py``. The compiled ones
are kept beside the source, or in ``NUMBA_CACHE_DIR``. Plans for a few experts call every kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

import numpy as np

from eplb.core.constraints import Constraints
from eplb.core.cost import CostModel
from eplb.core.dispatch import DispatchRule
from eplb.core.jit import compiled_at_once
from eplb.core.load import LoadHistory
from eplb.core.model import ModelShape
from eplb.core.problem import Problem
from eplb.core.topology import Topology
from eplb.deepseek import rebalance_experts
from eplb.planner import plan
from eplb.policies.coactivation import colocate_coactivated

RANKS = Topology.uniform(num_nodes=2, ranks_per_node=2, slots_per_rank=6)
# More ways to pack groups to nodes than are tried one by one.
FOUR_NODES = Topology.uniform(num_nodes=4, ranks_per_node=1, slots_per_rank=6)
END_DEADLINE_S = 10.0  # deadline for the function that is being compiled at the end
ONE_SLOT = Topology.uniform(num_nodes=2, ranks_per_node=8, slots_per_rank=1)


@contextmanager
def warmed_up_meanwhile(policy: str, on_pass: Callable[[str], None]) -> Iterator[None]:
    """Run ``warm_up`` on a thread of its own, which ends with the block.

    Args:
        policy: of the controller.
        on_pass: called by that thread, often while it compiles, with the name of a function; with
            "" once all are compiled.
    """
    # Imported here: who only declares kernels needs no compiler.
    from eplb.core.compiler import compiler_passes

    is_over = Event()

    def noted(function: str) -> None:
        if is_over.is_set():
            sys.exit()  # the thread, in the middle of the compiler
        on_pass(function)

    def work() -> None:
        with compiler_passes(noted):
            warm_up(policy)
        on_pass("")

    thread = Thread(target=work, name="eplb-compiler", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(END_DEADLINE_S)


@compiled_at_once()
def warm_up(policy: str) -> None:
    """Compile what a controller with this policy calls: half a minute, once for each install."""
    load = np.array([[[8, 4, 2, 1]], [[8, 4, 2, 2]]])  # [T, L, E]
    ranks = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=3)
    fresh = plan(load, ranks, policy=policy)
    plan(load[:, :, ::-1], ranks, policy=policy, current=fresh.target)


@compiled_at_once()
def compile_planner() -> None:
    """Compile all kernels of the planner: plan and re-plan in every mode, under every rule."""
    draw = np.random.default_rng(0)
    one = draw.poisson(1000 * draw.lognormal(size=(1, 2, 16)), size=(4, 2, 16))
    other = draw.permuted(one, axis=2)
    serving = plan(one, RANKS).target
    bound = Constraints(min_domains={(0, 0): 2}, pinned={(1, 3): (0,)}, hottest_in_two_domains=2)
    for history in (one[:1], one, other[:1], other):
        for current in (None, serving):
            plan(history, RANKS, current=current)
            plan(history, RANKS, current=current, model=_model(num_groups=4))
            plan(history, RANKS, current=current, objective="time")
            plan(history, RANKS, current=current, cost=CostModel(node_traffic=0.5))
            plan(history, RANKS, current=current, constraints=bound)
            plan(history, RANKS, current=current, policy="greedy")
    for rule in DispatchRule:
        for current in (None, serving):
            plan(other, RANKS, current=current, dispatch=rule)
    plan(one, FOUR_NODES, model=_model(num_groups=16))
    plan(other, ONE_SLOT, current=plan(one, ONE_SLOT).target)
    pairs = np.ones((2, 16, 16))
    colocate_coactivated(Problem(LoadHistory(one), RANKS), serving, pairs, price=1.0, steps=9)
    rebalance_experts(one[0], 24, 4, 2, 4)


def _model(num_groups: int) -> ModelShape:
    return ModelShape((0, 1), 16, 2, hidden=16, intermediate=8, num_expert_groups=num_groups)
