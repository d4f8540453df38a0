"""``GET /api/v1/deployments``: every deployment that the service shows, and how it stands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field
from starlette.requests import Request

from api.http.deployments.choice import path_of
from api.http.deployments.served import Deployments, Served
from api.http.schemas import Answer
from api.monitor.state import Grade
from eplb.errors import StoreError

if TYPE_CHECKING:
    from fastapi import APIRouter


class DeploymentLine(Answer):
    """One deployment."""

    name: str
    path: str = Field(
        description="of its page; its routes are below it", examples=["/deployments/demo/"]
    )
    is_default: bool = Field(description="whether paths without a name mean it")
    verdict: Grade
    reason: str = Field(description="of the verdict, in one sentence")
    problems: list[str]
    run: str | None = None
    step: int = 0
    generation: int | None = None
    num_ranks: int = 0
    imbalance: float | None = Field(description="of the latest window; null: no tokens")
    movement: bool | None = Field(description="null: not known")


class DeploymentsAnswer(Answer):
    """The deployments of the service: its own first, then the others by name."""

    deployments: list[DeploymentLine]


def get_deployments(request: Request) -> DeploymentsAnswer:
    """With their verdicts. A path of the service after `/deployments/NAME` is of that one."""
    shown: Deployments = request.app.state.deployments
    lines = [_line(one, is_default=one is shown.own) for one in shown.all()]
    lines += [_unread(name, why, is_default=False) for name, why in shown.unusable().items()]
    return DeploymentsAnswer(deployments=lines)


def add_deployment_routes(watch: APIRouter) -> None:
    """Add the route."""
    watch.get("/deployments", summary="Deployments of the service")(get_deployments)


def _line(one: Served, *, is_default: bool) -> DeploymentLine:
    try:
        state = one.service.reader.reading().state
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
    return DeploymentLine(
        name=name,
        path=path_of(name),
        is_default=is_default,
        verdict=Grade.BLIND,
        reason=why,
        problems=[why],
        imbalance=None,
        movement=None,
    )
