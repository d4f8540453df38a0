"""Routes of what moves experts: rebalances, rollbacks, proposals; and of explanations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from api.http.problems import ProblemType, documented
from api.http.proposals import Proposals
from api.http.requests import (
    MAX_ID,
    ExplainRequest,
    ProposalRequest,
    ReasonRequest,
    RebalanceRequest,
    RollbackRequest,
)
from api.http.routes.request_parts import actor_of, header_document, service_of
from api.http.schemas import ProposalAnswer, ProposalLine, ProposalsPage, TaskAnswer
from api.http.service import ANY
from telemetry.state.proposals import ProposalState

if TYPE_CHECKING:
    from fastapi import APIRouter

ProposalId = Annotated[int, Field(ge=0, le=MAX_ID)]
# No pattern: what is no tag of the generation that serves is a precondition that fails.
IF_GENERATION = header_document(
    "if-match", "the generation that must serve, in quotes; *: any", {"type": "string"}
)
NOT_YET: dict[int | str, dict[str, Any]] = {
    202: {"model": TaskAnswer, "description": "Not done yet; see Location"}
}
OF_TASKS = (
    ProblemType.CONTROLLER_REFUSED,
    ProblemType.NO_LOAD,
    ProblemType.NO_PLAN,
    ProblemType.TASK_EXPIRED,
    ProblemType.TASK_ABANDONED,
    ProblemType.TASK_CANCELLED,
    ProblemType.REQUEST_IN_PROGRESS,
)
OF_MOVES = (
    *OF_TASKS,
    ProblemType.MOVEMENT_OFF,
    ProblemType.MIGRATION_OPEN,
    ProblemType.GENERATION_MOVED_ON,
    ProblemType.CANNOT_SERVE,
    ProblemType.NOT_PUBLISHED,
    ProblemType.IMPOSSIBLE_THROTTLE,
    ProblemType.NO_SUCH_PLACEMENT,
)
OF_PROPOSALS = (
    ProblemType.NO_SUCH_PROPOSAL,
    ProblemType.PROPOSAL_ENDED,
    ProblemType.BASE_MOVED_ON,
)


def post_rebalance(request: Request, body: RebalanceRequest, response: Response) -> TaskAnswer:
    """Submits a task to the controller and waits a while for its result."""
    task = service_of(request).rebalance(body, _if_generation(request))
    return _answered(task, response)


def post_rollback(request: Request, body: RollbackRequest, response: Response) -> TaskAnswer:
    """Submits a task to the controller and waits a while for its result."""
    task = service_of(request).rollback(body, _if_generation(request))
    return _answered(task, response)


def get_proposals(
    request: Request,
    state: ProposalState | None = None,
    before: Annotated[int | None, Field(ge=0, le=MAX_ID)] = None,
    limit: Annotated[int, Field(ge=1, le=1000)] = 100,
) -> ProposalsPage:
    """Newest first, of the latest 50: give `next` as `before` to continue."""
    return Proposals(service_of(request)).page(state, before, limit)


def get_proposal(request: Request, proposal_id: ProposalId) -> ProposalAnswer:
    """With its target, its moves, what it changes in each layer, and why."""
    return Proposals(service_of(request)).one(proposal_id)


def post_proposal(request: Request, body: ProposalRequest) -> Response:
    """Submits a task to the controller and waits a while; `Location` is of the proposal."""
    made = Proposals(service_of(request)).create(body, actor_of(request).name)
    status, kind = (202, "tasks") if isinstance(made, TaskAnswer) else (201, "proposals")
    place = {"Location": f"/api/v1/{kind}/{made.id}"}
    return Response(made.model_dump_json(), status, place, "application/json")


def post_approval(
    request: Request, proposal_id: ProposalId, body: ReasonRequest, response: Response
) -> TaskAnswer:
    """Moves to exactly the stored target, or to none: 409 when its base moved on."""
    by, expected = actor_of(request).name, _if_generation(request)
    approved = Proposals(service_of(request)).approve(proposal_id, body.reason, by, expected)
    return _answered(approved, response)


def post_rejection(request: Request, proposal_id: ProposalId, body: ReasonRequest) -> ProposalLine:
    """It can be approved no more."""
    by = actor_of(request).name
    return Proposals(service_of(request)).reject(proposal_id, body.reason, by)


def post_explanation(request: Request, body: ExplainRequest, response: Response) -> TaskAnswer:
    """Plans now and explains one expert; moves nothing. The text is in `sentences`."""
    return _answered(service_of(request).explain(body), response)


def add_rebalance_routes(watch: APIRouter, act: APIRouter) -> None:
    """Add the routes."""
    of_moves = NOT_YET | documented(*OF_MOVES)
    act.post(
        "/rebalances",
        summary="Plan now; move only when dry_run is false",
        responses=of_moves,
        openapi_extra=IF_GENERATION,
    )(post_rebalance)
    act.post(
        "/rollbacks",
        summary="Back to an earlier placement; move only when dry_run is false",
        responses=of_moves,
        openapi_extra=IF_GENERATION,
    )(post_rollback)
    watch.get("/proposals", summary="Plans that wait for an approval")(get_proposals)
    watch.get(
        "/proposals/{proposal_id}",
        summary="One proposal",
        responses=documented(ProblemType.NO_SUCH_PROPOSAL),
    )(get_proposal)
    act.post(
        "/proposals",
        summary="Plan now and store the plan; nothing moves",
        status_code=201,
        response_model=ProposalAnswer,
        responses=NOT_YET | documented(*OF_TASKS, ProblemType.NOTHING_TO_PROPOSE),
    )(post_proposal)
    act.post(
        "/proposals/{proposal_id}/approve",
        summary="Carry out a proposal",
        responses=NOT_YET | documented(*OF_MOVES, *OF_PROPOSALS),
        openapi_extra=IF_GENERATION,
    )(post_approval)
    act.post(
        "/proposals/{proposal_id}/reject",
        summary="End a proposal",
        responses=documented(*OF_PROPOSALS, ProblemType.REQUEST_IN_PROGRESS),
    )(post_rejection)
    act.post(
        "/explanations",
        summary="Why is this expert there?",
        responses=NOT_YET | documented(*OF_TASKS, ProblemType.NO_SUCH_EXPERT),
    )(post_explanation)


def _if_generation(request: Request) -> str:
    return request.headers.get("if-match", ANY)


def _answered(task: TaskAnswer, response: Response) -> TaskAnswer:
    """The task, with status 202 until it is done."""
    if task.state in ("queued", "running"):
        response.status_code = 202
        response.headers["Location"] = f"/api/v1/tasks/{task.id}"
    return task
