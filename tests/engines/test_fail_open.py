"""Faults of the plug-in's processes, store and disk: passes go on, and the gauge reports it."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rebalance.engines.common import store_process
from telemetry import open_store
from tests.support.engines.gauge import value_of
from tests.support.engines.installed import engine
from tests.support.engines.ranks import (
    INTERVAL,
    NAME,
    NUM_LAYERS,
    NUM_RANKS,
    WINDOW,
    config_in,
    on_all,
    on_ranks,
    settings_in,
    wait_until,
)
from tests.support.redis_servers import RedisProcess, free_port

pytestmark = pytest.mark.slow
OUTAGES = 50
KILLS = 10


def is_reporting() -> bool:
    return value_of(engine.NAME, "store") == 1.0


def outages(rank: int, config: Path, folder: Path, port: int) -> dict[str, Any]:
    """Kill Redis, remove the spool, and kill the process at the store, again and again."""
    store_process.LONGEST_PAUSE_S = store_process.FIRST_PAUSE_S
    server = RedisProcess(folder / "redis", {"port": str(port)}) if rank == 0 else None
    made = engine.make_rank(rank, config)
    made.until(lambda: made.recorder is not None)
    recorder, spent = made.recorder, engine.watched(made)
    kept, dropped = 0, 0

    def has_answered() -> bool:
        return is_reporting() and not recorder.is_asked

    for outage in range(OUTAGES):
        # A process takes seconds to start. That of SGLang plans too, and is killed each time.
        is_process_killed = engine.NAME == "sglang" or outage % 10 == 0
        made.steps(INTERVAL)  # asks for a plan
        while not on_all(rank == 0 and has_answered() and not made.is_moving):
            if rank == 0:  # the others wait for it in a reduction, and leave it the processor
                wait_until(has_answered)
            on_all(True)
            made.steps(WINDOW)
        if server is not None:
            if is_process_killed:
                os.kill(recorder.pid, signal.SIGSTOP)
            server.kill()
            shutil.rmtree(folder / "spool", ignore_errors=True)
        before = made.generation
        # Longer than an interval, so that a plan is asked for of a process that does not answer.
        made.steps(2 * INTERVAL)
        kept += made.generation == before
        if server is not None:
            if is_process_killed:
                os.kill(recorder.pid, signal.SIGKILL)
            wait_until(lambda: not is_reporting())
            dropped += recorder.num_dropped
            server.start()
        on_all(True)
    made.until_maps(1)
    found = made.result() | {"kept": kept, "dropped": dropped, "spent": spent}
    if server is not None:
        server.kill()
    return found


def test_no_pass_fails_while_store_disk_and_process_are_killed_50_times(tmp_path: Path) -> None:
    port = free_port()
    config = config_in(
        tmp_path,
        deployment__store=f"redis://127.0.0.1:{port}",
        telemetry__spool_dir=str(tmp_path / "spool"),
    )
    found = on_ranks(outages, config, tmp_path, port)

    assert all(one["map"] == found[0]["map"] for one in found)
    assert found[0]["dropped"] == 0
    assert all(one[part] == 1.0 for one in found for part in engine.PARTS)
    if engine.NAME == "sglang":  # the process plans
        assert [one["kept"] for one in found] == [OUTAGES] * NUM_RANKS
    for rank, one in enumerate(found):
        waits, calls = sum(spent.num_waits > 0 for spent in one["spent"]), len(one["spent"])
        print(f"rank {rank}: {calls} calls in passes, {waits} of them waited")
        # A call that waits for the store, the disk or the process at the store gives the processor
        # up each time.
        assert waits <= 0.01 * calls


def killed(rank: int, config: Path) -> int:
    """Kill the process at the store whenever it was handed a sample; tokens of all passes."""
    store_process.LONGEST_PAUSE_S = store_process.FIRST_PAUSE_S
    made = engine.make_rank(rank, config, **engine.WITH_TASKS_ALONE)
    made.until(lambda: made.recorder is not None)
    recorder = made.recorder
    for _ in range(KILLS):
        wait_until(is_reporting)
        made.steps(WINDOW)
        os.kill(recorder.pid, signal.SIGKILL)
        wait_until(lambda: not is_reporting())
    made.close()
    assert recorder.num_dropped == 0
    return int(made.passes) * engine.ROWS * engine.TOP_K * NUM_LAYERS


def test_store_has_every_token_though_its_process_is_killed(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    routed = on_ranks(killed, config)

    with closing(open_store(settings_in(config).deployment.store, NAME)) as store:
        run = store.current_run()
        assert run is not None
        samples = [sample for _, sample in store.samples(run.run)]
    assert {sample.rank for sample in samples} == set(range(NUM_RANKS))
    assert sum(int(sample.tokens.sum()) for sample in samples) == sum(routed)


def one_differs(rank: int, config: Path, other: Path | None) -> dict[str, Any]:
    """Rank 2 has no plug-in, or other settings."""
    made = engine.make_rank(rank, other if rank == 2 else config)
    made.steps(3 * INTERVAL)
    return {"map": made.held.tolist(), "on": made.is_on, "why": made.why_off}


@pytest.mark.parametrize(
    ("other", "why"),
    [({}, "ranks [2] of 4 did not load"), ({"planner__pay_back_s": 2.0}, "rank 2 has ")],
    ids=["missing", "other settings"],
)
def test_rank_without_the_same_plugin_leaves_all_ranks_to_the_engine(
    other: dict[str, Any], why: str, tmp_path: Path
) -> None:
    deadline = {"engine__load_deadline_s": 20.0}
    found = on_ranks(
        one_differs,
        config_in(tmp_path, **deadline),
        config_in(tmp_path, **deadline, **other) if other else None,
    )

    assert all(one["map"] == found[0]["map"] for one in found)
    assert not any(one["on"] for one in found)
    assert why in found[0]["why"] or engine.NAME == "sglang", "SGLang's log alone has the reason"
