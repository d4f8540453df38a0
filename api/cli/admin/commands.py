"""Commands of an operator: proposals, rebalances, tasks and events.

Exit status of each: 0, done; 1, the state of the deployment does not allow it; 2, bad input, no
such service or store, or no permission; 3, the controller had not done it in the time of --wait.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from api.cli.admin.asking import (
    BAD_INPUT,
    WHY,
    AsJson,
    IfGeneration,
    Reason,
    asked,
    at,
    shown,
    with_place,
)
from api.cli.admin.place import Place
from api.http.requests import MAX_ID, MAX_INDEX
from api.terminal.printable import print_error, printable
from api.terminal.table import print_table

Policy = Annotated[str | None, typer.Option(help="Placement policy; else the controller's.")]
Move = Annotated[bool, typer.Option("--move", help="Carry it out; else it is a dry run.")]
Number = Annotated[int, typer.Argument(min=0, max=MAX_ID, help="Number of the proposal.")]
ExpertsPerTransaction = Annotated[
    int | None,
    typer.Option(min=1, max=MAX_INDEX, help="Experts that reach a rank together, at most."),
]
LayersPerTransaction = Annotated[
    int | None, typer.Option(min=1, max=MAX_INDEX, help="Layers that swap together, at most.")
]
LinkPart = Annotated[
    float | None, typer.Option(min=0, max=1, help="Part of each link's budget, above 0.")
]


@with_place()
def proposals(
    place: Place,
    json_output: AsJson = False,
) -> None:
    """List plans that wait for an approval, and how others ended."""
    answer = asked(place, "GET", "/proposals")
    shown(answer, json_output, _proposals)


@with_place(waits=True)
def propose(
    place: Place,
    reason: Reason = WHY,
    policy: Policy = None,
    expires_s: Annotated[
        int, typer.Option(min=1, max=604_800, help="For how long it can be approved.")
    ] = 900,
    json_output: AsJson = False,
) -> None:
    """Have the controller plan now, and store the plan; nothing moves."""
    body = {"reason": reason, "expires_s": expires_s} | ({"policy": policy} if policy else {})
    answer = asked(place, "POST", "/proposals", body)
    shown(answer, json_output, _proposal)


@with_place(waits=True)
def explain(
    place: Place,
    proposal: Annotated[int | None, typer.Argument(min=0, max=MAX_ID, help="A proposal.")] = None,
    layer: Annotated[
        int | None, typer.Option(min=0, max=65_536, help="Layer, from 0; with --expert.")
    ] = None,
    expert: Annotated[int | None, typer.Option(min=0, max=65_536, help="A logical expert.")] = None,
    json_output: AsJson = False,
) -> None:
    """Explain a proposal, or where a plan made now places an expert."""
    if proposal is not None and layer is None and expert is None:
        shown(asked(place, "GET", f"/proposals/{proposal}"), json_output, _proposal)
        return
    if proposal is not None or layer is None or expert is None:
        print_error("found neither a proposal alone nor --layer and --expert, expected one of them")
        raise typer.Exit(BAD_INPUT)
    body = {"layer": layer, "expert": expert}
    shown(asked(place, "POST", "/explanations", body), json_output, _sentences)


@with_place(waits=True)
def approve(
    place: Place,
    proposal: Number,
    reason: Reason = WHY,
    if_generation: IfGeneration = None,
    json_output: AsJson = False,
) -> None:
    """Carry out exactly a proposal; refused once its base moved on."""
    path = f"/proposals/{proposal}/approve"
    answer = asked(place, "POST", path, {"reason": reason}, if_match=if_generation)
    shown(answer, json_output, _task)


@with_place()
def reject(
    place: Place,
    proposal: Number,
    reason: Reason = WHY,
    json_output: AsJson = False,
) -> None:
    """End a proposal, so that nobody can approve it."""
    path = f"/proposals/{proposal}/reject"
    answer = asked(place, "POST", path, {"reason": reason})
    shown(answer, json_output, _proposal)


@with_place(waits=True)
def rebalance(
    place: Place,
    reason: Reason = WHY,
    policy: Policy = None,
    move: Move = False,
    experts_per_transaction: ExpertsPerTransaction = None,
    layers_per_transaction: LayersPerTransaction = None,
    link_part: LinkPart = None,
    if_generation: IfGeneration = None,
    json_output: AsJson = False,
) -> None:
    """Have the controller plan now; with --move, carry the plan out."""
    body = {"reason": reason, "dry_run": not move} | ({"policy": policy} if policy else {})
    body |= _throttle(experts_per_transaction, layers_per_transaction, link_part)
    answer = asked(place, "POST", "/rebalances", body, if_match=if_generation)
    shown(answer, json_output, _task)


@with_place(waits=True)
def rollback(
    place: Place,
    generation: Annotated[
        int, typer.Argument(min=0, max=MAX_ID, help="Whose placement is to serve again.")
    ],
    reason: Reason = WHY,
    move: Move = False,
    experts_per_transaction: ExpertsPerTransaction = None,
    layers_per_transaction: LayersPerTransaction = None,
    link_part: LinkPart = None,
    if_generation: IfGeneration = None,
    json_output: AsJson = False,
) -> None:
    """Plan the way back to an earlier placement; with --move, carry it out."""
    body = {"reason": reason, "dry_run": not move, "generation": generation}
    body |= _throttle(experts_per_transaction, layers_per_transaction, link_part)
    answer = asked(place, "POST", "/rollbacks", body, if_match=if_generation)
    shown(answer, json_output, _task)


@with_place()
def deployments(
    place: Place,
    json_output: AsJson = False,
) -> None:
    """List the deployments that a service shows, and how each stands."""
    if not place.url:
        print_error("found no --service, expected one; eplb store list has those of a store")
        raise typer.Exit(BAD_INPUT)
    shown(asked(place, "GET", "/deployments"), json_output, _deployments)


@with_place()
def tasks(
    place: Place,
    state: Annotated[str, typer.Option(help="queued, running, done or failed.")] = "queued",
    after: Annotated[int, typer.Option(min=0, max=MAX_ID, help="Those past this number.")] = 0,
    cancel: Annotated[
        int | None, typer.Option(min=0, max=MAX_ID, help="Cancel this one; it must be queued.")
    ] = None,
    reason: Reason = WHY,
    json_output: AsJson = False,
) -> None:
    """List requests to the controller, or cancel one."""
    if cancel is not None:
        answer = asked(place, "POST", f"/tasks/{cancel}/cancel", {"reason": reason})
        shown(answer, json_output, lambda found: _tasks({"tasks": [found], "next": None}))
        return
    shown(asked(place, "GET", "/tasks", state=state, after=after), json_output, _tasks)


@with_place()
def events(
    place: Place,
    last: Annotated[int, typer.Option(min=1, max=1000, help="How many, the latest.")] = 20,
    after: Annotated[
        int | None,
        typer.Option(min=0, max=MAX_ID, help="Those past this id instead, oldest first."),
    ] = None,
    json_output: AsJson = False,
) -> None:
    """Show what happened: decisions, commits, deaths, switches."""
    which = {"latest": last} if after is None else {"after": after}
    answer = asked(place, "GET", "/events", **which)
    shown(answer, json_output, _events)


@with_place()
def anomalies(
    place: Place,
    state: Annotated[str | None, typer.Option(help="open or ended; without: both.")] = None,
    last: Annotated[int, typer.Option(min=1, max=1000, help="Of how many.")] = 20,
    json_output: AsJson = False,
) -> None:
    """List what is wrong and what was, newest first; of a store, what is wrong now, and events."""
    shown(asked(place, "GET", "/anomalies", state=state, limit=last), json_output, _anomalies)


def _deployments(found: dict[str, Any]) -> None:
    names = ("name", "verdict", "num_ranks", "generation", "imbalance", "movement", "reason")
    rows = ([one[name] for name in names] for one in found["deployments"])
    columns = ("deployment", "verdict", "ranks", "generation", "imbalance", "movement")
    print_table(columns, rows, "reason")


def _anomalies(found: dict[str, Any]) -> None:
    rows = [
        [one[name] for name in ("id", "severity", "kind")]
        + [at(one["since"]), at(one["until"]) if one["until"] else "now", one["text"]]
        for one in found["anomalies"]
    ]
    if rows:
        print_table(("id", "severity", "kind", "since", "until"), rows, "what")
    else:
        typer.echo("no anomalies")


def _throttle(experts: int | None, layers: int | None, link_part: float | None) -> dict[str, Any]:
    """Part of a body that has the limits which were given."""
    given = {
        "experts_per_transaction": experts,
        "layers_per_transaction": layers,
        "link_part": link_part,
    }
    limits = {name: value for name, value in given.items() if value is not None}
    return {"throttle": limits} if limits else {}


def _proposals(found: dict[str, Any]) -> None:
    columns = ("id", "state", "expires", "by", "decision", "before", "after", "moves", "GB")
    names = ("id", "state", "expires", "by", "decision", "imbalance_before", "imbalance_after")
    rows = (
        [one[name] for name in (*names, "moves")]
        + [one["bytes"] / 1e9, one["end_reason"] or one["reason"]]
        for one in [line | {"expires": at(line["expires"])} for line in found["proposals"]]
    )
    print_table(columns, rows, "reason")


def _proposal(one: dict[str, Any]) -> None:
    _proposals({"proposals": [one]})
    for text in (one["plan_reason"], *(s for it in one["explanation"] for s in it["sentences"])):
        typer.echo(printable(text))
    if one["state"] == "open":
        base = one["base_generation"]
        typer.echo(f"eplb approve {one['id']} carries it out while generation {base} serves")


def _sentences(task: dict[str, Any]) -> None:
    for sentence in task["result"]["sentences"]:
        typer.echo(printable(sentence))


def _task(task: dict[str, Any]) -> None:
    found = task["result"]
    columns = ("task", "decision", "before", "after", "moves", "plan")
    row = [task["id"], *(found.get(name) for name in ("decision", "before", "after", "num_moves"))]
    print_table(columns, [[*row, found.get("plan_id"), found.get("reason")]], "reason")
    if found.get("published"):
        typer.echo(f"plan {found['plan_id']} is published to the ranks")
    else:
        typer.echo("nothing moves" + (": a dry run" if found.get("dry_run") else ""))


def _tasks(found: dict[str, Any]) -> None:
    rows = [
        [one["id"], at(one["time"]), one["kind"], one["state"], result.get("plan_id"), why]
        for one in found["tasks"]
        for result in [one["result"]]
        for why in [result.get("error") or one["request"].get("reason")]
    ]
    print_table(("id", "time", "kind", "state", "plan"), rows, "reason")
    _more(found)


def _events(found: dict[str, Any]) -> None:
    rows = (
        [one["id"], at(one["time"]), one["kind"], _words(one["detail"])] for one in found["events"]
    )
    print_table(("id", "time", "kind"), rows, "detail")
    _more(found)


def _more(found: dict[str, Any]) -> None:
    if found["next"] is not None:
        typer.echo(f"there are more: --after {found['next']}")


def _words(detail: dict[str, Any]) -> str:
    return " ".join(
        f"{name}={value}" for name, value in detail.items() if not isinstance(value, dict | list)
    )
