"""A store without room, and a launcher that has exited: what the verdict says, and what it leaves.

Nobody can report to a store that takes no changes, so silence proves nothing then.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from api.monitor.monitor import Monitor
from api.monitor.state import Grade, Reading
from api.monitor.verdict import unready
from eplb.versions import LAUNCHER, Announcement
from telemetry.state.holder import is_dead
from telemetry.state.joining import HEARTBEAT_S
from telemetry.state.store import StateStore
from tests.support import two_ranks
from tests.support.rank_reports import rank_report
from tests.support.redis_servers import RedisProcess
from tests.support.stores import MemoryStore, StoreClock, redis_store
from tests.support.two_ranks import FIRST, begin_run

ENOUGH = "500000000"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisProcess]:
    """A server of the test's own, whose memory it limits."""
    with RedisProcess(tmp_path / "redis") as started:
        yield started


def serve(store: StateStore, window: int, now: float) -> None:
    """Both ranks report, and have counted tokens in a window."""
    for rank in range(2):
        store.report(rank_report("a", rank, time=now, step=2 * window + 2))
    samples = [two_ranks.sample(rank, window, [6, 3], FIRST, at=now, steps=2) for rank in (0, 1)]
    store.append(samples)
    assert store.acquire_lease("the-controller", 30.0) is not None


def look(monitor: Monitor) -> Reading:
    monitor.refresh()
    return monitor.reading()


def test_ranks_and_controller_are_not_told_as_silent_while_redis_is_full(
    server: RedisProcess, store_clock: StoreClock
) -> None:
    with closing(redis_store(server.url, "d", clock=store_clock)) as store:
        begin_run(store, "a", store_clock.now, window_steps=2)
        store.commit(FIRST, expected=None, reason="start")
        serve(store, 0, store_clock.now)
        monitor = Monitor(store, clock=store_clock)
        assert look(monitor).state.verdict is Grade.SERVING
        server.ask("CONFIG SET", "maxmemory", "1")
        for seconds in (1, 40, 40):
            store_clock.now += seconds
            full = look(monitor)
            assert full.state.verdict is Grade.DEGRADED
            assert "the store takes no changes" in full.state.reason
            assert "is full" in full.state.reason
            assert [finding.kind for finding in full.findings] == ["store-full"]
            assert unready(full) is None

        server.ask("CONFIG SET", "maxmemory", ENOUGH)
        store_clock.now += 1
        assert [finding.kind for finding in look(monitor).findings] == ["store-full"]
        serve(store, 1, store_clock.now)
        look(monitor)
        assert look(monitor).state.verdict is Grade.SERVING

        store_clock.now += 45
        silent = look(monitor).state
        assert silent.verdict is Grade.BLIND
        assert "silent ranks: 0, 1" in silent.reason


@pytest.fixture
def exited() -> str:
    """The name of a process that has exited on this host."""
    script = "from telemetry.state.holder import new_holder; print(new_holder())"
    return subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_launcher_that_has_exited_stops_a_deployment_of_one_host_at_once(
    store_clock: StoreClock, exited: str
) -> None:
    store = MemoryStore("d", clock=store_clock)
    begin_run(store, "a", store_clock.now, window_steps=2)
    store.commit(FIRST, expected=None, reason="start")
    serve(store, 0, store_clock.now)
    monitor = Monitor(store, clock=store_clock)
    launcher = Announcement(LAUNCHER, "0", every_s=HEARTBEAT_S)
    store.announce(launcher)
    assert look(monitor).state.verdict is Grade.SERVING

    assert is_dead(exited)
    store.announce(replace(launcher, process=exited))
    seen = look(monitor)

    assert seen.state.verdict is Grade.STOPPED
    assert "the launcher of host 0 has exited, and its ranks with it" in seen.state.reason
    assert unready(seen) is not None
