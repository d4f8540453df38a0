"""``eplb``: the command line."""

from __future__ import annotations

import logging
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from api.access.commands import audit
from api.access.commands import keys as keys_commands
from api.access.local import local_actor
from api.cli.admin.asking import asked, at, with_place
from api.cli.admin.commands import (
    anomalies,
    approve,
    deployments,
    events,
    explain,
    proposals,
    propose,
    rebalance,
    reject,
    rollback,
    tasks,
)
from api.cli.admin.pins import app as pins_commands
from api.cli.admin.place import Place
from api.cli.admin.placements import app as placements_commands
from api.cli.admin.ranks import cordon, drain, ranks, uncordon
from api.cli.check import check, fsck
from api.cli.config import config as config_command
from api.cli.config import named_settings
from api.cli.deploy import compile_kernels, controller, host_cache, launch, serve
from api.cli.engine_files import convert, plan, validate
from api.cli.journal import journal
from api.cli.simulator.recommend import recommend_command
from api.cli.simulator.simulate import simulate
from api.cli.simulator.sweep import EXAMPLE as SWEEP_EXAMPLE
from api.cli.simulator.sweep import sweep_command
from api.cli.status import status, top
from api.cli.store_commands import app as store_commands
from api.cli.store_place import configured_store
from api.cli.support_bundle import support_bundle
from api.cli.switches import switch_movement
from api.config.loader import load
from api.demo.settings import DEMO_DEFAULTS, DEPLOYMENT
from api.http.requests import MOST_LASTS_S
from api.interrupts import interrupt_on_signals, leave, leave_on_signals
from api.metrics.observability import observability
from api.processes.children import WORKER_MODULES, import_for_children, preload_modules
from api.processes.devices import check_gpus
from api.shadow.command import shadow
from api.terminal.console import unbreakable_console
from api.terminal.logs import LogSettings, log_settings, set_up_logging
from api.terminal.printable import print_error, printable
from eplb import __version__
from eplb.errors import ConfigError, EplbError
from eplb.package_check import check_packages

BAD_INPUT = 2
WRONG_RESULT = 1
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

