"""Routes of anomalies: what is wrong, what was, since when, and which events tell why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, get_args

from pydantic import Field
from starlette.requests import Request

from api.http.requests import MAX_ID
from api.http.routes.request_parts import service_of
from api.http.schemas import Answer
from api.monitor.anomalies import EventAnomaly, Severity
from api.monitor.verdict import FindingKind

if TYPE_CHECKING:
    from fastapi import APIRouter

KINDS = [*get_args(FindingKind), *get_args(EventAnomaly)]


class AnomalyAnswer(Answer):
    """Something that is or was wrong."""

    id: int = Field(description="grows with each one of this service")
    kind: str = Field(json_schema_extra={"enum": KINDS})
    severity: Severity = Field(
        description="critical: stopped or blind, a death; warning: degraded; notice: costs speed"
    )
    subject: str = Field(description="the process; empty: ranks, or the deployment")
    ranks: list[int] = Field(description="that it is about; empty: the process or the deployment")
    since: float
    until: float | None = Field(description="null: it is so now")
    text: str = Field(description="what was found, and what was expected")
    events: list[int] = Field(description="ids of events within 30 s of its beginning")


class AnomaliesPage(Answer):
    """Anomalies, the newest first."""

    anomalies: list[AnomalyAnswer]
    next: int | None = Field(description="give as `before` to continue; null: there are no more")


def get_anomalies(
    request: Request,
    state: Literal["open", "ended"] | None = None,
    before: Annotated[int | None, Field(ge=1, le=MAX_ID)] = None,
    limit: Annotated[int, Field(ge=1, le=1000)] = 100,
) -> AnomaliesPage:
    """Newest first, the latest 1,000 of this service: give `next` as `before` to continue."""
    reader = service_of(request).reader
    reader.reading()
    is_open = None if state is None else state == "open"
    found, following = reader.anomalies.page(before, limit, is_open)
    anomalies = [AnomalyAnswer.model_validate(one) for one in found]
    return AnomaliesPage(anomalies=anomalies, next=following)


def add_anomaly_routes(watch: APIRouter) -> None:
    """Add the route."""
    watch.get("/anomalies", summary="What is wrong, and what was")(get_anomalies)
