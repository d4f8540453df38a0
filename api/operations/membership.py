"""Operations on which ranks serve: retire, scale up and down, and what the loss of ranks leaves.

A change is asked for once, with an id. The controller drains ranks that leave, `eplb launch` starts
ranks that are wanted, and the ranks change their group between two steps. An orchestrator polls
``GET`` until the operation has ended, and deletes ranks that are listed as safe to delete.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
from fastapi import Response
from pydantic import ConfigDict, Field

from api.http.arguments import (
    MAX_ID,
    MOST_LASTS_S,
    MOST_RANK,
    Rank,
    Reason,
    ReasonRequest,
    left_out,
)
from api.http.dependencies import (
    Asker,
    Audited,
    Epoch,
    Service,
    audited,
    changing,
    operator,
    reading,
    tag_with,
)
from api.http.document import refused_with
from api.http.problems import ProblemType, Refused
from api.http.service import AdminService
from api.monitor.membership import (
    MOST_UNCOVERED,
    LossAnswer,
    Membership,
    MembershipPlan,
    UncoveredExpert,
    membership_of,
)
from api.operations.commands import Answer, Ask, command
from api.operations.placements import shape_of_run
from api.terminal.printing import WHY, at, line, numbers
from eplb.clock import duration_text
from eplb.core.cost import CostModel
from eplb.core.model import ModelShape, named_ranks
from eplb.core.placement import uncovered_experts
from eplb.core.topology import Topology
from eplb.declared import Meaning
from eplb.errors import PlacementError, StaleRevision, TopologyError
from eplb.fitting import fitting_cordons
from eplb.measure import imbalance
from eplb.migration.membership import leavers, shortage, wanted_for
from eplb.migration.survivors import survive
from rebalance.controller.plans.planner_request import cordons_in_force
from telemetry.state.membership import MembershipRefused
from telemetry.state.placements import CommittedPlacement
from telemetry.state.runs import GROUP_STAYS
from telemetry.state.store import StateStore

reads, acts = reading(), changing(operator, audited)

MOST_RANKS = 4096
MOST_LOST = 4096  # characters
# Ten times what a rank may take to meet the others (120 s) and to load its experts (60 s). Ranks of
# the demo's size serve 1.2 s after the request, 2.6 s at most of 20.
WITHIN_S = 1800
NUMBERS = r"^\d{1,6}(,\d{1,6})*$"
ID = r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,63}$"
ChangeId = Annotated[str, Meaning("id of the operation", pattern=ID, example="scale-down-7")]


# -- what the loss of ranks would leave


@reads.get(
    "/membership/feasibility",
    responses=refused_with(ProblemType.NO_RUN, ProblemType.NO_SUCH_RANK),
)
def feasibility(
    service: Service,
    lose: Annotated[
        str, Meaning("numbers of ranks", pattern=NUMBERS, max_length=MOST_LOST, example="3,5")
    ],
) -> LossAnswer:
    """What the loss of ranks would leave. Whether the ranks that are left could hold every expert,
    which have no other replica, and what it takes to serve on.
    """
    model, topology = shape_of_run(service.store)
    lost = sorted({int(rank) for rank in lose.split(",")})
    check_rank(lost[-1], topology)
    return _loss(service, model, topology, committed_of(service.store), lost)


def _loss(
    service: AdminService,
    model: ModelShape,
    topology: Topology,
    committed: CommittedPlacement,
    lost: list[int],
    joining: Collection[int] = (),
) -> LossAnswer:
    """What the loss of ranks leaves, beside ranks that join without experts."""
    is_left = topology.serving.copy()
    is_left[lost] = False
    has_room = is_left.copy()
    has_room[list(joining)] = True
    spare = int(topology.slots_of_rank[has_room].sum()) - model.num_experts
    uncovered = uncovered_experts(committed.placement, topology, is_left)
    shown = [
        UncoveredExpert(model.layer_ids[layer], expert)
        for layer, expert in uncovered[:MOST_UNCOVERED]
    ]
    refills, refill_s, balance = 0, 0.0, None
    try:
        found = survive(committed.placement, topology, lost)
    except PlacementError:
        assert spare < 0 or joining or not is_left.any(), "ranks with enough slots serve on"
    else:
        refills = len(found.refills)
        most = max(len(found.refills_of(rank)) for rank in range(topology.num_ranks))
        rate = float(service.store.live().text("bytes_per_s") or CostModel.bytes_per_s)
        refill_s = round(most * model.expert_bytes / rate, 4)
        service.reader.reading()
        if windows := service.monitor.windows(1):
            per_layer = imbalance(windows[-1].tokens, found.target, found.topology)
            balance = round(float(per_layer.mean()), 4)
    size = refills * model.expert_bytes
    return LossAnswer(
        lost, spare >= 0, spare, len(uncovered), shown, refills, size, refill_s, balance
    )


def check_rank(rank: int, topology: Topology) -> None:
    """Refuse a number that is no rank of the run."""
    if rank >= topology.num_ranks:
        why = f"there is no rank {rank}, expected 0..{topology.num_ranks - 1}"
        raise Refused(ProblemType.NO_SUCH_RANK, why)


def committed_of(store: StateStore) -> CommittedPlacement:
    """Give the placement that serves; refuse where there is none."""
    found = store.committed()
    if found is None:
        raise Refused(ProblemType.NO_RUN, "no placement was committed yet, expected one")
    return found


# -- which ranks serve


class MembershipRequest(ReasonRequest):
    """Ranks that should serve, by exactly one of ``to``, ``retire`` and ``ranks``."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [{"required": ["to"]}, {"required": ["retire"]}, {"required": ["ranks"]}],
            "examples": [
                {"id": "scale-down-7", "to": 6, "reason": "night", "dry_run": False},
                {"retire": [3], "reason": "its GPU throttles"},
            ],
        }
    )

    id: Annotated[
        str | None,
        Meaning(
            "id of the operation: a repetition gives the same operation; null: an id is generated",
            pattern=ID,
            max_length=64,
        ),
    ] = None
    to: Annotated[
        int,
        Meaning(
            "number of ranks that should serve; which of them is chosen",
            at_least=1,
            at_most=MOST_RANK,
        ),
    ] = Field(default_factory=left_out)
    retire: Annotated[
        list[Rank],
        Meaning("ranks that should leave", min_length=1, max_length=MOST_RANKS),
    ] = Field(default_factory=left_out)
    ranks: Annotated[
        list[Rank],
        Meaning("ranks that should serve, all of them", min_length=1, max_length=MOST_RANKS),
    ] = Field(default_factory=left_out)
    dry_run: Annotated[bool, Meaning("report what the change would do, and change nothing")] = True
    within_s: Annotated[
        int,
        Meaning(
            "time after which an open operation fails: the earlier ranks are wanted again",
            at_least=1,
            at_most=MOST_LASTS_S,
        ),
    ] = WITHIN_S


