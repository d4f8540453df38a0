"""``eplb check``: configuration and host before a start; ``eplb fsck``: live slots after it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, replace
from enum import Enum
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from api.cli.config import Configured
from api.cli.deploy import Host, deployment_of, say
from api.cli.options import (
    BAD_INPUT,
    AsJson,
    ConfiguredDeployment,
    ConfiguredStore,
    ReportOptions,
    Seed,
    print_report,
    with_options,
)
from api.cli.store_place import configured_store, deployments_with_runs, open_existing
from api.config.tree import profile_names
from api.deploy.deployment import Deployment, host_here, resolve
from api.deploy.first_placement import check_belongs
from api.deploy.model import ACCEPT, accept_checkpoint
from api.terminal.printable import printable
from api.terminal.progress import progress
from eplb.errors import EplbError
from eplb.settings.loader import PROFILE_VARIABLE
from rebalance.engines.common.fsck.report import report_of
from rebalance.weights.link.secret import Secret

if TYPE_CHECKING:
    from api.deploy.check import Costs, Finding

FAULTY = 1
ConformEngine = Enum("ConformEngine", {name: name for name in ("vllm", "sglang")})  # type: ignore[misc]

Accept = Annotated[
    bool,
    typer.Option(
        "--accept-checkpoint",
        help="serve the checkpoint of this host from now on, in place of the one before",
    ),
]
Weights = Annotated[
    bool,
    typer.Option(
        "--weights",
        help="also read every byte of the checkpoint, and compare with its first run",
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
    weights: Weights = False,
    engine: Engine = None,
    model_config: ModelConfig = None,
    json_output: AsJson = False,
) -> None:
    """Check configuration, ports, memory, files, GPUs, store and clock; print what ranks take.

    Exit status 0: all is as it should be; 2: something is not, and the output names it.
    """
    if engine is not None:
        from api.deploy.check_engine import check_engine

        _end(_found(check_engine(engine, model_config, os.environ), json_output), json_output)
        return
    # Imported here: it needs the extra "api".
    from api.deploy.check import check_all, check_profiles, costs_of

    deployment = deployment_of(configured, "check")
    if accept:
        with closing(deployment.opened_store()) as store:
            check_belongs(store, deployment)
            accepted = accept_checkpoint(store, deployment.settings.model, ACCEPT)
            typer.echo(printable(accepted), err=json_output)
    here, others = host_here(deployment, host), _other_profiles(configured)
    checks = chain(check_all(deployment, here), check_profiles(deployment, here, others))
    if weights:
        checks = chain(checks, _read_weights(deployment, here, is_shown=not json_output))
    _end(_found(checks, json_output), json_output, costs_of(deployment))


def _read_weights(deployment: Deployment, host: int, *, is_shown: bool) -> Iterator[Finding]:
    from api.deploy.check import Finding, as_finding
    from api.deploy.model import check_weights

    try:
        with (
            closing(deployment.opened_store()) as store,
            progress("weight files", is_shown=is_shown) as advance,
        ):
            by = f"host {host}"
            yield Finding("weights", check_weights(store, deployment.settings.model, by, advance))
    except EplbError as exc:
        yield as_finding("weights", exc)


def _other_profiles(configured: Configured) -> dict[str, Callable[[Secret], Deployment]]:
    mine = configured.profile or os.environ.get(PROFILE_VARIABLE)

    def resolved(name: str, secret: Secret) -> Deployment:
        return resolve(replace(configured, profile=name).settings(), os.environ, secret)

    names = profile_names(configured.config, os.environ)
    return {name: partial(resolved, name) for name in names if name != mine}


def fsck(
    store: ConfiguredStore = None,
    deployment: ConfiguredDeployment = None,
    json_output: AsJson = False,
) -> None:
    """Print what the ranks of an engine have found in their live slots: the placement check.

    Each EP group of the deployment has a part of its own. Exit status 0: no fault; 1: faults; 2: no
    rank of a group checks, or the store cannot be read.
    """
    url, whole = configured_store(store, deployment)
    reports = {}
    for name in deployments_with_runs(url, whole):
        with closing(open_existing(url, name)) as opened:
            reports[name] = report_of(opened)
    lines = [
        line if name == whole else f"{name}: {line}"
        for name, report in reports.items()
        for line in report.lines
    ]
    print_report({name: asdict(report) for name, report in reports.items()}, lines, json_output)
    if any(report.faults for report in reports.values()):
        raise typer.Exit(FAULTY)
    if any("" not in report.ranks.values() for report in reports.values()):
        raise typer.Exit(BAD_INPUT)


@with_options
def conform(
    given: ReportOptions,
    engine: Annotated[ConformEngine, typer.Option(help="The engine that is installed here.")],
    quantisation: Annotated[
        list[str] | None, typer.Option(help="Case of a quantisation; by default all of them.")
    ] = None,
    moves: Annotated[int, typer.Option(min=1, max=100, help="Forced moves in a row.")] = 3,
    seed: Seed = 0,
) -> None:
    """Prove that an engine moves experts without changing one, with its own layers and kernels.

    It needs the engine and a CUDA device, which the ranks may share. Exit status 0: all layers are
    proved; 1: some are not; 2: there is no device, or the engine cannot be imported.
    """
    # Imported here: it needs torch.
    from rebalance.engines.common.conform import report, verdicts_of

    names = quantisation or ()
    with progress("quantisations", len(names) or None, is_shown=not given.json_output) as advance:
        about, verdicts, not_run = verdicts_of(
            engine.value, names, num_moves=moves, seed=seed, advance=advance
        )

    def show() -> None:
        for line in report(about, verdicts, not_run).splitlines():
            say(printable(line))

    layers = [asdict(one) for one in verdicts]
    given.give({"about": about, "not_run": not_run, "layers": layers}, show)
    if not all(one.may_move for one in verdicts):
        raise typer.Exit(FAULTY)


def _found(findings: Iterable[Finding], is_json: bool) -> list[Finding]:
    """All findings; each is printed once it is there, and a bar counts them meanwhile."""
    found: list[Finding] = []
    remaining = iter(findings)
    while True:
        with progress("checks", is_shown=not is_json) as advance:
            advance(len(found))
            finding = next(remaining, None)
        if finding is None:
            return found
        found.append(finding)
        if not is_json:
            say(printable(str(finding)))


def _end(findings: list[Finding], is_json: bool, costs: Costs | None = None) -> None:
    """Print what ranks and hosts take, or all of it as JSON; end with the status of a refusal."""
    from api.deploy.check import lines_of  # it needs the extra "api"

    report = {
        "findings": [asdict(one) | {"is_ok": one.is_ok} for one in findings],
        "costs": None if costs is None else asdict(costs),
    }
    print_report(report, () if costs is None else lines_of(costs), is_json)
    if not all(one.is_ok for one in findings):
        raise typer.Exit(BAD_INPUT)
