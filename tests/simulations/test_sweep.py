"""Sweeps on real processes: equal tables, resuming, deaths; and files and inputs that change."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import monotonic, sleep

import numpy as np
import pyarrow.parquet as parquet
import pytest
from click.testing import Result
from typer.testing import CliRunner

from api.cli.main import app
from eplb.dispatch_rules.rules import DispatchRule
from eplb.errors import ConfigError
from simulations.sweep.deadline import within
from simulations.sweep.grid import Settings, Task, software, tasks_of
from simulations.sweep.load import Generated, Recorded, recorded
from simulations.sweep.on_processes import run_on_processes
from simulations.sweep.on_ray import run_on_ray
from simulations.sweep.results import SCHEMA_KEY, Results, Row, read_rows
from simulations.sweep.run import Executor, Failure, Sweep, Work, on_this_host, sweep
from simulations.sweep.task import run_task
from simulations.windows import Windows
from tests.support.dying_work import HANGING, die_in_seed_0, hang_in_policy

DEADLINE_S = 60.0
LOAD = Generated("generated:gamma:windows=4,layers=2,experts=16")
WINDOW = np.arange(32, dtype=np.int64).reshape(2, 16)
RECORDED = recorded(Windows(2, 16, lambda: iter([WINDOW, WINDOW * 2, WINDOW + 5])))
SETTINGS = Settings(LOAD.digest, software())
HANGS = ("none", HANGING, "auto")
ONE_WORKER = partial(run_on_processes, num_workers=1)


def grid(settings: Settings = SETTINGS, seeds: Sequence[int] = (0, 1)) -> list[Task]:
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


def swept(
    folder: Path,
    *,
    load: Generated | Recorded = LOAD,
    tasks: Sequence[Task] | None = None,
    execute: Executor = ONE_WORKER,
) -> Sweep:
    tasks = grid(replace(SETTINGS, load=load.digest)) if tasks is None else tasks
    return sweep(load, tasks, Results(folder), execute)


def test_one_and_two_workers_give_the_same_table(tmp_path: Path) -> None:
    one = swept(tmp_path / "one")
    two = swept(tmp_path / "two", execute=partial(run_on_processes, num_workers=2))

    assert len(one.rows) == 4
    assert {row.failed for row in one.rows} == {""}
    assert one.table.read_bytes() == two.table.read_bytes()
    assert read_rows(one.table) == list(one.rows)


def test_recorded_windows_are_mapped_by_workers_and_give_the_same_rows(tmp_path: Path) -> None:
    mapped = swept(tmp_path, load=on_this_host(RECORDED, tmp_path))
    here = [run_task(RECORDED, task) for task in grid(replace(SETTINGS, load=RECORDED.digest))]

    assert list(mapped.rows) == here
    assert here[0].windows == 3


@pytest.mark.slow  # a cluster of Ray's own starts
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: extra `ray`")
@pytest.mark.parametrize("load", [LOAD, RECORDED], ids=["generated", "recorded"])
def test_ray_gives_the_table_of_processes(tmp_path: Path, load: Generated | Recorded) -> None:
    processes = swept(tmp_path / "processes", load=load)
    ran = on_ray(tmp_path / "ray", load.digest)

    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "ray" / "results.parquet").read_bytes() == processes.table.read_bytes()


def on_ray(folder: Path, load: str) -> subprocess.CompletedProcess[str]:
    """This file as a program, in a process of its own: Ray leaves sockets to the collector."""
    return subprocess.run(
        [sys.executable, __file__, str(folder), load],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S * 2,
        check=False,
    )


@pytest.mark.slow
def test_killed_sweep_finishes_only_what_is_missing(tmp_path: Path) -> None:
    command = sweep_words(tmp_path, "--seed", ",".join(map(str, range(200))), "--workers", "2")
    running = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        until(lambda: any(tmp_path.glob("tasks/*.parquet")))
        workers = workers_of(running.pid)
        running.kill()
    finally:
        running.wait(DEADLINE_S)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("tasks/*.parquet")}
    assert len(workers) >= 2
    assert 0 < len(kept) < 200

    again = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, timeout=DEADLINE_S * 2, check=True
    )

    told = json.loads(again.stdout)
    assert (told["skipped"], told["ran"]) == (len(kept), 200 - len(kept))
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert [row["seed"] for row in told["rows"]] == list(range(200))
    assert "tasks" not in again.stderr


def sweep_words(folder: Path, *more: str) -> list[str]:
    given = f"{LOAD.text} --ranks 4 --redundant 1 --every 1 --policy auto --out {folder}".split()
    return [sys.executable, "-m", "api.cli.main", "sweep", *given, *more]


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


def until(holds: Callable[[], bool]) -> None:
    deadline = monotonic() + DEADLINE_S
    while not holds():
        assert monotonic() < deadline, "the deadline passed"
        sleep(0.005)


def dying(load: Generated, marks: Path, times: int) -> Executor:
    """Two workers, of which that of seed 0 is killed the first times."""
    marks.mkdir()

    def execute(work: Work, tasks: Sequence[Task]) -> Iterator[Row | Failure]:
        return run_on_processes(partial(die_in_seed_0, load, marks, times), tasks, 2)

    return execute


def test_task_whose_worker_is_killed_runs_once_more(tmp_path: Path) -> None:
    done = swept(tmp_path / "a", execute=dying(LOAD, tmp_path / "marks", times=1))

    assert done.failures == ()
    assert list(done.rows) == [run_task(LOAD, task) for task in grid()]
    assert len(list((tmp_path / "marks").iterdir())) == 1


@pytest.mark.slow
def test_task_whose_worker_dies_twice_fails_and_others_are_kept(tmp_path: Path) -> None:
    tasks = grid()[1:]  # ``none`` of seed 1, ``auto`` of both
    done = swept(tmp_path / "a", tasks=tasks, execute=dying(LOAD, tmp_path / "marks", times=2))
    again = swept(tmp_path / "a", tasks=tasks)

    assert [(one.task.seed, one.reason) for one in done.failures] == [
        (0, "its worker died 2 times; is memory short?")
    ]
    assert [row.seed for row in done.rows] == [1, 1]
    assert read_rows(done.table) == list(again.rows)
    assert (again.num_skipped, len(again.rows), again.failures) == (2, 3, ())


HANGS_S = 15.0  # a first task compiles for a few seconds


def hanging_grid() -> list[Task]:
    """A policy that hangs, between others."""
    return [replace(grid()[0], policy=name, seed=seed) for seed, name in enumerate(HANGS)]


def hanging(execute: Executor) -> Executor:
    """The same executor, for work in which a policy hangs."""

    def run(work: Work, tasks: Sequence[Task]) -> Iterator[Row | Failure]:
        return execute(partial(within, HANGS_S, partial(hang_in_policy, LOAD)), tasks)

    return run


def failed_at_its_deadline(reason: str) -> bool:
    """The reason names the time, and the policy that the task was in."""
    return bool(
        re.match(r"TaskTimeout: no row after 0\.25 minutes: it was in threading\.py", reason)
    ) and ("dying_work.py" in reason and "waits_for_ever" in reason)


@pytest.mark.slow
def test_task_past_its_deadline_fails_with_where_it_was_and_others_are_kept(
    tmp_path: Path,
) -> None:
    done = swept(tmp_path, tasks=hanging_grid(), execute=hanging(ONE_WORKER))

    (failure,) = done.failures
    assert failure.task.policy == HANGING
    assert failed_at_its_deadline(failure.reason), failure.reason
    assert [row.policy for row in done.rows] == ["none", "auto"]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: extra `ray`")
def test_task_past_its_deadline_fails_on_ray_as_on_processes(tmp_path: Path) -> None:
    ran = on_ray(tmp_path, "hanging")

    assert ran.returncode == 0, ran.stderr
    assert failed_at_its_deadline(ran.stdout.strip()), ran.stdout
    assert [row.policy for row in read_rows(tmp_path / "results.parquet")] == ["none", "auto"]


def test_task_that_raises_fails_with_its_error_and_others_are_kept(tmp_path: Path) -> None:
    impossible = replace(grid()[0], ranks=0)
    done = swept(tmp_path, tasks=[impossible, grid()[1]])

    assert len(done.rows) == 1
    assert done.failures[0].task == impossible
    assert "Error: " in done.failures[0].reason


def test_workers_leave_when_their_outcomes_are_no_longer_read() -> None:
    outcomes = run_on_processes(partial(run_task, LOAD), grid(), 2)
    next(outcomes)
    workers = workers_of(os.getpid())
    outcomes.close()  # type: ignore[attr-defined]

    assert workers
    until(lambda: not set(workers) & set(workers_of(os.getpid())))


# -- files


def test_results_of_another_schema_version_are_refused(tmp_path: Path) -> None:
    done = swept(tmp_path)
    part = tmp_path / "tasks" / f"{done.rows[0].task}.parquet"
    table = parquet.read_table(part)
    parquet.write_table(table.replace_schema_metadata({SCHEMA_KEY: b"99"}), part)

    with pytest.raises(ConfigError, match=rf"{part} has schema version 99, expected 1"):
        swept(tmp_path)
    parquet.write_table(table.replace_schema_metadata(None), part)
    with pytest.raises(ConfigError, match="has schema version none, expected 1"):
        swept(tmp_path)


def test_damaged_result_is_refused_with_its_path(tmp_path: Path) -> None:
    done = swept(tmp_path)
    part = tmp_path / "tasks" / f"{done.rows[0].task}.parquet"
    part.write_bytes(part.read_bytes()[:100])

    with pytest.raises(ConfigError, match=rf"{part} cannot be read: .*remove it, and its task"):
        swept(tmp_path)


# -- what decides a result

ONE = grid()[0]


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
def test_any_changed_setting_changes_the_digest(other: Task) -> None:
    assert other.digest != ONE.digest
    assert replace(other).digest == other.digest


def test_one_changed_count_changes_the_digest_of_recorded_load() -> None:
    changed = WINDOW + 5
    changed[1, 3] += 1
    other = recorded(Windows(2, 16, lambda: iter([WINDOW, WINDOW * 2, changed])))
    same = recorded(Windows(2, 16, lambda: iter([WINDOW, WINDOW * 2, WINDOW + 5])))

    assert same.digest == RECORDED.digest
    assert other.digest != RECORDED.digest


def test_worker_with_other_software_refuses_the_task() -> None:
    stale = replace(ONE, settings=replace(SETTINGS, software="of another version"))

    with pytest.raises(ConfigError, match="this worker runs other software"):
        run_task(LOAD, stale)


# -- the command


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["sweep", *arguments])


def test_command_prints_the_best_rows_first_and_times(tmp_path: Path) -> None:
    load = "generated:v2-lite:windows=3,tokens=20000"
    ran = command(
        *(load, "--model", "deepseek-v2-lite", "--hardware", "h100", "--out", str(tmp_path)),
        *("--redundant", "0,1", "--every", "1", "--policy", "none,auto"),
    )
    rows = read_rows(tmp_path / "results.parquet")

    assert ran.exit_code == 0, ran.stderr
    assert "4 rows, 0 of them from earlier runs" in ran.stdout
    assert all(row.tokens_per_s_per_rank for row in rows)
    assert ran.stdout.index("auto") < ran.stdout.index("none")


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
    ran = command(LOAD.text, "--out", str(tmp_path), *arguments)

    assert ran.exit_code == 2
    assert message in ran.stderr
    assert len(ran.stderr.strip().splitlines()) == 1


if __name__ == "__main__":
    signal.alarm(int(DEADLINE_S * 2))
    if sys.argv[2] == "hanging":
        tasks = hanging_grid()
        found = swept(Path(sys.argv[1]), tasks=tasks, execute=hanging(run_on_ray))
        print(*(one.reason for one in found.failures))
        sys.exit()
    (chosen,) = (one for one in (LOAD, RECORDED) if one.digest == sys.argv[2])
    assert swept(Path(sys.argv[1]), load=chosen, execute=run_on_ray).failures == ()
