"""``eplb``: the command line. This table says where each command is."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command_from_info, get_group

from api.interrupts import INTERRUPTED, leaving_on_interrupt, raising_on_interrupt
from api.terminal.logs import set_up_logging
from api.terminal.printable import print_error
from eplb import __version__
from eplb.errors import EplbError
from eplb.packages import needed_for

# What a stream answers that takes no more bytes; without a reader (EPIPE) typer ends in silence.
UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


@dataclass(frozen=True)
class Place:
    """Where a command is, which is imported when it runs, and its sentence in the list.

    Args:
        at: ``module:name`` of a function or a ``typer.Typer``; a module alone declares commands of
            the admin API (``api/operations/commands.py``).
        help: first sentence of the command's own help.
        example: shown at the end of its help; "": none, or the one that it declares.
    """

    at: str
    help: str
    example: str = ""

    def load(self, name: str) -> Any:
        """Import the command, under the name that it has for users."""
        module, _, attribute = self.at.partition(":")
        with leaving_on_interrupt():
            found = import_module(module)
            if not attribute:
                from api.cli.admin.commands import commands_of

                return commands_of(name, self.help)
        command = getattr(found, attribute)
        if isinstance(command, typer.Typer):
            group: Any = get_group(command)
            group.name, group.help = name, self.help
            return group
        return made_of(command, name, self.example)


def made_of(function: Any, name: str, example: str) -> Any:
    """Make a command of a function."""
    apart = typer.Typer()
    apart.command(name, epilog=f"Example: {example}" if example else None)(function)
    return get_command_from_info(
        apart.registered_commands[0],
        pretty_exceptions_short=apart.pretty_exceptions_short,
        rich_markup_mode=apart.rich_markup_mode,
    )


COMMANDS: dict[str, dict[str, Place]] = {
    "Plan for an engine, and compare policies": {
        "plan": Place(
            "api.cli.engine_files:plan",
            "Plan a placement for a dump of load, judge it under the engine's rule, and write "
            "its file.",
        ),
        "convert": Place(
            "api.cli.engine_files:convert",
            "Convert a placement, or load, to another format; what is repaired or lost is printed.",
        ),
        "validate": Place(
            "api.cli.engine_files:validate",
            "Check a placement against an engine. Exit status 0: accepted; 1: refused; 2: not "
            "readable.",
        ),
        "shadow": Place(
            "api.cli.shadow:shadow",
            "Price this planner's decisions against the engine's own, on the same windows of "
            "its load.",
        ),
        "simulate": Place(
            "api.cli.simulator.simulate:simulate",
            "Plan on past windows, judge on the next one, and count what moved and what it took.",
        ),
        "sweep": Place(
            "api.cli.simulator.sweep:sweep_command",
            "Replay every combination of the given values; finished ones are skipped when run "
            "again.",
            "eplb sweep dump.jsonl --output sweep --ranks 16,32 --redundant-per-rank 0,1,2 "
            "--every 1,4,16; "
            "eplb sweep generated:mixed --model deepseek-v3 --hardware h200 --output sweep "
            "--seed 0,1,2",
        ),
        "recommend": Place(
            "api.cli.simulator.recommend:recommend_command",
            "Compare groups, redundancy and intervals on a load; print the best, and why.",
        ),
    },
    "Run a deployment": {
        "demo": Place(
            "api.cli.demo:demo",
            "Serve a small real model on rank processes, let its load drift, and balance it.",
        ),
        "serve": Place(
            "api.cli.deploy:serve",
            "Run a controller, the REST API and the page until a signal; ranks are started "
            "elsewhere.",
        ),
        "controller": Place(
            "api.cli.deploy:controller",
            "Plan for a deployment until a signal. Any number may run; one leads.",
        ),
        "host-cache": Place(
            "api.cli.deploy:host_cache",
            "Keep expert records in the memory of this host for its ranks, until a signal.",
        ),
        "launch": Place(
            "api.cli.deploy:launch",
            "Start the ranks of this host: eplb launch -- CMD. Under torchrun: become one of them.",
        ),
        "compile": Place(
            "api.cli.deploy:compile_kernels",
            "Compile the kernels of planner, simulator and digests, so that no start waits for "
            "them.",
        ),
        "check": Place(
            "api.cli.check:check",
            "Check configuration, ports, memory, files, GPUs, store and clock; print what "
            "ranks take.",
        ),
        "fsck": Place(
            "api.cli.check:fsck",
            "Print what the ranks of an engine have found in their live slots: the placement "
            "check.",
        ),
        "conform": Place(
            "api.cli.check:conform",
            "Prove that an engine moves experts without changing one, with its own layers and "
            "kernels.",
        ),
        "config": Place(
            "api.cli.config:config",
            "Print every setting and where its value comes from; passwords are masked.",
        ),
    },
    "Watch a deployment": {
        "status": Place(
            "api.cli.status:status",
            "Show how a deployment stands: the verdict, the latest plan, and what else is wrong.",
        ),
        "top": Place(
            "api.cli.status:top",
            "Watch a deployment in the terminal: verdict, load of ranks, imbalance, migration, "
            "decisions.",
        ),
        "journal": Place(
            "api.cli.journal:journal",
            "Show the journal entries of all ranks by time: plans, votes, swaps, deaths, "
            "recoveries.",
        ),
        "observability": Place(
            "api.metrics.observability:observability",
            "Write the Grafana dashboard and the Prometheus alert rules to a folder.",
        ),
        "support-bundle": Place(
            "api.cli.support_bundle:support_bundle",
            "Collect state, journals, settings without secrets, versions and the last events.",
        ),
        "deployments": Place(
            "api.operations.service",
            "List the deployments that a service shows, and how each stands.",
        ),
        "events": Place(
            "api.operations.watching",
            "Show what happened: decisions, commits, deaths, switches.",
        ),
        "anomalies": Place(
            "api.operations.watching",
            "List what is wrong and what was, newest first; of a store, what is wrong now, and "
            "events.",
        ),
        "placements": Place(
            "api.operations.placements",
            "Show, compare and export placements. Exit status 1: there is none such, or the "
            "deployment does not allow it; 2: bad input, no such service or store, or no "
            "permission.",
        ),
        "proposals": Place(
            "api.operations.plans",
            "List plans that wait for an approval, and how others ended.",
        ),
        "explain": Place(
            "api.operations.plans",
            "Explain a proposal, or where a plan made now places an expert.",
        ),
        "ranks": Place(
            "api.operations.ranks",
            "Show each rank: step, phase, age of its report, whether it takes experts, what it "
            "holds.",
        ),
        "membership": Place(
            "api.operations.membership",
            "Show which ranks serve, the open operation and its phase, and ranks that are safe "
            "to delete.",
        ),
    },
    "Act on a deployment": {
        "pins": Place(
            "api.operations.pins",
            "Pin experts to ranks. Exit status 1: the ranks cannot meet the pin, there is none "
            "such, or another change came first; 2: bad input, no such service or store, or no "
            "permission.",
        ),
        "store": Place(
            "api.cli.store_commands:app",
            "List, copy and clean up a store.",
        ),
        "keys": Place(
            "api.cli.access:keys",
            "Access keys of the HTTP service.",
        ),
        "audit": Place(
            "api.cli.access:audit",
            "Show who changed what, when and why; or verify that no line was changed.",
        ),
        "tasks": Place(
            "api.operations.plans",
            "List requests to the controller, or cancel one.",
        ),
        "rebalance": Place(
            "api.operations.plans",
            "Have the controller plan now; with --move, carry the plan out.",
        ),
        "rollback": Place(
            "api.operations.plans",
            "Plan a migration back to an earlier placement; with --move, carry it out.",
        ),
        "propose": Place(
            "api.operations.plans",
            "Plan now and store the plan; nothing moves.",
        ),
        "approve": Place(
            "api.operations.plans",
            "Carry out exactly a proposal; refused once its base moved on, and, without "
            "--force, where it costs more than it saves on the present load.",
        ),
        "reject": Place(
            "api.operations.plans",
            "Reject a proposal.",
        ),
        "cordon": Place(
            "api.operations.ranks",
            "Place no further expert on a rank.",
        ),
        "drain": Place(
            "api.operations.ranks",
            "Move every expert off a rank.",
        ),
        "uncordon": Place(
            "api.operations.ranks",
            "Let a rank take experts again.",
        ),
        "scale": Place(
            "api.operations.membership",
            "Have another number of ranks serve; which of them join or leave is chosen for few "
            "moves.",
        ),
        "retire": Place(
            "api.operations.membership",
            "Move every expert off ranks, and have them leave for good.",
        ),
        "cancel-membership": Place(
            "api.operations.membership",
            "Cancel an open operation on the ranks.",
        ),
        "pause": Place(
            "api.operations.switches",
            "Stop all movement of weights at once; serving continues.",
        ),
        "resume": Place(
            "api.operations.switches",
            "Let weights move again.",
        ),
    },
}


class LazyCommands(Mapping[str, Any]):
    """Commands by name: each is imported when it is taken out."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = PLACES[name].load(name)
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(PLACES)

    def __len__(self) -> int:
        return len(PLACES)


