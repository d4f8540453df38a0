"""``eplb``: the command line. This table says where each command is."""

from __future__ import annotations

import gc
from typing import Annotated

import typer

from api.cli.late import Late, group_of
from api.operations.table import COMMANDS as API_COMMANDS
from api.operations.table import GROUPS
from eplb import __version__

COMMANDS: dict[str, dict[str, Late]] = {
    "Plan for an engine, and compare policies": {
        "plan": Late("api.cli.engine_files:plan"),
        "convert": Late("api.cli.engine_files:convert"),
        "validate": Late("api.cli.engine_files:validate"),
        "shadow": Late("api.cli.shadow:shadow"),
        "simulate": Late("api.cli.simulator.simulate:simulate"),
        "sweep": Late(
            "api.cli.simulator.sweep:sweep_command",
            "eplb sweep dump.jsonl --output sweep --ranks 16,32 --redundant-per-rank 0,1,2 "
            "--every 1,4,16; "
            "eplb sweep generated:mixed --model deepseek-v3 --hardware h200 --output sweep "
            "--seed 0,1,2",
        ),
        "recommend": Late("api.cli.simulator.recommend:recommend_command"),
    },
    "Run a deployment": {
        "demo": Late("api.cli.demo:demo"),
        "serve": Late("api.cli.deploy:serve"),
        "controller": Late("api.cli.deploy:controller"),
        "host-cache": Late("api.cli.deploy:host_cache"),
        "launch": Late("api.cli.deploy:launch"),
        "compile": Late("api.cli.deploy:compile_kernels"),
        "check": Late("api.cli.check:check"),
        "fsck": Late("api.cli.check:fsck"),
        "conform": Late("api.cli.check:conform"),
        "config": Late("api.cli.config:config"),
    },
    "Watch a deployment": {
        "status": Late("api.cli.status:status"),
        "top": Late("api.cli.status:top"),
        "journal": Late("api.cli.journal:journal"),
        "observability": Late("api.metrics.observability:observability"),
        "support-bundle": Late("api.cli.support_bundle:support_bundle"),
    },
    "Act on a deployment": {
        "store": Late("api.cli.store_commands:app", help="List, copy and clean up a store."),
        "keys": Late("api.access.commands:keys", help="Access keys of the HTTP service."),
        "audit": Late("api.access.commands:audit"),
    },
}
for one in API_COMMANDS:
    group = one.words.partition(" ")[0]
    COMMANDS["Watch a deployment" if one.is_question else "Act on a deployment"][group] = Late(
        "api.cli.admin.commands:command_of",
        example=one.example,
        help=GROUPS.get(group) or one.about,
        words=group,
    )

app = typer.Typer(
    cls=group_of(COMMANDS),
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
    from api.terminal.logs import set_up_logging

    # Imports make objects that stay: to look for garbage at every 700 takes a tenth of a start.
    gc.set_threshold(50_000)
    set_up_logging()
    app()


if __name__ == "__main__":
    main()
