"""Planners of other projects, re-implemented from their published behaviour, for comparison.

``register_peers`` adds them to the policy table, for ``eplb simulate --policy`` and benchmarks.
"""

from __future__ import annotations

from eplb.policies.table import Policy, register_policy
from simulations.peers.flashlb import FlashlbWhenDue, flashlb
from simulations.peers.replans import greedy_on_average, greedy_on_last, greedy_on_sum
from simulations.peers.swift import swift_balancer

PEERS: dict[str, Policy] = {
    "flashlb": flashlb,  # a plan after every window
    "flashlb_when_due": FlashlbWhenDue(),
    "greedy_on_average": greedy_on_average,
    "greedy_on_last": greedy_on_last,
    "greedy_on_sum": greedy_on_sum,
    "swift_balancer": swift_balancer,
}


def register_peers() -> None:
    """Add the peers to ``eplb.policies.table``; calling it again changes nothing."""
    for name, policy in PEERS.items():
        register_policy(name, policy)
