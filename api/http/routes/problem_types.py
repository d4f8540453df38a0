"""Routes of the problem types: where the ``type`` of a problem leads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from api.http.problems import PATH, ProblemType, Refused, documented
from api.http.schemas import Answer

if TYPE_CHECKING:
    from fastapi import APIRouter

LABELS = {one.label: one for one in ProblemType}
FOLDER = f"/{PATH.rpartition('/')[2]}"


class ProblemTypeAnswer(Answer):
    """One type of problem."""

    type: str = Field(description="as in the answers", examples=[ProblemType.MOVEMENT_OFF.uri])
    status: int
    title: str
    meaning: str


async def get_problem_types() -> list[ProblemTypeAnswer]:
    """Every `type` that a refusal may have, by status."""
    return [_answer(one) for one in ProblemType]


async def get_problem_type(
    name: Annotated[str, Field(max_length=100, examples=[ProblemType.MOVEMENT_OFF.label])],
) -> ProblemTypeAnswer:
    """Where the `type` of a problem leads."""
    if name not in LABELS:
        raise Refused(ProblemType.NOT_FOUND, f"there is no problem type {name!r}")
    return _answer(LABELS[name])


def add_problem_types(watch: APIRouter) -> None:
    """Add the routes."""
    watch.get(FOLDER, summary="Types of problems")(get_problem_types)
    watch.get(
        f"{FOLDER}/{{name}}",
        summary="One type of problem",
        responses=documented(ProblemType.NOT_FOUND),
    )(get_problem_type)


def _answer(kind: ProblemType) -> ProblemTypeAnswer:
    return ProblemTypeAnswer(
        type=kind.uri, status=kind.status, title=kind.title, meaning=kind.meaning
    )
