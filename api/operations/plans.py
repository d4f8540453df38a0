"""Operations that have the controller plan: rebalances, rollbacks, proposals; and tasks.

A request for a plan is a task in the store, which the controller works off. It waits for the
controller a while; the answer 202 has the task when that takes longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import Response
from pydantic import ConfigDict, Field, TypeAdapter, model_validator

from api.access.audit import words
from api.http.answers import ProposalDetail, TaskAnswer, proposal_detail, task_answer
from api.http.arguments import (
    MAX_ID,
    MAX_INDEX,
    MOST_LASTS_S,
    After,
    Before,
    Body,
    Id,
    Limit,
    Next,
    Policy,
    Reason,
    ReasonRequest,
    left_out,
    page_of,
)
from api.http.dependencies import (
    Asker,
    Audited,
    ChangeAudit,
    Generation,
    Service,
    audited,
    changing,
    operator,
    reading,
)
from api.http.document import refused_with
from api.http.problems import V1, ProblemType, Refused
from api.operations.commands import Answer, Ask, command
from api.terminal.printing import WHY, line, listing, more
from eplb.declared import Meaning
from eplb.errors import ConfigError
from eplb.policies.table import policy_named
from telemetry.state.proposals import Proposal, ProposalEnded, base_moved, check_open
from telemetry.state.store import StateStore

reads, acts = reading(), changing(operator, audited)
asks = changing(audited)  # a viewer may: nothing moves

EXPLAIN = "eplb explain 12; eplb explain --layer 3 --expert 17"
DRY_OR_MOVE = {"dry_run": "dry-run/--move"}  # option of a command for the argument
OF_MOVES = (
    ProblemType.MOVEMENT_OFF,
    ProblemType.MIGRATION_OPEN,
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


OF_TASKS = (
    ProblemType.CONTROLLER_REFUSED,
    ProblemType.NO_LOAD,
    ProblemType.NO_PLAN,
    ProblemType.TASK_EXPIRED,
    ProblemType.TASK_ABANDONED,
    ProblemType.TASK_CANCELLED,
)
NOT_YET: dict[int | str, dict[str, Any]] = {
    202: {"model": TaskAnswer, "description": "Not done yet; see Location"}
}
MOVED_ON = ProblemType.GENERATION_MOVED_ON


def _answered(audit: ChangeAudit, response: Response, task: TaskAnswer) -> TaskAnswer:
    """Give the task, with status 202 until it is done."""
    shown = ("decision", "num_moves", "plan_id", "dry_run", "error")
    facts = {name: task.result.get(name) for name in shown}
    audit.describe(
        f"task {task.id} {task.state}: {words({**task.request, **facts, 'reason': None})}"
    )
    if task.state in ("queued", "running"):
        response.status_code = 202
        response.headers["Location"] = f"{V1}/tasks/{task.id}"
    return task


def _check_policy(name: str | None) -> None:
    """Refuse a policy that no controller knows.

    Raises:
        ConfigError: it is not known.
    """
    if name is not None:
        policy_named(name)


# -- tasks

TaskState = Annotated[
    Literal["queued", "running", "done", "failed"], Meaning("only tasks in this state")
]


@dataclass(frozen=True)
class TasksPage:
    """Tasks in a state."""

    tasks: list[TaskAnswer]
    next: Next


@reads.get("/tasks/{task_id}", responses=refused_with(ProblemType.NO_SUCH_TASK))
def task(service: Service, task_id: Id) -> TaskAnswer:
    """One task. A request that the controller works off, and its result."""
    return service.task(task_id)


@reads.get("/tasks")
def tasks(
    service: Service, state: TaskState = "queued", after: After = 0, limit: Limit = 100
) -> TasksPage:
    """Tasks in a state. Oldest first, past an id: give `next` as `after` to continue."""
    kept = service.store.tasks(state, after=after, limit=limit + 1)
    page, following = page_of(kept, limit, lambda task: task.id)
    return TasksPage([task_answer(service.store, task) for task in page], following)


@acts.post(
    "/tasks/{task_id}/cancel",
    responses=refused_with(ProblemType.NO_SUCH_TASK, ProblemType.TASK_BEGUN),
)
def cancel(service: Service, task_id: Id, body: ReasonRequest) -> TaskAnswer:
    """Cancel a queued task. Only before the controller begins it; a migration is stopped by a
    pause.
    """
    is_cancelled = service.store.cancel(task_id, reason=body.reason)
    answer = service.task(task_id)
    if not is_cancelled:
        why = f"task {task_id} is {answer.state}, expected it queued"
        raise Refused(ProblemType.TASK_BEGUN, why)
    return answer


def show_tasks(found: dict[str, Any]) -> None:
    """Print a page of tasks, or one."""
    listed: dict[str, Any] = found if "tasks" in found else {"tasks": [found], "next": None}
    shown = (
        one["result"] | one | {"reason": one["result"].get("error") or one["request"].get("reason")}
        for one in listed["tasks"]
    )
    listing(shown, "id time kind state plan_id:plan reason", none="no tasks in this state")
    more(listed)


def ask_for_tasks(
    ask: Ask,
    state: TaskState = "queued",
    after: After = 0,
    cancel_id: Annotated[
        int | None, Meaning("cancel this task; it must be queued", at_least=0, at_most=MAX_ID)
    ] = None,
    reason: Reason = WHY,
) -> Answer:
    """List requests to the controller, or cancel one."""
    if cancel_id is None:
        return ask(tasks, state=state, after=after)
    return ask(cancel, task_id=cancel_id, reason=reason)


command(
    "tasks",
    "eplb tasks --state failed; eplb tasks --cancel 7",
    ask_for_tasks,
    of=tasks,
    show=show_tasks,
    names={"cancel_id": "cancel"},
)


# -- rebalances and rollbacks


class ThrottleRequest(Body):
    """Limits of this migration below those of the deployment's settings."""

    model_config = ConfigDict(
        json_schema_extra={
            "minProperties": 1,
            "examples": [{"experts_per_transaction": 2, "link_part": 0.25}],
        }
    )

    experts_per_transaction: Annotated[
        int,
        Meaning(
            "most experts that a transaction brings to a rank; copy mode only",
            at_least=1,
            at_most=MAX_INDEX,
        ),
    ] = Field(default_factory=left_out)
    layers_per_transaction: Annotated[
        int, Meaning("most layers that swap together", at_least=1, at_most=MAX_INDEX)
    ] = Field(default_factory=left_out)
    link_part: Annotated[
        float,
        Meaning(
            "part of the budget of each of a rank's links that staging may use, above 0",
            above=0,
            at_most=1,
        ),
    ] = Field(default_factory=left_out)

    @model_validator(mode="after")
    def _names_a_limit(self) -> ThrottleRequest:
        if not self.model_fields_set:
            raise ValueError("the throttle names no limit, expected one or more")
        return self


