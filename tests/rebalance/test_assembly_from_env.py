"""Ranks that meet before they form a group; what they are given, and the places on a host.

``tests/api/deploy/test_launch.py`` has whole ranks that were started by ``eplb launch``.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from eplb.core.model import ModelShape
from eplb.core.topology import Topology
from eplb.errors import ConfigError, EplbError, RankError
from rebalance.assembly import meeting
from rebalance.assembly.config import NetworkConfig, RankConfig, ReportingConfig
from rebalance.assembly.description import DeploymentDescription
from rebalance.assembly.environment import build_rank_from_env
from rebalance.assembly.facts import HELLO, Attendance
from rebalance.assembly.group import interface_of
from rebalance.assembly.meeting import meet
from rebalance.assembly.places import JOINS_VARIABLE, claim_place, holder_of
from rebalance.stage.stage_settings import StageSettings
from rebalance.weights.cache.address import HostCacheAddress
from runtime.experts import ExpertSchema
from tests.support.deployments import CommandProcess, clean_environ
from tests.support.limits import NEVER_S
from tests.support.repository import ROOT
from tests.support.two_hosts import ADDRESSES, TwoHosts

HERE = "127.0.0.1"
SUMMARY = {"deployment": "west", "ranks": "3"}
Fork = Callable[..., Any]


def free_port() -> int:
    with closing(socket.create_server((HERE, 0))) as taken:
        return int(taken.getsockname()[1])


def at(port: int) -> dict[str, str]:
    return dict(os.environ) | {"MASTER_ADDR": HERE, "MASTER_PORT": str(port)}


def three(**changes: Any) -> list[Attendance]:
    usual = Attendance(0, range(3), HERE, b"key", SUMMARY)
    last = {"rank": 2} | changes
    return [usual, replace(usual, rank=1), replace(usual, **last)]


def met(attending: list[Attendance], port: int) -> list[Any]:
    """What ranks find that come to a meeting at once: its store, or why there is none."""

    def come(mine: Attendance) -> Any:
        try:
            return meet(mine, at(port), NEVER_S / 2)
        except RankError as exc:
            return str(exc)

    with ThreadPoolExecutor(len(attending)) as pool:
        return list(pool.map(come, attending))


def test_ranks_meet_and_a_second_process_with_a_place_of_theirs_is_refused() -> None:
    port = free_port()
    first = met(three(), port)
    assert [isinstance(one, Store) for one in first] == [True] * 3

    (second,) = met(three()[1:2], port)

    assert second.startswith(f"rank 1: its place is taken by process {os.getpid()} on {HERE}")


def test_rank_that_was_started_again_ends_the_meeting_that_its_dead_process_joined() -> None:
    """Else the others would wait for the dead one until the deadline."""
    listening = TCPStore(HERE, 0, None, True, timedelta(seconds=NEVER_S), wait_for_workers=False)
    ranks, environ = three(), at(listening.port) | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    PrefixStore("eplb/0", listening).add("place/1", 1)

    def come(mine: Attendance) -> str:
        with pytest.raises(RankError) as caught:
            meet(mine, environ, NEVER_S / 2)
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(come, ranks[rank]) for rank in (0, 2)]
        refused = come(ranks[1])

    assert refused.startswith("rank 1: its place is taken by another process")
    assert all(f"refused by {refused}" in one.result() for one in waiting)


def test_rank_that_is_not_there_in_time_is_named_to_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Time passes once the two ranks that are there have said so."""
    listening = TCPStore(HERE, 0, None, True, timedelta(seconds=NEVER_S), wait_for_workers=False)
    hellos = [f"eplb/0/{HELLO}/{rank}" for rank in (0, 1)]
    clock = SimpleNamespace(monotonic=lambda: NEVER_S * listening.check(hellos))
    monkeypatch.setattr(meeting, "time", clock)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")

    found = met(three()[:2], listening.port)

    assert all("2 of 3 ranks met in time, missing: 2;" in one for one in found), found


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"key": b"another", "host": "127.0.0.2"}, ["authentication", "rank 2 on 127.0.0.2"]),
        ({"summary": SUMMARY | {"ranks": "4"}}, ["ranks is 4 for rank 2", "expected 3"]),
    ],
    ids=["secret", "configuration"],
)
def test_rank_of_another_deployment_is_named_with_what_differs(
    changes: dict[str, Any], words: list[str]
) -> None:
    found = met(three(**changes), free_port())

    assert all(word in found[0] for word in words)
    assert all(isinstance(one, str) for one in found), "every rank refuses the meeting"


