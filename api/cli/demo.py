"""``eplb demo``: its options, and the settings that some of them stand for."""

from __future__ import annotations

import logging
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from api.cli.config import named_settings
from api.config.tree import Settings, load
from api.interrupts import interrupt_on_signals, leave, leave_on_signals
from api.terminal.logs import log_settings, set_up_logging
from api.terminal.printable import print_error, unbreakable_console
from eplb.errors import ConfigError, EplbError
from eplb.package_check import check_packages

BAD_INPUT = 2
WRONG_RESULT = 1

# A deployment begins by observing, on GPUs; the demo is to show rebalances, on any machine.
DEFAULTS: dict[str, Any] = {
    "controller.stage": "all",
    "topology.device": "cpu",
    "topology.nodes": 2,
    "topology.ranks_per_node": 4,
    "model.layers": 6,
    "model.experts": 64,
    "model.top_k": 6,
    "model.hidden": 64,
    "model.intermediate": 128,
    "model.precision": "float32",
    "telemetry.sample_steps": 1,  # until the steps of a window are known (api/demo/setup.py)
}
# On GPUs the sizes are those that DeepEP's kernels know, and ranks are GPUs of one host.
CUDA_DEFAULTS: dict[str, Any] = {
    "topology.nodes": 1,
    "model.layers": 3,
    "model.experts": 32,
    "model.hidden": 2048,
    "model.intermediate": 1408,
    "model.precision": "bfloat16",
}
TOKENS_PER_RANK = {"cpu": 256, "cuda": 128}


def demo(
    config: Annotated[Path | None, typer.Option(help="A TOML file of settings.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default cpu.")] = None,
    precision: Annotated[str | None, typer.Option(help="cuda: bfloat16 or fp8.")] = None,
    dispatcher: Annotated[str, typer.Option(help="cuda: auto, or a name.")] = "auto",
    ranks: Annotated[
        int | None, typer.Option(min=1, max=4096, help="Rank processes. Default 8.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="Nodes of the ranks. Default 2.")] = None,
    layers: Annotated[int | None, typer.Option(help="MoE layers. Default 6.")] = None,
    experts: Annotated[int | None, typer.Option(help="Experts a layer. Default 64.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Experts a token. Default 6.")] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, max=1_048_576, help="Slots a layer. Default 1.25x.")
    ] = None,
    tokens_per_rank: Annotated[
        int | None,
        typer.Option(min=1, max=1_048_576, help="Tokens of a rank in a step. Default 256."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.001, max=31_536_000, help="How long.")] = 60.0,
    text: Annotated[list[Path] | None, typer.Option(help="Files or folders of text.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Recorded routing instead of text.")] = None,
    policy: Annotated[str | None, typer.Option(help="Placement policy. Default auto.")] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Random seed of weights and text.")
    ] = 1,
    check_every: Annotated[
        int, typer.Option(min=1, max=10**9, help="Steps between two reference checks.")
    ] = 8,
    observe: Annotated[bool | None, typer.Option(help="Plan and report; publish nothing.")] = None,
    movement: Annotated[bool | None, typer.Option(help="The kill switch.")] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Serve until interrupted.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Start from the last placement.")
    ] = False,
    port: Annotated[int | None, typer.Option(help="HTTP port; 0: any free. 8765.")] = None,
    state_dir: Annotated[Path | None, typer.Option(help="Store and weights. .eplb")] = None,
    store: Annotated[str | None, typer.Option(help="URL of the store; none: a file.")] = None,
    view: Annotated[
        Literal["auto", "live", "plain", "off"], typer.Option(help="What is shown meanwhile.")
    ] = "auto",
    json_path: Annotated[Path | None, typer.Option("--json", help="Write a summary.")] = None,
    metrics_level: Annotated[str | None, typer.Option(help="layer or rank: more series.")] = None,
    log_format: Annotated[str | None, typer.Option(help="text or json, one line each.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    setting: Annotated[list[str] | None, typer.Option(help="Any setting: NAME=VALUE.")] = None,
) -> None:
    """Serve a small real model on rank processes, let its load drift, and balance it.

    It writes settings.toml into its state folder, the configuration of an ordinary deployment, and
    starts eplb serve, eplb host-cache and eplb launch with it.
    """
    flags: dict[str, Any] = {
        "topology.device": device,
        "topology.nodes": nodes,
        "model.precision": precision,
        "model.layers": layers,
        "model.experts": experts,
        "model.top_k": top_k,
        "policy": policy,
        "observe": observe,
        "movement": movement,
        "port": port,
        "state_dir": state_dir,
        "store": store,
        "metrics_level": metrics_level,
        "log_format": log_format,
        "log_level": log_level,
    }
    console = unbreakable_console()
    leave_on_signals(signal.SIGTERM, signal.SIGHUP)
    try:
        check_packages()
        settings = _settings(flags, config, setting, ranks, slots)
        set_up_logging(replace(settings.log, deployment=settings.deployment.name), process="demo")
        # Only now: torch takes seconds, and wrong settings need none of it.
        from api.demo.run import run_demo
        from api.demo.setup import Options

        interrupt_on_signals()
        options = Options(
            seconds=seconds,
            tokens_per_rank=tokens_per_rank or TOKENS_PER_RANK[settings.topology.device],
            text=text or (),
            trace=trace,
            seed=seed,
            check_every=check_every,
            dispatcher=dispatcher,
            serve=serve,
            resume=resume,
            json=json_path,
            view=view,
        )
        summary = run_demo(options, settings, console)
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


def _settings(
    flags: dict[str, Any],
    config: Path | None,
    setting: list[str] | None,
    ranks: int | None,
    slots: int | None,
) -> Settings:
    """Load the settings: with the defaults of the chosen device, ranks and slots for each rank.

    Raises:
        ConfigError: settings that cannot be used.
    """

    def with_defaults(defaults: dict[str, Any]) -> Settings:
        named = named_settings(setting or [])
        return load(flags, config=config, environ=os.environ, named=named, defaults=defaults)

    defaults = DEFAULTS
    topology = with_defaults(defaults).topology
    if topology.device == "cuda":
        defaults = DEFAULTS | CUDA_DEFAULTS
        topology = with_defaults(defaults).topology
    if ranks is not None:
        if ranks % topology.nodes:
            raise ConfigError(
                f"ranks is {ranks} in flag --ranks, expected a multiple of {topology.nodes}, the "
                "number of nodes"
            )
        flags["topology.ranks_per_node"] = ranks // topology.nodes
    if slots is not None:
        number = ranks or topology.nodes * topology.ranks_per_node
        if slots % number:
            raise ConfigError(
                f"slots is {slots} in flag --slots, expected a multiple of {number}, the number "
                "of ranks"
            )
        flags["topology.slots_per_rank"] = slots // number
    return with_defaults(defaults)
