"""Expert-parallel load balancing: where each expert of a mixture-of-experts model should live.

Pure functions over arrays and frozen dataclasses: no torch, no clock, no environment, no I/O.
"""

from eplb.core.constraints import Constraints
from eplb.core.load import LoadHistory, LoadSample
from eplb.core.model import ModelShape, preset
from eplb.core.placement import EMPTY, Placement
from eplb.core.problem import Budget, Problem
from eplb.core.scenarios import Scenarios
from eplb.core.topology import Topology
from eplb.decision.gate import CostModel, Decision
from eplb.decision.outcome import Plan
from eplb.decision.promises import Promise, Record
from eplb.decision.redundancy import (
    RedundancyLevel,
    allocate_redundancy,
    redundancy_price,
    slots_per_layer,
)
from eplb.deepseek import rebalance_experts
from eplb.dispatch.rules import DispatchRule, effective_shares
from eplb.explanation.explainer import explain, explain_layer
from eplb.explanation.figures import Explanation, LayerExplanation
from eplb.measure.balance import balancedness, imbalance, lower_bound, rank_load
from eplb.migration.build import Migration, Move, Pace, Source, Transaction, build_migration
from eplb.planner import plan
from eplb.policies.table import POLICIES
from eplb.shares.resplitting import resplit

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
