"""The three phases of a migration on one rank, as a pure state machine.

              adopted by every rank          every byte checked
    IDLE ---> PRELOAD ---------------> STAGE ----------------> SWAP ---> IDLE
                 |                       | ^                   |  |
                 |                       | +--- next bytes ----+  |
                 +-------------------> ABORTED <------------------+

preload  disk -> host memory; harmless, so it starts as soon as the plan is seen.
stage    into the staging ring (copy mode) or into EMPTY slots (flip mode); starts once a vote shows
         that every rank works on this plan, since only then has every rank finished the plan
         before, and its slots may be read, or written where they are EMPTY.
swap     into the live slots (copy mode) and into the routing table, at a step boundary, by the
         verdict of a vote alone.

A transaction may read or write a slot that an earlier one of its plan changes. It is staged one
vote later, when a verdict shows that the earlier one is complete on every rank (``may_stage``). In
flip mode that makes a slot's life a circle, in which bytes are written only where no token goes:

    LIVE --swap--> DRAINING --a verdict: applied everywhere--> SPARE --stage--> FILLING
      ^                                                                            |
      +------------------------- swap -------------------- READY <-- digest right -+

Nothing here does I/O. Each function takes a state and what happened, and returns the next state;
``rebalance/stage/mover.py`` and ``rebalance/swap/swapper.py`` do what the state asks for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from eplb.errors import ConfigError, RankError
from eplb.migration.recovery import Recovery
from rebalance.protocol.ballot import NO_PLAN, Ballot, Verdict

ELSEWHERE = "requested by another rank"  # the only reason of an abort that a verdict carries


class Phase(Enum):
    """Where a rank stands in a migration."""

    IDLE = "idle"
    PRELOAD = "preload"
    STAGE = "stage"
    SWAP = "swap"
    ABORTED = "aborted"


NEXT: dict[Phase, frozenset[Phase]] = {
    Phase.IDLE: frozenset({Phase.PRELOAD}),
    Phase.PRELOAD: frozenset({Phase.STAGE, Phase.ABORTED}),
    Phase.STAGE: frozenset({Phase.SWAP, Phase.ABORTED}),
    Phase.SWAP: frozenset({Phase.STAGE, Phase.IDLE, Phase.ABORTED}),
    Phase.ABORTED: frozenset({Phase.IDLE}),
}


@dataclass(frozen=True)
class PlanRef:
    """The phase machine's view of a migration."""

    plan_id: int
    plan_hash: int
    base_generation: int
    num_transactions: int
    transactions_per_commit: int
    weights_version: int = 0  # of the weights that it moves


@dataclass(frozen=True)
class RankPhase:
    """The whole state of the machine. Counts are of the plan's transactions, in order."""

    generation: int
    phase: Phase = Phase.IDLE
    plan: PlanRef | None = None
    is_adopted: bool = False  # a vote showed that every rank works on this plan
    is_preloaded: bool = False
    prepared: int = 0  # staged and checked
    swapped: int = 0  # ordered into the live slots
    applied: int = 0  # complete there, on the device
    applied_everywhere: int = 0  # the smallest ``applied`` that a verdict on this plan has named
    abort_reason: str = ""  # why this rank requests an abort of the plan
    refused_up_to: int = NO_PLAN  # plans with ids up to this are never adopted (again)
    frozen_reason: str = ""  # why this rank adopts no plan any more
    weights_version: int = 0  # of the weights that this rank serves
    next_weights: int | None = None  # their version while they are being replaced, else None


@dataclass(frozen=True)
class Swap:
    """The swap that a verdict orders: a half-open range of transactions."""

    first: int
    last: int


def see_plan(state: RankPhase, plan: PlanRef) -> RankPhase:
    """Start on a published plan, unless it is refused, stale, or another is being worked on.

    A plan for other weights than those served is stale too: its bytes must never be swapped in.
    """
    if state.plan is not None or state.frozen_reason or plan.plan_id <= state.refused_up_to:
        return state
    if plan.base_generation != state.generation or plan.weights_version != state.weights_version:
        return state
    return transition(replace(state, plan=plan), Phase.PRELOAD)


def preloaded(state: RankPhase, plan_id: int) -> RankPhase:
    """Note that the host holds every record that this rank takes from it."""
    if not _works_on(state, plan_id):
        return state
    return advance(replace(state, is_preloaded=True))


