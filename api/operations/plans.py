"""Operations that have the controller plan: rebalances, rollbacks, proposals; and tasks.

A request for a plan is a task in the store, which the controller works off. It waits for the
controller a while; the answer 202 has the task when that takes longer.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from api.access.keys import Role
from api.http.problems import ProblemType, Refused
from api.operations.declaration import (
    MAX_ID,
    MAX_INDEX,
    MOST_LASTS_S,
    NOT_GIVEN,
    V1,
    After,
    Answer,
    Arguments,
    Ask,
    Before,
    Call,
    Id,
    Limit,
    Page,
    Policy,
    Reason,
    ReasonRequest,
    command,
    operation,
)
from api.operations.printing import WHY, line, listing, more, words
from eplb.declared import Meaning

if TYPE_CHECKING:
    from api.http.answers import ProposalDetail, TaskAnswer
    from telemetry.state.proposals import Proposal, ProposalEnded
    from telemetry.state.store import StateStore

TASK = "api.http.answers:TaskAnswer"
PROPOSAL = "telemetry.state.proposals:Proposal"
DETAIL = "api.http.answers:ProposalDetail"
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


def _answered(call: Call, task: TaskAnswer) -> TaskAnswer:
    """The task, with status 202 until it is done."""
    shown = ("decision", "num_moves", "plan_id", "dry_run", "error")
    facts = {name: task.result.get(name) for name in shown}
    call.note(f"task {task.id} {task.state}: {words({**task.request, **facts, 'reason': None})}")
    return _not_yet(call, task) if task.state in ("queued", "running") else task


def _not_yet(call: Call, task: TaskAnswer) -> TaskAnswer:
    call.status = 202
    call.headers["Location"] = f"{V1}/tasks/{task.id}"
    return task


def _given(asked: Any) -> dict[str, Any]:
    """Arguments as the request of a task, without null values."""
    found = {name: value for name, value in asdict(asked).items() if value is not None}
    if (throttle := found.get("throttle")) is not None:
        found["throttle"] = {name: one for name, one in throttle.items() if one is not None}
    return found


def _check_policy(name: str | None) -> None:
    """Refuse a policy that no controller knows.

    Raises:
        ConfigError: it is not known.
    """
    from eplb.policies.table import policy_named

    if name is not None:
        policy_named(name)


# -- tasks

TaskState = Annotated[
    Literal["queued", "running", "done", "failed"], Meaning("only tasks in this state")
]


@operation(f"GET {V1}/tasks/{{task_id}}", answer=TASK, problems=(ProblemType.NO_SUCH_TASK,))
def task(call: Call, task_id: Id) -> TaskAnswer:
    """One task. A request that the controller works off, and its result."""
    return call.service.task(task_id)


@operation(f"GET {V1}/tasks", answer=TASK, page="tasks")
def tasks(
    call: Call, state: TaskState = "queued", after: After = 0, limit: Limit = 100
) -> Page[TaskAnswer]:
    """Tasks in a state. Oldest first, past an id: give `next` as `after` to continue."""
    from api.http.answers import task_answer

    kept = call.store.tasks(state, after=after, limit=limit + 1)
    page = Page.of(kept, limit, lambda one: one.id)
    return Page([task_answer(call.store, one) for one in page.items], page.next)


@operation(
    f"POST {V1}/tasks/{{task_id}}/cancel",
    answer=TASK,
    problems=(ProblemType.NO_SUCH_TASK, ProblemType.TASK_BEGUN),
)
def cancel(call: Call, task_id: Id, body: ReasonRequest) -> TaskAnswer:
    """Cancel a queued task. Only before the controller begins it; a migration is stopped by a
    pause.
    """
    is_cancelled = call.store.cancel(task_id, reason=body.reason)
    answer = call.service.task(task_id)
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


@command(
    "tasks",
    "eplb tasks --state failed; eplb tasks --cancel 7",
    show=show_tasks,
    names={"cancel_id": "cancel"},
)
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


# -- rebalances and rollbacks


@dataclass(frozen=True)
class ThrottleRequest(Arguments):
    """Limits of this migration below those of the deployment's settings."""

    shown: ClassVar[dict[str, Any]] = {
        "minProperties": 1,
        "examples": [{"experts_per_transaction": 2, "link_part": 0.25}],
    }

    experts_per_transaction: Annotated[
        int,
        Meaning(
            "most experts that a transaction brings to a rank; copy mode only",
            at_least=1,
            at_most=MAX_INDEX,
        ),
    ] = NOT_GIVEN
    layers_per_transaction: Annotated[
        int, Meaning("most layers that swap together", at_least=1, at_most=MAX_INDEX)
    ] = NOT_GIVEN
    link_part: Annotated[
        float,
        Meaning(
            "part of the budget of each of a rank's links that staging may use, above 0",
            above=0,
            at_most=1,
        ),
    ] = NOT_GIVEN

    def __post_init__(self) -> None:
        if all(limit is NOT_GIVEN for limit in vars(self).values()):
            raise ValueError("the throttle names no limit, expected one or more")


