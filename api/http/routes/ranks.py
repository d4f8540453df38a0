"""Routes of ranks: what each holds, and which an operator keeps from experts.

Cordons are the live setting ``cordons``, so their revision is that of all live settings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from api.http.problems import ProblemType, Refused, documented
from api.http.requests import ReasonRequest
from api.http.routes.placements.answers import shape_of_run
from api.http.routes.request_parts import header_document, revision_of, service_of
from api.http.schemas import Answer
from eplb.errors import StaleRevision
from eplb.fitting.cordons import (
    Cordon,
    fitting_cordons,
    slots_in_use,
    sole_experts,
    uncovered_experts,
)
from rebalance.controller.plans.planner_request import read_cordons, written_cordons
from telemetry.state.live import LiveState
from telemetry.state.store import StateStore

if TYPE_CHECKING:
    from fastapi import APIRouter

MOST_RANK = 999_999
MOST_LOST, MOST_UNCOVERED = 4096, 1000  # characters; experts
MOST_TRIES = 8  # against other changes of live settings, where the request names no revision
RankNumber = Annotated[int, Field(ge=0, le=MOST_RANK, examples=[3])]
IF_MATCH = header_document(
    "if-match",
    "the ETag that was read; without it, or *: whatever the revision is",
    {"type": "string"},
)


class RankLine(Answer):
    """One rank, by the placement that serves."""

    rank: int
    node: int
    host: int
    failure_domain: int
    state: Literal["open", "cordoned", "draining", "drained"] = Field(
        description="open: takes experts; draining: holds experts that are to leave"
    )
    experts: int = Field(description="slots of all layers that hold an expert")
    sole_experts: int = Field(description="experts of all layers that no other rank holds")


class RanksAnswer(Answer):
    """All ranks of the current run; the revision is the entity tag too."""

    revision: int = Field(description="of the live settings, of which cordons are one")
    ranks: list[RankLine]
    unmet: list[str] = Field(description="why plans leave a cordon out")
    waits: str = Field(description="why draining ranks keep their experts now; empty: they do not")
    time: float | None = Field(description="of the latest change; null: those of the configuration")
    reason: str | None


class UncoveredExpert(Answer):
    """An expert that no rank would hold."""

    layer: int
    expert: int


class LossAnswer(Answer):
    """What the loss of ranks would leave, by the placement that serves."""

    lost: list[int]
    is_feasible: bool = Field(description="whether the other ranks have a slot for each expert")
    spare_slots: int = Field(
        description="of the other ranks in each layer, beyond one for each expert; negative: so "
        "many experts of each layer would have none"
    )
    uncovered: int = Field(
        description="experts of all layers that no other rank holds: nothing serves their tokens "
        "until their weights are read again"
    )
    uncovered_experts: list[UncoveredExpert] = Field(
        description=f"by layer and expert, at most {MOST_UNCOVERED}"
    )


def get_loss(
    request: Request,
    lose: Annotated[
        str, Field(pattern=r"^\d{1,6}(,\d{1,6})*$", max_length=MOST_LOST, examples=["3,5"])
    ],
) -> LossAnswer:
    """Whether the ranks that are left could hold every expert, and which have no other replica."""
    store = service_of(request).store
    model, topology = shape_of_run(store)
    lost = sorted({int(rank) for rank in lose.split(",")})
    if lost[-1] >= topology.num_ranks:
        why = f"there is no rank {lost[-1]}, expected 0..{topology.num_ranks - 1}"
        raise Refused(ProblemType.NO_SUCH_RANK, why)
    committed = store.committed()
    if committed is None:
        raise Refused(ProblemType.NO_RUN, "no placement was committed yet, expected one")
    is_left = topology.serving.copy()
    is_left[lost] = False
    spare = int(topology.usable_slots[is_left].sum()) - model.num_experts
    uncovered = uncovered_experts(committed.placement, topology, is_left)
    return LossAnswer(
        lost=lost,
        is_feasible=spare >= 0,
        spare_slots=spare,
        uncovered=len(uncovered),
        uncovered_experts=[
            UncoveredExpert(layer=layer, expert=expert)
            for layer, expert in uncovered[:MOST_UNCOVERED]
        ],
    )


def get_ranks(request: Request, response: Response) -> RanksAnswer:
    """Node, state and experts of each rank; the `ETag` is for changes."""
    store = service_of(request).store
    return _answered(store, store.live(), response)


def post_cordon(
    request: Request, rank: RankNumber, body: ReasonRequest, response: Response
) -> RanksAnswer:
    """The rank keeps what it holds and takes nothing new, from the next plan on."""
    return _change(request, rank, Cordon.CORDON, body.reason, response)


def post_drain(
    request: Request, rank: RankNumber, body: ReasonRequest, response: Response
) -> RanksAnswer:
    """The next plan moves every expert off the rank, whatever that costs in balance."""
    return _change(request, rank, Cordon.DRAIN, body.reason, response)


def post_uncordon(
    request: Request, rank: RankNumber, body: ReasonRequest, response: Response
) -> RanksAnswer:
    """The rank takes experts again; plans bring them where they gain."""
    return _change(request, rank, None, body.reason, response)


def add_rank_routes(watch: APIRouter, act: APIRouter) -> None:
    """Add the routes."""
    watch.get("/ranks", summary="Ranks", responses=documented(ProblemType.NO_RUN))(get_ranks)
    watch.get(
        "/membership/feasibility",
        summary="What the loss of ranks would leave",
        responses=documented(ProblemType.NO_RUN, ProblemType.NO_SUCH_RANK),
    )(get_loss)
    refusals = (
        ProblemType.NO_SUCH_RANK,
        ProblemType.NO_RUN,
        ProblemType.IMPOSSIBLE_CORDON,
        ProblemType.SETTINGS_CHANGED,
        ProblemType.REQUEST_IN_PROGRESS,
    )
    for name, summary, handler in (
        ("cordon", "Place no further expert on a rank", post_cordon),
        ("drain", "Move every expert off a rank", post_drain),
        ("uncordon", "Let a rank take experts again", post_uncordon),
    ):
        act.post(
            f"/ranks/{{rank}}/{name}",
            summary=summary,
            responses=documented(*refusals),
            openapi_extra=IF_MATCH,
        )(handler)


def _change(
    request: Request, rank: int, cordon: Cordon | None, reason: str, response: Response
) -> RanksAnswer:
    store, expected = service_of(request).store, revision_of(request, is_required=False)
    for _ in range(MOST_TRIES):
        state = store.live()
        cordons = read_cordons(state.text("cordons"))
        if cordon is None:
            cordons.pop(rank, None)
        else:
            cordons[rank] = cordon
        _refuse_if_impossible(store, rank, cordon, cordons)
        text = written_cordons(cordons)
        revision = state.revision if expected is None else expected
        try:
            changed = store.change_live({"cordons": text}, expected=revision, reason=reason)
        except StaleRevision as exc:
            why = exc
            if expected is not None:
                break
        else:
            return _answered(store, changed, response)
    raise Refused(ProblemType.SETTINGS_CHANGED, str(why)) from why


def _refuse_if_impossible(
    store: StateStore, rank: int, cordon: Cordon | None, cordons: dict[int, Cordon]
) -> None:
    model, topology = shape_of_run(store)
    # A cordon may outlive its rank: it can be removed all the same.
    if cordon is None:
        return
    if rank >= topology.num_ranks:
        why = f"there is no rank {rank}, expected 0..{topology.num_ranks - 1}"
        raise Refused(ProblemType.NO_SUCH_RANK, why)
    committed = store.committed()
    if committed is None:
        raise Refused(ProblemType.NO_RUN, "no placement was committed yet, expected one")
    serving = committed.placement
    found = fitting_cordons(cordons, serving, topology, model.num_expert_groups)
    if found.unmet:
        raise Refused(ProblemType.IMPOSSIBLE_CORDON, found.unmet[-1])


def _answered(store: StateStore, state: LiveState, response: Response) -> RanksAnswer:
    model, topology = shape_of_run(store)
    cordons, change = read_cordons(state.text("cordons")), state.changes.get("cordons")
    committed = store.committed()
    response.headers["ETag"] = f'"{state.revision}"'
    held = sole = [0] * topology.num_ranks
    unmet: tuple[str, ...] = ()
    if committed is not None:
        serving = committed.placement
        held = slots_in_use(serving, topology).sum(axis=0).tolist()
        sole = sole_experts(serving, topology).tolist()
        unmet = fitting_cordons(cordons, serving, topology, model.num_expert_groups).unmet
    lines = [
        RankLine(
            rank=rank,
            node=int(topology.node_of_rank[rank]),
            host=int(topology.host_of_rank[rank]),
            failure_domain=int(topology.failure_domain[rank]),
            state=_state(cordons.get(rank), held[rank]),
            experts=held[rank],
            sole_experts=sole[rank],
        )
        for rank in range(topology.num_ranks)
    ]
    is_draining = any(line.state == "draining" for line in lines)
    return RanksAnswer(
        revision=state.revision,
        ranks=lines,
        unmet=list(unmet),
        waits=_waits(state) if is_draining else "",
        time=change.time if change else None,
        reason=change.reason if change else None,
    )


def _state(cordon: Cordon | None, held: int) -> Literal["open", "cordoned", "draining", "drained"]:
    if cordon is None:
        return "open"
    if cordon is Cordon.CORDON:
        return "cordoned"
    return "draining" if held else "drained"


def _waits(state: LiveState) -> str:
    if not state.control.movement:
        return "movement is off"
    if state.control.observe:
        return "observe is on"
    waits = {"observe": "the stage is observe", "propose": "the stage is propose: approve the plan"}
    return waits.get(state.text("stage"), "")