def staged(state: RankPhase, plan_id: int, num_transactions: int) -> RankPhase:
    """Note that the first ``num_transactions`` are staged here and their digests are right."""
    if not _works_on(state, plan_id):
        return state
    assert num_transactions > state.prepared, "transactions are staged in order, once"
    return advance(replace(state, prepared=num_transactions))


def may_stage(state: RankPhase, reads_after: int) -> bool:
    """Return whether bytes that need ``reads_after`` applied transactions may be staged."""
    return (
        state.plan is not None
        and state.phase is not Phase.ABORTED
        and not state.abort_reason
        and state.is_adopted
        and state.is_preloaded
        and state.applied_everywhere >= reads_after
    )


def completed(state: RankPhase, plan_id: int, num_transactions: int) -> RankPhase:
    """Note that the device is done with the swap of the first ``num_transactions``.

    Not when it was only ordered: the slots that it freed are read until then, and those that it
    filled are not yet what they will be.
    """
    if not _works_on(state, plan_id):
        return state
    assert num_transactions <= state.swapped, "only what was ordered can be complete"
    return replace(state, applied=num_transactions)


def want_abort(state: RankPhase, plan_id: int, reason: str) -> RankPhase:
    """Ask for the plan to be dropped; the next verdict drops it, on every rank at once."""
    if not _works_on(state, plan_id) or state.abort_reason:
        return state
    return replace(state, abort_reason=reason)


def freeze(state: RankPhase, reason: str) -> RankPhase:
    """Adopt no further plan, and request an abort of the present one. Serving continues."""
    frozen = replace(state, frozen_reason=state.frozen_reason or reason)
    return want_abort(frozen, state.plan.plan_id, reason) if state.plan else frozen


def begin_update(state: RankPhase, version: int) -> RankPhase:
    """Start to replace the weights: no step runs and no plan is adopted until the new ones serve.

    Raises:
        ConfigError: an update is under way, or versions do not grow.
    """
    if state.next_weights is not None:
        raise ConfigError(
            f"an update to weights version {state.next_weights} is under way, expected it to "
            f"end before one to version {version} begins"
        )
    if version <= state.weights_version:
        raise ConfigError(
            f"weights version {version} follows {state.weights_version}, expected a greater one"
        )
    return replace(state, next_weights=version)


def serve_weights(state: RankPhase) -> RankPhase:
    """Serve the new weights: no plan made for the old ones is adopted any more."""
    assert state.phase is Phase.IDLE, "weights are replaced while nothing moves"
    assert state.next_weights is not None, "only an update that began can end"
    return replace(state, weights_version=state.next_weights, next_weights=None)


def aborted(state: RankPhase) -> RankPhase:
    """Note that nothing writes to the staging ring any more: it may be used again."""
    assert state.phase is Phase.ABORTED, f"nothing was aborted in phase {state.phase.value}"
    return transition(_forget(state), Phase.IDLE)


def ballot(
    state: RankPhase, *, step: int, membership: int, halt: bool, next_group: int = 0
) -> Ballot:
    """Cast this rank's vote. An aborted plan is voted on as none: its copies only drain.

    The weights' version is negative while they are being replaced. If not all ranks update at once,
    the versions differ, and every rank detects the disagreement.
    """
    plan = state.plan if state.phase is not Phase.ABORTED else None
    version = state.weights_version if state.next_weights is None else -state.next_weights
    return Ballot(
        step=step,
        generation=state.generation,
        membership=membership,
        weights_version=version,
        plan_id=plan.plan_id if plan else NO_PLAN,
        plan_hash=plan.plan_hash if plan else 0,
        prepared=state.prepared if plan else 0,
        applied=state.applied if plan else 0,
        abort=bool(plan and state.abort_reason),
        halt=halt,
        next_group=next_group,
    )


