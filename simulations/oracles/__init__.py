"""Limits that no planner on the past can reach: each looks at the window that it serves.

    oracle:force-balanced  the same tokens in every slot: what benchmarks with forced routing show
    oracle:re-plan         a fresh plan for each window before it comes; its moves cost nothing
    oracle:shares          our placement from the past, with the best shares for the window itself
    oracle:moonep, oracle:ultraep  first copies in order, redundant slots filled for each window

Shapes:  L MoE layers, S slots, R ranks.
"""

from __future__ import annotations

import numpy as np

from eplb.core.load import LoadHistory
from eplb.core.problem import Problem
from eplb.policies.table import greedy_policy
from eplb.shares.resplitting import resplit
from simulations.oracles.quotas import MoonEp, UltraEp
from simulations.schemes import Fixed, Ours, Planned, SlotLoad, Split
from simulations.windows import Tokens


class ForceBalanced(Fixed):
    """Every live rank gets the same tokens, and every slot of a rank."""

    is_oracle = True

    def serve(self, tokens: Tokens) -> SlotLoad:
        """[L, S] equal parts."""
        topology = self.terms.topology
        size = np.maximum(topology.slots_of_rank, 1)
        part = np.where(topology.serving, 1.0 / topology.serving.sum(), 0.0) / size
        load: SlotLoad = tokens.sum(axis=1)[:, None] * part[topology.rank_of_slot]
        return load


class RePlan(Fixed):
    """Greedy on the window itself."""

    is_oracle = True

    def serve(self, tokens: Tokens) -> SlotLoad:
        """[L, S] under a plan for these tokens."""
        if not tokens.any():
            return super().serve(tokens)
        problem = Problem(LoadHistory(tokens[None]), self.terms.topology, self.terms.model)
        return Split(greedy_policy(problem), self.terms).of(tokens)


class BatchShares(Ours):
    """Ours, whose replicas get the shares that suit the window itself."""

    is_oracle = True

    def serve(self, tokens: Tokens) -> SlotLoad:
        """[L, S] under the best shares."""
        if not tokens.any():
            return super().serve(tokens)
        topology = self.terms.topology
        placement = resplit(LoadHistory(tokens[None]), self.serving, topology, trust=1.0)
        return Split(placement, self.terms).of(tokens)


ORACLES: dict[str, type[Planned]] = {
    "oracle:force-balanced": ForceBalanced,
    "oracle:re-plan": RePlan,
    "oracle:shares": BatchShares,
    "oracle:moonep": MoonEp,
    "oracle:ultraep": UltraEp,
}
