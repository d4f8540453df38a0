"""``eplb demo``: its options, and the settings that some of them stand for."""

from __future__ import annotations

import logging
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from api.cli.config import named_settings
from api.cli.options import BAD_INPUT, ReportOptions, with_options
from api.config.tree import Settings, load
from api.demo.options import (
    CUDA_DEFAULTS,
    DEFAULTS,
    TOKENS_PER_RANK,
    Options,
    SettingFlags,
)
from api.interrupts import interrupt_on_signals, leave, leave_on_signals
from api.terminal.logs import log_settings, set_up_logging
from api.terminal.printable import print_error, unbreakable_console
from eplb.errors import ConfigError, EplbError
from eplb.packages import check_packages

WRONG_RESULT = 1


@with_options
def demo(
    options: Options,
    given: ReportOptions,
    flags: SettingFlags,
    config: Annotated[Path | None, typer.Option(help="A TOML file of settings.")] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, max=4096, help="Rank processes. Default 8.")
    ] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, max=1_048_576, help="Slots a layer. Default 1.25x.")
    ] = None,
    setting: Annotated[list[str] | None, typer.Option(help="Any setting: NAME=VALUE.")] = None,
) -> None:
    """Serve a small real model on rank processes, let its load drift, and balance it.

    It writes settings.toml into its state folder, the configuration of an ordinary deployment, and
    starts eplb serve, eplb host-cache and eplb launch with it.
    """
    console = unbreakable_console(sys.stderr if given.json_output else sys.stdout)
    leave_on_signals(signal.SIGTERM, signal.SIGHUP)
    try:
        check_packages()
        named = dict(vars(flags))
        settings = _settings(named, config, setting, ranks, slots, DEFAULTS)
        set_up_logging(replace(settings.log, deployment=settings.deployment.name), process="demo")
        # Only now: torch takes seconds, and wrong settings need none of it.
        from api.demo.run import run_demo

        interrupt_on_signals()
        if not options.tokens_per_rank:
            tokens = TOKENS_PER_RANK[settings.topology.device]
            options = replace(options, tokens_per_rank=tokens)
        summary = run_demo(options, settings, console, given)
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
    defaults: dict[str, Any],
) -> Settings:
    """Load the settings: with the defaults of the chosen device, ranks and slots for each rank.

    Raises:
        ConfigError: settings that cannot be used.
    """

    def with_defaults(defaults: dict[str, Any]) -> Settings:
        named = named_settings(setting or [])
        return load(flags, config=config, environ=os.environ, named=named, defaults=defaults)

    topology = with_defaults(defaults).topology
    if topology.device == "cuda":
        defaults = defaults | CUDA_DEFAULTS
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