DryRun = Annotated[bool, Meaning("true: plan only, move nothing")]
Throttle = Annotated[ThrottleRequest | None, Meaning("null: the deployment's pace")]


class RebalanceRequest(ReasonRequest):
    """Ask the controller for a plan now, and unless this is a dry run, for its migration."""

    dry_run: DryRun = True
    policy: Policy = None
    throttle: Throttle = None


class RollbackRequest(ReasonRequest):
    """Ask the controller for a plan to an earlier placement, and for its cost in a dry run.

    A rollback is a migration forward: the earlier experts and shares become a new generation.
    """

    generation: Annotated[
        int, Meaning("generation whose placement is wanted", at_least=0, at_most=MAX_ID)
    ]
    dry_run: DryRun = True
    throttle: Throttle = None


@acts.post("/rebalances", responses=NOT_YET | refused_with(*OF_MOVES, *OF_TASKS, MOVED_ON))
def rebalance(
    service: Service,
    audit: Audited,
    response: Response,
    expected: Generation,
    body: RebalanceRequest,
) -> TaskAnswer:
    """Plan now; move only when dry_run is false. Submits a task to the controller and waits a while
    for its result.
    """
    _check_policy(body.policy)
    service.check_may_move(body.dry_run)
    asked = body.model_dump(exclude_none=True)
    return _answered(audit, response, service.ask("rebalance", asked, expected))


@acts.post("/rollbacks", responses=NOT_YET | refused_with(*OF_MOVES, *OF_TASKS, MOVED_ON))
def rollback(
    service: Service,
    audit: Audited,
    response: Response,
    expected: Generation,
    body: RollbackRequest,
) -> TaskAnswer:
    """Roll back to an earlier placement; move only when dry_run is false. Submits a task to the
    controller and waits a while for its result.
    """
    service.check_may_move(body.dry_run)
    asked = body.model_dump(exclude_none=True)
    return _answered(audit, response, service.ask("rollback", asked, expected))


