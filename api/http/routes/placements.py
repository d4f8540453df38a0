"""Placements over HTTP: their history, what differs between two, and one as an engine's file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from api.http.problems import documented
from api.http.requests import MAX_ID
from api.http.routes.placement_diff import changed_layers, layer_tables
from api.http.schemas import Answer, PlacementLine
from api.http.service import AdminService, Refused, placement_line
from eplb.core.model import ModelShape
from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.errors import ConfigError, EplbError, HistoryError, PlacementError
from eplb.migration.serialisation import model_from_dict, topology_from_dict
from telemetry.formats.table import WriteOptions, placement_bytes
from telemetry.formats.types import Layers, PlacementFile
from telemetry.store import CommittedPlacement

if TYPE_CHECKING:
    from fastapi import APIRouter

Generation = Annotated[int, Field(ge=0, le=MAX_ID)]
Engine = Literal["sglang", "vllm", "trtllm", "ascend", "eplb"]
NAME_OF: dict[str, tuple[str, str]] = {  # ending and media type
    "sglang": ("json", "application/json"),
    "vllm": ("jsonl", "application/jsonl"),
    "trtllm": ("yaml", "application/yaml"),
    "ascend": ("json", "application/json"),
    "eplb": ("json", "application/json"),
}
MOST_LAYERS = 64  # of one page; 64 x 2,880 slots are about 3 MB
NOTES = "Eplb-Notes"


class RankChange(Answer):
    """Experts that one rank gained and lost in a layer."""

    rank: int
    added: list[int] = Field(description="experts that it did not hold", examples=[[17]])
    removed: list[int] = Field(description="experts that it holds no more", examples=[[4]])


class ShareChange(Answer):
    """An expert that stays on a rank, which gets another part of its tokens."""

    rank: int
    expert: int
    before: float = Field(examples=[0.5])
    after: float = Field(examples=[0.25])


class LayerDiff(Answer):
    """What differs in one layer."""

    layer: int = Field(description="index in the placement, from 0")
    layer_id: int = Field(description="as the model numbers it")
    bytes: int = Field(description="of the experts that ranks did not hold")
    ranks: list[RankChange] = Field(description="those with a change alone")
    shares: list[ShareChange]


class PlacementDiff(Answer):
    """What differs between two placements."""

    base: PlacementLine
    target: PlacementLine
    changed_layers: int = Field(description="over all pages, as the next two")
    moves: int = Field(description="experts on ranks that did not hold them")
    bytes: int = Field(description="moves x bytes of an expert; read by this much, if not cached")
    layers: list[LayerDiff]
    next: int | None = Field(description="for `after`, of the next page; null: there is none")


def get_placements(
    request: Request,
    limit: Annotated[int, Field(ge=1, le=1000)] = 100,
    before: Annotated[int | None, Field(ge=0, le=MAX_ID)] = None,
) -> list[PlacementLine]:
    """Newest first, with the reason of each: give the last generation as `before` to continue."""
    return _service(request).placements(limit, before)


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
    service = _service(request)
    old, new = _found(service, base), _found(service, target)
    model, topology = _shape(service)
    for one in (old, new):
        _check_fits(one.placement, model, topology)
    changed = changed_layers(old.placement, new.placement)
    moves = {
        layer: int(layer_tables(old.placement, new.placement, topology, layer).added.sum())
        for layer in changed
    }
    page = [layer for layer in changed if after is None or layer > after][:limit]
    is_last = not page or page[-1] == changed[-1]
    return PlacementDiff(
        base=PlacementLine(**placement_line(old)),
        target=PlacementLine(**placement_line(new)),
        changed_layers=len(changed),
        moves=sum(moves.values()),
        bytes=sum(moves.values()) * model.expert_bytes,
        layers=[_layer(old.placement, new.placement, model, topology, layer) for layer in page],
        next=None if is_last else page[-1],
    )


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
    service = _service(request)
    found = _found(service, generation)
    model, topology = _shape(service)
    _check_fits(found.placement, model, topology)
    provenance = {"deployment": service.store.deployment, "generation": generation}
    layers = Layers(tuple(model.layer_ids), "model")
    file = PlacementFile(found.placement, layers, topology.num_ranks, provenance=provenance)
    try:
        data, notes = placement_bytes(file, format, WriteOptions(num_hidden=hidden_layers))
    except (ConfigError, HistoryError, PlacementError) as exc:
        raise Refused(409, f"generation {generation} as {format}: {exc}") from exc
    ending, media_type = NAME_OF[format]
    name = f"placement-{generation}.{format}.{ending}"
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    if notes:
        headers[NOTES] = "; ".join(notes).encode("ascii", "replace").decode()[:4000]
    return Response(data, headers=headers, media_type=media_type)


def add_placement_routes(watch: APIRouter) -> None:
    """Add the routes."""
    watch.get("/placements", summary="History of placements")(get_placements)
    watch.get(
        "/placements/diff",
        summary="What differs between two placements",
        responses=documented(404, 409),
    )(get_diff)
    content = {media_type: {"schema": dict[str, Any]()} for _, media_type in NAME_OF.values()}
    file: dict[int | str, dict[str, Any]] = {200: {"description": "The file", "content": content}}
    watch.get(
        "/placements/{generation}/export",
        summary="A placement as an engine's file",
        response_class=Response,
        responses=file | documented(404, 409),
    )(get_export)


def _service(request: Request) -> AdminService:
    service: AdminService = request.app.state.service
    return service


def _found(service: AdminService, generation: int) -> CommittedPlacement:
    found = service.store.placement(generation)
    if found is None:
        raise Refused(404, f"the store holds no placement that is generation {generation}")
    return found


def _shape(service: AdminService) -> tuple[ModelShape, Topology]:
    """Model and topology of the current run."""
    info = service.store.current_run()
    if info is None:
        raise Refused(409, "no run has begun, expected one: it has the ranks of a placement")
    try:
        return model_from_dict(dict(info.model)), topology_from_dict(dict(info.topology))
    except (EplbError, LookupError, TypeError, ValueError) as exc:
        raise Refused(409, f"run {info.run!r} has no readable model or topology: {exc!r}") from exc


def _check_fits(placement: Placement, model: ModelShape, topology: Topology) -> None:
    found = placement.num_layers, placement.num_experts, placement.num_slots
    expected = model.num_layers, model.num_experts, topology.num_slots
    if found != expected:
        raise Refused(
            409,
            f"generation {placement.generation} has layers, experts and slots {found}, expected "
            f"{expected} of the current run: it served under another model or other ranks",
        )


def _layer(
    base: Placement, target: Placement, model: ModelShape, topology: Topology, layer: int
) -> LayerDiff:
    tables = layer_tables(base, target, topology, layer)
    added, removed = tables.added, tables.removed
    before, after = tables.share
    return LayerDiff(
        layer=layer,
        layer_id=model.layer_ids[layer],
        bytes=int(added.sum()) * model.expert_bytes,
        ranks=[
            RankChange(rank=rank, added=_experts(added[rank]), removed=_experts(removed[rank]))
            for rank in np.flatnonzero((added | removed).any(axis=1)).tolist()
        ],
        shares=[
            ShareChange(
                rank=rank,
                expert=expert,
                before=round(float(before[rank, expert]), 6),
                after=round(float(after[rank, expert]), 6),
            )
            for rank, expert in np.argwhere(tables.reshared).tolist()
        ],
    )


def _experts(chosen: NDArray[np.bool_]) -> list[int]:
    experts: list[int] = np.flatnonzero(chosen).tolist()
    return experts
