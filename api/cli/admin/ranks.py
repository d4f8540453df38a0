"""Commands on ranks: what each does and holds; and which take no further experts, or hold none.

Exit status of each: 0, done; 1, the other ranks cannot make up for it, there is no such rank, or
another change came first; 2, bad input, no such service or store, or no permission.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any

import typer

from api.cli.admin.asking import WHY, AsJson, Reason, asked, shown, with_place
from api.cli.admin.place import Place
from api.terminal.printable import printable
from api.terminal.table import print_table

Rank = Annotated[int, typer.Argument(min=0, max=999_999, help="Number of the rank.")]


@with_place()
def ranks(
    place: Place,
    json_output: AsJson = False,
) -> None:
    """Show each rank: step, phase, age of its report, whether it takes experts, what it holds."""
    state = asked(place, "GET", "/state").body
    held = asked(place, "GET", "/ranks").body["ranks"] if state["run"] is not None else []
    found = [rank | here for rank, here in zip(state["ranks"], held, strict=True)]
    if json_output:
        typer.echo(json.dumps(found, indent=1))
        return
    names = ("step", "generation", "phase", "age_s", "step_ms", "state", "experts", "sole_experts")
    rows = (
        [one["rank"], one["node"], "yes" if one["is_alive"] else "no"]
        + [one[name] for name in (*names, "frozen")]
        for one in found
    )
    print_table(("rank", "node", "alive", *names), rows, "frozen")


def _change(verb: str, what: str) -> Callable[..., None]:
    @with_place()
    def change(place: Place, rank: Rank, reason: Reason = WHY, json_output: AsJson = False) -> None:
        answer = asked(place, "POST", f"/ranks/{rank}/{verb}", {"reason": reason})
        shown(answer, json_output, _ranks)

    change.__name__, change.__doc__ = verb, f"{what} Exit status 1: refused."
    return change


cordon = _change("cordon", "Place no further expert on a rank; it keeps what it holds.")
drain = _change("drain", "Move every expert off a rank, so that its loss costs none.")
uncordon = _change("uncordon", "Let a rank take experts again, after cordon or drain.")


def _ranks(found: dict[str, Any]) -> None:
    columns = ("rank", "node", "host", "experts", "sole_experts")
    rows = ([one[name] for name in (*columns, "state")] for one in found["ranks"])
    print_table(columns, rows, "state")
    for why in found["unmet"]:
        typer.echo(f"not met: {printable(why)}")
    if found["waits"]:
        typer.echo(f"not moved: {printable(found['waits'])}")
