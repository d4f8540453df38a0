"""Attacks on the store: shared, emptied, cut off, torn, and with a clock that is set."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np

from benchmarks.attack import Attack, Outcome
from eplb.core.load import LoadSample
from eplb.errors import StoreError
from telemetry import open_store
from telemetry.state.events import plan_end
from telemetry.state.store import StateStore
from tests.support.redis_servers import RedisProcess
from tests.support.stores import redis_store, sqlite_store

EPLB = Path(sys.executable).with_name("eplb")
HERE = Path(__file__).resolve().parents[2]
START_S, AFTER_S, END_S = 60.0, 30.0, 20.0
LOOK_S = 0.1
SMALL = {
    "ranks_per_node": 2,
    "nodes": 2,
    "layers": 2,
    "experts": 8,
    "top_k": 2,
    "hidden": 32,
    "intermediate": 32,
    "window_steps": 4,
    "pay_back_s": 1_000_000,
    "lease_ttl_s": 2,
    "port": 0,
}
OPTIONS = ["--serve", "--seconds", "2", "--tokens-per-rank", "64", "--view", "off"]


def demo_command(folder: Path, store: str) -> list[str]:
    """The command of a small demo; an empty store is the file in its folder."""
    given = {**SMALL, "state_dir": folder} | ({"store": store} if store else {})
    settings = [word for item in given.items() for word in ("--setting", "{}={}".format(*item))]
    text = [word for name in ("LICENSE", "README.md") for word in ("--text", str(HERE / name))]
    return [str(EPLB), "demo", *OPTIONS, *text, *settings]


def found_in_time(what: str, look: Callable[[], Any], within_s: float) -> Any:
    """What ``look`` finds; a store that is away for a moment is asked again."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            if found := look():
                return found
        except StoreError:
            pass
        if time.monotonic() >= deadline:
            raise TimeoutError(f"no {what} within {within_s:g} s")
        Event().wait(LOOK_S)


def commits(store: StateStore, after: int = 0) -> int:
    """Migrations that were committed by events past an id."""
    events = store.events(after=after, limit=100_000)
    return sum(one.kind == "commit" and plan_end(one) is not None for one in events)


def decisions(store: StateStore, after: int) -> int:
    """Plans by events past an id: a KEEP is one, too, where nothing is left to gain."""
    return sum(one.kind == "plan" for one in store.events(after=after, limit=100_000))


