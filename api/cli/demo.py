"""``eplb demo``: a whole deployment on one machine."""

from __future__ import annotations

import logging
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from api.cli.config import named_settings
from api.config.demo import DEMO_DEFAULTS
from api.config.tree import load
from api.interrupts import interrupt_on_signals, leave, leave_on_signals
from api.processes.children import WORKER_MODULES, import_for_children, preload_modules
from api.processes.devices import check_gpus
from api.terminal.logs import log_settings, set_up_logging
from api.terminal.printable import print_error, unbreakable_console
from eplb.errors import EplbError
from eplb.package_check import check_packages
from eplb.settings.deployment import DEPLOYMENT

BAD_INPUT = 2
WRONG_RESULT = 1


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
        settings = load(
            flags, config=config, environ=os.environ, named=named, defaults=DEMO_DEFAULTS
        )
        set_up_logging(replace(settings.log, deployment=DEPLOYMENT), process="demo")
        if settings.demo.device == "cuda":  # at once, and not by ranks that cannot start
            check_gpus(settings.demo.ranks)
        # Only now: torch takes seconds, and wrong settings need none of it. Here and for the
        # children at once.
        preload_modules(*WORKER_MODULES)
        import_for_children()
        from api.demo.run import run_demo

        interrupt_on_signals()
        summary = run_demo(settings, console)
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