DryRun = Annotated[bool, Meaning("true: plan only, move nothing")]
Throttle = Annotated[ThrottleRequest | None, Meaning("null: the deployment's pace")]


@dataclass(frozen=True)
class RebalanceRequest(ReasonRequest):
    """Ask the controller for a plan now, and unless this is a dry run, for its migration."""

    dry_run: DryRun = True
    policy: Policy = None
    throttle: Throttle = None


@dataclass(frozen=True)
class RollbackRequest(ReasonRequest):
    """Ask the controller for a plan to an earlier placement, and for its cost in a dry run.

    A rollback is a migration forward: the earlier experts and shares become a new generation.
    """

    generation: Annotated[
        int, Meaning("generation whose placement is wanted", at_least=0, at_most=MAX_ID)
    ]
    dry_run: DryRun = True
    throttle: Throttle = None


@operation(
    f"POST {V1}/rebalances",
    answer=TASK,
    problems=OF_MOVES,
    if_match="generation",
    is_task=True,
)
def rebalance(call: Call, body: RebalanceRequest) -> TaskAnswer:
    """Plan now; move only when dry_run is false. Submits a task to the controller and waits a while
    for its result.
    """
    _check_policy(body.policy)
    return _ask_to_move(call, "rebalance", body, is_dry_run=body.dry_run)


@operation(
    f"POST {V1}/rollbacks",
    answer=TASK,
    problems=OF_MOVES,
    if_match="generation",
    is_task=True,
)
def rollback(call: Call, body: RollbackRequest) -> TaskAnswer:
    """Roll back to an earlier placement; move only when dry_run is false. Submits a task to the
    controller and waits a while for its result.
    """
    return _ask_to_move(call, "rollback", body, is_dry_run=body.dry_run)


def _ask_to_move(call: Call, kind: str, body: Any, *, is_dry_run: bool) -> TaskAnswer:
    expected = call.service.check_generation(call.if_generation())
    call.service.check_may_move(is_dry_run)
    return _answered(call, call.service.ask(kind, _given(body), expected))


def _print_task(found: dict[str, Any]) -> None:
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


@command("rebalance", "eplb rebalance --reason 'hot expert' --move", rebalance, names=DRY_OR_MOVE)
def show_rebalance(found: dict[str, Any]) -> None:
    """Have the controller plan now; with --move, carry the plan out."""
    _print_task(found)


@command(
    "rollback",
    "eplb rollback 40 --reason 'answers got slower' --move",
    rollback,
    positional=("generation",),
    names=DRY_OR_MOVE,
)
def show_rollback(found: dict[str, Any]) -> None:
    """Plan a migration back to an earlier placement; with --move, carry it out."""
    _print_task(found)


