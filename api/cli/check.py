"""``eplb check``: configuration and host before a start; ``eplb fsck``: live slots after it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
from enum import Enum
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from api.cli.config import Configured
from api.cli.deploy import Host, deployment_of, say
from api.cli.late import BAD_INPUT
from api.cli.options import Seed, with_options
from api.cli.store_place import (
    ConfiguredDeployment,
    ConfiguredStore,
    configured_store,
    deployments_with_runs,
    open_existing,
)
from api.config.tree import profile_names
from api.deploy.deployment import Deployment, host_here, resolve
from api.terminal.printable import printable
from eplb.settings.loader import PROFILE_VARIABLE
from rebalance.engines.common.fsck.report import report_of
from rebalance.weights.link.secret import Secret
from telemetry.formats.bounded import write_atomically

if TYPE_CHECKING:
    from api.deploy.check import Finding

FAULTY = 1
ConformEngine = Enum("ConformEngine", {name: name for name in ("vllm", "sglang")})  # type: ignore[misc]

Accept = Annotated[
    bool,
    typer.Option(
        "--accept-checkpoint",
        help="serve the checkpoint of this host from now on, in place of the one before",
    ),
]
Engine = Annotated[
    str | None,
    typer.Option(
        "--engine",
        help="check in place of a deployment the command that starts an engine, such as "
        "'vllm serve MODEL --enable-eplb'",
    ),
]
ModelConfig = Annotated[
    Path | None,
    typer.Option("--model-config", help="config.json of the engine's model, where it is no folder"),
]


@with_options
def check(
    configured: Configured,
    host: Host = None,
    accept: Accept = False,
    engine: Engine = None,
    model_config: ModelConfig = None,
) -> None:
    """Check configuration, ports, memory, files, GPUs, store and clock; print what ranks take.

    Exit status 0: all is as it should be; 2: something is not, and the output names it.
    """
    if engine is not None:
        _check_engine(engine, model_config)
        return
    # Imported here: it needs the extra "api".
    from api.deploy.check import check_all, check_profiles, costs_of, lines_of
    from api.deploy.first_placement import check_belongs
    from api.deploy.model import ACCEPT, accept_checkpoint

    deployment = deployment_of(configured, "check")
    if accept:
        with closing(deployment.opened_store()) as store:
            check_belongs(store, deployment)
            say(printable(accept_checkpoint(store, deployment.settings.model, ACCEPT)))
    here, others = host_here(deployment, host), _other_profiles(configured)
    is_ok = _all_said(chain(check_all(deployment, here), check_profiles(deployment, here, others)))
    for line in lines_of(costs_of(deployment)):
        say(line)
    if not is_ok:
        raise typer.Exit(BAD_INPUT)


def _other_profiles(configured: Configured) -> dict[str, Callable[[Secret], Deployment]]:
    mine = configured.profile or os.environ.get(PROFILE_VARIABLE)

    def resolved(name: str, secret: Secret) -> Deployment:
        return resolve(replace(configured, profile=name).settings(), os.environ, secret)

    names = profile_names(configured.config, os.environ)
    return {name: partial(resolved, name) for name in names if name != mine}


def fsck(store: ConfiguredStore = None, deployment: ConfiguredDeployment = None) -> None:
    """Print what the ranks of an engine have found in their live slots: the placement check.

    Each EP group of the deployment has a part of its own. Exit status 0: no fault; 1: faults; 2: no
    rank of a group checks, or the store cannot be read.
    """
    url, whole = configured_store(store, deployment)
    reports = {}
    for name in deployments_with_runs(url, whole):
        with closing(open_existing(url, name)) as opened:
            reports[name] = report_of(opened)
    for name, report in reports.items():
        for line in report.lines:
            say(printable(line if name == whole else f"{name}: {line}"))
    if any(report.faults for report in reports.values()):
        raise typer.Exit(FAULTY)
    if any("" not in report.ranks.values() for report in reports.values()):
        raise typer.Exit(BAD_INPUT)


def conform(
    engine: Annotated[ConformEngine, typer.Option(help="The engine that is installed here.")],
    quantisation: Annotated[
        list[str] | None, typer.Option(help="Case of a quantisation; by default all of them.")
    ] = None,
    moves: Annotated[int, typer.Option(min=1, max=100, help="Forced moves in a row.")] = 3,
    seed: Seed = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="File for the report, for programs.")
    ] = None,
) -> None:
    """Prove that an engine moves experts without changing one, on its own layers in this process.

    Exit status 0: all layers are proved; 1: some are not; 2: the engine cannot be imported.
    """
    # Imported here: it needs torch.
    from rebalance.engines.common.conform import report, to_json, verdicts_of

    about, verdicts, not_run = verdicts_of(
        engine.value, quantisation or (), num_moves=moves, seed=seed
    )
    for line in report(about, verdicts, not_run).splitlines():
        say(printable(line))
    if json_file is not None:
        write_atomically(json_file, to_json(verdicts, about=about, not_run=not_run).encode())
    if not all(one.may_move for one in verdicts):
        raise typer.Exit(FAULTY)


def _check_engine(command: str, model_config: Path | None) -> None:
    from api.deploy.check_engine import check_engine

    is_ok = _all_said(check_engine(command, model_config, os.environ))
    if not is_ok:
        raise typer.Exit(BAD_INPUT)


def _all_said(findings: Iterable[Finding]) -> bool:
    """Print what was found; whether all of it is as it should be."""
    is_ok = True
    for finding in findings:
        say(printable(str(finding)))
        is_ok = is_ok and finding.is_ok
    return is_ok
