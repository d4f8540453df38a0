"""Commands of an operator: proposals, rebalances, tasks, events and ranks.

Exit status of each: 0, done; 1, the state of the deployment does not allow it; 2, bad input, no
such service or store, or no permission; 3, the controller had not done it in the time of --wait.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

from api.cli.store_place import ConfiguredDeployment, ConfiguredStore
from api.http.requests import MAX_ID
from api.terminal.printable import print_error, printable
from api.terminal.table import print_table
from eplb.errors import EplbError

NOT_ALLOWED, BAD_INPUT, NOT_YET = 1, 2, 3
OF_STATE = (404, 409, 412)  # statuses of an API that understood, and may not

Service = Annotated[
    str | None,
    typer.Option(
        envvar="EPLB_SERVICE", help="URL of a service, its key in EPLB_KEY; else a store is used."
    ),
]
Wait = Annotated[
    float, typer.Option(min=0, max=3600, help="Seconds for the controller; with a store.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the answer of the API as JSON.")]
Reason = Annotated[str, typer.Option(help="Reason; stored with the request.")]
Policy = Annotated[str | None, typer.Option(help="Placement policy; else the controller's.")]
Move = Annotated[bool, typer.Option("--move", help="Carry it out; else it is a dry run.")]
Number = Annotated[int, typer.Argument(min=0, max=MAX_ID, help="Number of the proposal.")]
IfGeneration = Annotated[
    int | None, typer.Option(min=0, max=MAX_ID, help="Only if this generation serves.")
]
WHY = "from the command line"


def proposals(
    service: Service = None,
    store: ConfiguredStore = None,
    deployment: ConfiguredDeployment = None,
    json_output: AsJson = False,
) -> None:
    """List plans that wait for an approval, and how others ended."""
    answer = _asked((service, store, deployment), "GET", "/proposals")
    _shown(answer, json_output, _proposals)


def propose(
    service: Service = None,
    store: ConfiguredStore = None,
    deployment: ConfiguredDeployment = None,
    reason: Reason = WHY,
    policy: Policy = None,
    expires_s: Annotated[
        int, typer.Option(min=1, max=604_800, help="For how long it can be approved.")
    ] = 900,
    wait: Wait = 60.0,
    json_output: AsJson = False,
) -> None:
    """Have the controller plan now, and store the plan; nothing moves."""
    body = {"reason": reason, "expires_s": expires_s} | ({"policy": policy} if policy else {})
    answer = _asked((service, store, deployment, wait), "POST", "/proposals", body)
    _shown(answer, json_output, _proposal)


def explain(
    proposal: Annotated[int | None, typer.Argument(min=0, max=MAX_ID, help="A proposal.")] = None,
    layer: Annotated[
        int | None, typer.Option(min=0, max=65_536, help="Layer, from 0; with --expert.")
    ] = None,
    expert: Annotated[int | None, typer.Option(min=0, max=65_536, help="A logical expert.")] = None,
    service: Service = None,
    store: ConfiguredStore = None,
    deployment: ConfiguredDeployment = None,
    wait: Wait = 60.0,
    json_output: AsJson = False,
) -> None:
    """Explain a proposal, or where a plan made now places an expert."""
    place = (service, store, deployment, wait)
    if proposal is not None and layer is None and expert is None:
        _shown(_asked(place, "GET", f"/proposals/{proposal}"), json_output, _proposal)
        return
    if proposal is not None or layer is None or expert is None:
        print_error("found neither a proposal alone nor --layer and --expert, expected one of them")
        raise typer.Exit(BAD_INPUT)
    body = {"layer": layer, "expert": expert}
    _shown(_asked(place, "POST", "/explanations", body), json_output, _sentences)


def approve(
    proposal: Number,
    service: Service = None,
    store: ConfiguredStore = None,
    deployment: ConfiguredDeployment = None,
    reason: Reason = WHY,
    if_generation: IfGeneration = None,
    wait: Wait = 60.0,
    json_output: AsJson = False,
) -> None:
    """Carry out exactly a proposal; refused once its base moved on."""
    place, path = (service, store, deployment, wait), f"/proposals/{proposal}/approve"
    answer = _asked(place, "POST", path, {"reason": reason}, if_generation=if_generation)
    _shown(answer, json_output, _task)


def reject(
    proposal: Number,
    service: Service = None,
    store: ConfiguredStore = None,
    deployment: ConfiguredDeployment = None,
    reason: Reason = WHY,
    json_output: AsJson = False,
) -> None:
    """End a proposal, so that nobody can approve it."""
    place, path = (service, store, deployment), f"/proposals/{proposal}/reject"
    answer = _asked(place, "POST", path, {"reason": reason})
    _shown(answer, json_output, lambda found: _proposals([found]))


def rebalance(
    service: Service = None,
    store: ConfiguredStore = None,
    deployment: ConfiguredDeployment = None,
    reason: Reason = WHY,
    policy: Policy = None,
    move: Move = False,
    if_generation: IfGeneration = None,
    wait: Wait = 60.0,
    json_output: AsJson = False,
) -> None:
    """Have the controller plan now; with --move, carry the plan out."""
    body = {"reason": reason, "dry_run": not move} | ({"policy": policy} if policy else {})
    place = (service, store, deployment, wait)
    answer = _asked(place, "POST", "/rebalances", body, if_generation=if_generation)
    _shown(answer, json_output, _task)


def rollback(
    generation: Annotated[
        int, typer.Argument(min=0, max=MAX_ID, help="Whose placement is to serve again.")
    ],
    service: Service = None,
    store: ConfiguredStore = None,
    deployment: ConfiguredDeployment = None,
    reason: Reason = WHY,
    move: Move = False,
    if_generation: IfGeneration = None,
    wait: Wait = 60.0,
    json_output: AsJson = False,
) -> None:
    """Plan the way back to an earlier placement; with --move, carry it out."""
    body = {"reason": reason, "dry_run": not move, "generation": generation}
    place = (service, store, deployment, wait)
    answer = _asked(place, "POST", "/rollbacks", body, if_generation=if_generation)
    _shown(answer, json_output, _task)


def tasks(
    service: Service = None,
    store: ConfiguredStore = None,
    deployment: ConfiguredDeployment = None,
    state: Annotated[str, typer.Option(help="queued, running, done or failed.")] = "queued",
    cancel: Annotated[
        int | None, typer.Option(min=0, max=MAX_ID, help="Cancel this one; it must be queued.")
    ] = None,
    reason: Reason = WHY,
    json_output: AsJson = False,
) -> None:
    """List requests to the controller, or cancel one."""
    place = (service, store, deployment)
    if cancel is not None:
        answer = _asked(place, "POST", f"/tasks/{cancel}/cancel", {"reason": reason})
        _shown(answer, json_output, lambda found: _tasks([found]))
        return
    _shown(_asked(place, "GET", "/tasks", state=state), json_output, _tasks)


def events(
    service: Service = None,
    store: ConfiguredStore = None,
    deployment: ConfiguredDeployment = None,
    last: Annotated[int, typer.Option(min=1, max=1000, help="How many, the latest.")] = 20,
    after: Annotated[
        int | None,
        typer.Option(min=0, max=MAX_ID, help="Those past this id instead, oldest first."),
    ] = None,
    json_output: AsJson = False,
) -> None:
    """Show what happened: decisions, commits, deaths, switches."""
    which = {"latest": last} if after is None else {"after": after}
    answer = _asked((service, store, deployment), "GET", "/events", **which)
    _shown(answer, json_output, _events)


def ranks(
    service: Service = None,
    store: ConfiguredStore = None,
    deployment: ConfiguredDeployment = None,
    json_output: AsJson = False,
) -> None:
    """Show each rank: step, generation, phase, and how old its report is."""
    state = _asked((service, store, deployment), "GET", "/state").body
    found = [rank | {"node": state["node_of_rank"][rank["rank"]]} for rank in state["ranks"]]
    if json_output:
        typer.echo(json.dumps(found, indent=1))
        return
    columns = ("rank", "node", "alive", "step", "generation", "phase", "age_s", "step_ms")
    rows = (
        [one["rank"], one["node"], "yes" if one["is_alive"] else "no"]
        + [one[name] for name in (*columns[3:], "frozen")]
        for one in found
    )
    print_table(columns, rows, "frozen")


def _asked(place: tuple[Any, ...], method: str, path: str, *body: Any, **more: Any) -> Any:
    # Imported here: httpx takes 0.1 s, and --help needs none of it.
    from api.cli.admin.client import AdminRefused, Place, ask

    try:
        return ask(Place(*place), method, path, *body, **more)
    except AdminRefused as exc:
        print_error(exc)
        raise typer.Exit(NOT_ALLOWED if exc.status in OF_STATE else BAD_INPUT) from exc
    except EplbError as exc:
        print_error(exc)
        raise typer.Exit(BAD_INPUT) from exc


def _shown(answer: Any, json_output: bool, show: Callable[[Any], None]) -> None:
    """Print an answer; one that is not done yet ends the command with NOT_YET."""
    if json_output:
        typer.echo(json.dumps(answer.body, indent=1))
    elif answer.status == 202:
        task = answer.body
        typer.echo(f"task {task['id']} ({task['kind']}) is {task['state']}: see eplb tasks")
    else:
        show(answer.body)
    if answer.status == 202:
        raise typer.Exit(NOT_YET)


def _proposals(found: list[dict[str, Any]]) -> None:
    columns = ("id", "state", "expires", "by", "decision", "before", "after", "moves", "GB")
    names = ("id", "state", "expires", "by", "decision", "imbalance_before", "imbalance_after")
    rows = (
        [one[name] for name in (*names, "moves")]
        + [one["bytes"] / 1e9, one["end_reason"] or one["reason"]]
        for one in [line | {"expires": _at(line["expires"])} for line in found]
    )
    print_table(columns, rows, "reason")


def _proposal(one: dict[str, Any]) -> None:
    _proposals([one])
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


def _tasks(found: list[dict[str, Any]]) -> None:
    rows = [
        [one["id"], _at(one["time"]), one["kind"], one["state"], result.get("plan_id"), why]
        for one in found
        for result in [one["result"]]
        for why in [result.get("error") or one["request"].get("reason")]
    ]
    print_table(("id", "time", "kind", "state", "plan"), rows, "reason")


def _events(found: list[dict[str, Any]]) -> None:
    rows = ([one["id"], _at(one["time"]), one["kind"], _words(one["detail"])] for one in found)
    print_table(("id", "time", "kind"), rows, "detail")


def _words(detail: dict[str, Any]) -> str:
    return " ".join(
        f"{name}={value}" for name, value in detail.items() if not isinstance(value, dict | list)
    )


def _at(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds)) + "Z"
