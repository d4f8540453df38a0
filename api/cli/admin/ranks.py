"""Commands on ranks: what each does and holds; and which take no further experts, or hold none.

Exit status of each: 0, done; 1, the other ranks cannot make up for it, there is no such rank, or
another change came first; 2, bad input, no such service or store, or no permission.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from api.cli.admin.asking import WHY, AsJson, Reason, Service, asked, shown
from api.cli.store_place import ConfiguredDeployment, ConfiguredStore
from api.terminal.printable import printable
from api.terminal.table import print_table

Rank = Annotated[int, typer.Argument(min=0, max=999_999, help="Number of the rank.")]


def ranks(
    service: Service = None,
    store: ConfiguredStore = None,
    deployment: ConfiguredDeployment = None,
    json_output: AsJson = False,
) -> None:
    """Show each rank: step, phase, age of its report, whether it takes experts, what it holds."""
    place = (service, store, deployment)
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


def cordon(
    rank: Rank,
    service: Service = None,
    store: ConfiguredStore = None,
    deployment: ConfiguredDeployment = None,
    reason: Reason = WHY,
    json_output: AsJson = False,
) -> None:
    """Place no further expert on a rank; it keeps what it holds. Exit status 1: refused."""
    place, path = (service, store, deployment), f"/ranks/{rank}/cordon"
    shown(asked(place, "POST", path, {"reason": reason}), json_output, _ranks)


def drain(
    rank: Rank,
    service: Service = None,
    store: ConfiguredStore = None,
    deployment: ConfiguredDeployment = None,
    reason: Reason = WHY,
    json_output: AsJson = False,
) -> None:
    """Move every expert off a rank, so that its loss costs none. Exit status 1: refused."""
    place, path = (service, store, deployment), f"/ranks/{rank}/drain"
    shown(asked(place, "POST", path, {"reason": reason}), json_output, _ranks)


def uncordon(
    rank: Rank,
    service: Service = None,
    store: ConfiguredStore = None,
    deployment: ConfiguredDeployment = None,
    reason: Reason = WHY,
    json_output: AsJson = False,
) -> None:
    """Let a rank take experts again, after cordon or drain. Exit status 1: refused."""
    place, path = (service, store, deployment), f"/ranks/{rank}/uncordon"
    shown(asked(place, "POST", path, {"reason": reason}), json_output, _ranks)


def _ranks(found: dict[str, Any]) -> None:
    columns = ("rank", "node", "host", "experts", "sole_experts")
    rows = ([one[name] for name in (*columns, "state")] for one in found["ranks"])
    print_table(columns, rows, "state")
    for why in found["unmet"]:
        typer.echo(f"not met: {printable(why)}")
    if found["waits"]:
        typer.echo(f"not moved: {printable(found['waits'])}")
