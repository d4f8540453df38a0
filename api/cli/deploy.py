"""``eplb controller``, ``host-cache``, ``serve`` and ``launch``: the processes of a deployment."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from api.cli.config import Configured
from api.cli.options import with_options
from api.deploy.deployment import Deployment, host_here, resolve
from api.deploy.roles import run_controller, run_host_cache
from api.deploy.waits import Reread
from api.processes.commands import own_command, raise_descriptor_limit, set_title
from api.terminal.logs import set_up_logging
from api.terminal.progress import CompileReports
from eplb.errors import ConfigError
from eplb.packages import check_packages
from eplb.precompile import compile_planner
from eplb.settings.loader import CONFIG_VARIABLE
from simulations.peers import compile_peers

Host = Annotated[
    int | None, typer.Option(min=0, max=255, help="Number of this host; else by its address.")
]
Command = Annotated[
    list[str] | None, typer.Argument(help="The program of a rank, or its arguments, after --.")
]
Module = Annotated[
    str | None,
    typer.Option(
        help="A Python module whose main() is the program of a rank: imported once for all ranks."
    ),
]


def deployment_of(
    configured: Configured, process: str, *, takes_engine: bool = False
) -> Deployment:
    """Read the configuration of a command, and have it log as that says.

    Args:
        configured: how the command names its configuration.
        process: the name in its log.
        takes_engine: as ``resolve``.

    Raises:
        ConfigError: the configuration cannot be used.
    """
    check_packages()
    raise_descriptor_limit()
    settings = configured.settings()
    set_up_logging(replace(settings.log, deployment=settings.deployment.name), process=process)
    return resolve(settings, os.environ, takes_engine=takes_engine)


def reread_of(configured: Configured) -> Reread:
    """How a process reads its configuration again, once what it refused has changed."""
    named = configured.config or os.environ.get(CONFIG_VARIABLE)

    def read() -> Deployment:
        return resolve(configured.settings(), os.environ, takes_engine=True)

    return Reread(None if named is None else Path(named), read)


def say(line: str) -> None:
    """Print a line at once: whoever started the command may wait for it."""
    typer.echo(line)


def compile_kernels() -> None:
    """Compile the kernels of planner, simulator and digests, so that no start waits for them.

    Run it once where the project is installed, when an image is built for example: two minutes of a
    processor. It prints how far it is. The kernels lie beside the installed files, or in
    NUMBA_CACHE_DIR. Without them the first plans are interpreted, 58 layers of 256 experts in a few
    seconds, while the controller compiles what it needs.
    """
    from eplb.core.compiler import compiler_passes  # loads numba

    check_packages()
    reports = CompileReports(lambda line: say(f"eplb compile: {line}"))
    with compiler_passes(reports.note):
        compile_planner()
        compile_peers()
        if find_spec("torch") is not None:  # a host of controllers needs none
            from runtime.memory import compile_digest

            compile_digest()
    reports.note("")


@with_options
def launch(
    configured: Configured,
    command: Command = None,
    host: Host = None,
    module: Module = None,
) -> None:
    """Start the ranks of this host: eplb launch -- CMD. Under torchrun: become one of them.

    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set as torchrun sets them.
    """
    # Imported here: it loads torch, and --help needs none of it.
    from api.deploy.launch import (
        Launch,
        become_rank,
        check_start,
        check_torchrun,
        prepare_store,
        run_ranks,
    )

    if not (command or module):
        raise typer.BadParameter("expected the program of a rank after --, or --module")
    deployment = deployment_of(configured, "launch")
    program = command or []
    number, reread = host_here(deployment, host), reread_of(configured)
    here = Launch(deployment, number, program, os.environ, module, reread)
    set_title(f"launch {here.host}")
    if {"RANK", "LOCAL_RANK"} <= os.environ.keys():
        if module:
            raise ConfigError("--module under torchrun, expected the program of a rank")
        check_torchrun(here)
        prepare_store(here)
        become_rank(here)
    check_start(here)
    master = f"{deployment.hosts[0]}:{deployment.settings.network.rendezvous_port}"
    say(
        f"eplb launch: host {here.host} of {deployment.name}: ranks {here.ranks[0]}.."
        f"{here.ranks[-1]} of {deployment.topology.num_ranks}, meeting at {master}"
    )
    supervision = deployment.settings.supervision
    raise typer.Exit(run_ranks(here, supervision, lambda line: say(f"eplb launch: {line}")))


@with_options
def controller(configured: Configured) -> None:
    """Plan for a deployment until a signal. Any number may run; one leads."""
    run_controller(deployment_of(configured, "controller"), say)


@with_options
def host_cache(configured: Configured, host: Host = None) -> None:
    """Keep expert records in the memory of this host for its ranks, until a signal."""
    deployment = deployment_of(configured, "host cache", takes_engine=True)
    run_host_cache(deployment, host_here(deployment, host), say, reread_of(configured))


@with_options
def serve(configured: Configured) -> None:
    """Run a controller, the REST API and the page until a signal; ranks are started elsewhere.

    For an engine, whose file has no model, it runs no controller: the engine's plug-in leads.
    """
    from api.deploy.serve import serve as serve_until_signal  # it needs the extra "api"

    given = configured
    same = [word for one in given.setting or [] for word in ("--setting", one)]
    same += ["--config", str(given.config)] if given.config else []
    same += ["--profile", given.profile] if given.profile else []
    deployment = deployment_of(configured, "serve", takes_engine=True)
    serve_until_signal(deployment, own_command("controller", *same), say)
