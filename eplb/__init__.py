"""Expert-parallel load balancing: placement of the experts of a mixture-of-experts model.

Pure functions over arrays and frozen dataclasses: no torch, no clock, no environment, no I/O.
Names are imported when they are first used: ``import eplb`` loads neither numba nor scipy.
"""

from typing import TYPE_CHECKING

from eplb.errors import (
    BrokenGroup,
    CheckpointError,
    ConfigError,
    EplbError,
    FencedOut,
    HistoryError,
    MigrationError,
    PlacementError,
    RankError,
    StaleGeneration,
    StaleRevision,
    StoreError,
    TopologyError,
)
from eplb.packages import lazy_exports

if TYPE_CHECKING:
    from eplb.core.constraints import Constraints
    from eplb.core.cost import CostModel, Decision
    from eplb.core.demand import Scenarios
    from eplb.core.dispatch import DispatchRule, effective_shares
    from eplb.core.load import LoadHistory, LoadSample
    from eplb.core.model import ModelShape, preset
    from eplb.core.placement import EMPTY, Placement
    from eplb.core.problem import Budget, Problem, Record
    from eplb.core.topology import Topology
    from eplb.decision.alternatives import Promise
    from eplb.decision.explanation import Explanation, LayerExplanation
    from eplb.decision.outcome import Plan, explain, explain_layer
    from eplb.decision.redundancy import (
        RedundancyLevel,
        allocate_redundancy,
        redundancy_price,
        slots_per_layer,
    )
    from eplb.deepseek import rebalance_experts
    from eplb.measure import balancedness, imbalance, lower_bound, rank_load
    from eplb.migration.build import Migration, Move, Pace, Source, Transaction, build_migration
    from eplb.planner import plan
    from eplb.policies.coactivation import coactivation, colocate_coactivated, nodes_per_token
    from eplb.policies.table import POLICIES, PolicyEntry, Proposal, register_policy
    from eplb.shares.resplitting import resplit

__version__ = "0.2.0"

__all__ = [
    "EMPTY",
    "POLICIES",
    "BrokenGroup",
    "Budget",
    "CheckpointError",
    "ConfigError",
    "Constraints",
    "CostModel",
    "Decision",
    "DispatchRule",
    "EplbError",
    "Explanation",
    "FencedOut",
    "HistoryError",
    "LayerExplanation",
    "LoadHistory",
    "LoadSample",
    "Migration",
    "MigrationError",
    "ModelShape",
    "Move",
    "Pace",
    "Placement",
    "PlacementError",
    "Plan",
    "PolicyEntry",
    "Problem",
    "Promise",
    "Proposal",
    "RankError",
    "Record",
    "RedundancyLevel",
    "Scenarios",
    "Source",
    "StaleGeneration",
    "StaleRevision",
    "StoreError",
    "Topology",
    "TopologyError",
    "Transaction",
    "allocate_redundancy",
    "balancedness",
    "build_migration",
    "coactivation",
    "colocate_coactivated",
    "effective_shares",
    "explain",
    "explain_layer",
    "imbalance",
    "lower_bound",
    "nodes_per_token",
    "plan",
    "preset",
    "rank_load",
    "rebalance_experts",
    "redundancy_price",
    "register_policy",
    "resplit",
    "slots_per_layer",
]

_EXPORTS = {
    "eplb.core.constraints": "Constraints",
    "eplb.core.cost": "CostModel Decision",
    "eplb.core.demand": "Scenarios",
    "eplb.core.dispatch": "DispatchRule effective_shares",
    "eplb.core.load": "LoadHistory LoadSample",
    "eplb.core.model": "ModelShape preset",
    "eplb.core.placement": "EMPTY Placement",
    "eplb.core.problem": "Budget Problem Record",
    "eplb.core.topology": "Topology",
    "eplb.decision.alternatives": "Promise",
    "eplb.decision.explanation": "Explanation LayerExplanation",
    "eplb.decision.outcome": "Plan explain explain_layer",
    "eplb.decision.redundancy": (
        "RedundancyLevel allocate_redundancy redundancy_price slots_per_layer"
    ),
    "eplb.deepseek": "rebalance_experts",
    "eplb.measure": "balancedness imbalance lower_bound rank_load",
    "eplb.migration.build": "Migration Move Pace Source Transaction build_migration",
    "eplb.planner": "plan",
    "eplb.policies.coactivation": "coactivation colocate_coactivated nodes_per_token",
    "eplb.policies.table": "POLICIES PolicyEntry Proposal register_policy",
    "eplb.shares.resplitting": "resplit",
}
__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