def read_verdict(state: RankPhase, cast: Ballot, verdict: Verdict) -> tuple[RankPhase, Swap | None]:
    """Draw the consequence of a verdict on the ballot that this rank had cast for it.

    Every rank that reads one verdict draws the same consequence for the plan it voted on.

    Returns:
        The next state, and the transactions to swap now, if any.

    Raises:
        RankError: ranks are at different steps; no rank may run another one.
    """
    if verdict.step is None:
        raise RankError(
            f"ranks are at different steps, this one voted at step {cast.step}, expected the same "
            "on all: a forward pass was run without its hook, or on some ranks only"
        )
    if verdict.step != cast.step:
        raise RankError(
            f"a verdict of step {verdict.step} was read for the vote of step {cast.step}, expected "
            "each vote's own: one was repeated or lost"
        )
    disagreement = _disagreement(verdict)
    if disagreement:
        frozen = freeze(state, disagreement)
        return drop(frozen, verdict.newest_plan_id, disagreement), None
    if verdict.unwanted_up_to != NO_PLAN:
        reason = state.abort_reason or ELSEWHERE
        return drop(state, verdict.unwanted_up_to, reason), None
    if not verdict.plan_hash or not _voted_on_current(state, cast):
        return state, None
    assert state.plan is not None, "a plan that was voted on is dropped only by a verdict"
    most = state.swapped + state.plan.transactions_per_commit
    everywhere = max(state.applied_everywhere, verdict.applied)
    state = advance(replace(state, is_adopted=True, applied_everywhere=everywhere))
    last = min(verdict.prepared, most)
    if last <= state.swapped:
        return state, None
    order = Swap(state.swapped, last)
    return replace(state, swapped=last), order


def finish_swap(state: RankPhase) -> RankPhase:
    """Move on after ordered transactions were copied: to the next bytes, or to the end."""
    assert state.plan is not None, "a swap belongs to a plan"
    if state.swapped < state.plan.num_transactions:
        return advance(state)
    committed = replace(
        _forget(state),
        generation=state.plan.base_generation + 1,
        refused_up_to=max(state.refused_up_to, state.plan.plan_id),
    )
    return transition(committed, Phase.IDLE)


def drop(state: RankPhase, up_to: int, reason: str) -> RankPhase:
    """Drop plans with ids up to one. Applied transactions stay, as a new generation."""
    state = replace(state, refused_up_to=max(state.refused_up_to, up_to))
    if state.plan is None or state.phase is Phase.ABORTED:
        return state
    if state.plan.plan_id > up_to:
        return state  # the verdict is about a plan before it
    generation = state.generation + (1 if state.swapped else 0)
    return transition(replace(state, generation=generation, abort_reason=reason), Phase.ABORTED)


def missed_verdicts(state: RankPhase, record: Recovery) -> list[tuple[Ballot, Verdict]]:
    """Return the verdicts that bring a survivor of a death to the record, as if read in time.

    First the swap that others have made and this rank has not, then the abort of the rest.
    """
    verdicts: list[tuple[Ballot, Verdict]] = []
    if state.plan is None or state.phase is Phase.ABORTED:
        return verdicts
    cast = ballot(state, step=0, membership=record.membership, halt=False)
    if state.plan.plan_id == record.plan_id and record.applied > state.swapped:
        verdicts.append(_unanimous(replace(cast, prepared=record.applied, abort=False)))
        if record.applied == state.plan.num_transactions:
            return verdicts
    return [*verdicts, _unanimous(replace(cast, abort=True))]


def _unanimous(cast: Ballot) -> tuple[Ballot, Verdict]:
    return cast, Verdict.decode(cast.encode())


def _forget(state: RankPhase) -> RankPhase:
    return replace(
        state,
        plan=None,
        is_adopted=False,
        is_preloaded=False,
        prepared=0,
        swapped=0,
        applied=0,
        applied_everywhere=0,
        abort_reason="",
    )


def advance(state: RankPhase) -> RankPhase:
    """Move between PRELOAD, STAGE and SWAP as the facts allow."""
    assert state.plan is not None, "only a plan has facts to settle"
    if not (state.is_adopted and state.is_preloaded):
        return state
    is_waiting_for_vote = state.prepared > state.swapped
    return transition(state, Phase.SWAP if is_waiting_for_vote else Phase.STAGE)


def transition(state: RankPhase, phase: Phase) -> RankPhase:
    """Enter a phase; an assertion fails if ``NEXT`` does not allow it."""
    if phase is state.phase:
        return state
    assert phase in NEXT[state.phase], f"{state.phase.value} cannot become {phase.value}"
    return replace(state, phase=phase)


def _works_on(state: RankPhase, plan_id: int) -> bool:
    """Return whether updates of a plan still apply; those of a dropped plan do not."""
    return (
        state.plan is not None
        and state.plan.plan_id == plan_id
        and state.phase is not Phase.ABORTED
    )


def _voted_on_current(state: RankPhase, cast: Ballot) -> bool:
    return _works_on(state, cast.plan_id)


def _disagreement(verdict: Verdict) -> str:
    for name in ("generation", "membership", "weights_version"):
        if getattr(verdict, name) is None:
            return f"ranks disagree on the {name.replace('_', ' ')}, expected the same everywhere"
    return ""
