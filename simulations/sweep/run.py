"""From a grid to its table: finished tasks are skipped, and each row is kept when its task ends.

Tasks run on the cores of this host or on a Ray cluster. A task runs in a thread, which cannot be
stopped: past its deadline it has failed with where it was, and its process ends a little later, so
that the executor starts another one. A thread that holds the interpreter lets no other thread run:
then the process alone ends, by faulthandler.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, fields, replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread, Timer

from eplb.core.dispatch import DispatchRule
from eplb.errors import ConfigError, EplbError
from eplb.packages import needed_for
from simulations.inputs import even_topology, model_of, step_model_of
from simulations.migration_cost import MigrationCost
from simulations.own_policies import register_named, source_digest
from simulations.peers import register_peers
from simulations.replay import Scenario, replay_all
from simulations.report import summary
from simulations.sweep.grid import Load, Recorded, SweepTask, software
from simulations.sweep.results import Results, Row, write_rows
from telemetry.formats.model_config import model_by_name, model_digest

TRIES = 2  # attempts at a task whose worker dies
TASK_S = 3600.0  # a task of 24 h of windows took 2 minutes


@dataclass(frozen=True)
class FailedTask:
    """A task without a row; the next run of the sweep tries it again."""

    task: SweepTask
    reason: str


Work = Callable[[SweepTask], Row]
# Runs work on every task, each in a process of its own choice, and gives outcomes as they come.
Executor = Callable[[Work, Sequence[SweepTask]], Iterator[Row | FailedTask]]


@dataclass(frozen=True)
class Sweep:
    """What a run of a sweep did."""

    rows: tuple[Row, ...]  # rows of all finished tasks, in the order of the grid
    failures: tuple[FailedTask, ...]
    num_skipped: int  # were finished before
    table: Path


def sweep(
    load: Load,
    tasks: Sequence[SweepTask],
    results: Results,
    execute: Executor,
    on_outcome: Callable[[int], object] = lambda finished: None,
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
    num_skipped, failures = len(rows), list[FailedTask]()
    on_outcome(num_skipped)
    for outcome in execute(partial(within, task_s, partial(run_task, load)), missing):
        if isinstance(outcome, FailedTask):
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


END_S = 2.0  # from a failure to the end of its process, in which the executor reads it
STUCK_S = 30.0  # time beyond the deadline, for a thread that lets no other one run
MOST_FRAMES = 4
STDERR = 2  # a number, which is there whatever sys.stderr was replaced by


class TaskTimeout(EplbError):
    """A task that did not end in time; it says where it was."""


def within(seconds: float, work: Callable[[SweepTask], Row], task: SweepTask) -> Row:
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


# Workers fill the cores themselves; these are read when the libraries are loaded.
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def run_on_processes(
    work: Work, tasks: Sequence[SweepTask], num_workers: int
) -> Iterator[Row | FailedTask]:
    """Run work on every task; outcomes come in the order in which tasks end.

    Every worker is a pool of one process, so that the death of a process names its task, and no
    other task pays for it.
    A task whose worker dies runs once more; the worker of a task past its deadline is replaced.
    Workers leave when the iterator is closed, and when this process dies.
    """
    hold, release = get_context("spawn").Pipe(duplex=False)
    waiting = deque((task, 1) for task in tasks)
    idle = [_worker(hold) for _ in range(min(num_workers, len(tasks)))]
    running: dict[Future[Row], tuple[ProcessPoolExecutor, SweepTask, int]] = {}
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
                    yield FailedTask(task, f"its worker died {TRIES} times; is memory short?")
    finally:
        release.close()
        for worker in (*idle, *(one for one, _, _ in running.values())):
            worker.shutdown(wait=False, cancel_futures=True)
        hold.close()


def _outcome(future: Future[Row], task: SweepTask) -> Row | FailedTask | None:
    """None: the worker died."""
    try:
        return future.result()
    except BrokenProcessPool:
        return None
    except Exception as exc:  # one task fails, and the others go on
        return FailedTask(task, f"{type(exc).__name__}: {exc}")


def _worker(hold: Connection) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, get_context("spawn"), _stay_while, (hold,))


def _submit(worker: ProcessPoolExecutor, work: Work, task: SweepTask) -> Future[Row]:
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


def run_on_ray(work: Work, tasks: Sequence[SweepTask]) -> Iterator[Row | FailedTask]:
    """Run work on every task, one core each, on the cluster of RAY_ADDRESS, else on this host.

    Outcomes come in the order in which tasks end.

    Raises:
        ConfigError: Ray is not installed, or its cluster cannot be reached.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # else Ray reports to its makers
    with needed_for("--executor ray"):
        import ray
        from ray.exceptions import RayError, RayTaskError
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    except (ConnectionError, RuntimeError, ValueError) as exc:
        raise ConfigError(f"the Ray cluster cannot be used: {exc}") from exc
    try:
        shared = ray.put(work)  # recorded windows travel to each host once
        call = ray.remote(num_cpus=1, max_retries=TRIES - 1)(_apply)
        running = {call.remote(shared, task): task for task in tasks}
        while running:
            # Work has its own deadline, and Ray notices the death of its worker.
            (done,), _ = ray.wait(list(running), num_returns=1)
            task = running.pop(done)
            try:
                yield ray.get(done)
            except RayTaskError as exc:
                yield FailedTask(task, f"{type(exc.cause).__name__}: {exc.cause}")
            except RayError as exc:
                yield FailedTask(task, f"its worker died {TRIES} times: {type(exc).__name__}")
    finally:
        ray.shutdown()


