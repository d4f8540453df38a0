"""Sweeps: resuming, failures, files and inputs that change; and on processes, which may die."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from queue import Empty
from threading import Event
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest
from click.testing import Result
from typer.testing import CliRunner

from api.cli.main import app
from eplb.core.dispatch import DispatchRule
from eplb.errors import ConfigError
from simulations.sweep import run as runs
from simulations.sweep.grid import (
    Generated,
    Recorded,
    SweepSettings,
    SweepTask,
    recorded,
    software,
    tasks_of,
)
from simulations.sweep.results import SCHEMA_KEY, Results, Row, read_rows
from simulations.sweep.run import (
    Executor,
    FailedTask,
    Sweep,
    TaskTimeout,
    Work,
    on_this_host,
    run_on_processes,
    run_on_ray,
    run_task,
    sweep,
    within,
)
from simulations.windows import WindowSeries
from tests.support.dying_work import HANGING, die_in_seed_0, hang_in_policy
from tests.support.limits import NEVER_S
from tests.support.processes import ForkedProcess

LOAD = Generated("generated:gamma:windows=4,layers=2,experts=16")
WINDOW = np.arange(32, dtype=np.int64).reshape(2, 16)
RECORDED = recorded(WindowSeries(2, 16, lambda: iter([WINDOW, WINDOW * 2, WINDOW + 5])))
SETTINGS = SweepSettings(LOAD.digest, software())
HANGS = ("none", HANGING, "auto")
ONE_WORKER = partial(run_on_processes, num_workers=1)


def in_process(
    work: Work, tasks: Sequence[SweepTask], num_workers: int = 1
) -> Iterator[Row | FailedTask]:
    """An executor without workers, for what a sweep decides whoever runs its tasks."""
    return (work(task) for task in tasks)


def grid(settings: SweepSettings = SETTINGS, seeds: Sequence[int] = (0, 1)) -> list[SweepTask]:
    """Two policies on four ranks, for each seed."""
    return tasks_of(
        settings,
        ranks=[4],
        redundant=[1],
        intervals=[1],
        policies=["none", "auto"],
        dispatch=[DispatchRule.WEIGHTED],
        seeds=seeds,
    )


ONE = grid()[0]


def swept(
    folder: Path,
    *,
    load: Generated | Recorded = LOAD,
    tasks: Sequence[SweepTask] | None = None,
    execute: Executor = in_process,
    on_outcome: Callable[[int], None] = lambda finished: None,
) -> Sweep:
    tasks = grid(replace(SETTINGS, load=load.digest)) if tasks is None else tasks
    return sweep(load, tasks, Results(folder), execute, on_outcome)


def test_finished_tasks_are_skipped_and_the_table_is_in_the_order_of_the_grid(
    tmp_path: Path,
) -> None:
    outcomes: list[int] = []
    some = swept(tmp_path, tasks=grid()[1:3])
    whole = swept(tmp_path, on_outcome=outcomes.append)

    assert (some.num_skipped, whole.num_skipped) == (0, 2)
    assert outcomes == [2, 3, 4]
    assert [row.task for row in whole.rows] == [task.digest for task in grid()]
    assert {row.failed for row in whole.rows} == {""}
    assert read_rows(whole.table) == list(whole.rows)


@pytest.mark.system
def test_one_and_two_workers_give_the_same_table(tmp_path: Path) -> None:
    one = swept(tmp_path / "one", execute=ONE_WORKER)
    two = swept(tmp_path / "two", execute=partial(run_on_processes, num_workers=2))

    assert one.rows == swept(tmp_path / "none").rows
    assert one.table.read_bytes() == two.table.read_bytes()


@pytest.mark.system
def test_recorded_windows_are_mapped_by_workers_and_give_the_same_rows(tmp_path: Path) -> None:
    mapped = swept(tmp_path, load=on_this_host(RECORDED, tmp_path), execute=ONE_WORKER)
    here = [run_task(RECORDED, task) for task in grid(replace(SETTINGS, load=RECORDED.digest))]

    assert list(mapped.rows) == here
    assert here[0].windows == 3


@pytest.mark.slow  # a cluster of Ray's own starts
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: extra `ray`")
@pytest.mark.parametrize("load", [LOAD, RECORDED], ids=["generated", "recorded"])
def test_ray_gives_the_same_table(tmp_path: Path, load: Generated | Recorded) -> None:
    here = swept(tmp_path / "here", load=load)
    ran = on_ray(tmp_path / "ray", load.digest)

    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "ray" / "results.parquet").read_bytes() == here.table.read_bytes()


def on_ray(folder: Path, load: str) -> subprocess.CompletedProcess[str]:
    """This file as a program, in a process of its own: Ray leaves sockets to the collector."""
    return subprocess.run(
        [sys.executable, __file__, str(folder), load],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )


def sweep_until_killed(pipe: Any, folder: Path, tasks: list[SweepTask]) -> None:
    """Name the workers as soon as one task of an earlier run, or of this one, has ended."""

    def tell(finished: int) -> None:
        if finished:
            pipe.send(workers_of(os.getpid()))

    execute = partial(run_on_processes, num_workers=2)
    swept(folder, tasks=tasks, execute=execute, on_outcome=tell)


@pytest.mark.system
def test_killed_sweep_finishes_only_what_is_missing(
    tmp_path: Path, fork: Callable[..., ForkedProcess]
) -> None:
    tasks = grid(seeds=range(20))
    running = fork(sweep_until_killed, tmp_path, tasks)
    workers = running.receive()
    handles = [os.pidfd_open(pid) for pid in workers if Path(f"/proc/{pid}").exists()]
    running.kill()
    for handle in handles:
        select.select([handle], [], [])
        os.close(handle)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("tasks/*.parquet")}
    again = swept(tmp_path, tasks=tasks)

    assert len(workers) == 2
    assert 0 < again.num_skipped == len(kept)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert [row.task for row in again.rows] == [task.digest for task in tasks]


def workers_of(pid: int) -> list[int]:
    """The children of a process that are pool workers, by their command line."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    pids = [int(word) for file in children for word in file.read_text().split()]
    return [one for one in pids if b"spawn_main" in command_line(one)]


