"""Expert-parallel load balancing: where each expert of a mixture-of-experts model should live.

Pure functions over arrays and frozen dataclasses: no torch, no clock, no environment, no I/O.
"""

from eplb.balance import balancedness, imbalance, lower_bound, rank_load
from eplb.constraints import Constraints
from eplb.deepseek import rebalance_experts
from eplb.dispatch import DispatchRule, effective_shares
from eplb.explain import explain, explain_layer
from eplb.explanation import Explanation, LayerExplanation
from eplb.gate import CostModel, Decision
from eplb.load import LoadHistory, LoadSample
from eplb.migration import Migration, Move, Pace, Source, Transaction, build_migration
from eplb.model import ModelShape, preset
from eplb.outcome import Plan
from eplb.placement import EMPTY, Placement
from eplb.plan import plan
from eplb.policies import POLICIES
from eplb.problem import Budget, Problem
from eplb.record import Promise, Record
from eplb.redundancy import (
    RedundancyLevel,
    allocate_redundancy,
    redundancy_price,
    slots_per_layer,
)
from eplb.resplit import resplit
from eplb.topology import Topology
from eplb.windows import Scenarios

__version__ = "0.1.0"

__all__ = [
    "EMPTY",
    "POLICIES",
    "Budget",
    "Constraints",
    "CostModel",
    "Decision",
    "DispatchRule",
    "Explanation",
    "LayerExplanation",
    "LoadHistory",
    "LoadSample",
    "Migration",
    "ModelShape",
    "Move",
    "Pace",
    "Placement",
    "Plan",
    "Problem",
    "Promise",
    "Record",
    "RedundancyLevel",
    "Scenarios",
    "Source",
    "Topology",
    "Transaction",
    "allocate_redundancy",
    "balancedness",
    "build_migration",
    "effective_shares",
    "explain",
    "explain_layer",
    "imbalance",
    "lower_bound",
    "plan",
    "preset",
    "rank_load",
    "rebalance_experts",
    "redundancy_price",
    "resplit",
    "slots_per_layer",
]
