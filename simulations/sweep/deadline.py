"""A deadline for one task, kept inside the process that runs it, alike for all executors.

The task runs in a thread, which cannot be stopped. Past the deadline the task has failed with where
it was, and the process ends a little later, so that its executor starts another one. A thread that
holds the interpreter lets no other thread run: then the process alone ends, by faulthandler.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread, Timer

from eplb.errors import EplbError
from simulations.sweep.grid import Task
from simulations.sweep.results import Row

END_S = 2.0  # from a failure to the end of its process: the executor reads the failure meanwhile
STUCK_S = 30.0  # beyond the deadline, of a thread that lets no other one run
MOST_FRAMES = 4
STDERR = 2  # a number, which is there whatever sys.stderr was replaced by


class TaskTimeout(EplbError):
    """A task that did not end in time; it says where it was."""


def within(seconds: float, work: Callable[[Task], Row], task: Task) -> Row:
    """Do the work of a task; call it in a process that may end.

    Raises:
        TaskTimeout: it did not end in time. This process ends ``END_S`` later.
        Exception: what the work raises.
    """
    ended: SimpleQueue[Row | BaseException] = SimpleQueue()

    def run() -> None:
        try:
            ended.put(work(task))
        except BaseException as exc:  # raised again below, in the thread that waits
            ended.put(exc)

    thread = Thread(target=run, daemon=True)
    faulthandler.dump_traceback_later(seconds + STUCK_S, exit=True, file=STDERR)
    try:
        thread.start()
        outcome = ended.get(timeout=seconds)
    except Empty:
        leave = Timer(END_S, os._exit, (1,))
        leave.daemon = True
        leave.start()
        raise TaskTimeout(f"no row after {seconds / 60:g} minutes: {_place(thread)}") from None
    finally:
        faulthandler.cancel_dump_traceback_later()
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def _place(thread: Thread) -> str:
    """The calls that a thread is in, innermost first."""
    frame = sys._current_frames().get(thread.ident or 0)
    calls = [
        f"{Path(one.filename).name}:{one.lineno} {one.name}"
        for one in reversed(traceback.extract_stack(frame))
    ]
    return "it was in " + ", called by ".join(calls[:MOST_FRAMES])