def command_line(pid: int) -> bytes:
    """b"" for a process that has ended since it was listed."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def dying(load: Generated, marks: Path, times: int) -> Executor:
    """Two workers, of which that of seed 0 is killed the first times."""
    marks.mkdir()

    def execute(work: Work, tasks: Sequence[SweepTask]) -> Iterator[Row | FailedTask]:
        return run_on_processes(partial(die_in_seed_0, load, marks, times), tasks, 2)

    return execute


@pytest.mark.system
def test_task_whose_worker_is_killed_runs_once_more_and_others_are_kept(tmp_path: Path) -> None:
    tasks = grid()[1:]  # ``none`` of seed 1, ``auto`` of both
    once = swept(tmp_path / "a", tasks=tasks, execute=dying(LOAD, tmp_path / "of a", times=1))
    twice = swept(tmp_path / "b", tasks=tasks, execute=dying(LOAD, tmp_path / "of b", times=2))
    again = swept(tmp_path / "b", tasks=tasks)

    assert (once.failures, once.rows) == ((), again.rows)
    assert [one.task.seed for one in twice.failures] == [0]
    assert [row.seed for row in twice.rows] == [1, 1]
    assert read_rows(twice.table) == list(again.rows)
    assert (again.num_skipped, len(again.rows), again.failures) == (2, 3, ())


def test_task_past_its_deadline_fails_with_where_it_was_and_its_process_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The deadline has passed as soon as the task is in the call that never ends."""
    begun, ends, timers = Event(), Event(), list[tuple[Any, ...]]()

    def never_ends(task: SweepTask) -> Row:
        begun.set()
        ends.wait()
        raise AssertionError("nobody waits for this any more")

    class PassedQueue:
        def put(self, outcome: object) -> None: ...

        def get(self, timeout: float) -> object:
            begun.wait()
            raise Empty

    class RecordedTimer:
        def __init__(self, *args: Any) -> None:
            timers.append(args)

        def start(self) -> None: ...

    monkeypatch.setattr(runs, "SimpleQueue", PassedQueue)
    monkeypatch.setattr(runs, "Timer", RecordedTimer)
    try:
        with pytest.raises(TaskTimeout, match=r" 1\.5 minutes.* never_ends"):
            within(90.0, never_ends, ONE)
    finally:
        ends.set()

    assert timers == [(runs.END_S, os._exit, (1,))]


