"""The commands of operators, made from the declarations of their routes.

Exit status of each: 0, done; 1, the state of the deployment does not allow it; 2, bad input, no
such service or store, or no permission; 3, the controller had not done it in the time of --wait.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from typer.main import get_command_from_info, get_group

from api.cli.options import ApiOptions, AsJson, with_options
from api.http.arguments import MAX_ID
from api.http.dependencies import if_generation
from api.operations.commands import (
    COMMANDS,
    AdminCommand,
    Argument,
    arguments_of,
    keys_of,
    route_of,
    table_in,
)
from api.terminal.printing import WHY
from eplb.errors import ConfigError

NOT_YET = 3

Wait = Annotated[
    float, typer.Option("--wait", min=0, max=3600, help="Seconds for the controller; with a store.")
]
IfGeneration = Annotated[
    int | None, typer.Option(min=0, max=MAX_ID, help="Only if this generation serves.")
]


def commands_of(first: str, about: str) -> Any:
    """Make the command of a word, or its group of commands.

    Args:
        first: the word after ``eplb``; the module that declares its commands is imported.
        about: the help of a group.
    """
    app = typer.Typer(no_args_is_help=True)
    for command in COMMANDS.values():
        word, _, name = command.words.partition(" ")
        if word == first:
            epilog = f"Example: {command.example}"
            app.command(name or word, epilog=epilog)(command_of(command.words))
    if first in COMMANDS:
        return get_command_from_info(
            app.registered_commands[0],
            pretty_exceptions_short=app.pretty_exceptions_short,
            rich_markup_mode=app.rich_markup_mode,
        )
    group: Any = get_group(app)
    group.name, group.help = first, about
    return group


def command_of(words: str) -> Callable[..., None]:
    """Make the function of a command, whose parameters are its arguments and options.

    Args:
        words: what is typed after ``eplb``; the module that declares the command is imported.
    """
    command = COMMANDS[words]
    route, arguments = route_of(command.of), arguments_of(command.function)
    assert route is not None, f"{words} asks a route"
    options = dict(_options(command, arguments))
    of_place: dict[str, Any] = {
        "json_output": (AsJson, False),
        "place": (ApiOptions, inspect.Parameter.empty),
    }
    if any(one.call is if_generation for one in route.dependant.dependencies):
        of_place["if_generation"] = (IfGeneration, None)
    if 202 in route.responses:
        of_place["wait_s"] = (Wait, 60.0)

    def run(**values: Any) -> None:
        given = {name: values.pop(name) for name in options}
        _run(command, _nested(arguments, given), **values)

    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(name, kind, default=default, annotation=annotation)
        for name, (annotation, default) in (options | of_place).items()
    ]
    run.__name__, run.__doc__ = command.words.replace(" ", "_"), command.help
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return with_options(run)


def _options(
    command: AdminCommand, arguments: Mapping[str, Argument]
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Annotation and default of each argument or option, by its name in a request."""
    for name, one in arguments.items():
        if (table := table_in(one.kind)) is not None:  # each of its keys is an option
            yield from _options(command, keys_of(table))
            continue
        is_typed = name in command.positional or one.is_of_path
        spelled = None if is_typed else command.names.get(name, name)
        default = command.defaults.get(name, WHY if name == "reason" else one.default)
        yield name, _option(one._replace(default=default), spelled)


def _nested(arguments: Mapping[str, Argument], given: dict[str, Any]) -> dict[str, Any]:
    """Put options that are keys of a table of the body into that table."""
    for name, one in arguments.items():
        if (table := table_in(one.kind)) is not None:
            limits = {key: given.pop(key) for key in keys_of(table)}
            limits = {key: value for key, value in limits.items() if value is not None}
            given |= {name: limits} if limits else {}
    return given


def _option(argument: Argument, spelled: str | None) -> tuple[Any, Any]:
    """Give typer an argument (``spelled`` is None) or an option."""
    base, meaning, default = argument.kind, argument.meaning, argument.default
    if get_origin(base) is UnionType:
        (base,) = (part for part in get_args(base) if part is not NoneType)
    about = meaning.text.replace("null:", "without:")  # an option is left out in place of null
    if get_origin(base) is Literal:  # the API checks it, and names those that it knows
        about, base = f"{', '.join(get_args(base))}; {about}", str
    about = f"{about[:1].upper()}{about[1:]}"
    limits: dict[str, Any] = {}
    if base in (int, float):
        least = meaning.above if meaning.at_least is None else meaning.at_least
        limits = {"min": least, "max": meaning.at_most}
    if spelled is None:
        info = typer.Argument(help=f"{about}.", **limits)
    else:
        info = typer.Option(*_spellings(spelled), help=f"{about}.", **limits)
    wanted: Any = base | None if default is None else base
    return Annotated[wanted, info], inspect.Parameter.empty if default is ... else default


def _spellings(spelled: str) -> list[str]:
    """``after``, ``output/-o`` and ``dry-run/--move`` as typer takes them."""
    first, _, other = f"--{spelled.replace('_', '-')}".partition("/")
    if other.startswith("--"):
        return [f"{first}/{other}"]  # the one for true, the other for false
    return [first, other] if other else [first]


def _run(
    command: AdminCommand,
    given: Mapping[str, Any],
    *,
    json_output: bool,
    place: ApiOptions,
    if_generation: int | None = None,
    wait_s: float | None = None,
) -> None:
    # Imported here: httpx takes 0.1 s, and --help needs none of it.
    from api.cli.admin.client import asking

    if command.is_of_service and place.url is None:
        raise ConfigError("found no --service, expected one; eplb store list has those of a store")
    with asking(place, wait_s) as ask:
        if command.is_of_route:
            answer = ask(command.function, **given, if_match=if_generation)
        else:
            answer = command.function(ask, **given)
    if json_output:
        typer.echo(json.dumps(answer.body, indent=1))
    elif answer.status == 202:
        task = answer.body
        typer.echo(f"task {task['id']} ({task['kind']}) is {task['state']}: see eplb tasks")
    else:
        raise typer.Exit(command.show(answer.body) or 0)
    raise typer.Exit(NOT_YET if answer.status == 202 else 0)
