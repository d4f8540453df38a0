"""``eplb``: the command line. This table says where each command is."""

from __future__ import annotations

from typing import Annotated

import typer

from api.cli.late import Late, group_of
from eplb import __version__

COMMANDS: dict[str, dict[str, Late]] = {
    "Plan for an engine, and compare policies": {
        "plan": Late("api.cli.engine_files:plan"),
        "convert": Late("api.cli.engine_files:convert"),
        "validate": Late("api.cli.engine_files:validate"),
        "shadow": Late("api.shadow.command:shadow"),
        "simulate": Late("api.cli.simulator.simulate:simulate"),
        "sweep": Late(
            "api.cli.simulator.sweep:sweep_command",
            "eplb sweep dump.jsonl --out sweep --ranks 16,32 --redundant 0,1,2 --every 1,4,16; "
            "eplb sweep generated:mixed --model deepseek-v3 --hardware h200 --out sweep "
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
        "config": Late("api.cli.config:config"),
    },
    "Watch a deployment": {
        "status": Late("api.cli.status:status"),
        "top": Late("api.cli.status:top"),
        "ranks": Late(
            "api.cli.admin.ranks:ranks", "eplb ranks --store redis://HOST:PORT --deployment prod"
        ),
        "deployments": Late(
            "api.cli.admin.commands:deployments", "eplb deployments --service http://127.0.0.1:8765"
        ),
        "events": Late("api.cli.admin.commands:events", "eplb events --last 100 --json"),
        "anomalies": Late(
            "api.cli.admin.commands:anomalies",
            "eplb anomalies --state open; eplb anomalies --last 100 --json",
        ),
        "journal": Late("api.cli.journal:journal"),
        "observability": Late("api.metrics.observability:observability"),
        "support-bundle": Late("api.cli.support_bundle:support_bundle"),
    },
    "Act on a deployment": {
        "pause": Late("api.cli.switches:pause"),
        "resume": Late("api.cli.switches:resume"),
        "proposals": Late(
            "api.cli.admin.commands:proposals", "eplb proposals --service http://127.0.0.1:8765"
        ),
        "propose": Late(
            "api.cli.admin.commands:propose",
            "eplb propose --reason 'evening load' --store .eplb/store.sqlite",
        ),
        "explain": Late(
            "api.cli.admin.commands:explain", "eplb explain 12; eplb explain --layer 3 --expert 17"
        ),
        "approve": Late(
            "api.cli.admin.commands:approve",
            "eplb approve 12 --reason 'looks right' --if-generation 41",
        ),
        "reject": Late("api.cli.admin.commands:reject", "eplb reject 12 --reason 'not tonight'"),
        "rebalance": Late(
            "api.cli.admin.commands:rebalance", "eplb rebalance --reason 'hot expert' --move"
        ),
        "rollback": Late(
            "api.cli.admin.commands:rollback",
            "eplb rollback 40 --reason 'answers got slower' --move",
        ),
        "tasks": Late(
            "api.cli.admin.commands:tasks", "eplb tasks --state failed; eplb tasks --cancel 7"
        ),
        "cordon": Late(
            "api.cli.admin.ranks:cordon",
            "eplb cordon 3 --reason 'its GPU throttles'",
            "Place no further expert on a rank; it keeps what it holds.",
        ),
        "drain": Late(
            "api.cli.admin.ranks:drain",
            "eplb drain 3 --reason 'change 4711'; eplb ranks",
            "Move every expert off a rank, so that its loss costs none.",
        ),
        "uncordon": Late(
            "api.cli.admin.ranks:uncordon",
            "eplb uncordon 3 --reason 'change 4711 is done'",
            "Let a rank take experts again, after cordon or drain.",
        ),
        "placements": Late(
            "api.cli.admin.placements:app",
            help="Show, compare and export placements. Exit status 1: there is none such, or the "
            "deployment does not allow it; 2: bad input, no such service or store, or no "
            "permission.",
        ),
        "pins": Late(
            "api.cli.admin.pins:app",
            help="Pin experts to ranks. Exit status 1: the ranks cannot meet the pin, there is "
            "none such, or another change came first; 2: bad input, no such service or store, or "
            "no permission.",
        ),
        "store": Late("api.cli.store_commands:app", help="List, copy and clean up a store."),
        "keys": Late("api.access.commands:keys", help="Access keys of the HTTP service."),
        "audit": Late("api.access.commands:audit"),
    },
}

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

    set_up_logging()
    app()


if __name__ == "__main__":
    main()
