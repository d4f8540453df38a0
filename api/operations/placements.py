"""Operations on placements: read, history, difference of two, export as an engine's file.

Shapes:  L MoE layers, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Header, Response
from pydantic import TypeAdapter

from api.http.arguments import MAX_ID, Before, Id, Limit, Next, page_of
from api.http.dependencies import Service, reading
from api.http.document import answered_as, refused_with
from api.http.placement_answers import (
    PlacementAnswer,
    PlacementDiff,
    PlacementLine,
    answer_of,
    layer_diffs,
    line_of,
)
from api.http.problems import ProblemType, Refused
from api.operations.commands import Answer, Ask, command
from api.terminal.printable import print_table
from api.terminal.printing import line, listing
from eplb.core.model import ModelShape
from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.declared import Meaning
from eplb.errors import ConfigError, EplbError, HistoryError, PlacementError, counted
from eplb.migration.serialisation import model_from_dict, topology_from_dict
from telemetry.formats.table import placement_bytes
from telemetry.formats.types import Layers, PlacementFile, WriteOptions
from telemetry.state.placements import CommittedPlacement
from telemetry.state.store import StateStore
from telemetry.written_files import file_digest, write_atomically

reads = reading()

NOTES = "Eplb-Notes"  # header: what the format of the file cannot express
MOST_LAYERS = 64  # layers of one page; 64 x 2,880 slots are about 3 MB
SHOWN = 8  # experts of a cell of a table
SHOWN_OF_HASH = 8  # characters: a reason has to have room beside them
FILE_OF = {  # ending and media type, by engine
    "sglang": ("json", "application/json"),
    "vllm": ("jsonl", "application/jsonl"),
    "trtllm": ("yaml", "application/yaml"),
    "ascend": ("json", "application/json"),
    "eplb": ("json", "application/json"),
}
OF_PLACEMENTS = refused_with(
    ProblemType.NO_SUCH_PLACEMENT, ProblemType.NO_RUN, ProblemType.OTHER_SHAPE
)
OF_EXPORTS = refused_with(
    ProblemType.NO_SUCH_PLACEMENT,
    ProblemType.NO_RUN,
    ProblemType.OTHER_SHAPE,
    ProblemType.NOT_EXPRESSIBLE,
)


TO_JSON = TypeAdapter(PlacementAnswer)


@reads.get(
    "/placement",
    response_model=PlacementAnswer,
    responses=refused_with(ProblemType.NO_SUCH_PLACEMENT)
    | {304: {"description": "The answer is the one of `If-None-Match`"}},
)
def placement(
    service: Service,
    generation: Annotated[
        int | None,
        Meaning(
            "generation of the placement; null: the generation that ranks serve",
            at_least=0,
            at_most=MAX_ID,
        ),
    ] = None,
    if_none_match: Annotated[
        str, Header(alias="If-None-Match", description="the ETag that the client has")
    ] = "",
) -> Response:
    """A committed placement. Of the generation that ranks serve, or of another one; its `ETag` is
    for `If-Match`. With that tag in `If-None-Match` the answer is 304, without a body.
    """
    committed = service.store.committed()
    if generation is None and committed is not None:
        generation = committed.placement.generation

    def make() -> bytes:
        return TO_JSON.dump_json(placement_answer(service.store, generation))

    # Once as long as one placement serves: many clients may ask for it.
    key = committed and (committed.placement.generation, committed.placement.hash, committed.time)
    answer = service.of_commit.get(key, f"placement {generation}", make)
    tag = "" if generation is None else f'"{generation}"'
    headers = {"ETag": tag} if tag else {}
    if tag and if_none_match == tag:
        return Response(status_code=304, headers=headers)
    return Response(answer, headers=headers, media_type="application/json")


def placement_answer(store: StateStore, generation: int | None) -> PlacementAnswer:
    """Give the placement of a generation; None: the committed one.

    Raises:
        Refused: nothing is committed yet, or not that generation.
    """
    found = store.committed() if generation is None else _placement(store, generation)
    if found is None:
        raise Refused(ProblemType.NO_SUCH_PLACEMENT, "the store has no committed placement")
    return answer_of(found)


def _placement(store: StateStore, generation: int) -> CommittedPlacement:
    found = store.placement(generation)
    if found is None:
        why = f"the store has no placement of generation {generation}"
        raise Refused(ProblemType.NO_SUCH_PLACEMENT, why)
    return found


@dataclass(frozen=True)
class PlacementsPage:
    """History of placements."""

    placements: list[PlacementLine]
    next: Next


@reads.get("/placements")
def placements(service: Service, limit: Limit = 100, before: Before = None) -> PlacementsPage:
    """History of placements. Newest first, with the reason of each: give `next` as `before` to
    continue.
    """
    kept = list(map(line_of, service.store.placements(limit + 1, before=before)))
    return PlacementsPage(*page_of(kept, limit, lambda line: line.generation))


def show_lines(found: dict[str, Any]) -> None:
    """Print placements, and why each was made."""
    shown = (
        one | {"replicas": sum(one["num_replicas"]), "hash": one["hash"][:SHOWN_OF_HASH]}
        for one in found["placements"]
    )
    listing(shown, "generation:gen time plan_id:plan replicas hash reason", none="no placements")


command(
    "placements list",
    "eplb placements list --last 5 --json",
    placements,
    show=show_lines,
    about="List placements that ranks served, newest first, and why each was made.",
    names={"limit": "last"},
    defaults={"limit": 20},
)


# -- what differs between two


@reads.get("/placements/diff", responses=OF_PLACEMENTS)
def placement_diff(
    service: Service,
    base: Annotated[int, Meaning("generation", at_least=0, at_most=MAX_ID)],
    target: Annotated[int, Meaning("generation to compare with", at_least=0, at_most=MAX_ID)],
    after: Annotated[
        int | None, Meaning("layers past this one; null: all", at_least=0, at_most=65_536)
    ] = None,
    limit: Annotated[int, Meaning("most layers", at_least=1, at_most=MOST_LAYERS)] = 16,
) -> PlacementDiff:
    """What differs between two placements. By layer: experts added and removed on each rank, their
    bytes, changed shares. The ranks are those of the current run. Layers past `after` are given,
    `limit` at most.
    """
    before, now = (_placement(service.store, one) for one in (base, target))
    model, topology = shape_of_run(service.store)
    for one in (before, now):
        _check_fits(one.placement, model, topology)
    every = layer_diffs(before.placement, now.placement, model, topology)
    every.sort(key=lambda one: one.layer)
    left = [one for one in every if after is None or one.layer > after]
    layers, following = page_of(left, limit, lambda one: one.layer)
    return PlacementDiff(
        base=line_of(before),
        target=line_of(now),
        changed_layers=len(every),
        moves=sum(len(rank.added) for one in every for rank in one.ranks),
        bytes=sum(one.bytes for one in every),
        layers=layers,
        next=following,
    )


def shape_of_run(store: StateStore) -> tuple[ModelShape, Topology]:
    """Give model and topology of the current run.

    Raises:
        Refused: there is none, or they cannot be read.
    """
    info = store.current_run()
    if info is None:
        why = "no run has begun, expected one: it has the model and the ranks"
        raise Refused(ProblemType.NO_RUN, why)
    try:
        return model_from_dict(dict(info.model)), topology_from_dict(dict(info.topology))
    except (EplbError, LookupError, TypeError, ValueError) as exc:
        why = f"run {info.run!r} has no readable model or topology: {exc!r}"
        raise Refused(ProblemType.NO_RUN, why) from exc


def _check_fits(kept: Placement, model: ModelShape, topology: Topology) -> None:
    found = kept.num_layers, kept.num_experts, kept.num_slots
    expected = model.num_layers, model.num_experts, topology.num_slots
    if found != expected:
        raise Refused(
            ProblemType.OTHER_SHAPE,
            f"generation {kept.generation} has layers, experts and slots {found}, expected "
            f"{expected} of the current run: it served under another model or other ranks",
        )


def show_diff(found: dict[str, Any]) -> None:
    """Print what differs between two placements: experts, bytes and shares, by layer and rank."""
    base, target = (found[side]["generation"] for side in ("base", "target"))
    line(
        f"generation {base} to {target}: {counted(found['moves'], 'move')}, "
        f"{found['bytes'] / 1e9:.3f} GB, in {counted(found['changed_layers'], 'layer')}"
    )
    rows = list[list[Any]]()
    for layer in found["layers"]:
        cells = {
            one["rank"]: [_first(one["added"]), _first(one["removed"]), ""]
            for one in layer["ranks"]
        }
        shares = dict[int, list[str]]()
        for one in layer["shares"]:
            text = f"{one['expert']}: {one['before']:.3f} to {one['after']:.3f}"
            shares.setdefault(one["rank"], []).append(text)
        for rank, texts in shares.items():
            cells.setdefault(rank, ["", "", ""])[2] = _first(texts)
        for rank, of_rank in sorted(cells.items()):
            rows.append([layer["layer"], rank, *of_rank])
    if rows:
        print_table(("layer", "rank", "gains", "loses"), rows, "shares")
    if found["next"] is not None:
        line(f"more layers differ: --after {found['next']}")


command(
    "placements diff",
    "eplb placements diff 40 41 --service http://127.0.0.1:8765",
    placement_diff,
    show=show_diff,
    positional=("base", "target"),
    names={"limit": "layers"},
)


def _first(values: list[Any]) -> str:
    more = [f"{len(values) - SHOWN} more"] if len(values) > SHOWN else []
    return ", ".join([*map(str, values[:SHOWN]), *more])


# -- one as an engine's file

Engine = Annotated[
    Literal["sglang", "vllm", "trtllm", "ascend", "eplb"], Meaning("engine that reads the file")
]
HiddenLayers = Annotated[
    int | None,
    Meaning("layers of the model, dense ones included; SGLang", at_least=1, at_most=65_536),
]


@reads.get(
    "/placements/{generation}/export",
    response_class=Response,
    responses=OF_EXPORTS | answered_as({media_type: {} for _, media_type in FILE_OF.values()}),
)
def placement_export(
    service: Service, generation: Id, format: Engine = "eplb", hidden_layers: HiddenLayers = None
) -> Response:
    """A placement as an engine's file. What `eplb convert` writes, for the ranks and layer numbers
    of the current run. What is repaired or lost is in the header `Eplb-Notes`.
    """
    kept = _placement(service.store, generation).placement
    model, topology = shape_of_run(service.store)
    _check_fits(kept, model, topology)
    provenance = {"deployment": service.store.deployment, "generation": generation}
    layers = Layers(tuple(model.layer_ids), "model")
    file = PlacementFile(kept, layers, topology.num_ranks, provenance=provenance)
    try:
        data, notes = placement_bytes(file, format, WriteOptions(num_hidden=hidden_layers))
    except (ConfigError, HistoryError, PlacementError) as exc:
        why = f"generation {generation} as {format}: {exc}"
        raise Refused(ProblemType.NOT_EXPRESSIBLE, why) from exc
    ending, media_type = FILE_OF[format]
    name = f"placement-{generation}.{format}.{ending}"
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    if notes:
        headers[NOTES] = "; ".join(notes).encode("ascii", "replace").decode()[:4000]
    return Response(data, headers=headers, media_type=media_type)


def show_file(found: dict[str, Any]) -> None:
    """Print what was written."""
    line(*(f"note: {note}" for note in found["notes"]))
    line(f"written: {found['file']} {found['digest']}")


def export_file(
    ask: Ask,
    generation: Id,
    output: Annotated[str, Meaning("the file to write")],
    format: Engine = "eplb",
    hidden_layers: HiddenLayers = None,
) -> Answer:
    """Write a placement as an engine's file; what is repaired or lost is printed."""
    found = ask(placement_export, generation=generation, format=format, hidden_layers=hidden_layers)
    if not found.headers.get("content-disposition", "").startswith("attachment"):
        raise ConfigError("the answer is no file, expected a service of eplb")
    write_atomically(Path(output), found.content)
    notes = [note for note in found.headers.get(NOTES, "").split("; ") if note]
    written = {"file": output, "bytes": len(found.content), "notes": notes}
    return Answer(200, written | {"digest": file_digest(Path(output)).strip()})


command(
    "placements export",
    "eplb placements export 41 --format vllm --output placement.jsonl",
    export_file,
    of=placement_export,
    show=show_file,
    positional=("generation",),
    names={"output": "output/-o"},
)