# -- proposals


@dataclass(frozen=True)
class ProposalRequest(ReasonRequest):
    """Ask the controller for a plan now, and store it until somebody decides on it."""

    policy: Policy = None
    expires_s: Annotated[
        int,
        Meaning("time within which the proposal can be approved", at_least=1, at_most=MOST_LASTS_S),
    ] = 900


@dataclass(frozen=True)
class ApproveRequest(ReasonRequest):
    """Carry out a proposal."""

    accept_loss: Annotated[
        bool,
        Meaning("carry the plan out also where it costs more than it saves on the present load"),
    ] = False


@operation(f"GET {V1}/proposals", answer=PROPOSAL, page="proposals")
def proposals(
    call: Call,
    state: Annotated[
        Literal["open", "approved", "rejected", "expired"] | None, Meaning("null: in any state")
    ] = None,
    before: Before = None,
    limit: Limit = 100,
) -> Page[Proposal]:
    """Plans that wait for an approval. Newest first, of the latest 50: give `next` as `before` to
    continue.
    """
    kept = [
        one
        for one in reversed(call.store.proposals())
        if state in (None, one.state) and (before is None or one.id < before)
    ]
    return Page.of(kept, limit, lambda one: one.id)


@operation(
    f"GET {V1}/proposals/{{proposal_id}}",
    answer=DETAIL,
    problems=(ProblemType.NO_SUCH_PROPOSAL,),
)
def proposal(call: Call, proposal_id: Id) -> ProposalDetail:
    """One proposal. With its target, its moves, what it changes in each layer, and why."""
    from api.http.answers import proposal_detail

    return proposal_detail(call.store, _proposal(call.store, proposal_id))


@operation(
    f"POST {V1}/proposals",
    answer=DETAIL,
    problems=(ProblemType.NOTHING_TO_PROPOSE,),
    is_task=True,
    status=201,
)
def propose(call: Call, body: ProposalRequest) -> ProposalDetail | TaskAnswer:
    """Plan now and store the plan; nothing moves. Submits a task to the controller and waits a
    while; `Location` is of the proposal.
    """
    from api.http.answers import proposal_detail

    _check_policy(body.policy)
    made = call.service.ask("propose", _given(body) | {"by": call.actor.name})
    number = made.result.get("proposal")
    if number is None:
        return _not_yet(call, made)
    call.headers["Location"] = f"{V1}/proposals/{number}"
    return proposal_detail(call.store, _proposal(call.store, number))


@operation(
    f"POST {V1}/proposals/{{proposal_id}}/approve",
    answer=TASK,
    problems=(*OF_MOVES, *OF_PROPOSALS, ProblemType.LOSES),
    if_match="generation",
    is_task=True,
)
def approve(call: Call, proposal_id: Id, body: ApproveRequest) -> TaskAnswer:
    """Carry out a proposal. Moves to exactly the stored target, or to none: 409 when its base moved
    on.
    """
    from telemetry.state.proposals import ProposalEnded, check_open

    expected = call.service.check_generation(call.if_generation())
    found = _proposal(call.store, proposal_id)
    try:
        check_open(found)
    except ProposalEnded as exc:
        raise _ended(call.store, found, exc) from exc
    call.service.check_may_move(is_dry_run=False)
    given = _given(body) | {"proposal": found.id, "by": call.actor.name}
    return _answered(call, call.service.ask("approve", given, expected))


@operation(f"POST {V1}/proposals/{{proposal_id}}/reject", answer=PROPOSAL, problems=OF_PROPOSALS)
def reject(call: Call, proposal_id: Id, body: ReasonRequest) -> Proposal:
    """Reject a proposal. It cannot be approved afterwards."""
    from telemetry.state.proposals import ProposalEnded

    found = _proposal(call.store, proposal_id)
    try:
        return call.store.reject(found.id, by=call.actor.name, reason=body.reason)
    except ProposalEnded as exc:
        raise _ended(call.store, found, exc) from exc


