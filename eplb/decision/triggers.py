"""When the controller makes a plan, and how much of it a deployment carries out.

    membership, drain              at once, also within the cool-down
    first, change                  at once
    interval                       every so many tokens of prefill, or seconds
    imbalance                      above ``start_imbalance``; again only after it fell below
                                   ``rearm_imbalance``, or after another placement was committed
    load                           each window, where neither interval nor imbalance is set

After a commit no plan follows for ``cool_down_s``, whatever the load does. Membership does not
wait, and neither does an operator, who asks by a task or has a rank drained.

Staged rollout:

    observe --> propose --> layers --> all        forward: an operator, by the setting
       ^__________|^__________|^________|         back: the controller, on a breach

    observe   plans are recorded, nothing else
    propose   plans are stored as proposals; an operator approves one
    layers    the few layers that gain most move
    all       the whole plan
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal, get_args

import numpy as np

from eplb.core.cost import Decision
from eplb.core.placement import EMPTY
from eplb.decision.outcome import Plan
from eplb.declared import Setting, check_fields
from eplb.errors import UnfitSetting

Trigger = Literal["membership", "drain", "first", "change", "interval", "imbalance", "load"]
# What the event of a decision names: a trigger, or what an operator asked for.
ACTS = (*get_args(Trigger), "request", "rollback", "approval")


@dataclass(frozen=True)
class TriggerRules:
    """When a plan is due. 0 switches a rule off.

    Raises:
        ConfigError: a figure that is out of range, or limits that contradict each other.
    """

    interval_tokens: Annotated[
        int,
        Setting(
            "prefill tokens from one plan to the next; see operations.md; 0: no trigger",
            at_most=10**15,
            live=True,
        ),
    ] = 0
    interval_s: Annotated[
        float, Setting("time from one plan to the next; 0: no trigger", live=True)
    ] = 0.0
    start_imbalance: Annotated[
        float, Setting("imbalance of a window at which a plan is made; 0: no trigger", live=True)
    ] = 0.0
    rearm_imbalance: Annotated[
        float,
        Setting("imbalance below which start_imbalance may trigger again; 0: the same", live=True),
    ] = 0.0
    cool_down_s: Annotated[
        float, Setting("time after a commit in which no load starts a plan", live=True)
    ] = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.rearm_imbalance > self.start_imbalance:
            expected = f"at most start_imbalance, which is {self.start_imbalance}"
            raise UnfitSetting("rearm_imbalance", self.rearm_imbalance, expected)

    @property
    def is_each_window(self) -> bool:
        """Whether no rule says otherwise."""
        return not (self.interval_tokens or self.interval_s or self.start_imbalance)

    @property
    def rearms_below(self) -> float:
        """Imbalance below which it may trigger again."""
        return self.rearm_imbalance or self.start_imbalance


@dataclass(frozen=True)
class Observed:
    """The latest window, as the triggers see it."""

    now: float  # seconds since the epoch
    tokens: int  # prefill tokens, in the windows since the last call
    imbalance: float  # mean over layers
    generation: int  # generation of the serving placement
    committed_at: float  # seconds since the epoch: the commit of the serving placement
    is_rebalanced: bool  # whether a plan led to what serves; a first placement cools nothing down
    is_changed: bool  # whether the load changed suddenly since the last plan
    is_draining: bool = False  # whether a rank that is to hold nothing holds experts


@dataclass(frozen=True)
class TriggerState:
    """What was seen since the last plan. ``-1``: nothing was planned yet."""

    planned_at: float = 0.0
    tokens: int = 0
    generation: int = -1
    is_armed: bool = True
    is_member_change: bool = False  # ranks came or went


def due(
    rules: TriggerRules, state: TriggerState, seen: Observed
) -> tuple[Trigger | None, TriggerState]:
    """The trigger of a plan that is due now, or None; and the state that follows.

    A clock that was set back counts as no time: intervals begin again.
    """
    planned_at = min(state.planned_at, seen.now)
    state = replace(state, tokens=state.tokens + seen.tokens, planned_at=planned_at)
    if seen.imbalance < rules.rearms_below or seen.generation != state.generation:
        state = replace(state, is_armed=True)
    trigger = _trigger(rules, state, seen)
    cools = seen.is_rebalanced and 0 <= seen.now - seen.committed_at < rules.cool_down_s
    if trigger is None or (cools and trigger not in ("membership", "drain")):
        return None, state
    is_armed = not (rules.start_imbalance and seen.imbalance >= rules.start_imbalance)
    return trigger, TriggerState(seen.now, 0, seen.generation, is_armed)


def _trigger(rules: TriggerRules, state: TriggerState, seen: Observed) -> Trigger | None:
    if state.is_member_change:
        return "membership"
    if seen.is_draining:
        return "drain"
    if rules.is_each_window:
        return "load"
    if state.generation < 0:
        return "first"
    if seen.is_changed:
        return "change"
    if rules.interval_tokens and state.tokens >= rules.interval_tokens:
        return "interval"
    if rules.interval_s and seen.now - state.planned_at >= rules.interval_s:
        return "interval"
    if rules.start_imbalance and state.is_armed and seen.imbalance >= rules.start_imbalance:
        return "imbalance"
    return None


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
    whole, gained = proposal.before - proposal.after, proposal.before - float(after.mean())
    part = gained / whole if np.isfinite(whole) and whole > 0 else 1.0  # of the plan's gain
    return replace(
        proposal,
        target=few,
        after_per_layer=after,
        decision=Decision.MOVE if moves else Decision.RESPLIT,
        reason=f"{proposal.reason}; {most} of {int(changes.sum())} layers, those that gain most",
        expected_gain=proposal.expected_gain * part,
    )
