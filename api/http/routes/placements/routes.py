"""Routes of placements: one, their history, what differs between two, one as an engine's file."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from api.http.problems import ProblemType, documented
from api.http.requests import MAX_ID, NOTES
from api.http.routes.placements.answers import NAME_OF, Engine, Placements
from api.http.routes.placements.schemas import PlacementAnswer, PlacementDiff, PlacementsPage
from api.http.routes.request_parts import header_document, service_of
from api.http.service import generation_tag

if TYPE_CHECKING:
    from fastapi import APIRouter

Generation = Annotated[int, Field(ge=0, le=MAX_ID)]
OF_PLACEMENTS = (ProblemType.NO_SUCH_PLACEMENT, ProblemType.NO_RUN, ProblemType.OTHER_SHAPE)
NOT_CHANGED: dict[int | str, dict[str, Any]] = {
    304: {"description": "The placement is the one of `If-None-Match`"}
}
IF_NONE_MATCH = header_document(
    "if-none-match", "the ETag of the placement that the client has", {"type": "string"}
)
MOST_LAYERS = 64  # of one page; 64 x 2,880 slots are about 3 MB


def get_placement(
    request: Request, generation: Annotated[int | None, Field(ge=0, le=MAX_ID)] = None
) -> Response:
    """The one that serves, or the one of a generation; its `ETag` is for `If-Match`.

    With that tag in `If-None-Match` the answer is 304, without a body.
    """
    service = service_of(request)
    committed = service.store.committed()
    if generation is None and committed is not None:
        generation = committed.placement.generation
    made = partial(Placements(service.store).one, generation)
    answer = service.once_a_commit(committed, f"placement {generation}", made)
    headers = {} if generation is None else {"ETag": generation_tag(generation)}
    if request.headers.get("if-none-match") in headers.values():
        return Response(status_code=304, headers=headers)
    return Response(answer, headers=headers, media_type="application/json")


def get_placements(
    request: Request,
    limit: Annotated[int, Field(ge=1, le=1000)] = 100,
    before: Annotated[int | None, Field(ge=0, le=MAX_ID)] = None,
) -> PlacementsPage:
    """Newest first, with the reason of each: give `next` as `before` to continue."""
    return Placements(service_of(request).store).history(limit, before)


def get_diff(
    request: Request,
    base: Generation,
    target: Generation,
    after: Annotated[int | None, Field(ge=0, le=65_536)] = None,
    limit: Annotated[int, Field(ge=1, le=MOST_LAYERS)] = 16,
) -> PlacementDiff:
    """By layer: experts added and removed on each rank, their bytes, changed shares.

    The ranks are those of the current run. Layers past `after` are given, `limit` at most.
    """
    return Placements(service_of(request).store).diff(base, target, after=after, limit=limit)


def get_export(
    request: Request,
    generation: Generation,
    format: Engine = "eplb",
    hidden_layers: Annotated[int | None, Field(ge=1, le=65_536)] = None,
) -> Response:
    """What `eplb convert` writes, for the ranks and layer numbers of the current run.

    What is repaired or lost is in the header `Eplb-Notes`. `hidden_layers` of the model, dense ones
    included, is for SGLang alone.
    """
    file = Placements(service_of(request).store).export(generation, format, hidden_layers)
    headers = {"Content-Disposition": f'attachment; filename="{file.name}"'}
    if file.notes:
        headers[NOTES] = "; ".join(file.notes).encode("ascii", "replace").decode()[:4000]
    return Response(file.data, headers=headers, media_type=file.media_type)


def add_placement_routes(watch: APIRouter) -> None:
    """Add the routes."""
    watch.get(
        "/placement",
        summary="A committed placement",
        response_model=PlacementAnswer,
        responses=NOT_CHANGED | documented(ProblemType.NO_SUCH_PLACEMENT),
        openapi_extra=IF_NONE_MATCH,
    )(get_placement)
    watch.get("/placements", summary="History of placements")(get_placements)
    watch.get(
        "/placements/diff",
        summary="What differs between two placements",
        responses=documented(*OF_PLACEMENTS),
    )(get_diff)
    content = {media_type: {"schema": dict[str, Any]()} for _, media_type in NAME_OF.values()}
    file: dict[int | str, dict[str, Any]] = {200: {"description": "The file", "content": content}}
    watch.get(
        "/placements/{generation}/export",
        summary="A placement as an engine's file",
        response_class=Response,
        responses=file | documented(*OF_PLACEMENTS, ProblemType.NOT_EXPRESSIBLE),
    )(get_export)
