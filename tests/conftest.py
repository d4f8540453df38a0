"""What the whole suite shares: the tiers, compiled kernels, small models, processes, servers."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eplb.core.model import ModelShape
from eplb.policies.table import POLICIES
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.checkpoints.own_model import write_random_checkpoint
from runtime.experts import ExpertSchema
from tests.support.processes import ForkedProcess, RankFunction, run_ranks_in
from tests.support.redis_servers import RedisClusterProcesses, RedisProcess
from tests.support.repository import ROOT

pytest_plugins = ("tests.support.demo", "tests.support.stores")

# Ranks are forked; a library thread of the parent would leave its locks held in the child.
torch.set_num_threads(1)
# A thread that logs between two tests, where pytest captures nothing, prints nothing either.
logging.getLogger().addHandler(logging.NullHandler())

COMPILE = """
from eplb.precompile import compile_planner
from runtime.memory import compile_digest
from simulations.peers import compile_peers
compile_planner()
compile_peers()
compile_digest()
"""
COMPILED = re.compile(r"^\s*(@jit|@kernel|@inner|@numba|return jit\()", re.MULTILINE)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile the planner's kernels before any test runs, once for all workers."""
    config = session.config
    if hasattr(config, "workerinput") or config.option.collectonly:
        return
    # As numba's own cache does: a file with compiled functions that was written again is compiled
    # again. Other files compile nothing.
    stamp = [
        [str(path), path.stat().st_mtime_ns, path.stat().st_size]
        for name in ("eplb", "runtime", "simulations")
        for path in sorted((ROOT / name).rglob("*.py"))
        if COMPILED.search(path.read_text())
    ]
    cache = getattr(config, "cache", None)  # none with ``-p no:cacheprovider``
    key = f"eplb/kernels{sys.prefix}"  # an engine's environment has a numba of its own
    if cache is None or cache.get(key, None) != stamp:
        # By no command of ours: a GPU host has the packages and no installation.
        subprocess.run([sys.executable, "-c", COMPILE], cwd=ROOT, check=True)
        if cache is not None:
            cache.set(key, stamp)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """End with what was not tested, and for want of what."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)
    terminalreporter.section("not tested")
    for reason, number in reasons.most_common():
        terminalreporter.line(f"{number} skipped: {reason}")
    if config.option.markexpr:
        terminalreporter.line(f"selected: {config.option.markexpr} (CONTRIBUTING.md has the tiers)")


@pytest.fixture(autouse=True)
def logging_of_each_test() -> Iterator[None]:
    """A command that a test runs in this process sets up logging; later tests do not print it."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)
    for handler in set(handlers) - set(root.handlers):
        root.addHandler(handler)
    root.setLevel(level)
    logging.captureWarnings(False)


@pytest.fixture(autouse=True)
def policies_of_each_test() -> Iterator[None]:
    """Take what a test registered out of the policy table: the generated documents list it."""
    known = dict(POLICIES)
    yield
    for name in POLICIES.keys() - known:
        del POLICIES[name]


@pytest.fixture
def run_ranks(tmp_path: Path) -> Callable[[int, RankFunction], list[Any]]:
    """Run ``function(rank)`` in ``size`` processes that are one gloo group; return all results."""
    return lambda size, function: run_ranks_in(tmp_path, size, function)


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
