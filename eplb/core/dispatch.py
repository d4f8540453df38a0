"""How an engine chooses among the replicas of an expert, and the effective share of each slot.

A plan assigns tokens by shares; an engine dispatches them by its own rule. Where that rule lets
each source rank use one replica of an expert, shares are sums of source ranks' parts, and a plan
that is balanced by its shares is not balanced in operation.

Shapes:  L MoE layers, E experts, S slots, R ranks, W words of the random generator.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eplb.core.jit import FloatArray, IntArray, inner, kernel
from eplb.core.placement import Placement, duplicate_replicas
from eplb.core.topology import Topology
from eplb.errors import ConfigError

SGLANG_SEED = 42  # SGLang's draws restart from it with every map
Words = NDArray[np.uint32]
START = cast(int, np.int64(0))


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


MOST_DRAWS = 2**26  # 2 GB of words; 61 layers of 1,024 slots, half of them redundant, take half


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
    if draws > MOST_DRAWS:
        raise ConfigError(
            f"dispatch rule {rule.value}: {num_layers} layers of {num_slots:,} slots, {spare:,} of "
            f"them redundant, take {draws:,} random draws, expected at most {MOST_DRAWS:,}: fewer "
            "redundant experts"
        )
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


class Sources(NamedTuple):
    """Source ranks of tokens."""

    part: FloatArray  # [R] part of the tokens
    node: IntArray  # [R]
    rank: IntArray  # [S]
    nearest: bool  # SGLang's rule; else vllm-ascend's


@inner
def replica_slots(held: IntArray, num_experts: int) -> tuple[IntArray, IntArray]:
    """[E, M] slots of each expert of a layer [S] in order, padded with -1, and [E] their number."""
    count = np.zeros(num_experts, dtype=np.int64)
    slots = np.full((num_experts, len(held) - num_experts + 1), -1)
    for slot in range(len(held)):
        expert = held[slot]
        if expert >= 0:
            slots[expert, count[expert]] = slot
            count[expert] += 1
    return slots, count


@inner
def nearest(slots: IntArray, count: int, source: int, sources: Sources) -> int:
    """Index of the replica that a source rank uses without a draw; -1 if it draws."""
    if not sources.nearest:
        return source % count
    if count == 1:
        return 0
    first, near = -1, 0
    for place in range(count):
        rank = sources.rank[slots[place]]
        if rank == source:
            return place
        if sources.node[rank] == sources.node[source]:
            near += 1
            if first < 0:
                first = place
    return first if near < count else -1


@inner
def draw_layer(
    slots: IntArray, count: IntArray, sources: Sources, words: Words, at: int, drawn: IntArray
) -> int:
    """Fill in ``drawn`` [E, R + 1] and return the index of the next layer's first word.

    The first entry of a row is the number of ranks that draw, the others their replicas in order.
    """
    num_ranks = len(sources.part)
    for expert in range(len(count)):
        left = 0
        if sources.nearest and count[expert] > 1:
            for source in range(num_ranks):
                left += nearest(slots[expert], count[expert], source, sources) < 0
        drawn[expert, 0] = left
        if left > 0:
            at = _fair(drawn[expert, 1:], left, count[expert], words, at)
    return at


@inner
def _fair(drawn: IntArray, left: int, count: int, words: Words, at: int) -> int:
    """All replicas equally often, the remainder by a sample without repeats, then shuffled."""
    often, rest = left // count, left % count
    for place in range(often * count):
        drawn[place] = place % count
    enough = 21
    if rest > 5:
        power = 1
        while power < 3 * rest:
            power *= 4
        enough += power
    pool = np.arange(count)
    for place in range(rest):
        if count <= enough:
            pick, at = _below(count - place, words, at)
            drawn[often * count + place] = pool[pick]
            pool[pick] = pool[count - place - 1]
        else:
            pick, at = _below(count, words, at)
            while pool[pick] < 0:
                pick, at = _below(count, words, at)
            drawn[often * count + place] = pick
            pool[pick] = -1
    for place in range(left - 1, 0, -1):
        pick, at = _below(place + 1, words, at)
        drawn[place], drawn[pick] = drawn[pick], drawn[place]
    return at


@inner
def _below(number: int, words: Words, at: int) -> tuple[int, int]:
    """A draw below a number from the top bits of words; draws that are too large are rejected."""
    bits = 0
    while number >> bits:
        bits += 1
    while True:
        assert at < len(words), "there are words for all draws"
        draw = int(words[at]) >> (32 - bits)
        at += 1
        if draw < number:
            return draw, at


@inner
def fill_shares(
    slots: IntArray, count: int, drawn: IntArray, sources: Sources, share: FloatArray
) -> None:
    """Fill in ``share`` [M] of one expert; the expected ones where ``drawn`` is not valid.

    A row of draws is valid for one number of replicas and one number of ranks that draw.
    """
    for place in range(count):
        share[place] = 0.0
    if count == 1:
        share[0] = 1.0
        return
    left, open_part = 0, 0.0
    for source in range(len(sources.part)):
        place = nearest(slots, count, source, sources)
        if place >= 0:
            share[place] += sources.part[source]
            continue
        left += 1
        open_part += sources.part[source]
    if left == 0:
        return
    if left != drawn[0]:
        for place in range(count):
            share[place] += open_part / count
        return
    left = 0
    for source in range(len(sources.part)):
        if nearest(slots, count, source, sources) < 0:
            left += 1
            share[drawn[left]] += sources.part[source]


@kernel
def shares_by_choice(
    held: IntArray, num_experts: int, sources: Sources, words: Words
) -> FloatArray:
    """[L, S] part of its expert's tokens that each slot gets."""
    num_layers, num_slots = held.shape
    by_slot = np.zeros((num_layers, num_slots))
    drawn = np.zeros((num_experts, len(sources.part) + 1), dtype=np.int64)
    share = np.zeros(num_slots)
    at = START
    for layer in range(num_layers):
        slots, count = replica_slots(held[layer], num_experts)
        at = draw_layer(slots, count, sources, words, at, drawn)
        for expert in range(num_experts):
            fill_shares(slots[expert], count[expert], drawn[expert], sources, share)
            for place in range(count[expert]):
                by_slot[layer, slots[expert, place]] = share[place]
    return by_slot
