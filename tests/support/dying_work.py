"""Work of a sweep whose process is killed in mid-task, as the kernel does when memory is short."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from simulations.sweep.grid import Task
from simulations.sweep.load import Load
from simulations.sweep.results import Row
from simulations.sweep.task import run_task


def die_in_seed_0(load: Load, marks: Path, times: int, task: Task) -> Row:
    """Run a task; the process of seed 0 is killed the first times, and leaves a mark each time."""
    row = run_task(load, task)
    deaths = len(list(marks.iterdir()))
    if task.seed == 0 and deaths < times:
        (marks / str(deaths)).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return row