app = typer.Typer(
    help="Expert-parallel load balancing for mixture-of-experts serving.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(simulate)
app.command(name="sweep", epilog=f"Example: {SWEEP_EXAMPLE}")(sweep_command)
app.command(name="recommend")(recommend_command)
app.command()(journal)
app.command(name="config")(config_command)
app.command()(observability)
app.command()(support_bundle)
app.command("compile")(compile_kernels)
for one in (serve, controller, host_cache, launch, check, fsck, status, top, audit):
    app.command()(one)
for beside in (plan, convert, validate, shadow):
    app.command()(beside)
EXAMPLES: dict[Callable[..., None], str] = {
    proposals: "eplb proposals --service http://127.0.0.1:8765",
    propose: "eplb propose --reason 'evening load' --store .eplb/store.sqlite",
    explain: "eplb explain 12; eplb explain --layer 3 --expert 17",
    approve: "eplb approve 12 --reason 'looks right' --if-generation 41",
    reject: "eplb reject 12 --reason 'not tonight'",
    rebalance: "eplb rebalance --reason 'hot expert' --move",
    rollback: "eplb rollback 40 --reason 'answers got slower' --move",
    deployments: "eplb deployments --service http://127.0.0.1:8765",
    tasks: "eplb tasks --state failed; eplb tasks --cancel 7",
    events: "eplb events --last 100 --json",
    ranks: "eplb ranks --store redis://HOST:PORT --deployment prod",
    anomalies: "eplb anomalies --state open; eplb anomalies --last 100 --json",
    cordon: "eplb cordon 3 --reason 'its GPU throttles'",
    drain: "eplb drain 3 --reason 'change 4711'; eplb ranks",
    uncordon: "eplb uncordon 3 --reason 'change 4711 is done'",
}
for asks, example in EXAMPLES.items():
    app.command(epilog=f"Example: {example}")(asks)
app.add_typer(placements_commands, name="placements")
app.add_typer(pins_commands, name="pins")
app.add_typer(store_commands, name="store")
app.add_typer(keys_commands, name="keys")

Reason = Annotated[str, typer.Option(help="Reason; stored with the change.")]


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


@app.command()
def demo(
    config: Annotated[Path | None, typer.Option(help="A TOML file of settings.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default cpu.")] = None,
    precision: Annotated[str | None, typer.Option(help="cuda: bfloat16 or fp8.")] = None,
    dispatcher: Annotated[str | None, typer.Option(help="cuda: auto, or a name.")] = None,
    ranks: Annotated[int | None, typer.Option(help="Rank processes. Default 8.")] = None,
    nodes: Annotated[int | None, typer.Option(help="Nodes of the ranks. Default 2.")] = None,
    layers: Annotated[int | None, typer.Option(help="MoE layers. Default 6.")] = None,
    experts: Annotated[int | None, typer.Option(help="Experts a layer. Default 64.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Experts a token. Default 6.")] = None,
    slots: Annotated[int | None, typer.Option(help="Slots a layer. Default 1.25x.")] = None,
    seconds: Annotated[float | None, typer.Option(help="How long. Default 60.")] = None,
    text: Annotated[list[Path] | None, typer.Option(help="Files or folders of text.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Recorded routing instead of text.")] = None,
    policy: Annotated[str | None, typer.Option(help="Placement policy. Default auto.")] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed.")] = None,
    observe: Annotated[bool | None, typer.Option(help="Plan and report; publish nothing.")] = None,
    movement: Annotated[bool | None, typer.Option(help="The kill switch.")] = None,
    serve: Annotated[bool | None, typer.Option(help="Serve until interrupted.")] = None,
    resume: Annotated[bool | None, typer.Option(help="Start from the last placement.")] = None,
    join: Annotated[bool | None, typer.Option(help="Share the store of another one.")] = None,
    port: Annotated[int | None, typer.Option(help="HTTP port; 0: any free. 8765.")] = None,
    state_dir: Annotated[Path | None, typer.Option(help="Store and weights. .eplb")] = None,
    store: Annotated[str | None, typer.Option(help="URL of the store; none: a file.")] = None,
    view: Annotated[str | None, typer.Option(help="auto, live, plain or off.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write a summary.")] = None,
    metrics_level: Annotated[str | None, typer.Option(help="layer or rank: more series.")] = None,
    log_format: Annotated[str | None, typer.Option(help="text or json, one line each.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    setting: Annotated[list[str] | None, typer.Option(help="Any other: NAME=VALUE.")] = None,
) -> None:
    """Serve a small real model on rank processes, let its load drift, and balance it."""
    flags: dict[str, Any] = {
        name: value for name, value in locals().items() if name not in ("config", "setting")
    }
    console = unbreakable_console()
    leave_on_signals(signal.SIGTERM, signal.SIGHUP)
    try:
        check_packages()
        named = named_settings(setting or [])
        loaded = load(flags, config=config, environ=os.environ, named=named, defaults=DEMO_DEFAULTS)
        log = loaded.settings.log
        set_up_logging(LogSettings(log.format, log.level, DEPLOYMENT), process="demo")
        if loaded.settings.demo.device == "cuda":  # at once, and not by ranks that cannot start
            check_gpus(loaded.settings.demo.ranks)
        # Only now: torch takes seconds, and wrong settings need none of it. Here and for the
        # children at once.
        preload_modules(*WORKER_MODULES)
        import_for_children()
        from api.demo.run import run_demo

        interrupt_on_signals()
        summary = run_demo(loaded, console)
    except KeyboardInterrupt:
        leave()
    except EplbError as exc:
        if log_settings().format == "json":
            logging.getLogger("eplb").error("%s", exc)
        else:
            print_error(exc)
        raise typer.Exit(BAD_INPUT) from exc
    if summary["reference_failures"] or summary["samples_lost"] or summary["missing"]:
        raise typer.Exit(WRONG_RESULT)


@app.command()
@with_place()
def pause(
    place: Place,
    reason: Reason = "paused from the command line",
    lasts: Annotated[
        str | None,
        typer.Option("--for", help="Resume after this time, as 90s, 30m, 2h or 1d."),
    ] = None,
) -> None:
    """Stop all movement of weights at once; serving continues."""
    lasts_s = None if lasts is None else _seconds(lasts)
    _switch(place, movement=False, reason=reason, lasts_s=lasts_s)


@app.command()
@with_place()
def resume(place: Place, reason: Reason = "resumed from the command line") -> None:
    """Let weights move again."""
    _switch(place, movement=True, reason=reason)


def main() -> None:
    """Entry point of the console script."""
    set_up_logging()
    app()


def _seconds(text: str) -> int:
    found = re.fullmatch(r"([1-9][0-9]{0,6})([smhd])", text)
    seconds = int(found[1]) * _UNITS_S[found[2]] if found else 0
    if not 0 < seconds <= MOST_LASTS_S:
        wanted = f"a whole number and s, m, h or d, {MOST_LASTS_S // 86_400}d at most, as 2h"
        print_error(ConfigError(f"--for is {text!r}, expected {wanted}"))
        raise typer.Exit(BAD_INPUT)
    return seconds


def _switch(place: Place, *, movement: bool, reason: str, lasts_s: int | None = None) -> None:
    if place.url:
        body = {"reason": reason} | ({} if lasts_s is None else {"expires_s": lasts_s})
        done = asked(place, "POST", "/resume" if movement else "/pause", body).body
        end = "" if done["until"] is None else f" until {at(done['until'])}"
        typer.echo(f"movement {'on' if movement else 'off'}{end}: {printable(reason)}")
        return
    try:
        store, deployment = configured_store(place.store, place.deployment)
        change, has_reports = switch_movement(
            store, deployment, movement=movement, reason=reason, lasts_s=lasts_s
        )
    except EplbError as exc:
        print_error(exc)
        raise typer.Exit(BAD_INPUT) from exc
    typer.echo(f"{change}\nby {local_actor()}: {printable(reason)}")
    if not has_reports:
        typer.echo(
            "eplb: no rank reports to this store: the switch is written, and may have no effect",
            err=True,
        )
        raise typer.Exit(WRONG_RESULT)


if __name__ == "__main__":
    main()