def show_task(found: dict[str, Any]) -> None:
    """Print what came of a rebalance, a rollback or an approval."""
    result = found["result"]
    columns = "task decision before after num_moves:moves plan_id:plan reason"
    listing([result | {"task": found["id"]}], columns, none="no task")
    if "serves" in result:  # an engine's plug-in moved the experts itself
        line(f"generation {result['serves']} serves")
    elif result.get("published"):
        line(f"plan {result['plan_id']} is published to the ranks")
        if found["kind"] == "rollback":
            line("later plans may undo it; `eplb config --live --set observe=true` keeps it")
    else:
        why = "a dry run" if result.get("dry_run") else result.get("kept", "")
        line(f"nothing moves: {why}" if why else "nothing moves")


command(
    "rebalance",
    "eplb rebalance --reason 'hot expert' --move",
    rebalance,
    show=show_task,
    about="Have the controller plan now; with --move, carry the plan out.",
    names=DRY_OR_MOVE,
)
command(
    "rollback",
    "eplb rollback 40 --reason 'answers got slower' --move",
    rollback,
    show=show_task,
    about="Plan a migration back to an earlier placement; with --move, carry it out.",
    positional=("generation",),
    names=DRY_OR_MOVE,
)


# -- proposals


class ProposalRequest(ReasonRequest):
    """Ask the controller for a plan now, and store it until somebody decides on it."""

    policy: Policy = None
    expires_s: Annotated[
        int,
        Meaning("time within which the proposal can be approved", at_least=1, at_most=MOST_LASTS_S),
    ] = 900


class ApproveRequest(ReasonRequest):
    """Carry out a proposal."""

    accept_loss: Annotated[
        bool,
        Meaning("carry the plan out also where it costs more than it saves on the present load"),
    ] = False


@dataclass(frozen=True)
class ProposalsPage:
    """Plans that wait for an approval."""

    proposals: list[Proposal]
    next: Next


@reads.get("/proposals")
def proposals(
    service: Service,
    state: Annotated[
        Literal["open", "approved", "rejected", "expired"] | None, Meaning("null: in any state")
    ] = None,
    before: Before = None,
    limit: Limit = 100,
) -> ProposalsPage:
    """Plans that wait for an approval. Newest first, of the latest 50: give `next` as `before` to
    continue.
    """
    kept = [
        proposal
        for proposal in reversed(service.store.proposals())
        if state in (None, proposal.state) and (before is None or proposal.id < before)
    ]
    return ProposalsPage(*page_of(kept, limit, lambda proposal: proposal.id))


@reads.get("/proposals/{proposal_id}", responses=refused_with(ProblemType.NO_SUCH_PROPOSAL))
def proposal(service: Service, proposal_id: Id) -> ProposalDetail:
    """One proposal. With its target, its moves, what it changes in each layer, and why."""
    return proposal_detail(service.store, _proposal(service.store, proposal_id))


@acts.post(
    "/proposals",
    status_code=201,
    response_model=ProposalDetail,
    responses=NOT_YET | refused_with(ProblemType.NOTHING_TO_PROPOSE, *OF_TASKS),
)
def propose(
    service: Service, asker: Asker, response: Response, body: ProposalRequest
) -> ProposalDetail | Response:
    """Plan now and store the plan; nothing moves. Submits a task to the controller and waits a
    while; `Location` is of the proposal.
    """
    _check_policy(body.policy)
    made = service.ask("propose", body.model_dump(exclude_none=True) | {"by": asker.name})
    number = made.result.get("proposal")
    if number is None:
        content = TypeAdapter(TaskAnswer).dump_json(made)
        location = {"Location": f"{V1}/tasks/{made.id}"}
        return Response(content, 202, location, "application/json")
    response.headers["Location"] = f"{V1}/proposals/{number}"
    return proposal_detail(service.store, _proposal(service.store, number))


@acts.post(
    "/proposals/{proposal_id}/approve",
    responses=NOT_YET
    | refused_with(*OF_MOVES, *OF_PROPOSALS, ProblemType.LOSES, *OF_TASKS, MOVED_ON),
)
def approve(
    service: Service,
    asker: Asker,
    audit: Audited,
    response: Response,
    proposal_id: Id,
    expected: Generation,
    body: ApproveRequest,
) -> TaskAnswer:
    """Carry out a proposal. Moves to exactly the stored target, or to none: 409 when its base moved
    on.
    """
    found = _proposal(service.store, proposal_id)
    try:
        check_open(found)
    except ProposalEnded as exc:
        raise _ended(service.store, found, exc) from exc
    service.check_may_move(is_dry_run=False)
    asked = body.model_dump(exclude_none=True) | {"proposal": found.id, "by": asker.name}
    return _answered(audit, response, service.ask("approve", asked, expected))


