"""Runs tasks on the cores of this host.

Every worker is a pool of one process, so that the death of a process names its task, and no other
task pays for it.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from multiprocessing.connection import Connection
from threading import Thread

from simulations.sweep.deadline import TaskTimeout
from simulations.sweep.grid import Task
from simulations.sweep.results import Row
from simulations.sweep.run import TRIES, Failure, Work

# Workers fill the cores themselves; these are read when the libraries are loaded.
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def run_on_processes(
    work: Work, tasks: Sequence[Task], num_workers: int
) -> Iterator[Row | Failure]:
    """Run work on every task; outcomes come in the order in which tasks end.

    A task whose worker dies runs once more; the worker of a task past its deadline is replaced.
    Workers leave when the iterator is closed, and when this process dies.
    """
    hold, release = get_context("spawn").Pipe(duplex=False)
    waiting = deque((task, 1) for task in tasks)
    idle = [_worker(hold) for _ in range(min(num_workers, len(tasks)))]
    running: dict[Future[Row], tuple[ProcessPoolExecutor, Task, int]] = {}
    try:
        while waiting or running:
            while waiting and idle:
                worker, (task, attempt) = idle.pop(), waiting.popleft()
                running[_submit(worker, work, task)] = (worker, task, attempt)
            # Work has its own deadline, and the death of its process ends the wait.
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                worker, task, attempt = running.pop(future)
                outcome = _outcome(future, task)
                if outcome is not None and not isinstance(future.exception(), TaskTimeout):
                    idle.append(worker)
                    yield outcome
                    continue
                worker.shutdown(wait=False)
                idle.append(_worker(hold))
                if outcome is not None:
                    yield outcome
                elif attempt < TRIES:
                    waiting.appendleft((task, attempt + 1))
                else:
                    yield Failure(task, f"its worker died {TRIES} times; is memory short?")
    finally:
        release.close()
        for worker in (*idle, *(one for one, _, _ in running.values())):
            worker.shutdown(wait=False, cancel_futures=True)
        hold.close()


def _outcome(future: Future[Row], task: Task) -> Row | Failure | None:
    """None: the worker died."""
    try:
        return future.result()
    except BrokenProcessPool:
        return None
    except Exception as exc:  # of one task: the others go on
        return Failure(task, f"{type(exc).__name__}: {exc}")


def _worker(hold: Connection) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, get_context("spawn"), _stay_while, (hold,))


def _submit(worker: ProcessPoolExecutor, work: Work, task: Task) -> Future[Row]:
    """Start the process with one thread for its libraries, if it does not run yet."""
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, "1"))
    try:
        return worker.submit(work, task)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _stay_while(hold: Connection) -> None:
    """In a worker: leave at once when the other end is closed, whatever the task does.

    A pool's own workers outlive a killed parent: each holds both ends of the pipe that it reads.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides

    def leave() -> None:
        hold.poll(None)
        os._exit(1)

    Thread(target=leave, daemon=True).start()