def attend_and_end(pipe: Connection, mine: Attendance, port: int) -> None:
    """As an engine does: a refused process ends with all that it listens at."""
    try:
        meet(mine, at(port), NEVER_S)
    except RankError as exc:
        pipe.send(str(exc))


@pytest.mark.system
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"key": b"another"}, "authentication failed: the secret of rank"),
        ({"summary": SUMMARY | {"deployment": "east"}}, "deployment is "),
    ],
    ids=["another secret", "another configuration"],
)
def test_each_rank_says_why_although_the_listener_ends_at_once(
    fork: Fork,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    why: str,
) -> None:
    monkeypatch.setattr(meeting, "LEAVE_DEADLINE_S", NEVER_S)
    port = free_port()
    processes = [fork(attend_and_end, one, port) for one in three(**changes)]

    found = [process.receive() for process in processes]

    assert [one for one in found if why not in one] == []
    assert capfd.readouterr().err == ""  # torch logs a lost connection with a stack trace


WAITING_RANK = """
import os, sys
from rebalance.assembly.facts import Attendance
from rebalance.assembly.meeting import meet
host, rank = sys.argv[1], int(sys.argv[2])
try:
    meet(Attendance(rank, range(3), host, b"key", {}), os.environ, float(sys.argv[3]), print)
except Exception as exc:
    print(type(exc).__name__, exc)
"""


@pytest.mark.system
def test_meeting_ends_by_itself_on_a_host_whose_link_is_cut(tmp_path: Path) -> None:
    """Rank 2 never comes, and the deadline of the meeting is far off."""
    environ = clean_environ(PYTHONPATH=str(ROOT), MASTER_ADDR=ADDRESSES[0], MASTER_PORT="29555")
    with ExitStack() as stack:
        try:
            spaces = stack.enter_context(TwoHosts())
        except OSError as exc:
            pytest.skip(str(exc))
        ranks = []
        for rank, address in enumerate(ADDRESSES):
            words = [sys.executable, "-u", "-c", WAITING_RANK, address, str(rank), str(NEVER_S)]
            ranks.append(CommandProcess(spaces.on(rank, words), tmp_path, environ))
            stack.callback(ranks[-1].kill)
        for one in ranks:
            one.wait_for("1 of 3 ranks: 2")

        spaces.cut_link()

        assert "the meeting of the ranks ended" in ranks[1].wait_for("RankError")


def test_search_for_the_connection_of_a_meeting_leaves_no_file_open(tmp_path: Path) -> None:
    file = tmp_path.resolve() / "no socket"
    with file.open("w"):
        meeting._end_when_silent(free_port())

        # Of this file alone: what other tests have left is closed at any moment.
        opened = [path for path in Path("/proc/self/fd").iterdir() if path.resolve() == file]
        assert len(opened) == 1


def test_meeting_port_in_use_is_refused_and_nobody_is_waited_for_without_end() -> None:
    with closing(socket.create_server((HERE, 0))) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RankError, match=f"rank 0 cannot listen at {HERE}:{port}"):
            meet(Attendance(0, range(2), HERE, b"", {}), at(port), NEVER_S)
    with pytest.raises(RankError, match=f"rank 1: no answer at {HERE}:{port} in time"):
        meet(Attendance(1, range(2), HERE, b"", {}), at(port), 0.3)


def test_place_of_a_rank_is_one_process_s_until_it_ends(fork: Fork) -> None:
    name = f"west-{os.getpid()}"
    other = fork(hold_place, name)
    pid = other.receive()

    assert holder_of(name, 3) == pid
    assert holder_of(name, 2) is None
    with pytest.raises(RankError, match=f"rank 3 of deployment '{name}' is run by process {pid}"):
        claim_place(name, 3)

    other.kill()
    claim_place(name, 3).close()


def hold_place(pipe: Connection, name: str) -> None:
    with claim_place(name, 3):
        pipe.send(os.getpid())
        pipe.recv()


