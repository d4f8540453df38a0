"""What several test files share: ranks and demos as real processes, small models, checkpoints."""

from __future__ import annotations

import ctypes
import itertools
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from repository import ROOT

from api.processes.children import preload_modules
from eplb.core.model import ModelShape
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.checkpoints.own_model import write_random_checkpoint
from runtime.experts import ExpertSchema
from telemetry import open_store
from telemetry.store import LoadStore
from telemetry.stores.memory import MemoryStore
from telemetry.stores.redis.connection.address import RedisAddress
from telemetry.stores.redis.connection.local_server import RedisClusterProcesses, RedisProcess
from telemetry.stores.redis.store import RedisStore
from telemetry.stores.sqlite.store import SqliteStore

RANKS_DEADLINE_S = 60.0
COMPILE_DEADLINE_S = 1800.0  # 92 s of CPU in a fresh clone; after that 3 s
DEMO_DEADLINE_S = 90.0  # a start takes 5 s on two free cores, and much longer on busy ones
GONE_DEADLINE_S = 20.0  # an interpreter with torch takes a second to end, on a busy machine more

# Begun first: a file is run by one process, and one of these begun last would run on alone.
LONGEST_FILES = (
    "tests/test_documents.py",
    "tests/api/demo/test_demo.py",
    "tests/api/http/test_page.py",
    "tests/api/cli/test_cli.py",
    "tests/api/demo/test_demo_faults.py",
    "tests/rebalance/protocol/test_protocol.py",
    "tests/api/demo/test_demo_support.py",
)

C_LIBRARY = ctypes.CDLL(None)  # found before any fork: a child loads nothing
PR_SET_PDEATHSIG = 1  # of linux/prctl.h; the thread that forks is the main one here

# Ranks are forked; a library thread of the parent would leave its locks held in the child.
torch.set_num_threads(1)
# Children that tests start have these imported already: a second for each of them.
preload_modules("api.processes.children", "pytest")

COMPILE = """
from eplb.precompile import compile_planner
from runtime.memory.shared import compile_digest
from simulations.peers.precompile import compile_peers
compile_planner()
compile_peers()
compile_digest()
"""

RankFunction = Callable[..., Any]


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile the planner's kernels before any test's time limit runs, once for all workers."""
    config = session.config
    if hasattr(config, "workerinput") or config.option.collectonly:
        return
    # As numba's own cache does: a file that was written again is compiled again.
    sources = sorted(
        path for name in ("eplb", "runtime", "simulations") for path in (ROOT / name).rglob("*.py")
    )
    stamp = [[str(path), path.stat().st_mtime_ns, path.stat().st_size] for path in sources]
    cache = getattr(config, "cache", None)  # none with ``-p no:cacheprovider``
    if cache is None or cache.get("eplb/compiled", None) != stamp:
        # By no command of ours: a GPU host has the packages and no installation.
        command = [sys.executable, "-c", COMPILE]
        subprocess.run(command, cwd=ROOT, check=True, timeout=COMPILE_DEADLINE_S)
        if cache is not None:
            cache.set("eplb/compiled", stamp)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first; the order within a file stays."""
    longest = {ROOT / name: place for place, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: longest.get(item.path, len(longest)))


