"""Routes of tasks: requests that the controller works off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field
from starlette.requests import Request

from api.http.problems import ProblemType, documented
from api.http.requests import MAX_ID, ReasonRequest
from api.http.routes.request_parts import service_of
from api.http.schemas import TaskAnswer, TasksPage
from telemetry.state.tasks import TaskState

if TYPE_CHECKING:
    from fastapi import APIRouter

TaskId = Annotated[int, Field(ge=0, le=MAX_ID)]


def get_task(request: Request, task_id: TaskId) -> TaskAnswer:
    """A request that the controller works off, and its result."""
    return service_of(request).task(task_id)


def get_tasks(
    request: Request,
    state: TaskState = "queued",
    after: Annotated[int, Field(ge=0, le=MAX_ID)] = 0,
    limit: Annotated[int, Field(ge=1, le=1000)] = 100,
) -> TasksPage:
    """Oldest first, past an id: give `next` as `after` to continue."""
    return service_of(request).tasks(state, after, limit)


def post_cancel(request: Request, task_id: TaskId, body: ReasonRequest) -> TaskAnswer:
    """Only before the controller begins it; a migration is stopped by a pause."""
    return service_of(request).cancel(task_id, body.reason)


def add_task_routes(watch: APIRouter, act: APIRouter) -> None:
    """Add the routes."""
    missing = ProblemType.NO_SUCH_TASK
    watch.get("/tasks/{task_id}", summary="One task", responses=documented(missing))(get_task)
    watch.get("/tasks", summary="Tasks in a state")(get_tasks)
    act.post(
        "/tasks/{task_id}/cancel",
        summary="Cancel a queued task",
        responses=documented(missing, ProblemType.TASK_BEGUN, ProblemType.REQUEST_IN_PROGRESS),
    )(post_cancel)