@acts.post("/proposals/{proposal_id}/reject", responses=refused_with(*OF_PROPOSALS))
def reject(service: Service, asker: Asker, proposal_id: Id, body: ReasonRequest) -> Proposal:
    """Reject a proposal. It cannot be approved afterwards."""
    found = _proposal(service.store, proposal_id)
    try:
        return service.store.reject(found.id, by=asker.name, reason=body.reason)
    except ProposalEnded as exc:
        raise _ended(service.store, found, exc) from exc


def _proposal(store: StateStore, proposal_id: int) -> Proposal:
    for found in store.proposals():
        if found.id == proposal_id:
            return found
    raise Refused(ProblemType.NO_SUCH_PROPOSAL, f"there is no proposal {proposal_id}")


def _ended(store: StateStore, one: Proposal, why: ProposalEnded) -> Refused:
    found = store.committed()
    serving = None if found is None else (found.placement.generation, found.placement.hash)
    has_moved = one.state == "expired" and base_moved(one, serving)
    kind = ProblemType.BASE_MOVED_ON if has_moved else ProblemType.PROPOSAL_ENDED
    return Refused(kind, str(why))


def show_proposals(found: dict[str, Any]) -> None:
    """Print proposals, and how each ended."""
    shown = (
        one | {"GB": one["bytes"] / 1e9, "reason": one["end_reason"] or one["reason"]}
        for one in found["proposals"]
    )
    listing(
        shown,
        "id state expires by decision imbalance_before:before imbalance_after:after moves GB "
        "reason",
        none="no proposals",
    )


def show_proposal(one: dict[str, Any]) -> None:
    """Print a proposal, and how it is approved."""
    show_proposals({"proposals": [one]})
    line(one["plan_reason"])
    for layer in one.get("explanation", ()):
        line(*layer["sentences"])
    if one["state"] == "open":
        base = one["base_generation"]
        line(f"eplb approve {one['id']} carries it out while generation {base} serves")


command(
    "proposals",
    "eplb proposals --service http://127.0.0.1:8765",
    proposals,
    show=show_proposals,
    about="List plans that wait for an approval, and how others ended.",
)
command(
    "propose",
    "eplb propose --reason 'evening load' --store .eplb/store.sqlite",
    propose,
    show=show_proposal,
)
command(
    "approve",
    "eplb approve 12 --reason 'looks right' --if-generation 41",
    approve,
    show=show_task,
    about="Carry out exactly a proposal; refused once its base moved on, and, without --force, "
    "where it costs more than it saves on the present load.",
    names={"accept_loss": "force"},
)
command("reject", "eplb reject 12 --reason 'not tonight'", reject, show=show_proposal)


# -- explanations


class ExplainRequest(Body):
    """Ask the controller to explain where a plan made now places an expert, and why."""

    layer: Annotated[int, Meaning("the model's layer number", at_least=0, at_most=MAX_INDEX)]
    expert: Annotated[int, Meaning("a logical expert", at_least=0, at_most=MAX_INDEX)]
    policy: Policy = None


@asks.post("/explanations", responses=NOT_YET | refused_with(ProblemType.NO_SUCH_EXPERT, *OF_TASKS))
def explanation(
    service: Service, audit: Audited, response: Response, body: ExplainRequest
) -> TaskAnswer:
    """Why is this expert there? Plans now and explains one expert; moves nothing. The text is in
    `sentences`.
    """
    _check_policy(body.policy)
    asked = body.model_dump(exclude_none=True)
    return _answered(audit, response, service.ask("explain", asked))


def show_explained(found: dict[str, Any]) -> None:
    """Print the sentences of a task, or a proposal."""
    if "result" in found:
        line(*found["result"]["sentences"])
    else:
        show_proposal(found)


def ask_to_explain(
    ask: Ask,
    proposal_id: Annotated[
        int | None, Meaning("number of a proposal", at_least=0, at_most=MAX_ID)
    ] = None,
    layer: Annotated[
        int | None,
        Meaning("the model's layer number; with --expert", at_least=0, at_most=MAX_INDEX),
    ] = None,
    expert: Annotated[
        int | None, Meaning("a logical expert", at_least=0, at_most=MAX_INDEX)
    ] = None,
) -> Answer:
    """Explain a proposal, or where a plan made now places an expert."""
    if proposal_id is not None and layer is None and expert is None:
        return ask(proposal, proposal_id=proposal_id)
    if proposal_id is not None or layer is None or expert is None:
        raise ConfigError(
            "found neither a proposal alone nor --layer and --expert, expected one of them, as "
            f"{EXPLAIN}"
        )
    return ask(explanation, layer=layer, expert=expert)


command(
    "explain",
    EXPLAIN,
    ask_to_explain,
    of=explanation,
    show=show_explained,
    positional=("proposal_id",),
)