def _run_rank(rank: int, size: int, port: Path, function: RankFunction, pipe: Connection) -> None:
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{port}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=RANKS_DEADLINE_S / 2),
        )
        pipe.send((True, function(rank)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
        # No exit handlers: the fixtures of the parent process are not this one's to tear down.
        os._exit(0)


@pytest.fixture
def run_ranks(tmp_path: Path) -> Callable[[int, RankFunction], list[Any]]:
    """Run ``function(rank)`` in ``size`` processes that are one gloo group; return all results."""

    def run(size: int, function: RankFunction) -> list[Any]:
        context = multiprocessing.get_context("fork")
        pipes, processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_run_rank, args=(rank, size, tmp_path / "rendezvous", function, theirs)
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        results: dict[int, Any] = {}
        try:
            while len(results) < size:
                ready = wait([p for i, p in enumerate(pipes) if i not in results], RANKS_DEADLINE_S)
                silent = sorted(set(range(size)) - results.keys())
                assert ready, f"ranks {silent} gave no result in {RANKS_DEADLINE_S} s"
                for pipe in ready:
                    rank = pipes.index(pipe)
                    good, result = pipe.recv()
                    assert good, f"rank {rank} failed:\n{result}"
                    results[rank] = result
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [results[rank] for rank in range(size)]

    return run


@pytest.fixture(scope="session")
def small_model() -> ModelShape:
    """Two layers of eight experts, top-2, and a shared expert."""
    return ModelShape((0, 1), 8, 2, hidden=16, intermediate=8, num_shared_experts=1)


@pytest.fixture(scope="session")
def small_schema(small_model: ModelShape) -> ExpertSchema:
    return ExpertSchema.swiglu(small_model.hidden, small_model.intermediate)


@pytest.fixture(scope="session")
def small_checkpoint(
    small_model: ModelShape, small_schema: ExpertSchema, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    path = tmp_path_factory.mktemp("weights") / "small"
    write_random_checkpoint(path, small_model, small_schema, vocabulary=64, seed=1)
    return Checkpoint(path)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


FORKED_DEADLINE_S = 30.0


class ForkedProcess:
    """A process of a test's own, which starts in milliseconds. It talks through a pipe.

    Fork while no store is open: SQLite must not be carried over.
    """

    def __init__(self, function: Callable[..., object], *args: Any) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run_forked, args=(function, theirs, *args))
        self._process.start()
        theirs.close()

    def receive(self) -> Any:
        """Wait for what it says next."""
        assert self._pipe.poll(FORKED_DEADLINE_S), f"it said nothing in {FORKED_DEADLINE_S} s"
        return self._pipe.recv()

    def remaining(self) -> list[Any]:
        """Return what it said before its end, and nobody heard yet."""
        heard = []
        while True:
            try:
                heard.append(self.receive())
            except EOFError:
                return heard

    def send(self, message: object) -> None:
        """Send it something."""
        self._pipe.send(message)

    def kill(self) -> None:
        """SIGKILL it, and wait until it is gone."""
        self._process.kill()
        self.ends()

    def ends(self) -> int | None:
        """Wait for its end and return the exit status."""
        self._process.join(FORKED_DEADLINE_S)
        assert self._process.exitcode is not None, f"it did not end in {FORKED_DEADLINE_S} s"
        return self._process.exitcode


def _run_forked(function: Callable[..., object], pipe: Connection, *args: Any) -> None:
    status = 1
    try:
        function(pipe, *args)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        pipe.close()
        # No exit handlers: the fixtures of the parent process are not this one's to tear down.
        os._exit(status)


@pytest.fixture
def fork() -> Iterator[Callable[..., ForkedProcess]]:
    """Run ``function(pipe, *args)`` in a process of its own."""
    started: list[ForkedProcess] = []

    def start(function: Callable[..., object], *args: Any) -> ForkedProcess:
        started.append(ForkedProcess(function, *args))
        return started[-1]

    yield start
    for process in started:
        process.kill()


# -- every kind of store, for the contract that all of them keep


class StoreClock:
    """The clocks of the stores under test. They stand still until a test makes time pass.

    ``now`` is of the day, and may be set; ``passed`` only grows.
    """

    def __init__(self) -> None:
        self.now, self.passed = 1000.0, 0.0

    def __call__(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.passed


OpenStore = Callable[[str], LoadStore]  # of a deployment; the same again sees the same store
Place = Callable[[pytest.FixtureRequest, StoreClock], OpenStore]


def _in_memory(_: pytest.FixtureRequest, clock: StoreClock) -> OpenStore:
    opened: dict[str, LoadStore] = {}
    return lambda deployment: opened.setdefault(
        deployment, MemoryStore(deployment, clock=clock, monotonic=clock.monotonic)
    )


def _in_sqlite(request: pytest.FixtureRequest, clock: StoreClock) -> OpenStore:
    path = request.getfixturevalue("tmp_path") / "store.sqlite"
    return lambda deployment: SqliteStore(path, deployment, clock=clock, monotonic=clock.monotonic)


_prefixes = (f"test-{number}" for number in itertools.count())


def _on_server(address: RedisAddress, clock: StoreClock) -> OpenStore:
    """Open stores on a server that tests share, under a prefix that no other test has."""
    own = replace(address, prefix=next(_prefixes))
    return lambda deployment: RedisStore(own, deployment, clock=clock, monotonic=clock.monotonic)


def _in_redis(request: pytest.FixtureRequest, clock: StoreClock) -> OpenStore:
    return _on_server(request.getfixturevalue("redis_server").address, clock)


def _in_redis_cluster(request: pytest.FixtureRequest, clock: StoreClock) -> OpenStore:
    return _on_server(request.getfixturevalue("redis_cluster").address, clock)


@dataclass(frozen=True)
class StoreKind:
    """A kind of store under test.

    ``place`` makes the function that opens stores; a fixture that it needs (a server, say) it asks
    of the request. Where leases follow a server's clock, time passes by waiting.
    """

    place: Place
    has_own_clock: bool = False


# One line for each kind: the tests of the contract run over all of these.
STORE_KINDS = {
    "memory": StoreKind(_in_memory),
    "sqlite": StoreKind(_in_sqlite),
    "redis": StoreKind(_in_redis),
    "redis cluster": StoreKind(_in_redis_cluster),
}


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    """A server that tests share: each takes a prefix of its own and leaves settings alone."""
    with RedisProcess(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisClusterProcesses]:
    """Three primaries that tests share, as they do the one server."""
    with RedisClusterProcesses(tmp_path_factory.mktemp("redis-cluster")) as cluster:
        yield cluster


@pytest.fixture(params=STORE_KINDS)
def store_kind(request: pytest.FixtureRequest) -> StoreKind:
    return STORE_KINDS[request.param]


@pytest.fixture
def store_clock() -> StoreClock:
    return StoreClock()


@pytest.fixture
def open_stores(
    request: pytest.FixtureRequest, store_kind: StoreKind, store_clock: StoreClock
) -> Iterator[OpenStore]:
    """Open stores of one place: ``open_stores(deployment)``, again for another look at the same."""
    place, opened = store_kind.place(request, store_clock), list[LoadStore]()

    def open_one(deployment: str) -> LoadStore:
        opened.append(place(deployment))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


@pytest.fixture
def store(open_stores: OpenStore) -> LoadStore:
    """A new store of each kind, of the deployment "demo"."""
    return open_stores("demo")


@pytest.fixture
def pass_time(store_kind: StoreKind, store_clock: StoreClock) -> Callable[[float], None]:
    """Let seconds pass for stores; few, because some kinds of store really wait."""

    def wait_for(seconds: float) -> None:
        store_clock.now += seconds
        store_clock.passed += seconds
        if store_kind.has_own_clock:
            threading.Event().wait(seconds)

    return wait_for


# The smallest demo that still has everything: two hosts, replicas, and a plan every few steps.
SMALL_DEMO = {
    "ranks": 4,
    "nodes": 2,
    "layers": 2,
    "experts": 8,
    "top_k": 2,
    "hidden": 32,
    "intermediate": 32,
    "tokens_per_rank": 64,
    "window_tokens": 1024,
    "seconds": 2,
    "pay_back_s": 1e9,
    "lease_ttl_s": 2,  # whoever follows a demo that was killed waits for so long
    "port": 0,
    "view": "plain",
}


class DemoProcess:
    """``eplb demo`` in a session of its own: what it says, what it keeps, all its processes."""

    def __init__(
        self,
        folder: Path,
        flags: tuple[str, ...],
        settings: Mapping[str, Any],
        before_exec: Callable[[], object] | None,
    ) -> None:
        self.state_dir, self._json = folder / "state", folder / "summary.json"
        self._errors = folder / "errors.txt"
        given = {"state_dir": self.state_dir, "json_path": self._json} | SMALL_DEMO | settings
        command = [str(Path(sys.executable).with_name("eplb")), "demo", *flags]
        command += [word for item in given.items() for word in ("--setting", "{}={}".format(*item))]
        environ = {name: text for name, text in os.environ.items() if not name.startswith("EPLB_")}

        def prepare() -> None:
            # A shell's background job ignores Ctrl-C, and all that it starts would too.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            # A test run that is killed leaves no demo behind, which would slow all later ones.
            C_LIBRARY.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if before_exec is not None:
                before_exec()

        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
                preexec_fn=prepare,
            )
        self._lines: list[str] = []
        self._is_silent = False  # it has closed its output
        self._said = threading.Condition()
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None, "it was asked for"
        with self.process.stdout as lines:
            for line in lines:
                with self._said:
                    self._lines.append(line)
                    self._said.notify_all()
        with self._said:
            self._is_silent = True
            self._said.notify_all()

    def wait_for_line(self, words: str) -> str:
        """Wait for a line with these words, and return it."""

        def found() -> list[str]:
            return [line for line in self._lines if words in line]

        with self._said:
            self._said.wait_for(lambda: found() or self._is_silent, DEMO_DEADLINE_S)
        assert found(), f"no {words!r} before its end or the deadline; {self.output_text()}"
        return found()[0]

    def sees(self, what: str, look: Callable[[LoadStore], Any]) -> Any:
        """Wait until it serves and ``look`` finds something in the store; return that."""
        self.wait_for_line(" ranks, ")
        deadline = time.monotonic() + DEMO_DEADLINE_S
        version = -1
        with closing(open_store(self.state_dir / "store.sqlite", "demo")) as store:
            while True:
                has_ended = self.process.poll() is not None  # first: what it wrote last counts
                if found := look(store):
                    break
                assert not has_ended, f"ended before {what}; {self.output_text()}"
                assert time.monotonic() < deadline, f"no {what} in time; {self.output_text()}"
                version = store.wait(version, 0.2)
            return found

    def ends(self) -> int:
        """Wait for its end, and return the exit status. Nothing that it started outlives it."""
        status = self.process.wait(DEMO_DEADLINE_S)
        self.leaves_nothing()
        return status

    def leaves_nothing(self) -> None:
        """Wait until every process of the session is gone, and its words are all read."""
        deadline = time.monotonic() + GONE_DEADLINE_S
        while running := self.processes():
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"still running: {running}; {self.output_text()}"
            with ExitStack() as stack:
                poll = select.poll()
                try:
                    handle = os.pidfd_open(next(iter(running)))
                except ProcessLookupError:
                    continue
                stack.callback(os.close, handle)
                poll.register(handle, select.POLLIN)
                poll.poll(left_s * 1000)
        self._listener.join(GONE_DEADLINE_S)
        assert not self._listener.is_alive(), "somebody still holds the output of a demo that ended"

    def processes(self) -> dict[int, str]:
        """Title of each living process of the session, by id."""
        found = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                title, _, rest = stat.read_text().partition("(")[2].rpartition(")")
            except (FileNotFoundError, ProcessLookupError):
                continue
            state, _, _, session = rest.split()[:4]
            if int(session) == self.process.pid and state not in "ZX":
                found[int(stat.parent.name)] = title
        return found

    def kill(self, title: str, how: signal.Signals = signal.SIGKILL) -> int:
        """Signal one process of a demo that serves, by its title; return its id."""
        pid = next(pid for pid, found in sorted(self.processes().items()) if found == title)
        os.kill(pid, how)
        return pid

    @property
    def errors(self) -> str:
        """What it said on the standard error stream."""
        return self._errors.read_text()

    def output_text(self) -> str:
        """All that it said, for a test that fails."""
        return f"output:\n{''.join(self._lines)}errors:\n{self.errors}"

    def summary(self) -> dict[str, Any]:
        """Read the summary that it wrote."""
        summary: dict[str, Any] = json.loads(self._json.read_text())
        return summary


StartDemo = Callable[..., DemoProcess]


@pytest.fixture(scope="session")
def start_demo() -> Iterator[StartDemo]:
    """Start demos: ``start_demo(folder, *flags, before_exec=None, **settings)``."""
    started: list[DemoProcess] = []

    def start(
        folder: Path, *flags: str, before_exec: Callable[[], object] | None = None, **settings: Any
    ) -> DemoProcess:
        started.append(DemoProcess(folder, flags, settings, before_exec))
        return started[-1]

    yield start
    for demo in started:
        for pid in demo.processes():
            os.kill(pid, signal.SIGKILL)
        demo.process.wait(GONE_DEADLINE_S)
        demo.leaves_nothing()