@contextmanager
def serving_demo(folder: Path, url: str) -> Iterator[StateStore]:
    """A demo that has rebalanced once; ended with the attack, whatever came of it."""
    errors = (folder / "errors.txt").open("w")
    with errors:
        demo = subprocess.Popen(
            demo_command(folder / "state", url),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
    try:
        path = folder / "state" / "store.sqlite"
        found_in_time("store", lambda: url or path.exists(), START_S)
        with closing(open_store(url or path, "demo")) as store:
            found_in_time("first rebalance", lambda: commits(store), START_S)
            yield store
    finally:
        demo.terminate()
        try:
            demo.wait(END_S)
        except subprocess.TimeoutExpired:
            demo.kill()
            demo.wait(END_S)


def two_deployments(folder: Path) -> Outcome:
    """Start a second demo on the store of one that serves."""
    with RedisProcess(folder / "redis") as server, serving_demo(folder, server.url) as store:
        run, started = store.current_run(), time.monotonic()
        second = subprocess.run(
            demo_command(folder / "second", server.url),
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
        took_s = time.monotonic() - started
        is_refused = second.returncode == 2 and "is run by process" in second.stderr
        return Outcome(
            is_refused and store.current_run() == run,
            f"second start: exit {second.returncode} after {took_s:.1f} s, {second.stderr[:90]!r}",
        )


def lost(how: Callable[[RedisProcess], object]) -> Callable[[Path], Outcome]:
    """Take a store's contents from a demo that serves, and wait for the next rebalance."""

    def attack(folder: Path) -> Outcome:
        with RedisProcess(folder / "redis") as server, serving_demo(folder, server.url) as store:
            how(server)
            begun = time.monotonic()

            def restored() -> int:
                events = store.events(limit=100_000)
                return next((one.id for one in events if one.kind == "restore"), 0)

            try:
                event_id = found_in_time("event restore", restored, AFTER_S)
                restored_s = time.monotonic() - begun
                found_in_time("plan after it", lambda: decisions(store, event_id), AFTER_S)
            except TimeoutError as exc:
                return Outcome(False, str(exc))
            again_s = time.monotonic() - begun
            return Outcome(True, f"written anew in {restored_s:.2f} s, planned in {again_s:.1f}")

    return attack


def restart_empty(server: RedisProcess) -> None:
    """Kill a server that keeps no files, and start it again."""
    server.kill()
    server.start()


def removed_log(folder: Path) -> Outcome:
    """Remove the write-ahead log of a demo that serves, and ask it to pause."""
    with serving_demo(folder, ""):
        path = folder / "state" / "store.sqlite"
        for end in ("wal", "shm"):
            path.with_name(f"{path.name}-{end}").unlink()
        done = subprocess.run(
            [str(EPLB), "pause", "--store", str(path)],
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
        said = (folder / "errors.txt").read_text()
        is_told = "was removed or replaced" in said
        return Outcome(
            done.returncode != 0 and is_told,
            f"pause: exit {done.returncode}, {done.stderr[:70]!r}; the ranks said so: {is_told}",
        )


def make_sample(sequence: int) -> LoadSample:
    slot, one = np.array([[0]]), np.array([[1]])
    return LoadSample("demo", "run-1", 0, sequence, 1.0, 0, 0, "decode", 1, slot, one)


def torn_append(folder: Path) -> Outcome:
    """Cut the append-only file at many places in its last transaction, and start it twice."""
    logging.getLogger("telemetry.state.redis").setLevel(logging.ERROR)  # it says each repair
    settings = {"appendonly": "yes", "appendfsync": "always"}
    torn = list[str]()
    with RedisProcess(folder / "redis", settings) as server:
        with closing(redis_store(server.address, "demo")) as store:
            store.append([make_sample(1)])
            (journal,) = [
                *server.folder.glob("appendonly.aof"),
                *server.folder.glob("*/*.incr.aof"),
            ]
            num_before = journal.stat().st_size
            store.append([make_sample(sequence) for sequence in (2, 3)])
        server.kill()
        whole = journal.read_bytes()
        cuts = range(num_before + 10, len(whole) - 1, max(1, (len(whole) - num_before) // 40))
        for cut in cuts:
            journal.write_bytes(whole[:cut])
            server.start()
            with closing(redis_store(server.address, "demo")) as store:
                store.append([make_sample(2), make_sample(4)])
            server.kill()
            server.start()
            with closing(redis_store(server.address, "demo")) as store:
                found = [sample.sequence for _, sample in store.samples("run-1")]
                parts = (len(set(found)), store.sample_counts("run-1")[0], store.prune(1e9))
                if {1, 2, 4} - set(found) or set(parts) != {len(found)}:
                    torn.append(f"cut at byte {cut}: {found}, {parts}")
            server.kill()
    return Outcome(not torn, f"{len(cuts)} cuts, {len(torn)} broken; {torn[:1]}")


def clock_set(folder: Path) -> Outcome:
    """Set the clock of the day back or ahead by an hour, with a leader that lives or is dead."""
    for jump_s in (-3600.0, 3600.0):
        now = {"day": 1e9, "passed": 0.0}
        path = folder / f"{jump_s:g}.sqlite"
        clocks = {"clock": lambda now=now: now["day"], "monotonic": lambda now=now: now["passed"]}
        with (
            closing(sqlite_store(path, "demo", **clocks)) as leader,
            closing(sqlite_store(path, "demo", **clocks)) as other,
        ):
            leader.acquire_lease("one", 10.0)
            other.acquire_lease("two", 10.0)
            now["day"] += jump_s
            for _ in range(10):
                now["passed"] += 3.0
                if leader.acquire_lease("one", 10.0) is None:
                    return Outcome(False, f"{jump_s:g} s: a living leader lost its lease")
                if other.acquire_lease("two", 10.0) is not None:
                    return Outcome(False, f"{jump_s:g} s: taken from a living leader")
            now["passed"] += 10.0
            if other.acquire_lease("two", 10.0) is None:
                return Outcome(False, f"{jump_s:g} s: nobody leads 10 s after the leader's death")
    return Outcome(True, "set by -3600 and +3600 s: kept while alive, taken 10 s after the death")


ATTACKS = (
    Attack("two-deployments", "A second deployment on one store is refused.", two_deployments),
    Attack(
        "store-flushed",
        "After FLUSHALL while ranks serve, balancing goes on.",
        lost(lambda server: server.ask("FLUSHALL")),
    ),
    Attack(
        "store-restarted-empty",
        "After Redis came back without its files, balancing goes on.",
        lost(restart_empty),
    ),
    Attack("removed-log", "No pause answers 0 once SQLite's log was removed.", removed_log),
    Attack("torn-append", "No torn write leaves a sample without its index.", torn_append),
    Attack("clock-set", "A clock that is set neither ends nor prolongs a lease.", clock_set),
)
