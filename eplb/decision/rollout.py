"""Staged rollout: how much of a plan a deployment carries out, and the step back.

    observe --> propose --> layers --> all        forward: an operator, by the setting
       ^__________|^__________|^________|         back: the controller, on a breach

observe   plans are recorded, nothing else
propose   plans are stored as proposals; an operator approves one
layers    the few layers that gain most move
all       the whole plan
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from eplb.core.cost import Decision
from eplb.core.placement import EMPTY
from eplb.decision.outcome import Plan

Stage = Literal["observe", "propose", "layers", "all"]
STAGES: tuple[Stage, ...] = ("observe", "propose", "layers", "all")


def stage_before(stage: Stage) -> Stage:
    """The stage that a breach leads back to; observe has none before it."""
    return STAGES[max(0, STAGES.index(stage) - 1)]


def breach(given: float, limit: float) -> str:
    """Why a judged plan breaches the limit of the rollout; "" if it does not.

    Args:
        given: reduction of imbalance that was measured after the plan.
        limit: imbalance that a plan may make worse; 0: no limit.
    """
    if not limit or given > -limit:
        return ""
    return f"the plan gave {given:.3f} in its first windows, expected above {-limit:.3f}"


def for_few_layers(proposal: Plan, most: int) -> Plan:
    """The plan with at most ``most`` layers: those with experts on drained ranks, then by gain."""
    base, target = proposal.base, proposal.target
    if proposal.decision is Decision.KEEP:
        return proposal
    changes = (base.slot_to_expert != target.slot_to_expert).any(axis=1)
    changes |= ~np.isclose(base.slot_share, target.slot_share).all(axis=1)
    if int(changes.sum()) <= most:
        return proposal
    gain = np.where(changes, proposal.before_per_layer - proposal.after_per_layer, -np.inf)
    # A drain is an order: its layers come first, whatever they gain.
    topology = proposal.topology
    gain[(base.slot_to_expert[:, topology.drained[topology.rank_of_slot]] != EMPTY).any(axis=1)] = (
        np.inf
    )
    taken = np.sort(np.argsort(-gain, kind="stable")[:most])
    is_taken = np.zeros(base.num_layers, dtype=np.bool_)
    is_taken[taken] = True
    after = np.where(is_taken, proposal.after_per_layer, proposal.before_per_layer)
    few = base.with_layers(target, taken.tolist()).with_generation(target.generation)
    moves = bool((base.slot_to_expert != few.slot_to_expert).any())
    return replace(
        proposal,
        target=few,
        after_per_layer=after,
        decision=Decision.MOVE if moves else Decision.RESPLIT,
        reason=f"{proposal.reason}; {most} of {int(changes.sum())} layers, those that gain most",
        expected_gain=proposal.expected_gain * _part(proposal, after),
    )


def _part(proposal: Plan, after: np.ndarray) -> float:
    """Part of the plan's gain that these layers have."""
    whole = proposal.before - proposal.after
    part = proposal.before - float(after.mean())
    return part / whole if np.isfinite(whole) and whole > 0 else 1.0
