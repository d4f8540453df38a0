"""Engines over time: DeepSeek's balancer, started by each engine's own trigger.

All of them plan on the load since their latest plan or on a window of it, and take every plan.

    deepseek  at each interval, on all load since the latest plan
    sglang    the same, unless ranks were used better than 0.8 since then
              (``eplb_min_rebalancing_utilization_threshold``, pull request 8345)
    vllm      first after a quarter of an interval, on its latest third, as its defaults have it

Intervals are counted in windows. DeepSeek's balancer, which vLLM, SGLang and TensorRT-LLM share,
replicates greedily, then packs. Where the model's expert groups divide by nodes, groups are packed
onto nodes first and the rest is done on each node; else the whole group of ranks is one node.

1. **Groups to nodes.** Heaviest first, to the lightest node that has room.
2. **Replicas.** One spare slot after another to the expert with the heaviest replica.
3. **Replicas to ranks.** Heaviest first, to the lightest rank that has a free slot; an expert may
   be put on a rank twice.

Written anew from the behaviour of deepseek-ai/EPLB (eplb.py); ``eplb.rebalance_experts`` has the
same arguments and a better plan.

Shapes:  L MoE layers, E experts, S slots, G expert groups, N nodes, R ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eplb.core.jit import jit
from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.errors import PlacementError
from simulations.schemes import PlanTerms, Scheme, Taken, by_rank
from simulations.windows import LatestWindows, Tokens

SGLANG_UTILIZATION = 0.8
Table = NDArray[np.int64]  # [R, C] the expert in each slot, or -1
VLLM_WINDOW = 3  # an interval is so many times the steps whose load is added up


def deepseek_slots(
    tokens: NDArray[np.int64], topology: Topology, num_groups: int = 1
) -> NDArray[np.int32]:
    """[L, S] the expert of each slot, for tokens [L, E].

    Raises:
        PlacementError: ranks of different sizes or dead ones, or fewer slots than experts.
    """
    size = topology.slots_of_rank
    num_ranks, num_nodes = topology.num_ranks, topology.num_nodes
    if not topology.alive.all() or (size != size[0]).any() or num_ranks % num_nodes:
        raise PlacementError(
            f"{num_ranks} ranks on {num_nodes} nodes with {sorted(set(size.tolist()))} slots, "
            f"{int((~topology.alive).sum())} dead, expected live ranks of one size on equal nodes"
        )
    if topology.num_slots < tokens.shape[1]:
        raise PlacementError(
            f"{topology.num_slots} slots for {tokens.shape[1]} experts, expected at least one each"
        )
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    load = np.ascontiguousarray(tokens, dtype=np.float64)
    return _slots(load, num_groups, num_nodes, num_ranks, topology.num_slots)


@jit
def _slots(
    tokens: NDArray[np.float64], num_groups: int, num_nodes: int, num_ranks: int, num_slots: int
) -> NDArray[np.int32]:
    num_layers, num_experts = tokens.shape
    group_size, groups = num_experts // num_groups, num_groups // num_nodes
    per_node, ranks = num_slots // num_nodes, num_ranks // num_nodes
    experts_of_node = num_experts // num_nodes
    held = np.empty((num_layers, num_slots), dtype=np.int32)
    for layer in range(num_layers):
        of_group = tokens[layer].copy().reshape(num_groups, group_size).sum(axis=1)
        node_of_group, place_of_group = _packed(of_group, num_nodes, groups)
        for node in range(num_nodes):
            mine = np.empty(experts_of_node, dtype=np.int64)
            for group in range(num_groups):
                if node_of_group[group] == node:
                    for number in range(group_size):
                        place = place_of_group[group] * group_size + number
                        mine[place] = group * group_size + number
            copies = np.ones(experts_of_node, dtype=np.int64)
            expert_of = np.empty(per_node, dtype=np.int64)
            expert_of[:experts_of_node] = np.arange(experts_of_node)
            for spare in range(experts_of_node, per_node):
                heaviest = int(np.argmax(tokens[layer][mine] / copies))
                expert_of[spare] = heaviest
                copies[heaviest] += 1
            load = (tokens[layer][mine] / copies)[expert_of]
            rank_of, place_of = _packed(load, ranks, per_node // ranks)
            for replica in range(per_node):
                place = rank_of[replica] * (per_node // ranks) + place_of[replica]
                held[layer, node * per_node + place] = mine[expert_of[replica]]
    return held


@jit
def _packed(
    weight: NDArray[np.float64], num_packs: int, size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The pack of each item and its place there: heaviest first, to the lightest with room."""
    pack_of, place_of = np.arange(len(weight)), np.zeros(len(weight), dtype=np.int64)
    if size == 1:
        return pack_of, place_of
    load, used = np.zeros(num_packs), np.zeros(num_packs, dtype=np.int64)
    for item in np.argsort(-weight, kind="mergesort"):
        best = -1
        for pack in range(num_packs):
            if used[pack] < size and (best < 0 or load[pack] < load[best]):
                best = pack
        pack_of[item], place_of[item] = best, used[best]
        load[best] += weight[item]
        used[best] += 1
    return pack_of, place_of


