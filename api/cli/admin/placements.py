"""``eplb placements``: the history, what differs between two, and one as an engine's file.

Exit status of each: 0, done; 1, the store has no such placement, or the deployment does not allow
it; 2, bad input, no such service or store, or no permission.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from api.cli.admin.asking import (
    AsJson,
    asked,
    at,
    refusals_end_the_command,
    shown,
    with_place,
)
from api.cli.admin.place import Place
from api.http.requests import MAX_ID
from api.terminal.printable import printable
from api.terminal.table import print_table

app = typer.Typer(
    help="Show, compare and export placements. Exit status 1: there is none such, or the "
    "deployment does not allow it; 2: bad input, no such service or store, or no permission.",
    no_args_is_help=True,
)
# A name is checked by the API, which names those that it knows.
Format = Annotated[str, typer.Option(help="sglang, vllm, trtllm, ascend or eplb.")]
SHOWN = 8  # experts of a cell


def _number(about: str) -> Any:
    return typer.Argument(min=0, max=MAX_ID, help=about)


@app.command("list", epilog="Example: eplb placements list --last 5 --json")
@with_place()
def list_placements(
    place: Place,
    last: Annotated[int, typer.Option(min=1, max=1000, help="How many, the latest.")] = 20,
    before: Annotated[
        int | None, typer.Option(min=0, max=MAX_ID, help="Those before this generation.")
    ] = None,
    json_output: AsJson = False,
) -> None:
    """List placements that served, newest first, and why each was made."""
    answer = asked(place, "GET", "/placements", limit=last, before=before)
    shown(answer, json_output, _lines)


@app.command(epilog="Example: eplb placements diff 40 41 --service http://127.0.0.1:8765")
@with_place()
def diff(
    place: Place,
    base: Annotated[int, _number("Generation.")],
    target: Annotated[int, _number("Generation that it is compared with.")],
    after: Annotated[
        int | None, typer.Option(min=0, max=65_536, help="Layers past this one, from 0.")
    ] = None,
    layers: Annotated[int, typer.Option(min=1, max=64, help="Most layers that are shown.")] = 16,
    json_output: AsJson = False,
) -> None:
    """Show what differs between two placements: experts, bytes and shares, by layer and rank."""
    asks = {"base": base, "target": target, "after": after, "limit": layers}
    shown(asked(place, "GET", "/placements/diff", **asks), json_output, _diff)


@app.command(epilog="Example: eplb placements export 41 --format vllm --output placement.jsonl")
@with_place()
def export(
    place: Place,
    generation: Annotated[int, _number("Generation of the placement.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")],
    format: Format = "eplb",
    hidden_layers: Annotated[
        int | None,
        typer.Option(min=1, max=65_536, help="Layers of the model, dense ones included; SGLang."),
    ] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print file, bytes and notes as JSON.")
    ] = False,
) -> None:
    """Write a placement as an engine's file; what is repaired or lost is printed."""
    from api.cli.admin.client import download
    from telemetry.formats.bounded import file_digest, write_atomically

    path = f"/placements/{generation}/export"
    with refusals_end_the_command():
        found = download(place, path, format=format, hidden_layers=hidden_layers)
        write_atomically(output, found.data)
    notes = [note for note in found.notes.split("; ") if note]
    if json_output:
        written = {"file": str(output), "bytes": len(found.data), "notes": notes}
        typer.echo(json.dumps(written, indent=1))
        return
    for note in notes:
        typer.echo(f"note: {printable(note)}")
    typer.echo(f"written: {output}{file_digest(output)}")


def _lines(found: dict[str, Any]) -> None:
    names = ("generation", "time", "plan_id", "replicas", "hash", "reason")
    shown_as = (
        one | {"time": at(one["time"]), "replicas": sum(one["num_replicas"])}
        for one in found["placements"]
    )
    rows = ([one[name] for name in names] for one in shown_as)
    print_table(("generation", "time", "plan", "replicas", "hash"), rows, names[-1])


def _diff(found: dict[str, Any]) -> None:
    generations = [found[side]["generation"] for side in ("base", "target")]
    typer.echo(
        f"generation {generations[0]} to {generations[1]}: {found['moves']} moves, "
        f"{found['bytes'] / 1e9:.3f} GB, in {found['changed_layers']} layers"
    )
    rows = [
        [layer["layer"], layer["layer_id"], rank, *cells]
        for layer in found["layers"]
        for rank, cells in sorted(_by_rank(layer).items())
    ]
    if rows:
        print_table(("layer", "of the model", "rank", "gains", "loses"), rows, "shares")
    if found["next"] is not None:
        typer.echo(f"more layers differ: --after {found['next']}")


def _by_rank(layer: dict[str, Any]) -> dict[int, list[str]]:
    """Experts that a rank gains and loses in a layer, and shares that change."""
    cells = {
        one["rank"]: [_experts(one["added"]), _experts(one["removed"]), ""]
        for one in layer["ranks"]
    }
    shares = dict[int, list[str]]()
    for one in layer["shares"]:
        text = f"{one['expert']}: {one['before']:.3f} to {one['after']:.3f}"
        shares.setdefault(one["rank"], []).append(text)
    for rank, texts in shares.items():
        cells.setdefault(rank, ["", "", ""])[2] = _first(texts)
    return cells


def _experts(experts: list[int]) -> str:
    return _first([str(one) for one in experts])


def _first(texts: list[str]) -> str:
    more = [f"{len(texts) - SHOWN} more"] if len(texts) > SHOWN else []
    return ", ".join(texts[:SHOWN] + more)