def described(**changes: Any) -> DeploymentDescription:
    config = RankConfig(
        "west",
        sample_steps=4,
        staging_experts=2,
        stage=StageSettings(),
        network=NetworkConfig("lo", ("10.0.0.1", "10.0.0.2")),
        reporting=ReportingConfig(spool_dir=Path("spool")),
        journal_dir=Path("journal"),
    )
    whole = DeploymentDescription(
        config=config,
        store="redis://:pass@10.0.0.9",
        model=ModelShape((1, 2), 8, 2, 16, 8, expert_cost=np.linspace(0.5, 1.0, 8)),
        schema=ExpertSchema.swiglu(16, 8),
        topology=Topology.uniform(2, 1, 5),
        device="cpu",
        hosts=("10.0.0.1", "10.0.0.2"),
        host_caches=tuple(HostCacheAddress(f"west-{host}", bytes(16)) for host in range(2)),
        join_key=bytes(range(16)),
        window_steps=8,
        checkpoint=Path("weights"),
    )
    return replace(whole, **changes)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "rank.json"
    file.write_text(described().to_json())
    return file


def test_description_is_read_as_it_was_written(file: Path) -> None:
    written, found = described(), DeploymentDescription.read(file)

    assert found.config == written.config
    assert found.summary() == written.summary()
    assert found.to_json() == written.to_json()


def test_description_shows_no_secret_and_its_summary_names_what_differs() -> None:
    one, other = described(), described(window_steps=16)

    assert not any(word in repr(one) for word in ("pass", "join_key", r"\x00\x01\x02"))
    assert {name for name in one.summary() if one.summary()[name] != other.summary()[name]} == {
        "window_steps"
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "cannot be read"),
        ('{"store": 7}', "DeploymentDescription"),
        (described().to_json().replace('"version": 4', '"version": 3'), "version 3, expected 4"),
    ],
)
def test_damaged_description_is_refused(file: Path, text: str, expected: str) -> None:
    file.write_text(text)

    with pytest.raises(ConfigError, match=expected):
        DeploymentDescription.read(file)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "EPLB_RANK_FILE"),
        ({"RANK": "0", "WORLD_SIZE": "3"}, "rank 0 of 3 ranks.* 2 ranks"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 of 2 ranks.* 2 ranks"),
        ({"WORLD_SIZE": "2"}, "RANK is ''"),
    ],
)
def test_environment_that_is_no_rank_of_the_deployment_is_refused(
    file: Path, environ: dict[str, str], expected: str
) -> None:
    given = environ | ({"EPLB_RANK_FILE": str(file)} if environ else {})

    with pytest.raises(ConfigError, match=expected):
        build_rank_from_env(environ=given)


@pytest.mark.skipif(torch.cuda.is_available(), reason="refuses a host without GPUs")
def test_cuda_rank_without_a_gpu_is_refused(file: Path) -> None:
    file.write_text(described(device="cuda").to_json())
    environ = {"EPLB_RANK_FILE": str(file), "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}

    with pytest.raises(ConfigError, match="LOCAL_RANK is 0 and 0 GPUs"):
        build_rank_from_env(environ=environ)


def test_joining_rank_uses_the_interface_of_its_host_s_address(file: Path, fork: Fork) -> None:
    config = replace(described().config, deployment=f"west-{os.getpid()}")
    config = replace(config, network=NetworkConfig(None, (HERE, HERE)))
    file.write_text(described(config=config, hosts=(HERE, HERE), store="sqlite:/proc/x").to_json())

    assert fork(join_without_a_store, file).receive() == ("lo", "StoreError")


def join_without_a_store(pipe: Connection, file: Path) -> None:
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", JOINS_VARIABLE: "1"}
    try:
        build_rank_from_env(environ={"EPLB_RANK_FILE": str(file)} | place)
    except EplbError as exc:
        pipe.send((os.environ.get("GLOO_SOCKET_IFNAME"), type(exc).__name__))


def test_interface_of_a_loopback_address_is_lo_and_of_a_stranger_s_none() -> None:
    assert interface_of("127.0.0.9") == "lo"
    assert interface_of("198.51.100.1") is None
