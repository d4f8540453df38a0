"""What commands that ask the admin API share: options, exit statuses, the question, the answer."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from api.cli.admin.place import Place
from api.cli.store_place import ConfiguredDeployment, ConfiguredStore
from api.http.requests import MAX_ID
from api.terminal.printable import print_error
from eplb.errors import EplbError

NOT_ALLOWED, BAD_INPUT, NOT_YET = 1, 2, 3
OF_STATE = (404, 409, 412)  # statuses of an API that understood, and may not

Service = Annotated[
    str | None,
    typer.Option(
        envvar="EPLB_SERVICE",
        help="URL of a service, its key in EPLB_KEY; else, or with --store: a store.",
    ),
]
Wait = Annotated[
    float, typer.Option(min=0, max=3600, help="Seconds for the controller; with a store.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the answer of the API as JSON.")]
Reason = Annotated[str, typer.Option(help="Reason; stored with the request.")]
IfGeneration = Annotated[
    int | None, typer.Option(min=0, max=MAX_ID, help="Only if this generation serves.")
]
WHY = "from the command line"


def with_place(*, waits: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options that choose an API, in place of its first parameter, ``place``.

    Args:
        waits: whether ``--wait`` is one of them.
    """
    options: dict[str, Any] = {
        "service": Service,
        "store": ConfiguredStore,
        "deployment": ConfiguredDeployment,
    }
    defaults = dict.fromkeys(options) | ({"wait": 60.0} if waits else {})
    options |= {"wait": Wait} if waits else {}

    def given(command: Callable[..., None]) -> Callable[..., None]:
        def run(**values: Any) -> None:
            command(Place(*(values.pop(name) for name in options)), **values)

        signature = inspect.signature(command, eval_str=True)
        of_place = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=option
            )
            for name, option in options.items()
        ]
        own = [
            one.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for one in list(signature.parameters.values())[1:]
        ]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = signature.replace(parameters=own + of_place)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in own + of_place}
        return run

    return given


def asked(place: Place, method: str, path: str, *body: Any, **more: Any) -> Any:
    """Send one request; a refusal ends the command."""
    # Imported here: httpx takes 0.1 s, and --help needs none of it.
    from api.cli.admin.client import ask

    with refusals_end_the_command():
        return ask(place, method, path, *body, **more)


@contextmanager
def refusals_end_the_command() -> Iterator[None]:
    """Print an error of the project, and end the command with its exit status."""
    from api.cli.admin.client import AdminRefused

    try:
        yield
    except EplbError as exc:
        print_error(exc)
        is_of_state = isinstance(exc, AdminRefused) and exc.status in OF_STATE
        raise typer.Exit(NOT_ALLOWED if is_of_state else BAD_INPUT) from exc


def shown(answer: Any, json_output: bool, show: Callable[[Any], None]) -> None:
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


def at(seconds: float) -> str:
    """Give a time since the epoch as date and time of UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds)) + "Z"
