"""``eplb pins``: which ranks must hold which experts.

Exit status of each: 0, done; 1, the ranks cannot meet the pin, there is none such, or another
change came first; 2, bad input, no such service or store, or no permission.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from api.cli.admin.asking import (
    BAD_INPUT,
    NOT_ALLOWED,
    WHY,
    AsJson,
    Reason,
    asked,
    shown,
    with_place,
)
from api.cli.admin.place import Place
from api.terminal.printable import print_error, printable
from api.terminal.table import print_table

app = typer.Typer(
    help="Pin experts to ranks. Exit status 1: the ranks cannot meet the pin, there is none such, "
    "or another change came first; 2: bad input, no such service or store, or no permission.",
    no_args_is_help=True,
)
Layer = Annotated[
    int | None, typer.Option(min=0, max=999_999, help="Layer, from 0; without: every layer.")
]
Expert = Annotated[int, typer.Option(min=0, max=999_999, help="A logical expert.")]


@app.command("list", epilog="Example: eplb pins list --service http://127.0.0.1:8765")
@with_place()
def list_pins(
    place: Place,
    json_output: AsJson = False,
) -> None:
    """List pins, and those that the ranks cannot meet now."""
    shown(asked(place, "GET", "/pins"), json_output, _pins)


@app.command("set", epilog="Example: eplb pins set --layer 3 --expert 17 --ranks 0,4")
@with_place()
def set_pin(
    place: Place,
    expert: Expert,
    ranks: Annotated[str, typer.Option(help="Ranks that must hold it, as 0,4.")],
    layer: Layer = None,
    reason: Reason = WHY,
    json_output: AsJson = False,
) -> None:
    """Pin an expert to ranks, in place of its pin before; other pins stay."""
    numbers = [part.strip() for part in ranks.split(",")]
    if not all(number.isascii() and number.isdigit() for number in numbers):
        print_error(f"--ranks is {ranks!r}, expected numbers with commas, as 0,4")
        raise typer.Exit(BAD_INPUT)
    found = asked(place, "GET", "/pins").body
    new = {"layer": layer, "expert": expert, "ranks": [int(number) for number in numbers]}
    body = {"reason": reason, "pins": [*_others(found, layer, expert), new]}
    answer = asked(place, "PUT", "/pins", body, if_match=found["revision"])
    shown(answer, json_output, _pins)


@app.command(epilog="Example: eplb pins remove --layer 3 --expert 17; eplb pins remove --all")
@with_place()
def remove(
    place: Place,
    expert: Annotated[
        int | None, typer.Option(min=0, max=999_999, help="A logical expert.")
    ] = None,
    layer: Layer = None,
    every: Annotated[bool, typer.Option("--all", help="All pins.")] = False,
    reason: Reason = WHY,
    json_output: AsJson = False,
) -> None:
    """Remove the pin of an expert, or with --all every pin; nothing moves for that alone."""
    if every == (expert is not None) or (every and layer is not None):
        print_error("found neither --expert nor --all alone, expected one of them")
        raise typer.Exit(BAD_INPUT)
    found = asked(place, "GET", "/pins").body
    tag, body = found["revision"], {"reason": reason}
    if every:
        shown(asked(place, "DELETE", "/pins", body, if_match=tag), json_output, _pins)
        return
    others = _others(found, layer, expert)
    if len(others) == len(found["pins"]):
        where = "every layer" if layer is None else f"layer {layer}"
        print_error(f"there is no pin of {where} expert {expert}")
        raise typer.Exit(NOT_ALLOWED)
    answer = asked(place, "PUT", "/pins", body | {"pins": others}, if_match=tag)
    shown(answer, json_output, _pins)


def _others(found: dict[str, Any], layer: int | None, expert: int | None) -> list[dict[str, Any]]:
    return [one for one in found["pins"] if (one["layer"], one["expert"]) != (layer, expert)]


def _pins(found: dict[str, Any]) -> None:
    rows = (
        ["all" if one["layer"] is None else one["layer"], one["expert"], _ranks(one["ranks"])]
        for one in found["pins"]
    )
    if found["pins"]:
        print_table(("layer", "expert"), rows, "ranks")
    else:
        typer.echo("no pins")
    for why in found["unmet"]:
        typer.echo(f"not met: {printable(why)}")


def _ranks(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
