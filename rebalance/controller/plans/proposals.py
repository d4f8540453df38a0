"""Proposals of the controller: a plan with its explanation into the store, and out of it again."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from eplb.core.placement import Placement
from eplb.decision.outcome import explain_layer
from eplb.errors import StaleGeneration
from eplb.planner import Plan
from rebalance.controller.plans.planning import summary
from telemetry.state.proposals import Content, Proposal, ProposalEnded, check_open
from telemetry.state.store import StateStore

CONTROLLER = "controller"  # by whom its own proposals are
EXPLAINED_LAYERS = 4  # that gain most
FIGURES = (  # figures in the summary of a plan
    "target_generation",
    "decision",
    "policy",
    "imbalance_before",
    "imbalance_after",
    "expected_gain",
    "moves",
    "bytes",
    "cost_s",
)
KEPT_MOVES = 5000  # of the list, for display; the target has them all


class Why(NamedTuple):
    """Why a proposal is made."""

    by: str
    trigger: str
    reason: str


def drafted(
    plan: Plan,
    target: Placement,
    serving: Placement,
    *,
    now: float,
    lasts_s: float,
    why: Why,
) -> tuple[Proposal, Content]:
    """Make a proposal of a plan.

    Args:
        plan: that moves something.
        target: of its migration, with spare slots where the deployment has them.
        serving: the base of the migration.
        now: seconds since the epoch.
        lasts_s: how long it can be approved.
        why: it is made.
    """
    figures = summary(plan)
    proposal = Proposal(
        time=now,
        expires=now + lasts_s,
        base_generation=serving.generation,
        base_hash=serving.hash,
        by=why.by,
        trigger=why.trigger,
        reason=why.reason,
        plan_reason=figures["reason"],
        **{name: figures[name] for name in FIGURES},
    )
    layer_ids = plan.problem.layer_ids
    moves = [
        [layer_ids[move.layer], move.expert, move.dst_slot, move.source.name.lower(), move.src_slot]
        for move in plan.moves[:KEPT_MOVES]
    ]
    detail = {"plan": plan.to_dict(), "move_list": moves, "explanation": _explained(plan)}
    return proposal, Content(target, detail)


def _explained(plan: Plan) -> list[dict[str, Any]]:
    layer_ids, gain = plan.problem.layer_ids, plan.before_per_layer - plan.after_per_layer
    changes = (plan.base.slot_to_expert != plan.target.slot_to_expert).any(axis=1)
    changes |= (plan.base.slot_share != plan.target.slot_share).any(axis=1)
    best = np.argsort(-np.where(changes, gain, -np.inf), kind="stable")
    taken = [int(layer) for layer in best[:EXPLAINED_LAYERS] if changes[layer]]
    return [
        {"layer": found.layer, "sentences": list(found.sentences)}
        for found in (explain_layer(plan, layer_ids[layer]) for layer in taken)
    ]


def to_carry_out(
    store: StateStore, proposal_id: int, serving: Placement
) -> tuple[Proposal, Placement]:
    """Return an open proposal and its target.

    Raises:
        ProposalEnded: it is not open any more, or there is none.
        StaleGeneration: it was made on another placement than ``serving``.
    """
    found = next((one for one in store.proposals() if one.id == proposal_id), None)
    content = store.proposal_content(proposal_id)
    if found is None or content is None:
        raise ProposalEnded(f"there is no proposal {proposal_id}")
    check_open(found)
    if found.base_hash != serving.hash:
        raise StaleGeneration(
            f"base moved on: found generation {serving.generation} serving, expected generation "
            f"{found.base_generation} of proposal {proposal_id}"
        )
    return found, content.target


def waiting(store: StateStore) -> Proposal | None:
    """Return the controller's own open proposal: it makes no other while one waits."""
    open_ones = (one for one in store.proposals() if one.state == "open")
    return next((one for one in open_ones if one.by == CONTROLLER), None)