def _proposal(store: StateStore, proposal_id: int) -> Proposal:
    for found in store.proposals():
        if found.id == proposal_id:
            return found
    raise Refused(ProblemType.NO_SUCH_PROPOSAL, f"there is no proposal {proposal_id}")


def _ended(store: StateStore, one: Proposal, why: ProposalEnded) -> Refused:
    from telemetry.state.proposals import base_moved

    found = store.committed()
    serving = None if found is None else (found.placement.generation, found.placement.hash)
    has_moved = one.state == "expired" and base_moved(one, serving)
    kind = ProblemType.BASE_MOVED_ON if has_moved else ProblemType.PROPOSAL_ENDED
    return Refused(kind, str(why))


@command("proposals", "eplb proposals --service http://127.0.0.1:8765", proposals)
def show_proposals(found: dict[str, Any]) -> None:
    """List plans that wait for an approval, and how others ended."""
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


def _print_proposal(one: dict[str, Any]) -> None:
    show_proposals.show({"proposals": [one]})
    line(one["plan_reason"])
    for layer in one.get("explanation", ()):
        line(*layer["sentences"])
    if one["state"] == "open":
        base = one["base_generation"]
        line(f"eplb approve {one['id']} carries it out while generation {base} serves")


@command("propose", "eplb propose --reason 'evening load' --store .eplb/store.sqlite", propose)
def show_proposed(found: dict[str, Any]) -> None:
    """Have the controller plan now, and store the plan; nothing moves."""
    _print_proposal(found)


@command(
    "approve",
    "eplb approve 12 --reason 'looks right' --if-generation 41",
    approve,
    names={"accept_loss": "force"},
)
def show_approved(found: dict[str, Any]) -> None:
    """Carry out exactly a proposal; refused once its base moved on, and, without --force, where it
    costs more than it saves on the present load.
    """
    _print_task(found)


@command("reject", "eplb reject 12 --reason 'not tonight'", reject)
def show_rejected(found: dict[str, Any]) -> None:
    """Reject a proposal: it cannot be approved afterwards."""
    _print_proposal(found)


# -- explanations


@dataclass(frozen=True)
class ExplainRequest(Arguments):
    """Ask the controller to explain where a plan made now places an expert, and why."""

    layer: Annotated[int, Meaning("the model's layer number", at_least=0, at_most=MAX_INDEX)]
    expert: Annotated[int, Meaning("a logical expert", at_least=0, at_most=MAX_INDEX)]
    policy: Policy = None


@operation(
    f"POST {V1}/explanations",
    answer=TASK,
    problems=(ProblemType.NO_SUCH_EXPERT,),
    is_task=True,
    role=Role.VIEWER,  # it moves nothing
)
def explanation(call: Call, body: ExplainRequest) -> TaskAnswer:
    """Why is this expert there? Plans now and explains one expert; moves nothing. The text is in
    `sentences`.
    """
    _check_policy(body.policy)
    return _answered(call, call.service.ask("explain", _given(body)))


def show_explained(found: dict[str, Any]) -> None:
    """Print the sentences of a task, or a proposal."""
    if "result" in found:
        line(*found["result"]["sentences"])
    else:
        _print_proposal(found)


@command(
    "explain",
    "eplb explain 12; eplb explain --layer 3 --expert 17",
    explanation,
    show=show_explained,
    positional=("proposal_id",),
)
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
    from eplb.errors import ConfigError

    if proposal_id is not None and layer is None and expert is None:
        return ask(proposal, proposal_id=proposal_id)
    if proposal_id is not None or layer is None or expert is None:
        raise ConfigError(
            "found neither a proposal alone nor --layer and --expert, expected one of them, as "
            f"{ask_to_explain.example}"
        )
    return ask(explanation, layer=layer, expert=expert)