@reads.get("/membership", responses=refused_with(ProblemType.NO_RUN))
def membership(service: Service, response: Response) -> Membership:
    """Which ranks serve. Members, wanted ranks, the latest operation and its phase, and ranks that
    are safe to delete; the `ETag` is the epoch.
    """
    return _membership(service.store, response)


def _membership(store: StateStore, response: Response) -> Membership:
    _, topology = shape_of_run(store)
    committed, epoch = store.committed(), store.epoch()
    tag_with(response, epoch)
    placement = None if committed is None else committed.placement
    change, ready = store.membership_change(), [joiner.rank for joiner in store.joiners()]
    now = store.backend.now()
    return membership_of(topology, placement, change, epoch, store.live(), ready, now)


@acts.post(
    "/membership",
    responses=refused_with(
        ProblemType.NO_RUN,
        ProblemType.NO_SUCH_RANK,
        ProblemType.IMPOSSIBLE_MEMBERSHIP,
        ProblemType.OTHER_OPERATION,
        ProblemType.MEMBERSHIP_CHANGED,
    ),
)
def change_membership(
    service: Service,
    asker: Asker,
    audit: Audited,
    response: Response,
    expected: Epoch,
    body: MembershipRequest,
) -> MembershipPlan:
    """Retire ranks, scale up or down. A dry run unless told otherwise: whether it can be done, what
    has to move, and the balance afterwards. Repeated with its `id` it is done once.
    """
    store = service.store
    asked = body.model_dump(include={"to", "retire", "ranks"}, exclude_unset=True)
    if len(asked) != 1:
        found = ", ".join(asked) or "none"
        why = f"the body names {found} of to, retire and ranks, expected one of them"
        raise Refused(ProblemType.INVALID_REQUEST, why)
    model, topology = shape_of_run(store)
    serving = committed_of(store)
    known = store.change_of_id(body.id) if body.id else None
    epoch = store.epoch()
    if known is None and expected not in (None, epoch):
        why = f"the epoch is {epoch}, expected {expected} as in If-Match: read the membership again"
        raise Refused(ProblemType.MEMBERSHIP_CHANGED, why)
    # A repeated request was checked the first time; the ranks may have changed since.
    wanted = _wanted(store, body, model, topology, serving) if known is None else known.wanted
    refusal = _refusal(store, model, topology, serving, wanted) if known is None else ""
    members = set(topology.alive.nonzero()[0].tolist())
    operation = None
    if not body.dry_run:
        if refusal:
            raise Refused(ProblemType.IMPOSSIBLE_MEMBERSHIP, refusal)
        try:
            operation = store.change_membership(
                body.id or secrets.token_hex(4),
                wanted,
                asked=asked,
                alive=topology.alive.tolist(),
                reason=body.reason,
                by=asker.name,
                expected=expected,
                within_s=body.within_s,
            )
        except MembershipRefused as exc:
            raise Refused(ProblemType.OTHER_OPERATION, str(exc)) from exc
        except StaleRevision as exc:
            raise Refused(ProblemType.MEMBERSHIP_CHANGED, str(exc)) from exc
    retires, joins = sorted(members - set(wanted)), sorted(set(wanted) - members)
    loss = _loss(service, model, topology, serving, retires, joins)
    tag_with(response, store.epoch())
    done = "a dry run" if operation is None else f"operation {operation.id}"
    audit.describe(f"{done}, so that {named_ranks(wanted)} serve")
    return MembershipPlan(body.dry_run, refusal, wanted, joins, retires, loss, operation)


