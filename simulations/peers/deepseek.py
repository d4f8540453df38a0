"""DeepSeek's balancer, which vLLM, SGLang and TensorRT-LLM share: replicate greedily, then pack.

Where the model's expert groups divide by nodes, groups are packed onto nodes first and the rest is
done on each node; else the whole group of ranks is one node.

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
from eplb.core.topology import Topology
from eplb.errors import PlacementError


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
