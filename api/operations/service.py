"""Operations on the service itself: probes, metrics, deployments, keys, audit, problem types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from api.access.keys import Role
from api.http.problems import PATH, ProblemType, Refused
from api.operations.declaration import (
    MAX_ID,
    OF_KEYS,
    OF_STORE,
    V1,
    Call,
    Limit,
    Page,
    Raw,
    command,
    operation,
)
from api.operations.printing import listing
from eplb import __version__
from eplb.declared import Meaning, Named

if TYPE_CHECKING:
    from api.access.audit import AuditEntry
    from api.http.service import AdminService

LABELS = {one.label: one for one in ProblemType}


@dataclass(frozen=True)
class Health:
    """The service is alive or ready; otherwise the answer is a problem."""

    detail: str
    status: Literal["ok"] = "ok"


@operation("GET /livez")
async def livez(call: Call) -> Health:
    """Is the HTTP service alive? Answers while the process runs."""
    return Health(detail=f"eplb {__version__}")


@operation("GET /healthz", problems=OF_KEYS + OF_STORE)
def healthz(call: Call) -> Health:
    """Does the store answer? Reads one number from the store."""
    return Health(detail=f"the store answers, at version {call.store.version()}")


@operation(
    "GET /readyz",
    problems=(ProblemType.NOT_READY, ProblemType.STORE_UNAVAILABLE),
)
async def readyz(call: Call) -> Health:
    """Does every rank serve? A run has begun, every rank reports, and steps make progress."""
    return Health(detail=call.service.readiness())


@operation(
    "GET /metrics",
    problems=OF_KEYS + OF_STORE,
    media_types={"text/plain": {"type": "string"}},
)
def metrics(call: Call) -> Raw:
    """Figures for Prometheus. At most 130 series of each deployment, whose counters survive a
    restart of the service. A path of one deployment has the series of that deployment alone.
    """
    from api.metrics.exposition import metrics_text

    is_of_one = getattr(call.request.state, "asked_for", None) is not None
    chosen = [call.service] if is_of_one else call.request.app.state.deployments.all()
    return Raw(*metrics_text(one.metrics for one in chosen))


@dataclass(frozen=True)
class DeploymentLine:
    """One deployment."""

    name: str
    path: Annotated[str, Meaning("path of its page; its routes are below it", example="/")]
    is_default: Annotated[bool, Meaning("whether paths without a name mean it")]
    verdict: Annotated[
        str, Named("verdict on the deployment", names=("stopped", "blind", "degraded", "serving"))
    ]
    reason: Annotated[str, Meaning("reason of the verdict, in one sentence")]
    problems: list[str]
    run: str | None = None
    step: int = 0
    generation: int | None = None
    num_ranks: int = 0
    imbalance: Annotated[
        float | None, Meaning("imbalance of the latest window; null: no tokens")
    ] = None
    movement: Annotated[bool | None, Meaning("whether weights may move; null: not known")] = None


@dataclass(frozen=True)
class DeploymentsAnswer:
    """The deployments of the service: its own first, then the others by name."""

    deployments: list[DeploymentLine]


@operation(f"GET {V1}/deployments")
def deployments(call: Call) -> DeploymentsAnswer:
    """Deployments of the service. With their verdicts. `/deployments/NAME` before a path of the
    service chooses one of them.
    """
    shown = call.request.app.state.deployments
    lines = [_line(one, is_default=one is shown.own) for one in shown.all()]
    lines += [_unread(name, why, is_default=False) for name, why in shown.unusable().items()]
    return DeploymentsAnswer(lines)


def _line(one: AdminService, *, is_default: bool) -> DeploymentLine:
    from api.http.deployments import path_of
    from eplb.errors import StoreError

    try:
        state = one.reader.reading().state
    except StoreError as exc:
        return _unread(one.name, str(exc), is_default=is_default)
    return DeploymentLine(
        name=one.name,
        path=path_of(one.name),
        is_default=is_default,
        verdict=state.verdict,
        reason=state.reason,
        problems=list(state.problems),
        run=state.run,
        step=state.step,
        generation=state.generation,
        num_ranks=len(state.ranks),
        imbalance=state.last_score.measured if state.last_score else None,
        movement=state.movement,
    )


def _unread(name: str, why: str, *, is_default: bool) -> DeploymentLine:
    from api.http.deployments import path_of

    return DeploymentLine(name, path_of(name), is_default, "blind", why, [why])


@command(
    "deployments",
    "eplb deployments --service http://127.0.0.1:8765",
    deployments,
    is_of_service=True,
)
def show_deployments(found: dict[str, Any]) -> None:
    """List the deployments that a service shows, and how each stands."""
    listing(
        found["deployments"],
        "name:deployment verdict num_ranks:ranks generation imbalance movement reason",
        none="no deployments",
    )


@dataclass(frozen=True)
class WhoAnswer:
    """Who sends the request."""

    name: str
    role: Literal["viewer", "operator", "admin"]


@operation(f"GET {V1}/whoami")
async def whoami(call: Call) -> WhoAnswer:
    """Who asks. Name and role of the key."""
    return WhoAnswer(call.actor.name, call.actor.role.label)  # type: ignore[arg-type]


@operation(
    f"GET {V1}/audit",
    answer="api.access.audit:AuditEntry",
    page="entries",
    problems=(ProblemType.NOT_FOUND,),
    role=Role.OPERATOR,  # it names people
)
def audit(
    call: Call,
    before: Annotated[
        int | None, Meaning("only lines before this number; null: all", at_least=1, at_most=MAX_ID)
    ] = None,
    limit: Limit = 100,
) -> Page[AuditEntry]:
    """Who changed what, and why. Newest first; give `next` as `before` to continue."""
    kept = call.request.app.state.audit
    if kept is None:
        why = "this service keeps no audit, expected one with a state folder"
        raise Refused(ProblemType.NOT_FOUND, why)
    found = kept.page(before, limit)
    return Page(found, found[-1].number if found and found[-1].number > 1 else None)


@dataclass(frozen=True)
class ProblemTypeAnswer:
    """One type of problem."""

    type: Annotated[str, Meaning("`type` of problems", example=ProblemType.MOVEMENT_OFF.uri)]
    status: int
    title: str
    meaning: str

    @classmethod
    def of(cls, kind: ProblemType) -> ProblemTypeAnswer:
        """Describe a type."""
        return cls(kind.uri, kind.status, kind.title, kind.meaning)


@operation(f"GET {PATH}")
async def problem_types(call: Call) -> list[ProblemTypeAnswer]:
    """Types of problems. Every `type` that a refusal may have, by status."""
    return list(map(ProblemTypeAnswer.of, ProblemType))


@operation(f"GET {PATH}/{{name}}", problems=(ProblemType.NOT_FOUND,))
async def problem_type(
    call: Call,
    name: Annotated[str, Meaning("last part of the type", max_length=100, example="movement-off")],
) -> ProblemTypeAnswer:
    """One type of problem. What the `type` of a problem means."""
    if name not in LABELS:
        raise Refused(ProblemType.NOT_FOUND, f"there is no problem type {name!r}")
    return ProblemTypeAnswer.of(LABELS[name])