def test_task_in_time_gives_its_row_or_its_error() -> None:
    row = run_task(LOAD, ONE)

    def refuse(task: SweepTask) -> Row:
        raise ConfigError("no such rank")

    assert within(NEVER_S, lambda task: row, ONE) is row
    with pytest.raises(ConfigError, match="no such rank"):
        within(NEVER_S, refuse, ONE)


def hanging_grid() -> list[SweepTask]:
    """A policy that hangs, between others."""
    return [replace(grid()[0], policy=name, seed=seed) for seed, name in enumerate(HANGS)]


def work_with_a_hang(task: SweepTask) -> Row:
    """The policy that hangs has a short time, the others all that they need."""
    seconds = 0.5 if task.policy == HANGING else NEVER_S
    return within(seconds, partial(hang_in_policy, LOAD), task)


def hanging(execute: Executor) -> Executor:
    """The same executor, for work in which a policy hangs."""
    return lambda work, tasks: execute(work_with_a_hang, tasks)


@pytest.mark.system
def test_task_past_its_deadline_fails_and_others_are_kept(tmp_path: Path) -> None:
    done = swept(tmp_path, tasks=hanging_grid(), execute=hanging(ONE_WORKER))

    (failure,) = done.failures
    assert failure.task.policy == HANGING
    assert failure.reason.startswith("TaskTimeout: ")
    assert [row.policy for row in done.rows] == ["none", "auto"]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: extra `ray`")
def test_task_past_its_deadline_fails_on_ray_as_on_processes(tmp_path: Path) -> None:
    ran = on_ray(tmp_path, "hanging")

    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("TaskTimeout: ")
    assert [row.policy for row in read_rows(tmp_path / "results.parquet")] == ["none", "auto"]


def test_worker_goes_on_after_a_task_that_raises_and_leaves_when_nobody_reads() -> None:
    tasks = [replace(ONE, ranks=0), ONE, *grid()[1:]]
    ending = workers_of(os.getpid())  # of an earlier test, which may take a while to end
    outcomes = run_on_processes(partial(run_task, LOAD), tasks, 1)
    failure, row = next(outcomes), next(outcomes)
    (worker,) = set(workers_of(os.getpid())) - set(ending)
    handle = os.pidfd_open(worker)
    outcomes.close()  # type: ignore[attr-defined]
    select.select([handle], [], [])
    os.close(handle)

    assert isinstance(failure, FailedTask)
    assert failure.task == tasks[0]
    assert "Error: " in failure.reason
    assert row == run_task(LOAD, ONE)
    assert worker not in workers_of(os.getpid())


# -- files


def test_results_of_another_schema_version_are_refused(tmp_path: Path) -> None:
    done = swept(tmp_path)
    part = tmp_path / "tasks" / f"{done.rows[0].task}.parquet"
    table = parquet.read_table(part)
    parquet.write_table(table.replace_schema_metadata({SCHEMA_KEY: b"99"}), part)

    with pytest.raises(ConfigError, match=rf"{part} has schema version 99, expected 2"):
        swept(tmp_path)
    parquet.write_table(table.replace_schema_metadata(None), part)
    with pytest.raises(ConfigError, match="has schema version none, expected 2"):
        swept(tmp_path)


