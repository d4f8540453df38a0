"""Commands that are imported when they are run.

``eplb --help`` and the start of each command load neither torch nor FastAPI nor the planner's
compiler: the list of commands shows the first sentence of each docstring, which is read from the
source, and a module is imported once its command is chosen.

An error of the project that a command raises is printed in one line and ends it with BAD_INPUT, or
with the error's own ``exit_status``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command_from_info, get_group

from api.interrupts import INTERRUPTED, leaving_on_interrupt, raising_on_interrupt
from api.terminal.printable import print_error
from eplb.errors import EplbError
from eplb.packages import needed_for

BAD_INPUT = 2  # exit status


@dataclass(frozen=True)
class Late:
    """Where a command or a group of commands is declared.

    Args:
        place: ``module:name`` of a function, or of a ``typer.Typer`` with several commands.
        example: shown at the end of a command's help; "": none.
        help: of a group, or of a command that is made from a table.
        words: what ``place`` makes the command of; "": it is the command.
    """

    place: str
    example: str = ""
    help: str = ""
    words: str = ""

    @property
    def summary(self) -> str:
        """One sentence for the list of commands."""
        module, _, name = self.place.partition(":")
        return self.help or _docstrings(module)[name].partition("\n\n")[0].replace("\n", " ")

    def load(self, name: str) -> Any:
        """Import the command, under the name that it has for users."""
        module, _, attribute = self.place.partition(":")
        with leaving_on_interrupt():
            found = getattr(import_module(module), attribute)
        if self.words:
            found = found(self.words)
        if isinstance(found, typer.Typer):
            made: Any = get_group(found)
            made.name, made.help = name, self.help
            return made
        epilog = f"Example: {self.example}" if self.example else None
        apart = typer.Typer()
        apart.command(name, epilog=epilog)(found)
        return get_command_from_info(
            apart.registered_commands[0],
            pretty_exceptions_short=apart.pretty_exceptions_short,
            rich_markup_mode=apart.rich_markup_mode,
        )


@cache
def _docstrings(module: str) -> dict[str, str]:
    """The docstrings of a module's functions, by name."""
    spec = find_spec(module)
    assert spec is not None, f"{module} is a module of this project"
    tree = ast.parse(Path(str(spec.origin)).read_text(encoding="utf-8"))
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    return {one.name: ast.get_docstring(one) or "" for one in functions}


class LateCommands(Mapping[str, Any]):
    """Commands by name: each is imported when it is taken out."""

    def __init__(self, known: dict[str, Late]) -> None:
        self.known = known
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = self.known[name].load(name)
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.known)

    def __len__(self) -> int:
        return len(self.known)


def group_of(panels: dict[str, dict[str, Late]]) -> type[TyperGroup]:
    """Make the class of a command line with these commands, by the headings of its help."""
    known = {name: late for panel in panels.values() for name, late in panel.items()}
    panel_of = {name: title for title, panel in panels.items() for name in panel}

    class LateGroup(TyperGroup):
        def __init__(self, **attrs: Any) -> None:
            super().__init__(**attrs)
            self.commands = LateCommands(known)  # type: ignore[assignment]  # nothing is added

        def list_commands(self, ctx: Any) -> list[str]:
            """Give the names in the order of the table."""
            return list(known)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            """Give a command as lists show it; ``resolve_command`` gives the one that runs."""
            found = known.get(cmd_name)
            if found is None:
                return None
            return TyperCommand(cmd_name, help=found.summary, rich_help_panel=panel_of[cmd_name])

        def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
            """Import the command that is asked for; an unknown one is refused with those alike."""
            name, found, rest = super().resolve_command(ctx, args)
            return name, found if name is None else self.commands[name], rest

        def invoke(self, ctx: Any) -> Any:
            """Run the command that is asked for."""
            try:
                with raising_on_interrupt(), needed_for("this command"):
                    return super().invoke(ctx)
            except KeyboardInterrupt as exc:  # typer would end the process without a word
                print_error("interrupted")
                raise typer.Exit(INTERRUPTED) from exc
            except EplbError as exc:
                from api.processes.commands import Notifier

                print_error(exc)
                Notifier().status(str(exc))  # a service manager may have started the command
                raise typer.Exit(getattr(exc, "exit_status", BAD_INPUT)) from exc

    return LateGroup
