"""Operations on the service itself: probes, metrics, deployments, keys, audit, problem types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import Request, Response

from api.access.audit import AuditEntry
from api.http.arguments import MAX_ID, Limit, Next
from api.http.dependencies import Asker, Service, operator, reading
from api.http.deployments import path_of
from api.http.document import OF_KEYS, OF_STORE, answered_as, refused_with
from api.http.problems import ProblemType, Refused
from api.http.service import AdminService
from api.metrics.exposition import metrics_text
from api.operations.commands import command
from api.terminal.printing import listing
from eplb import __version__
from eplb.declared import Meaning, Named
from eplb.errors import StoreError

health, reads = reading(prefix="", tag="health"), reading()
audits = reading(operator)  # it names people

LABELS = {one.label: one for one in ProblemType}


@dataclass(frozen=True)
class Health:
    """The service is alive or ready; otherwise the answer is a problem."""

    detail: str
    status: Literal["ok"] = "ok"


@health.get("/livez")
async def livez() -> Health:
    """Is the HTTP service alive? Answers while the process runs."""
    return Health(detail=f"eplb {__version__}")


@health.get("/healthz", responses=refused_with(*OF_KEYS, *OF_STORE))
def healthz(service: Service) -> Health:
    """Does the store answer? Reads one number from the store."""
    return Health(detail=f"the store answers, at version {service.store.version()}")


@health.get("/readyz", responses=refused_with(ProblemType.NOT_READY, ProblemType.STORE_UNAVAILABLE))
async def readyz(service: Service) -> Health:
    """Does every rank serve? A run has begun, every rank reports, and steps make progress."""
    return Health(detail=service.readiness())


@health.get(
    "/metrics",
    response_class=Response,
    responses=refused_with(*OF_KEYS, *OF_STORE) | answered_as({"text/plain": {"type": "string"}}),
)
def metrics(request: Request, service: Service) -> Response:
    """Figures for Prometheus. At most 130 series of each deployment, whose counters survive a
    restart of the service. A path of one deployment has the series of that deployment alone.
    """
    is_of_one = getattr(request.state, "asked_for", None) is not None
    chosen = [service] if is_of_one else request.app.state.deployments.all()
    content, media_type = metrics_text(one.metrics for one in chosen)
    return Response(content, media_type=media_type)


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


@reads.get("/deployments")
def deployments(request: Request) -> DeploymentsAnswer:
    """Deployments of the service. With their verdicts. `/deployments/NAME` before a path of the
    service chooses one of them.
    """
    shown = request.app.state.deployments
    lines = [_line(one, is_default=one is shown.own) for one in shown.all()]
    lines += [_unread(name, why, is_default=False) for name, why in shown.unusable().items()]
    return DeploymentsAnswer(lines)


def _line(one: AdminService, *, is_default: bool) -> DeploymentLine:
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
        run=state.start.run,
        step=state.group.step,
        generation=state.plans.generation,
        num_ranks=len(state.group.ranks),
        imbalance=state.load.last_score.measured if state.load.last_score else None,
        movement=state.orders.movement,
    )


def _unread(name: str, why: str, *, is_default: bool) -> DeploymentLine:
    return DeploymentLine(name, path_of(name), is_default, "blind", why, [why])


def show_deployments(found: dict[str, Any]) -> None:
    """Print deployments, and how each stands."""
    listing(
        found["deployments"],
        "name:deployment verdict num_ranks:ranks generation imbalance movement reason",
        none="no deployments",
    )


command(
    "deployments",
    "eplb deployments --service http://127.0.0.1:8765",
    deployments,
    show=show_deployments,
    about="List the deployments that a service shows, and how each stands.",
    is_of_service=True,
)


@dataclass(frozen=True)
class WhoAnswer:
    """Who sends the request."""

    name: str
    role: Literal["viewer", "operator", "admin"]


@reads.get("/whoami")
async def whoami(asker: Asker) -> WhoAnswer:
    """Who asks. Name and role of the key."""
    return WhoAnswer(asker.name, asker.role.label)  # type: ignore[arg-type]


@dataclass(frozen=True)
class EntriesPage:
    """Who changed what, and why."""

    entries: list[AuditEntry]
    next: Next


@audits.get("/audit", responses=refused_with(ProblemType.NOT_FOUND, ProblemType.ROLE_TOO_LOW))
def audit(
    request: Request,
    before: Annotated[
        int | None, Meaning("only lines before this number; null: all", at_least=1, at_most=MAX_ID)
    ] = None,
    limit: Limit = 100,
) -> EntriesPage:
    """Who changed what, and why. Newest first; give `next` as `before` to continue."""
    kept = request.app.state.audit
    if kept is None:
        why = "this service keeps no audit, expected one with a state folder"
        raise Refused(ProblemType.NOT_FOUND, why)
    found = kept.page(before, limit)
    return EntriesPage(found, found[-1].number if found and found[-1].number > 1 else None)


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


@reads.get("/problems")
async def problem_types() -> list[ProblemTypeAnswer]:
    """Types of problems. Every `type` that a refusal may have, by status."""
    return list(map(ProblemTypeAnswer.of, ProblemType))


@reads.get("/problems/{name}", responses=refused_with(ProblemType.NOT_FOUND))
async def problem_type(
    name: Annotated[str, Meaning("last part of the type", max_length=100, example="movement-off")],
) -> ProblemTypeAnswer:
    """One type of problem. What the `type` of a problem means."""
    if name not in LABELS:
        raise Refused(ProblemType.NOT_FOUND, f"there is no problem type {name!r}")
    return ProblemTypeAnswer.of(LABELS[name])