def test_damaged_result_is_refused_with_its_path(tmp_path: Path) -> None:
    done = swept(tmp_path)
    part = tmp_path / "tasks" / f"{done.rows[0].task}.parquet"
    part.write_bytes(part.read_bytes()[:100])

    with pytest.raises(ConfigError, match=rf"{part} cannot be read: .*remove it, and its task"):
        swept(tmp_path)


# -- what decides a result


@pytest.mark.parametrize(
    "other",
    [
        replace(ONE, seed=7),
        replace(ONE, interval=2),
        replace(ONE, dispatch="even"),
        replace(ONE, settings=replace(SETTINGS, past_windows=3)),
        replace(ONE, settings=replace(SETTINGS, software="of another version")),
        replace(ONE, settings=replace(SETTINGS, load=Generated(LOAD.text, steps=9).digest)),
    ],
)
def test_any_changed_setting_changes_the_digest(other: SweepTask) -> None:
    assert other.digest != ONE.digest
    assert replace(other).digest == other.digest


def test_one_changed_count_changes_the_digest_of_recorded_load() -> None:
    changed = WINDOW + 5
    changed[1, 3] += 1
    other = recorded(WindowSeries(2, 16, lambda: iter([WINDOW, WINDOW * 2, changed])))
    same = recorded(WindowSeries(2, 16, lambda: iter([WINDOW, WINDOW * 2, WINDOW + 5])))

    assert same.digest == RECORDED.digest
    assert other.digest != RECORDED.digest


def test_worker_with_other_software_refuses_the_task() -> None:
    stale = replace(ONE, settings=replace(SETTINGS, software="of another version"))

    with pytest.raises(ConfigError, match="this worker runs other software"):
        run_task(LOAD, stale)


# -- the command


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["sweep", *arguments])


def test_command_prints_the_best_rows_first_and_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("plotly")
    monkeypatch.setattr("api.cli.simulator.sweep.run_on_processes", in_process)
    load, page = "generated:v2-lite:windows=3,tokens=20000", tmp_path / "out.html"
    ran = command(
        *(load, "--model", "deepseek-v2-lite", "--hardware", "h100", "--output", str(tmp_path)),
        *(
            "--redundant-per-rank",
            "0,1",
            "--every",
            "1",
            "--policy",
            "none,auto",
            "--html",
            str(page),
        ),
    )
    rows = read_rows(tmp_path / "results.parquet")

    assert ran.exit_code == 0, ran.stderr
    assert "4 rows, 0 of them from earlier runs" in ran.stdout
    assert all(row.tokens_per_s_per_rank for row in rows)
    assert ran.stdout.index("auto") < ran.stdout.index("none")
    read = page.read_text()
    assert "<li>best of EP8: auto on 8 ranks" in read


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ranks", "x"), "--ranks is 'x', expected numbers of 1 to 65536"),
        (("--policy", "nope"), "'nope'"),
        (("--dispatch", "dice"), "unknown dispatch rule 'dice', expected one of: even, weighted"),
        (("--hardware", "h200"), "expected --model"),
        (("--executor", "ray", "--workers", "2"), "--workers is for processes"),
        (("--model", "deepseek-v3", "--ranks-per-node", "0"), "ranks_per_node is 0"),
    ],
)
def test_bad_sweep_is_one_sentence_and_exit_code_2(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    ran = command(LOAD.text, "--output", str(tmp_path), *arguments)

    assert ran.exit_code == 2
    assert message in ran.stderr
    assert len(ran.stderr.strip().splitlines()) == 1


if __name__ == "__main__":
    if sys.argv[2] == "hanging":
        tasks = hanging_grid()
        found = swept(Path(sys.argv[1]), tasks=tasks, execute=hanging(run_on_ray))
        print(*(one.reason for one in found.failures))
        sys.exit()
    (chosen,) = (one for one in (LOAD, RECORDED) if one.digest == sys.argv[2])
    assert swept(Path(sys.argv[1]), load=chosen, execute=run_on_ray).failures == ()