def _apply(work: Work, task: SweepTask) -> Row:
    return work(task)


def run_task(load: Load, task: SweepTask) -> Row:
    """Replay a configuration.

    Raises:
        ConfigError: a host with other software, or a configuration that cannot be.
        HistoryError: load that cannot be replayed.
    """
    register_peers()
    if task.policy_file:
        register_named(task.policy_file)
    if task.policy_digest and source_digest(task.policy) != task.policy_digest:
        raise ConfigError(
            f"policy {task.policy!r} was changed since the sweep began, expected the same source "
            "on all hosts: run the sweep again"
        )
    scenario = _scenario(load, task)
    replays = replay_all(scenario, [task.policy])
    result = summary(task.settings.load, scenario, replays)
    figures = result["policies"][task.policy]
    moved = sum(figures.get("bytes_by_link", {}).values())
    # Without a window there are no figures: counts are 0, and what could not be measured is None.
    none = {"rebalances": 0, "kept": 0, "experts_moved": 0, "bytes_moved": moved, "objective": ""}
    found = none | vars(task.settings) | vars(task) | result | figures | {"task": task.digest}
    return Row(**{column.name: found.get(column.name) for column in fields(Row)})


def _scenario(load: Load, task: SweepTask) -> Scenario:
    settings = task.settings
    if settings.model is not None and model_digest(settings.model) != settings.model_digest:
        raise ConfigError(
            f"{settings.model} is another file than when the sweep started, expected the same one "
            "on all hosts"
        )
    if software() != settings.software:
        raise ConfigError(
            "this worker runs other software than the command that started the sweep: expected "
            "the same version of eplb, numpy, scipy, numba and ortools on all hosts"
        )
    model = None if settings.model is None else model_by_name(settings.model)
    if model is not None and settings.precision is not None:
        model = model.with_precision(settings.precision)
    windows = load.windows(task.seed, model)
    fitted = model_of(model, windows, settings.load)
    topology = even_topology(
        task.ranks, settings.ranks_per_node, task.redundant, windows.num_experts
    )
    step_model = price = None
    if settings.hardware is not None:
        step_model = step_model_of(
            fitted,
            topology,
            settings.hardware,
            is_prefill=settings.is_prefill,
            other_us=settings.other_us,
            is_overlapped=settings.is_overlapped,
        )
        price = MigrationCost(step_model.model, step_model.hardware)
        windows = replace(windows, phase="prefill" if settings.is_prefill else "decode")
    return Scenario(
        topology,
        fitted,
        load=windows,
        seed=task.seed,
        past_windows=settings.past_windows,
        plan_every=task.interval,
        dispatch=DispatchRule(task.dispatch),
        step_model=step_model,
        migration=price,
    )
