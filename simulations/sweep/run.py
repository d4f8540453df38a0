"""From a grid to its table: finished tasks are skipped, and each row is kept when its task ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from simulations.sweep.deadline import within
from simulations.sweep.grid import Task
from simulations.sweep.load import Load, Recorded
from simulations.sweep.results import Results, Row, write_rows
from simulations.sweep.task import run_task

TRIES = 2  # of a task whose worker dies
TASK_S = 3600.0  # a task of 24 h of windows took 2 minutes


@dataclass(frozen=True)
class Failure:
    """A task without a row; the next run of the sweep tries it again."""

    task: Task
    reason: str


Work = Callable[[Task], Row]
# Runs work on every task, each in a process of its own choice, and gives outcomes as they come.
Executor = Callable[[Work, Sequence[Task]], Iterator[Row | Failure]]


@dataclass(frozen=True)
class Sweep:
    """What a run of a sweep did."""

    rows: tuple[Row, ...]  # of all finished tasks, in the order of the grid
    failures: tuple[Failure, ...]
    num_skipped: int  # were finished before
    table: Path


def sweep(
    load: Load,
    tasks: Sequence[Task],
    results: Results,
    execute: Executor,
    on_outcome: Callable[[int], None] = lambda finished: None,
    *,
    task_s: float = TASK_S,
) -> Sweep:
    """Run the tasks that are not finished, and write the table.

    Args:
        on_outcome: gets the number of tasks that ended, at first those of earlier runs.
        task_s: a task that takes longer has failed, with where it was.

    Raises:
        ConfigError: results that cannot be read or written.
    """
    rows = results.finished(tasks)
    missing = [task for task in tasks if task.digest not in rows]
    num_skipped, failures = len(rows), list[Failure]()
    on_outcome(num_skipped)
    for outcome in execute(partial(within, task_s, partial(run_task, load)), missing):
        if isinstance(outcome, Failure):
            failures.append(outcome)
        else:
            results.add(outcome)
            rows[outcome.task] = outcome
        on_outcome(len(rows) + len(failures))
    in_order = tuple(rows[task.digest] for task in tasks if task.digest in rows)
    write_rows(results.table, in_order)
    return Sweep(in_order, tuple(failures), num_skipped, results.table)


def on_this_host(load: Load, folder: Path) -> Load:
    """The load as processes of one host share it: recorded windows are one mapped file."""
    return load.saved(folder) if isinstance(load, Recorded) else load
