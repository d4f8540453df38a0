"""What other engines and planners do, re-implemented from their published behaviour.

They are policies like any other once ``register_peers`` was called: to compare with, in
``eplb simulate --policy`` and in benchmarks.
"""

from __future__ import annotations

from eplb.policies.table import Policy, register_policy
from simulations.peers.flashlb import flashlb
from simulations.peers.replans import greedy_on_average, greedy_on_last, greedy_on_sum
from simulations.peers.swift import swift_balancer

PEERS: dict[str, Policy] = {
    "flashlb": flashlb,
    "greedy_on_average": greedy_on_average,
    "greedy_on_last": greedy_on_last,
    "greedy_on_sum": greedy_on_sum,
    "swift_balancer": swift_balancer,
}


def register_peers() -> None:
    """Make the peers known to ``eplb.policies.table`` by name; again changes nothing."""
    for name, policy in PEERS.items():
        register_policy(name, policy)
