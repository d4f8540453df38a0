"""Whole ranks that the commands start on one host: a death, torchrun, and what is refused."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Event

import pytest

from rebalance.assembly.places import holder_of
from runtime.checkpoints.checkpoint import Checkpoint
from tests.support.deployments import OneHost
from tests.support.documents import files_of
from tests.support.redis_servers import RedisProcess


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


ENGINE = ("--", sys.executable, "engine.py")


@pytest.mark.slow
def test_ranks_serve_again_after_one_was_killed(
    stack: ExitStack, tmp_path: Path, small_checkpoint: Checkpoint
) -> None:
    host = OneHost(stack, tmp_path, small_checkpoint.path)
    host.start_cache()
    launch = host.start("eplb", "launch", *ENGINE)
    launch.wait_for("engine: generation 0 serves")
    killed = holder_of(host.name, 1)
    assert killed is not None

    os.kill(killed, signal.SIGKILL)
    launch.wait_for("rank 1 was killed by SIGKILL; starting the ranks of this host again")
    launch.wait_for("engine: generation", times=2)
    second = host.start("eplb", "launch", *ENGINE)

    assert second.ends() == 2
    assert re.fullmatch(
        rf"eplb: rank 0 of deployment '{host.name}' is run by process \d+ of this host, "
        "expected none",
        second.lines[-1],
    )
    assert launch.ends(signal.SIGTERM) == 0, launch.lines
    assert len(re.findall(r"ended, 0 of \d+ wrong", "".join(launch.lines))) == 2


@pytest.mark.slow
def test_rank_that_dies_after_its_host_cache_serves_again_once_the_cache_is_back(
    stack: ExitStack, tmp_path: Path, small_checkpoint: Checkpoint
) -> None:
    host = OneHost(stack, tmp_path, small_checkpoint.path)
    cache = host.start_cache()
    launch = host.start("eplb", "launch", *ENGINE)
    launch.wait_for("engine: generation 0 serves")

    cache.kill()
    told = "problem    no report from the host cache of host 0 for"
    while told not in host.says("eplb", "status"):
        Event().wait(1.0)
    killed = holder_of(host.name, 1)
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    launch.wait_for("rank 1 was killed by SIGKILL; starting the ranks of this host again")
    launch.wait_for("does not listen yet: waiting")
    host.start_cache()
    launch.wait_for("engine: generation", times=2)

    assert launch.ends(signal.SIGTERM) == 0, launch.lines
    assert len(re.findall(r"ended, 0 of \d+ wrong", "".join(launch.lines))) == 2


@pytest.mark.slow
def test_rank_that_dies_after_the_store_lost_its_contents_serves_again(
    stack: ExitStack, tmp_path: Path, small_checkpoint: Checkpoint
) -> None:
    server = stack.enter_context(RedisProcess(tmp_path / "redis"))
    host = OneHost(stack, tmp_path, small_checkpoint.path)
    host.environ |= {"EPLB_STORE": server.url, "EPLB_SECRET": "0123456789abcdef" * 2}
    host.start("eplb", "controller").wait_for("eplb controller: ready")
    host.start_cache()
    launch = host.start("eplb", "launch", *ENGINE)
    launch.wait_for("engine: generation 0 serves")

    server.ask("FLUSHALL")
    killed = holder_of(host.name, 1)
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    launch.wait_for("starting the ranks of this host again")
    launch.wait_for("engine: generation", times=2)

    assert launch.ends(signal.SIGTERM) == 0, launch.lines
    assert len(re.findall(r"ended, 0 of \d+ wrong", "".join(launch.lines))) == 2


TWO_HOSTS = {
    "EPLB_TOPOLOGY__NODES": "2",
    "EPLB_TOPOLOGY__RANKS_PER_NODE": "1",
    "EPLB_TOPOLOGY__HOSTS": "127.0.0.1,127.0.0.2",
    "EPLB_SUPERVISION__RESTART_AFTER_DEATH": "0",
}


@pytest.mark.slow
def test_host_whose_peer_is_absent_says_so_and_serves_once_it_is_there(
    stack: ExitStack, tmp_path: Path, small_checkpoint: Checkpoint
) -> None:
    """Starts without the peer end at a deadline, and count as no deaths."""
    host = OneHost(stack, tmp_path, small_checkpoint.path, deadline_s=8.0)
    host.environ |= TWO_HOSTS
    caches = [host.start("eplb", "host-cache", "--host", number) for number in "01"]
    first = host.start("eplb", "launch", "--host", "0", *ENGINE)
    first.wait_for("launcher of host 0 waits for 1 of 2 ranks: 1, ")
    first.wait_for("1 of 2 ranks met in time, missing: 1", times=2)

    status = host.says("eplb", "status")
    second = host.start("eplb", "launch", "--host", "1", *ENGINE)
    first.wait_for("engine: generation 0 serves")

    assert "problem    launcher of host 0 waits for " in status
    assert not [line for line in first.lines + second.lines if "used up" in line]
    assert first.ends(signal.SIGTERM) == 0, first.lines
    assert second.ends() == 0, second.lines
    assert [cache.ends(signal.SIGTERM) for cache in caches] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_rank_that_is_stopped_alone_on_its_host_is_killed_and_all_serve_again(
    stack: ExitStack, tmp_path: Path, small_checkpoint: Checkpoint, stopped: int
) -> None:
    host = OneHost(stack, tmp_path, small_checkpoint.path)
    budget = {"EPLB_SUPERVISION__RESTART_AFTER_DEATH": "1000"}  # on a busy machine more are late
    host.environ |= TWO_HOSTS | budget | {"EPLB_AGENT__VOTE_DEADLINE_S": "5"}
    for number in "01":
        host.start("eplb", "host-cache", "--host", number)
    launchers = [host.start("eplb", "launch", "--host", number, *ENGINE) for number in "01"]
    launchers[0].wait_for("engine: generation 0 serves")
    address = f"127.0.0.{stopped + 1}"
    pid = holder_of(host.name, stopped, address)
    assert pid is not None

    os.kill(pid, signal.SIGSTOP)
    launchers[stopped].wait_for(f"rank {stopped} was excluded by the others: killed")
    launchers[0].wait_for("engine: generation 0 serves, 0 of 0 wrong", times=2)


@pytest.mark.slow
def test_deployment_is_resized_by_a_start_with_other_ranks(
    stack: ExitStack, tmp_path: Path, small_checkpoint: Checkpoint
) -> None:
    host = OneHost(stack, tmp_path, small_checkpoint.path)
    host.start_cache()
    shapes = [(2, ""), (3, "2 ranks x 5 slots taken over for 3 ranks x 4 slots: 16 of 16 replicas")]
    shapes.append((1, "3 ranks x 4 slots taken over for 1 ranks x 8 slots: "))

    for generation, (num_ranks, words) in enumerate(shapes):
        environ = {"EPLB_TOPOLOGY__RANKS_PER_NODE": str(num_ranks)}
        launch = host.start("eplb", "launch", *ENGINE, **environ)
        launch.wait_for(f"placement of {words}" if words else "wrote the first placement")
        launch.wait_for(f"engine: generation {generation} serves")
        assert launch.ends(signal.SIGTERM) == 0, launch.lines
        ended = re.findall(r"ended, 0 of \d+ wrong", "".join(launch.lines))
        assert len(ended) == num_ranks


@pytest.mark.slow
def test_engine_that_formed_its_group_itself_keeps_it(
    stack: ExitStack, tmp_path: Path, small_checkpoint: Checkpoint
) -> None:
    host = OneHost(stack, tmp_path, small_checkpoint.path)
    host.start_cache()
    joined = "import torch.distributed as dist\ndist.init_process_group('gloo')\n\nimport torch\n"
    engine = (tmp_path / "engine.py").read_text().replace("import torch\n", joined, 1)
    (tmp_path / "own_group.py").write_text(engine)

    program = (sys.executable, "own_group.py")
    launch = host.start("eplb", "launch", "--", *program, GLOO_SOCKET_IFNAME="lo")
    launch.wait_for("engine: generation 0 serves")

    assert launch.ends(signal.SIGTERM) == 0, launch.lines
    assert len(re.findall(r"ended, 0 of \d+ wrong", "".join(launch.lines))) == 2


def with_own_weights(host: OneHost, weights: Path) -> None:
    """Have the engine fill its slots as the page shows."""
    (host.folder / "weights").symlink_to(weights)  # as the page names it
    for name, code in files_of("docs/embedding.md").items():
        (host.folder / name).write_text(code)
    engine = (host.folder / "engine.py").read_text()
    given = engine.replace("build_rank_from_env()", "build_rank_from_env(own_experts)")
    given = given.replace("Checkpoint(rank.deployment.checkpoint)", 'Checkpoint(Path("weights"))')
    imported = "import torch\n\nfrom pathlib import Path\n\nfrom own_experts import own_experts\n"
    (host.folder / "engine.py").write_text(given.replace("import torch\n", imported, 1))


@pytest.mark.slow
def test_engine_that_loads_its_own_weights_fills_the_slots(
    stack: ExitStack, tmp_path: Path, small_checkpoint: Checkpoint
) -> None:
    host = OneHost(stack, tmp_path, small_checkpoint.path)
    host.start_cache()
    with_own_weights(host, small_checkpoint.path)

    launch = host.start("eplb", "launch", *ENGINE)
    launch.wait_for("engine: generation 0 serves")

    assert launch.ends(signal.SIGTERM) == 0, launch.lines
    assert len(re.findall(r"ended, 0 of \d+ wrong", "".join(launch.lines))) == 2


@pytest.mark.slow
def test_engine_without_a_checkpoint_is_rebalanced_from_what_it_offered(
    stack: ExitStack, tmp_path: Path, small_checkpoint: Checkpoint
) -> None:
    host = OneHost(stack, tmp_path, small_checkpoint.path)
    settings = (tmp_path / "eplb.toml").read_text()
    (tmp_path / "eplb.toml").write_text(re.sub(r"checkpoint = .*\n", "", settings))
    with_own_weights(host, small_checkpoint.path)
    launch = host.start("eplb", "launch", *ENGINE)
    launch.wait_for("does not listen yet: waiting")
    host.start("eplb", "host-cache").wait_for("ready: records that an engine offers")
    host.start("eplb", "serve")
    launch.wait_for("engine: generation 1 serves, 0 of ")

    killed = holder_of(host.name, 1)
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    launch.wait_for("rank 1 was killed by SIGKILL; starting the ranks of this host again")
    launch.wait_for("engine: generation", times=3)

    assert launch.ends(signal.SIGTERM) == 0, launch.lines
    assert len(re.findall(r"ended, 0 of \d+ wrong", "".join(launch.lines))) == 2


@pytest.mark.slow
def test_torchrun_starts_ranks_of_the_same_deployment(
    stack: ExitStack, tmp_path: Path, small_checkpoint: Checkpoint
) -> None:
    host = OneHost(stack, tmp_path, small_checkpoint.path)
    host.start_cache()
    serve = host.start("eplb", "serve")
    torchrun = ["torchrun", "--nproc-per-node", "2", "--master-port", str(host.port)]
    ranks = host.start(*torchrun, "--no-python", "eplb", "launch", *ENGINE)

    ranks.wait_for("engine: generation 1 serves, 0 of ")

    pid = holder_of(host.name, 0)
    assert pid is not None
    os.kill(pid, signal.SIGTERM)  # all ranks end at one step
    assert ranks.ends() == 0, ranks.lines
    assert len(re.findall(r"ended, 0 of \d+ wrong", "".join(ranks.lines))) == 2
    assert serve.ends(signal.SIGTERM) == 0, serve.lines


@pytest.mark.slow
def test_torchrun_with_another_number_of_ranks_is_refused(
    stack: ExitStack, tmp_path: Path, small_checkpoint: Checkpoint
) -> None:
    host = OneHost(stack, tmp_path, small_checkpoint.path)

    launch = host.start("eplb", "launch", *ENGINE, RANK="0", LOCAL_RANK="0", WORLD_SIZE="3")

    assert launch.ends() == 2
    assert launch.lines == [
        "eplb: torchrun starts 3 ranks (WORLD_SIZE), expected 2 by topology.nodes and "
        "topology.ranks_per_node"
    ]


@pytest.mark.slow
def test_ranks_try_a_host_cache_with_another_secret_again(
    stack: ExitStack, tmp_path: Path, small_checkpoint: Checkpoint
) -> None:
    host = OneHost(stack, tmp_path, small_checkpoint.path, deadline_s=15.0)
    other = host.start("eplb", "host-cache", EPLB_SECRET="another secret of the host")
    other.wait_for("ready: 16 records")

    launch = host.start("eplb", "launch", *ENGINE)

    words = f"engine: the host cache {host.name}-host0-127.0.0.1 does not answer: "
    launch.wait_for(words)
    launch.wait_for("launcher of host 0 waits for another start: ")  # it may get the right one
    assert launch.ends(signal.SIGTERM) != 0