PLACES = {name: place for panel in COMMANDS.values() for name, place in panel.items()}
PANEL_OF = {name: title for title, panel in COMMANDS.items() for name in panel}


class CommandLine(TyperGroup):
    """The commands of the table. An error of the project ends one in one line.

    Its exit status is 2, or the error's own ``exit_status``.
    """

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        self.commands = LazyCommands()  # type: ignore[assignment]  # nothing is added

    def list_commands(self, ctx: Any) -> list[str]:
        """Give the names in the order of the table."""
        return list(PLACES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Give a command as lists show it; ``resolve_command`` gives the one that runs."""
        place = PLACES.get(cmd_name)
        if place is None:
            return None
        return TyperCommand(cmd_name, help=place.help, rich_help_panel=PANEL_OF[cmd_name])

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Import the command that is asked for; an unknown one is refused with those alike."""
        name, found, rest = super().resolve_command(ctx, args)
        return name, found if name is None else self.commands[name], rest

    def invoke(self, ctx: Any) -> Any:
        """Run the command that is asked for."""
        try:
            with raising_on_interrupt(), needed_for("this command"):
                result = super().invoke(ctx)
                sys.stdout.flush()  # here, where a full device is still an error of the command
                return result
        except KeyboardInterrupt as exc:  # typer would end the process without a word
            print_error("interrupted")
            raise typer.Exit(INTERRUPTED) from exc
        except EplbError as exc:
            print_error(exc)
            from api.processes.commands import Notifier  # a whole part, for an error alone

            Notifier().status(str(exc))  # a service manager may have started the command
            raise typer.Exit(getattr(exc, "exit_status", 2)) from exc
        except OSError as exc:
            if exc.filename is not None or exc.errno not in UNWRITABLE:
                raise
            print_error(f"the output cannot be written: {exc.strerror}")
            # What is still buffered would fail again at the exit, with a status of its own.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(2) from exc


app = typer.Typer(
    cls=CommandLine,
    help="Expert-parallel load balancing for mixture-of-experts serving.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"eplb {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Take the options of every command."""


def main() -> None:
    """Entry point of the console script."""
    set_up_logging()
    app()


if __name__ == "__main__":
    main()
