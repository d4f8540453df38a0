"""Upgrades while ranks serve: real processes of two installed releases in one deployment."""

from __future__ import annotations

import os
import re
import secrets
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from eplb.versions import PROTOCOL
from runtime.checkpoints.checkpoint import Checkpoint
from telemetry import open_store
from tests.support.deployments import CommandProcess, OneHost
from tests.support.redis_servers import RedisProcess
from tests.support.releases import Release, installed, other_release
from tests.support.repository import ROOT

pytestmark = pytest.mark.slow  # wheels and kernels included
# Two replicas for eight experts: nearly every drift of one hot expert needs a rebalance.
ONE_HOT_EXPERT = (
    "(torch.randint(2, (TOKENS,), generator=random) + hot) % model.num_experts",
    "(3 * hot // 2) % model.num_experts",
)
SOON = ("DRIFT_EVERY = 64, 32, 500", "DRIFT_EVERY = 64, 32, 256")
ENGINE = ("eplb", "launch", "--", sys.executable, "engine.py")


@pytest.fixture(scope="module")
def this(tmp_path_factory: pytest.TempPathFactory) -> Release:
    return installed(ROOT, tmp_path_factory.mktemp("releases") / "this")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


class Upgraded:
    """A deployment of two ranks whose processes are of any release."""

    def __init__(self, stack: ExitStack, folder: Path, weights: Path, store: str) -> None:
        self.host, self._stack, self.store_url = OneHost(stack, folder, weights), stack, store
        config = folder / "eplb.toml"
        text = config.read_text().replace("[model]", f'store = "{store}"\n[model]')
        config.write_text(text)
        engine = folder / "engine.py"
        text = engine.read_text().replace(*ONE_HOT_EXPERT).replace(*SOON)
        engine.write_text(text)

    def start(self, release: Release, *words: str, **environ: str) -> CommandProcess:
        return self.host.start(*words, **(release.environ | environ))

    def run(self, release: Release, *words: str) -> tuple[int, str]:
        process = self.start(release, *words)
        return process.ends(), "\n".join(process.lines)

    def generation(self) -> int:
        with closing(open_store(self.store_url, self.host.name)) as store:
            committed = store.committed()
            assert committed is not None
            return committed.placement.generation

    def plans_of(self, holder_pid: int) -> int:
        """Plans that were published while the process of that number led."""
        with closing(open_store(self.store_url, self.host.name)) as store:
            leads, found = False, 0
            for event in store.events(limit=100_000):
                if event.kind == "lease" and event.detail["state"] == "leads":
                    leads = event.detail["holder"].split(":")[1] == str(holder_pid)
                found += leads and event.kind == "publish"
            return found


def wait_for_swap(engine: CommandProcess) -> None:
    """Wait until a generation serves that did not when this was called."""
    shown = sum("engine: generation" in line for line in engine.lines)
    engine.wait_for("engine: generation", times=shown + 1)


def assert_right(*engines: CommandProcess) -> None:
    printed = "".join(line for one in engines for line in one.lines)
    ended = re.findall(r"rank (\d) ended, (\d+) of (\d+) wrong", printed)
    assert sorted(rank for rank, *_ in ended) == ["0", "1"], printed
    assert all(wrong == "0" and int(checked) > 0 for _, wrong, checked in ended), ended


@pytest.fixture(params=["sqlite", "redis"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "store.sqlite")
    server: RedisProcess = request.getfixturevalue("redis_server")
    return f"{server.url}?prefix=upgrade-{os.getpid()}-{secrets.token_hex(3)}"


@pytest.fixture(scope="module")
def previous(this: Release, tmp_path_factory: pytest.TempPathFactory) -> Release:
    folder = tmp_path_factory.mktemp("previous") / "installed"
    return other_release(this, folder, software="0.1.9", protocol=PROTOCOL - 1)


@pytest.fixture(scope="module")
def next_but_one(this: Release, tmp_path_factory: pytest.TempPathFactory) -> Release:
    folder = tmp_path_factory.mktemp("next-but-one") / "installed"
    return other_release(this, folder, software="0.4.0", protocol=PROTOCOL + 2)


def test_every_process_is_upgraded_in_order_and_others_are_refused(
    stack: ExitStack,
    tmp_path: Path,
    small_checkpoint: Checkpoint,
    this: Release,
    previous: Release,
    next_but_one: Release,
    store_url: str,
) -> None:
    deployed = Upgraded(stack, tmp_path, small_checkpoint.path, store_url)
    ours = f"eplb 0.2.0 (protocol {PROTOCOL})"
    older = f"eplb 0.1.9 (protocol {PROTOCOL - 1})"
    newer = f"eplb 0.4.0 (protocol {PROTOCOL + 2})"

    # All of the release before.
    old_cache = deployed.start(previous, "eplb", "host-cache")
    old_cache.wait_for("ready: 16 records")
    old_controller = deployed.start(previous, "eplb", "controller")
    old_controller.wait_for("eplb controller: ready")
    ranks = deployed.start(previous, *ENGINE)
    ranks.wait_for("engine: generation 1 serves")
    _, found = deployed.run(this, "eplb", "check")
    assert (
        f"refused  versions: the ranks of {ours} cannot join: found the "
        f"controller of {older}, expected protocol {PROTOCOL} or later: upgrade controllers and "
        "host caches before ranks"
    ) in found
    status, found = deployed.run(next_but_one, "eplb", "controller")
    assert status == 2
    assert (
        f"the controller of {newer} cannot join: found the ranks of {older}, expected "
        f"protocol {PROTOCOL + 1} or later: upgrade by one release at a time"
    ) in found
    status, found = deployed.run(next_but_one, "eplb", "host-cache")
    assert (status, f"the host cache of {newer} cannot join" in found) == (2, True), found

    # The controller, then the cache, while the ranks serve.
    controller = deployed.start(this, "eplb", "controller")
    controller.wait_for("eplb controller: ready")
    assert old_controller.ends(signal.SIGTERM) == 0, old_controller.lines
    wait_for_swap(ranks)
    wait_for_swap(ranks)  # the first may be of a plan that the old controller left
    assert deployed.plans_of(controller.process.pid) > 0
    assert old_cache.ends(signal.SIGTERM) == 0, old_cache.lines
    cache = deployed.start(this, "eplb", "host-cache")
    cache.wait_for("ready: 16 records")
    wait_for_swap(ranks)
    _, found = deployed.run(this, "eplb", "status")
    assert f"versions   ranks: {older}; controller, host cache 0: {ours}" in found

    # The ranks; then nothing older comes back.
    assert ranks.ends(signal.SIGTERM) == 0, ranks.lines
    assert_right(ranks)
    ranks = deployed.start(this, *ENGINE)
    ranks.wait_for("engine: generation")
    wait_for_swap(ranks)
    status, found = deployed.run(previous, "eplb", "controller")
    assert status == 2
    assert (
        f"the controller of {older} cannot join: found the ranks of {ours}, expected "
        f"protocol {PROTOCOL - 1} at most: ranks go back before all others"
    ) in found
    assert ranks.ends(signal.SIGTERM) == 0, ranks.lines
    assert_right(ranks)
    status, found = deployed.run(next_but_one, *ENGINE)
    assert (status, f"the ranks of {newer} cannot join: found the controller" in found) == (2, True)
