"""Every way to serve that a replay compares, by name.

contiguous, none   consecutive experts, redundant slots empty: no balancing
in-order           experts in order and again from the first: where engines start
deepseek, sglang, vllm           simulations/peers/engines.py
flashlb, greedy_on_sum, ...      simulations/peers, each plan taken
oracle:...                       simulations/oracles
auto, greedy, ...                the planner's policies, with its gate
raw:auto, raw:NAME, ...          the same policies, each placement taken as it is, as a peer's
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from eplb.core.load import LoadHistory
from eplb.core.placement import EMPTY, Placement
from eplb.core.problem import Problem
from eplb.core.topology import Topology
from eplb.errors import ConfigError
from eplb.policies.table import POLICIES, contiguous_policy, policy_named
from simulations.oracles import ORACLES, BatchShares
from simulations.peers import PEERS
from simulations.peers.engines import ENGINES
from simulations.schemes import AlwaysTaken, Fixed, Ours, Scheme, Terms

if TYPE_CHECKING:
    from simulations.windows import Tokens

UNBALANCED = ("none", "contiguous")
IN_ORDER = "in-order"
RAW = "raw:"  # a policy without the planner's gate, budget and repair
BATCH_POLICY = "auto"  # whose placement ``oracle:shares`` starts from


def check_names(names: tuple[str, ...]) -> None:
    """Refuse names that are unknown or given twice.

    Raises:
        ConfigError: no name, a name twice, or an unknown one; the message lists the known ones.
    """
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"policies are {list(names)}, expected distinct names")
    extra = (*UNBALANCED, IN_ORDER, *ENGINES, *PEERS, *ORACLES)
    for name in names:
        if name in extra:
            continue
        try:
            policy_named(name.removeprefix(RAW))
        except ConfigError as exc:
            known = ", ".join(sorted({*POLICIES, *extra}))
            raise ConfigError(
                f"unknown policy {name!r}, expected one of: {known}, or {RAW} and a policy"
            ) from exc


def scheme_named(name: str, terms: Terms, first: Tokens, every: int) -> Scheme:
    """The scheme of a name.

    Args:
        terms: ranks, model, gate.
        first: [L, E] of the first window, for its shape alone.
        every: windows from one plan to the next.
    """
    start = contiguous(terms, first)
    if name in UNBALANCED:
        return Fixed(terms, start)
    if name == IN_ORDER:
        return Fixed(terms, in_order(terms.topology, first))
    if name in ENGINES:
        return ENGINES[name](terms, in_order(terms.topology, first), every)
    if name in PEERS:
        return AlwaysTaken(terms, start, PEERS[name], every)
    if name.startswith(RAW):
        return AlwaysTaken(terms, start, policy_named(name.removeprefix(RAW)).policy, every)
    if name in ORACLES:
        kind = ORACLES[name]
        if issubclass(kind, BatchShares):
            return kind(terms, start, BATCH_POLICY, every)
        assert issubclass(kind, Fixed), "the other oracles plan nothing"
        return kind(terms, start)
    return Ours(terms, start, name, every)


def contiguous(terms: Terms, first: Tokens) -> Placement:
    """Consecutive experts on each rank, redundant slots empty."""
    history = LoadHistory(first[None])
    return contiguous_policy(Problem(history, terms.topology, terms.model))


def in_order(topology: Topology, first: Tokens) -> Placement:
    """Experts in order and then again from the first, on live ranks: where engines start."""
    num_layers, num_experts = first.shape
    usable = topology.alive[topology.rank_of_slot]
    row = np.full(topology.num_slots, EMPTY, dtype=np.int32)
    row[usable] = np.arange(int(usable.sum())) % num_experts
    return Placement(np.tile(row, (num_layers, 1)), num_experts)
