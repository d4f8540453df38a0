"""``eplb sweep``: replay a grid of configurations on all cores or on Ray, and keep a table."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from json import dumps
from pathlib import Path
from typing import Annotated, Literal

import typer

from api.cli.options import AsJson, FileOptions, RoutingOptions, Steps, numbers, with_options
from api.cli.simulator.options import (
    Intervals,
    Overlap,
    Past,
    PlotOptions,
    Policies,
    Ranks,
    RanksPerNode,
    RedundantPerRank,
    StepOptions,
    Trace,
    command_line,
    files_of,
    names_in,
    reading_of,
)
from api.terminal.printable import print_error, print_plain, printable
from api.terminal.progress import LINE_AFTER_S, progress
from eplb.core.dispatch import DispatchRule
from eplb.errors import ConfigError, counted
from simulations.inputs import check_steps, model_of, windows_of
from simulations.pages.of_commands import sweep_page, words
from simulations.peers import register_peers
from simulations.replay import check_names
from simulations.step_time import hardware_named
from simulations.sweep.grid import (
    Generated,
    Load,
    SweepSettings,
    recorded,
    software,
    tasks_of,
)
from simulations.sweep.results import Results, rows_table
from simulations.sweep.run import (
    TASK_S,
    Executor,
    Sweep,
    num_cores,
    on_this_host,
    run_on_processes,
    run_on_ray,
    sweep,
)
from simulations.windows import WindowSeries
from simulations.workloads import PREFIX
from telemetry.formats.model_config import model_digest
from telemetry.formats.types import ReadOptions

INCOMPLETE = 1  # exit code
MOST_SHOWN = 20  # rows of the terminal's table
NUM_COLUMNS = 9  # columns of rows that fit into 80 characters


@with_options
def sweep_command(
    trace: Trace,
    plots: PlotOptions,
    timed: StepOptions,
    stated: FileOptions,
    routing: RoutingOptions,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="Folder of the results; run again to go on."),
    ],
    ranks: Ranks = "8",
    ranks_per_node: RanksPerNode = 8,
    redundant_per_rank: RedundantPerRank = "0,1,2",
    every: Intervals = "1,4,16",
    policy: Policies = "none,auto",
    dispatch: Annotated[
        str, typer.Option(help="How engines choose replicas: weighted, even, sglang_static, ...")
    ] = "weighted",
    seed: Annotated[str, typer.Option(help="Seeds of generated load and of planners.")] = "0",
    past: Past = 16,
    overlap: Overlap = False,
    steps: Steps = None,
    executor: Annotated[
        Literal["processes", "ray"], typer.Option(help="Processes of this host, or a Ray cluster.")
    ] = "processes",
    workers: Annotated[
        int | None, typer.Option(min=1, max=4096, help="Processes; all cores if not given.")
    ] = None,
    task_minutes: Annotated[
        float, typer.Option(min=0.001, max=1e6, help="A task that takes longer has failed.")
    ] = TASK_S / 60,
    json_output: AsJson = False,
) -> None:
    """Replay every combination of the given values; finished ones are skipped when run again."""
    plots.check()
    times = (timed.model, timed.hardware, timed.prefill, timed.other_us or 0.0, overlap)
    digest = model_digest(timed.model) if timed.model is not None else ""
    settings = SweepSettings("", software(), *times, past, ranks_per_node, timed.precision, digest)
    options = reading_of(trace, stated, timed, **vars(routing))
    windows = _windows(trace, steps, timed, options, stated.input_format)
    load: Load = Generated(trace, steps) if trace.startswith(PREFIX) else recorded(windows)
    register_peers()
    policies = names_in(policy)
    check_names(policies)
    tasks = tasks_of(
        replace(settings, load=load.digest),
        ranks=numbers("--ranks", ranks),
        redundant=numbers("--redundant-per-rank", redundant_per_rank, least=0),
        intervals=numbers("--every", every, most=1_000_000),
        policies=policies,
        dispatch=[_rule(name.strip()) for name in dispatch.split(",")],
        seeds=numbers("--seed", seed, least=0, most=2**32 - 1),
        files=files_of(policy),
    )
    results = Results(output)
    execute: Executor = run_on_ray
    if executor == "processes":
        execute = partial(run_on_processes, num_workers=workers or num_cores())
        load = on_this_host(load, output)
    elif workers is not None:
        raise ConfigError("--workers is for processes; a Ray cluster has its own, expected none")
    with progress(
        "tasks", len(tasks), is_shown=not json_output, line_after_s=LINE_AFTER_S
    ) as advance:
        done = sweep(load, tasks, results, execute, advance, task_s=task_minutes * 60)
    best_first = sorted(done.rows, key=lambda row: row.order)
    plots.write(lambda: sweep_page(best_first, Path(trace).name, command_line()))
    plots.write_rows([asdict(row) for row in best_first])
    if json_output:
        typer.echo(dumps(_as_json(done) | {"notes": windows.notes}, indent=2))
    else:
        skipped = f"{counted(len(done.rows), 'row')}, {done.num_skipped} of them from earlier runs"
        table = rows_table(best_first, MOST_SHOWN).for_terminal(NUM_COLUMNS)
        print_plain(table, f"{done.table}: {skipped}")
    for failure in done.failures:
        print_error(f"{words(failure.task)}: {failure.reason}")
    if done.failures or any(row.failed for row in done.rows):
        raise typer.Exit(INCOMPLETE)


def _windows(
    trace: str, steps: int | None, timed: StepOptions, options: ReadOptions, name: str | None
) -> WindowSeries:
    """The load's windows, checked against the options as far as no replay is needed."""
    shape = timed.shape()
    if timed.hardware is not None:
        hardware_named(timed.hardware)
        if shape is None:
            raise ConfigError("times of steps need the sizes of experts, expected --model")
    windows = windows_of(trace, options, 0, shape, name=name)
    model_of(shape, windows, trace)
    if timed.hardware is not None:
        check_steps(windows, trace, steps)
    for note in windows.notes:
        typer.echo(printable(f"note: {note}"), err=True)
    return windows if steps is None else replace(windows, steps=steps)


def _rule(name: str) -> DispatchRule:
    try:
        return DispatchRule(name)
    except ValueError as exc:
        known = ", ".join(rule.value for rule in DispatchRule)
        raise ConfigError(f"unknown dispatch rule {name!r}, expected one of: {known}") from exc


def _as_json(done: Sweep) -> dict[str, object]:
    return {
        "table": str(done.table),
        "skipped": done.num_skipped,
        "ran": len(done.rows) - done.num_skipped,
        "failures": [
            {"task": one.task.digest, "configuration": words(one.task), "reason": one.reason}
            for one in done.failures
        ],
        "rows": [asdict(row) for row in done.rows],
    }
