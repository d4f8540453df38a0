"""Commands that ask the admin API: each is made from the declaration of its route.

    command("cordon", "eplb cordon 3", cordon, show=print_ranks)

Path, parameters and keys of the body are the arguments and options, the docstring of the route is
the help. A command adds what is for a terminal: how its answer is printed, and other names. One
that asks several routes is a function of its own, which takes what asks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from inspect import Parameter, signature
from types import UnionType
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from fastapi import APIRouter
from fastapi.routing import APIRoute

from api.http.arguments import Body
from api.http.document import sentences_of
from eplb.declared import Meaning


@dataclass(frozen=True)
class Answer:
    """An answer of the API, as a command gets it."""

    status: int
    body: Any  # the decoded JSON
    content: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


Show = Callable[[Any], int | None]  # prints the body of an answer; its exit status, None: 0
# Takes the function of a route and its arguments by name; if_match: a number.
Ask = Callable[..., Answer]


class Argument(NamedTuple):
    """One argument of a route or command."""

    kind: Any  # its type
    meaning: Meaning
    default: Any  # ...: it must be given
    is_of_path: bool = False


@dataclass(frozen=True, eq=False)
class AdminCommand:
    """A command that asks the admin API and prints the answer.

    Args:
        words: what is typed after ``eplb``.
        example: a call, for the help.
        function: of a route; or what asks, and takes the ``Ask`` first.
        show: prints the body of the answer.
        of: the function of the route whose wait and precondition are options too.
        about: the help, where the docstring speaks of requests.
        positional: arguments beside those of the path that are typed without an option's name.
        names: of options, by argument, where they are others.
        defaults: by argument, where they are others.
        is_of_service: a store alone cannot answer it.
    """

    words: str
    example: str
    function: Callable[..., Any]
    show: Show
    of: Callable[..., Any]
    about: str = ""
    positional: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    is_of_service: bool = False

    @property
    def is_of_route(self) -> bool:
        """Whether it asks one route, with the arguments of that route."""
        return self.function is self.of

    @property
    def help(self) -> str:
        """``about``, or the docstring of its function."""
        return self.about or " ".join(sentences_of(self.function.__doc__ or "")).strip()


COMMANDS: dict[str, AdminCommand] = {}  # those of the modules that are imported, by their words


def command(
    words: str,
    example: str,
    function: Callable[..., Any],
    *,
    show: Show,
    of: Callable[..., Any] | None = None,
    **more: Any,
) -> None:
    """Declare a command; ``AdminCommand`` has the rest."""
    COMMANDS[words] = AdminCommand(words, example, function, show, of or function, **more)


def route_of(function: Callable[..., Any]) -> APIRoute | None:
    """Return the route of a function, in a router of its module; None: it has none."""
    for router in vars(sys.modules[function.__module__]).values():
        if isinstance(router, APIRouter):
            for route in router.routes:
                if isinstance(route, APIRoute) and route.endpoint is function:
                    return route
    return None


def arguments_of(function: Callable[..., Any]) -> dict[str, Argument]:
    """Read what has a ``Meaning``, by name; a body is given by its keys."""
    route = route_of(function)
    in_path = set() if route is None else {one.name for one in route.dependant.path_params}
    found = dict[str, Argument]()
    for name, parameter in signature(function, eval_str=True).parameters.items():
        annotation = parameter.annotation
        if isinstance(annotation, type) and issubclass(annotation, Body):
            found |= keys_of(annotation)
            continue
        kind, *metadata = get_args(annotation) if get_origin(annotation) is Annotated else [None]
        default = ... if parameter.default is Parameter.empty else parameter.default
        for meaning in metadata:
            if isinstance(meaning, Meaning):
                found[name] = Argument(kind, meaning, default, name in in_path)
    return found


def keys_of(body: type[Body]) -> dict[str, Argument]:
    """Read the keys of a body."""
    found = dict[str, Argument]()
    for name, key in body.model_fields.items():
        (meaning,) = (one for one in key.metadata if isinstance(one, Meaning))
        default = ... if key.is_required() else key.get_default(call_default_factory=True)
        found[name] = Argument(key.annotation, meaning, default)
    return found


def table_in(kind: Any) -> type[Body] | None:
    """Return the table of a body that a key has as its value; None: it has another one."""
    for part in _parts_of(kind):
        if isinstance(part, type) and issubclass(part, Body):
            return part
    return None


def _parts_of(kind: Any) -> Iterator[Any]:
    yield from get_args(kind) if get_origin(kind) is UnionType else (kind,)
