"""Work of a sweep whose process is killed in mid-task, and a policy that never ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from threading import Event
from typing import Any, NoReturn

from eplb.policies.table import register_policy
from simulations.peers import PEERS
from simulations.sweep.grid import Load, SweepTask
from simulations.sweep.results import Row
from simulations.sweep.run import run_task


def die_in_seed_0(load: Load, marks: Path, times: int, task: SweepTask) -> Row:
    """Run a task; the process of seed 0 is killed the first times, and leaves a mark each time."""
    row = run_task(load, task)
    deaths = len(list(marks.iterdir()))
    if task.seed == 0 and deaths < times:
        (marks / str(deaths)).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return row


HANGING = "greedy_on_last"  # a policy of the table, in whose place another one is put


def waits_for_ever(*problem: Any, **more: Any) -> NoReturn:
    """A policy that never gives a placement."""
    Event().wait()
    raise AssertionError("nobody sets the event")


def hang_in_policy(load: Load, task: SweepTask) -> Row:
    """Run a task in whose process ``HANGING`` hangs."""
    PEERS[HANGING] = waits_for_ever
    register_policy(HANGING, waits_for_ever)
    return run_task(load, task)
