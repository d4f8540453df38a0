"""A soak's readings stay small, its publisher never stops in silence, and it ends in order."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from benchmarks.publishing import Publisher
from benchmarks.ranks.soak_readings import MIB, Level, Progress, Reservoir, progress_line
from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.errors import EplbError
from eplb.migration.build import Migration, build_migration
from telemetry import open_store
from telemetry.state.store import StateStore
from tests.support.limits import NEVER_S
from tests.support.repository import ROOT

TWO_RANKS = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2)
HERE = Placement(np.array([[0, 1, 2, 0]]), num_experts=3)
THERE = Placement(np.array([[0, 1, 2, 1]]), num_experts=3)

OpenOne = Callable[[], StateStore]


# -- readings


def test_reservoir_is_a_fair_sample_of_all_values_and_the_same_for_a_seed() -> None:
    first_half = 0
    for seed in range(200):
        one, other = Reservoir(10, seed=seed), Reservoir(10, seed=seed)
        for value in range(40):
            assert len(one.values) == min(value, 10)
            one.add(value)
            other.add(value)
        assert len(set(one.values)) == 10
        assert one.values == other.values
        assert one.num_seen == 40
        first_half += sum(value < 20 for value in one.values)

    assert 900 < first_half < 1100  # of 2000; five standard deviations are 97


def test_level_and_line_of_progress_have_the_highest_memory_and_the_wrong_slots() -> None:
    level = Level()
    for reading in (300, 420, 310):
        level.note(reading)

    assert (level.first, level.highest, level.last, level.num_readings) == (300, 420, 310, 3)
    assert level.rise == 120
    told = re.findall(r"\d+", progress_line(60.4, Progress(50, 7, 120, 1, 210 * MIB)))
    assert told == ["60", "50", "7", "1", "120", "210"]


# -- the publisher


@pytest.fixture
def open_one(tmp_path: Path) -> OpenOne:
    """Open a store in which HERE is committed, again for another look at it."""

    def open_again() -> StateStore:
        return open_store(tmp_path / "store.sqlite", "bench")

    with closing(open_again()) as store:
        store.commit(HERE, expected=None, reason="start")
    return open_again


def test_publisher_offers_one_migration_and_waits_until_it_is_committed(
    open_one: OpenOne,
) -> None:
    bases = []

    def there(base: Placement) -> Migration:
        bases.append(base.slot_to_expert.tolist())
        return build_migration(base, THERE, TWO_RANKS, plan_id=7)

    with closing(open_one()) as store:
        version = store.version()
        publisher = Publisher(open_one(), there, poll_s=0.01)
        assert publisher.num_published == 0
        publisher.want(True)
        store.wait(version, NEVER_S)
        publisher.close()
        offered = store.published()

    assert offered is not None
    assert offered.target.slot_to_expert.tolist() == [[0, 1, 2, 1]]
    assert (bases, publisher.num_published) == ([[[0, 1, 2, 0]]], 1)


def test_failure_of_the_publisher_is_raised_at_the_next_step(open_one: OpenOne) -> None:
    was_asked = threading.Event()

    def refuse(base: Placement) -> Migration:
        was_asked.set()
        raise ValueError("no such layer")

    publisher = Publisher(open_one(), refuse, poll_s=0.01)
    publisher.check()
    publisher.want(True)
    was_asked.wait()

    words = "0 migrations: ValueError: no such layer"
    with pytest.raises(EplbError, match=words):
        publisher.close()
    with pytest.raises(EplbError, match=words):
        publisher.check()


# -- the whole of it


def wait_for_message(process: subprocess.Popen[str], words: str) -> None:
    """Read its error stream until it has said these words."""
    assert process.stderr is not None
    said = ""
    while words not in said:
        found = os.read(process.stderr.fileno(), 4096).decode()
        assert found, f"ended before {words!r}, after {said!r}"
        said += found


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_soak_prints_its_rows_and_leaves_nothing(
    tmp_path: Path, how: signal.Signals
) -> None:
    command = [sys.executable, "-m", "benchmarks.ranks.thread", "--seconds", "3600"]
    command += ["--swap-every", "0", "--progress-every", "1"]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            wait_for_message(process, "migrations")
            os.killpg(process.pid, how)  # as a terminal and a service manager do: to all of them
            rows, errors = process.communicate()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)

    assert process.returncode == 128 + how, errors
    assert f"{how.name}: the ranks are asked to halt" in errors
    assert re.search(r"slots with wrong bytes at the end +0 ", rows), rows
    assert re.search(r"placements at the end +1 ", rows), rows
    assert list(tmp_path.iterdir()) == []