def utilization(load: NDArray[np.float64]) -> float:
    """Mean over layers of mean over busiest rank load [L, R]; an idle layer counts as 1."""
    busiest = load.max(axis=1)
    ratio = np.divide(load.mean(axis=1), busiest, out=np.ones(len(load)), where=busiest > 0)
    return float(ratio.mean())


class Engine(Scheme):
    """DeepSeek's balancer on a sum of windows."""

    def __init__(self, terms: PlanTerms, first: Placement, every: int) -> None:
        super().__init__(terms, first)
        self._every = every
        self._sum: Tokens | None = None

    def plan(self, window: int, tokens: Tokens, past: LatestWindows) -> Taken | None:
        """Add a window up, and plan where the trigger says so."""
        if self.is_recorded(window + 1):
            self._sum = tokens.astype(np.int64) if self._sum is None else self._sum + tokens
        if not self.is_due(window + 1, tokens):
            return None
        counted, self._sum = self._sum, None
        if counted is None or not counted.any():
            return None
        model = self.terms.model
        groups = 1 if model is None else model.num_expert_groups
        held = deepseek_slots(counted, self.terms.topology, groups)
        generation = self.serving.generation + 1
        return self.take(Placement(held, counted.shape[1], generation), "at each interval")

    def is_recorded(self, number: int) -> bool:
        """Whether the load of a window counts for the next plan; windows count from 1."""
        return True

    def is_due(self, number: int, tokens: Tokens) -> bool:
        """Whether to plan after a window."""
        return number % self._every == 0


class Sglang(Engine):
    """SGLang's manager: at each interval, unless ranks were used well since the latest plan."""

    def __init__(self, terms: PlanTerms, first: Placement, every: int) -> None:
        super().__init__(terms, first, every)
        self._used: list[float] = []

    def is_due(self, number: int, tokens: Tokens) -> bool:
        """At each interval, unless ranks are used well."""
        load = by_rank(self.serve(tokens), self.terms.topology)
        self._used.append(utilization(load[:, self.terms.topology.serving]))
        if number % self._every:
            return False
        mean = float(np.mean(self._used))
        self._used = []
        return mean <= SGLANG_UTILIZATION


class Vllm(Engine):
    """vLLM's state machine of intervals and windows; weights move in the background."""

    is_async = True

    def is_recorded(self, number: int) -> bool:
        """The latest third of an interval."""
        passed = self._passed(number)
        return passed == 0 or self._every - passed < max(1, self._every // VLLM_WINDOW)

    def is_due(self, number: int, tokens: Tokens) -> bool:
        """At each interval, first after a quarter of one."""
        return self._passed(number) == 0

    def _passed(self, number: int) -> int:
        """Windows since the latest plan was due."""
        return (number + self._every - self._every // 4) % self._every


ENGINES: dict[str, type[Engine]] = {"deepseek": Engine, "sglang": Sglang, "vllm": Vllm}


def table_of(placement: Placement, topology: Topology) -> NDArray[np.int64]:
    """[L, R, C] the expert in each slot, or -1.

    Raises:
        PlacementError: ranks that are dead or of different sizes.
    """
    size = topology.slots_of_rank
    if not topology.alive.all() or (size != size[0]).any():
        raise PlacementError(
            f"ranks have {size.tolist()} slots, {int((~topology.alive).sum())} are dead, "
            "expected live ranks of one size: this planner knows no others"
        )
    held: NDArray[np.int64] = placement.slot_to_expert.astype(np.int64)
    return held.reshape(placement.num_layers, topology.num_ranks, int(size[0]))


def placement_of(table: NDArray[np.int64], current: Placement) -> Placement:
    """The placement of a table, with the generation after ``current``."""
    held = table.reshape(len(table), -1).astype(np.int32)
    return Placement(held, current.num_experts, current.generation + 1)


def kept_in_place(serving: NDArray[np.int64], new: NDArray[np.int64]) -> NDArray[np.int64]:
    """[C] the experts ``new`` of a rank, in an order in which those that stay keep their slot."""
    result = np.empty_like(new)
    stays = np.isin(serving, new) & (serving >= 0)
    result[stays] = serving[stays]
    result[~stays] = new[~np.isin(new, serving)]
    return result