def _wanted(
    store: StateStore,
    body: MembershipRequest,
    model: ModelShape,
    topology: Topology,
    serving: CommittedPlacement,
) -> tuple[int, ...]:
    """Give the ranks that a request asks for.

    Raises:
        Refused: it names a rank that there is not, or no such number of ranks can serve.
    """
    until_now = store.wanted_ranks()
    before = set(range(topology.num_ranks) if until_now is None else until_now)
    if "to" not in body.model_fields_set:
        for rank in body.ranks or body.retire or ():
            check_rank(rank, topology)
        return tuple(sorted(set(body.ranks or before - set(body.retire or ()))))
    limits = model.num_expert_groups, _spare_slots(store)
    try:
        return wanted_for(body.to, before, serving.placement, topology, *limits)
    except TopologyError as exc:
        raise Refused(ProblemType.NO_SUCH_RANK, str(exc)) from exc
    except PlacementError as exc:
        raise Refused(ProblemType.IMPOSSIBLE_MEMBERSHIP, str(exc)) from exc


def _spare_slots(store: StateStore) -> int:
    return int(store.live().text("spare_slots") or 0)


def _refusal(
    store: StateStore,
    model: ModelShape,
    topology: Topology,
    serving: CommittedPlacement,
    wanted: tuple[int, ...],
) -> str:
    """Why these ranks cannot become those that serve; "": they can."""
    placement, leaving = serving.placement, leavers(wanted, topology)
    if why := shortage(wanted, model.num_experts, topology, _spare_slots(store)):
        return why
    # Ranks that join take experts before the others leave.
    alive = topology.alive | np.isin(np.arange(topology.num_ranks), wanted)
    cordons = cordons_in_force(store.live().text("cordons"), leaving)
    found = fitting_cordons(
        cordons, placement, replace(topology, alive=alive), model.num_expert_groups
    )
    stuck = tuple(f"rank {rank} " for rank in leaving)
    if unmet := [one for one in found.unmet if stuck and one.startswith(stuck)]:
        return unmet[0]
    info = store.current_run()
    notes = {one.rank: one.detail for one in store.rank_states(info.run)} if info else {}
    for rank in topology.alive.nonzero()[0].tolist():
        why = notes.get(rank, {}).get(GROUP_STAYS, "it does not tell that its group can change")
        if why:
            return (
                f"rank {rank} cannot change its group while it serves: {why}; start all ranks "
                "again, with agent.serve_on or with other [topology] settings"
            )
    return ""


@acts.post(
    "/membership/{change_id}/cancel",
    responses=refused_with(ProblemType.NO_RUN, ProblemType.OTHER_OPERATION),
)
def cancel_membership(
    service: Service, asker: Asker, response: Response, change_id: ChangeId, body: ReasonRequest
) -> Membership:
    """Cancel an open operation on the ranks. The ranks that were wanted before it are wanted again;
    those that have left by then come back.
    """
    store, why = service.store, f"cancelled by {asker.name}: {body.reason}"
    if not store.end_membership_change(change_id, "cancelled", why=why):
        known = store.change_of_id(change_id)
        found = "there is no such operation" if known is None else f"it is {known.ended}"
        why = f"operation {change_id!r} cannot be cancelled: {found}, expected an open one"
        raise Refused(ProblemType.OTHER_OPERATION, why)
    return _membership(store, response)


