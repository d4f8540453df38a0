"""How an engine chooses among the replicas of an expert, and the effective share of each slot.

A plan assigns tokens by shares; an engine dispatches them by its own rule. Where that rule lets
each source rank use one replica of an expert, shares are sums of source ranks' parts, and a plan
that is balanced by its shares is not balanced in operation.

Shapes:  L MoE layers, E experts, S slots, R ranks, W words of the random generator.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eplb.core.kernels import FloatArray, IntArray
from eplb.core.placement import Placement, duplicate_replicas
from eplb.core.topology import Topology
from eplb.dispatch_rules.engine_draws import Sources, shares_by_choice
from eplb.errors import ConfigError

SGLANG_SEED = 42  # of SGLang's draws, which restart with every map


DispatchRuleName = Literal["even", "weighted", "sglang_static", "ascend_mod", "per_source"]


class DispatchRule(Enum):
    """The rule by which an engine chooses the replica for a token."""

    EVEN = "even"  # equally, whatever the shares: vLLM's hash, SGLang's ``dynamic``
    WEIGHTED = "weighted"  # by ``slot_share``, as this project's dispatchers do
    SGLANG_STATIC = "sglang_static"  # one for each source rank: own GPU, own node, else drawn
    ASCEND_MOD = "ascend_mod"  # one for each source rank: its number modulo replicas
    PER_SOURCE = "per_source"  # by ``source_share`` of the source's node

    @property
    def by_rank(self) -> bool:
        """Whether each source rank uses one replica of an expert."""
        return self in (DispatchRule.SGLANG_STATIC, DispatchRule.ASCEND_MOD)

    @property
    def uses_shares(self) -> bool:
        """Whether the engine uses the shares of a placement."""
        return self in (DispatchRule.WEIGHTED, DispatchRule.PER_SOURCE)


def effective_shares(
    placement: Placement,
    topology: Topology,
    rule: DispatchRule,
    tokens_of_rank: ArrayLike | None = None,
) -> FloatArray:
    """[L, S] part of its expert's tokens that each slot gets under an engine's rule.

    Args:
        placement: experts by slot, and the shares that some rules follow.
        topology: where slots are.
        rule: how the engine chooses.
        tokens_of_rank: [R] part of the tokens that starts on each rank; by default all equal.

    Raises:
        ConfigError: the engine cannot serve such a placement, or parts out of range.
    """
    starts = _starts(tokens_of_rank, topology)
    if rule is DispatchRule.EVEN:
        return Placement(placement.slot_to_expert, placement.num_experts).slot_share
    if rule is DispatchRule.PER_SOURCE and placement.source_share is not None:
        of_node = np.bincount(topology.node_of_rank, starts, topology.num_nodes)
        share: FloatArray = np.tensordot(of_node, placement.source_share, 1)
        return share
    if not rule.by_rank:
        return placement.slot_share
    _check_servable(placement, topology, rule)
    held = placement.slot_to_expert.astype(np.int64)
    sources = sources_of(topology, rule, starts)
    return shares_by_choice(held, placement.num_experts, sources, words_for(held, placement, rule))


def check_topology(topology: Topology, rule: DispatchRule) -> None:
    """Check that an engine with this rule can have such ranks.

    Raises:
        ConfigError: dead ranks, unequal slots, or nodes that are not equal runs of ranks.
    """
    if not rule.by_rank:
        return
    where = f"dispatch rule {rule.value}"
    if not topology.alive.all():
        dead = np.flatnonzero(~topology.alive).tolist()
        raise ConfigError(f"{where}: ranks {dead} are dead, expected live ranks only")
    slots = topology.slots_of_rank
    if (slots != slots[0]).any():
        raise ConfigError(f"{where}: ranks have {slots.tolist()} slots, expected equally many")
    each, rest = divmod(topology.num_ranks, topology.num_nodes)
    in_order = np.repeat(np.arange(topology.num_nodes), each)
    uneven = rest > 0 or (topology.node_of_rank != in_order).any()
    if rule is DispatchRule.SGLANG_STATIC and uneven:
        raise ConfigError(
            f"{where}: ranks are on nodes {topology.node_of_rank.tolist()}, "
            "expected as many consecutive ranks on each node"
        )


def _check_servable(placement: Placement, topology: Topology, rule: DispatchRule) -> None:
    check_topology(topology, rule)
    if placement.num_slots != topology.num_slots:
        raise ConfigError(
            f"dispatch rule {rule.value}: the placement has {placement.num_slots} slots a layer, "
            f"the topology has {topology.num_slots}"
        )
    twice = duplicate_replicas(placement, topology)
    if rule is DispatchRule.ASCEND_MOD and twice.size:
        layer, rank, expert = twice[0]
        raise ConfigError(
            f"dispatch rule {rule.value}: layer {layer}: rank {rank} holds expert {expert} twice, "
            "expected once: the engine's map has one place for it"
        )


def sources_of(topology: Topology, rule: DispatchRule, starts: FloatArray) -> Sources:
    """Source ranks as the kernels read them, for parts of tokens [R]."""
    return Sources(
        starts,
        topology.node_of_rank.astype(np.int64),
        topology.rank_of_slot.astype(np.int64),
        rule is DispatchRule.SGLANG_STATIC,
    )


def words_for(held: IntArray, placement: Placement, rule: DispatchRule) -> NDArray[np.uint32]:
    """[W] words of Python's ``random.Random(42)``, enough for any replicas of these slots.

    numpy's MT19937, seeded with a list, starts in the same state.
    """
    if rule is not DispatchRule.SGLANG_STATIC:
        return np.zeros(0, dtype=np.uint32)
    num_layers, num_slots = held.shape
    # An expert with replicas draws at most once per rank and per replica. A draw takes two words
    # on average; twice that sufficed in all tests.
    spare = max(num_slots - placement.num_experts, 0)
    draws = num_layers * (spare * int(num_slots) + num_slots)
    generator = np.random.MT19937()
    state: Any = np.random.RandomState([SGLANG_SEED]).get_state(legacy=False)
    generator.state = state
    words: NDArray[np.uint32] = generator.random_raw(1000 + 4 * draws).astype(np.uint32)
    return words


def _starts(tokens_of_rank: ArrayLike | None, topology: Topology) -> FloatArray:
    if tokens_of_rank is None:
        parts = topology.alive.astype(np.float64)
    else:
        parts = np.array(tokens_of_rank, dtype=np.float64)
    right = parts.shape == (topology.num_ranks,) and (np.isfinite(parts) & (parts >= 0)).all()
    if not right or not parts.sum() > 0:
        raise ConfigError(
            f"tokens_of_rank is {parts.tolist()}, expected {topology.num_ranks} finite parts, "
            "0 or more, and one above 0"
        )
    normal: FloatArray = parts / parts.sum()
    return normal