# -- commands

Yes = Annotated[bool, Meaning("carry the change out; without it, report what the change would do")]
AtEpoch = Annotated[
    int | None,
    Meaning(
        "refuse the change at another epoch of the ranks; null: at none", at_least=0, at_most=MAX_ID
    ),
]
Within = Annotated[
    int,
    Meaning("seconds after which an open operation fails", at_least=1, at_most=MOST_LASTS_S),
]
Named = Annotated[
    str | None,
    Meaning(
        "id of the operation, which is done once however often it is repeated; null: generated"
    ),
]


def show_plan(found: dict[str, Any]) -> int:
    """Print what a change of the ranks does; 1: it cannot be done."""
    loss = found["loss"]
    line(
        f"serve afterwards: {named_ranks(found['wanted'])}",
        f"join: {named_ranks(found['joins'])}; retire: {named_ranks(found['retires'])}",
        f"experts that have to move: {loss['uncovered']}, {loss['refill_bytes'] / 1e6:.1f} MB, "
        f"{duration_text(loss['refill_s'])} on the rank with most; spare slots in a layer: "
        f"{loss['spare_slots']}",
    )
    if loss["imbalance"] is not None:
        line(f"imbalance without them, before the next plan: {loss['imbalance']:.3f}")
    if found["refusal"]:
        line(f"it cannot be done: {found['refusal']}")
        return 1
    if found["is_dry_run"]:
        line("nothing was changed; --yes carries it out")
    else:
        one = found["operation"]
        line(f"operation {one['id']} is {one['ended'] or 'open'}; eplb membership follows it")
    return 0


def ask_to_scale(
    ask: Ask,
    to: Annotated[int, Meaning("number of ranks that should serve", at_least=1, at_most=MOST_RANK)],
    yes: Yes = False,
    id: Named = None,
    epoch: AtEpoch = None,
    within: Within = WITHIN_S,
    reason: Reason = WHY,
) -> Answer:
    """Have another number of ranks serve; which of them join or leave is chosen for few moves.
    Exit status 1: it cannot be done.
    """
    named = {"to": to, "id": id, "reason": reason, "within_s": within}
    return ask(change_membership, **named, dry_run=not yes, if_match=epoch)


def ask_to_retire(
    ask: Ask,
    ranks: Annotated[str, Meaning("numbers of ranks, with commas")],
    yes: Yes = False,
    id: Named = None,
    epoch: AtEpoch = None,
    within: Within = WITHIN_S,
    reason: Reason = WHY,
) -> Answer:
    """Move every expert off ranks, and have them leave for good. Exit status 1: it cannot be
    done.
    """
    named = {
        "retire": list(numbers("RANKS", ranks, least=0)),
        "id": id,
        "reason": reason,
        "within_s": within,
    }
    return ask(change_membership, **named, dry_run=not yes, if_match=epoch)


def show_membership(found: dict[str, Any]) -> None:
    """Print which ranks serve and should."""
    line(
        f"epoch {found['epoch']}; serve: {named_ranks(found['members'])}; wanted: "
        f"{named_ranks(found['wanted'])}",
        found["phase"] + (f": {found['waits']}" if found["waits"] else ""),
        f"safe to delete: {named_ranks(found['safe_to_delete'])}",
    )
    if (one := found["operation"]) is not None:
        end = f"{one['ended']} at {at(one['ended_at'])}: {one['why']}" if one["ended"] else "open"
        if (left_s := found["left_s"]) is not None:
            end += f", fails in {left_s:.0f} s"
        line(
            f"operation {one['id']} since {at(one['time'])} by {one['by'] or 'the program'} for "
            f"{named_ranks(one['wanted'])} ({one['reason']}): {end}"
        )


command(
    "membership",
    "eplb membership; eplb membership --json",
    membership,
    show=show_membership,
    about="Show which ranks serve, the open operation and its phase, and ranks that are safe to "
    "delete.",
)
command(
    "scale",
    "eplb scale --to 6; eplb scale --to 6 --yes",
    ask_to_scale,
    of=change_membership,
    show=show_plan,
)
command(
    "retire",
    "eplb retire 3; eplb retire 3,5 --yes --reason 'change 4711'",
    ask_to_retire,
    of=change_membership,
    show=show_plan,
    positional=("ranks",),
)
command(
    "cancel-membership",
    "eplb cancel-membership scale-down-7",
    cancel_membership,
    show=show_membership,
)
