"""Liveness connections between machines: here, other addresses of one machine."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from eplb.errors import RankError
from eplb.settings.deployment import is_loopback
from rebalance.protocol.gloo_votes import GlooVotes
from rebalance.protocol.liveness import LivenessConnections, address_towards
from rebalance.types import Outcome
from tests.support.limits import NEVER_S
from tests.support.processes import ForkedProcess
from tests.support.repository import ROOT


def own_ends() -> set[str]:
    """Addresses at which this process's own ends of connections are."""
    ends = set()
    for entry in Path("/proc/self/fd").iterdir():
        if not entry.is_socket():
            continue
        with socket.socket(fileno=os.dup(int(entry.name))) as end, suppress(OSError):
            end.getpeername()  # not of one that only listens
            if end.family in (socket.AF_INET, socket.AF_INET6):
                ends.add(str(end.getsockname()[0]).removeprefix("::ffff:"))
    return ends


def run_pair(towards: str, hosts: list[str | None]) -> list[Any]:
    """Run two ranks that meet at a rendezvous; the second is killed once they have voted.

    Returns:
        What the first has seen: its ends of connections, and who was dead in the end.
    """
    listening = socket.create_server((towards, 0))  # one address: a store of its own takes all
    port = listening.getsockname()[1]
    rendezvous = TCPStore(
        towards, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )

    def run(pipe: Connection, rank: int) -> None:
        pipe.send(_live(rank, hosts[rank], TCPStore(towards, rendezvous.port)))

    first, second = ForkedProcess(run, 0), ForkedProcess(run, 1)
    try:
        found: list[Any] = first.receive()
        return found
    finally:
        first.kill()
        second.kill()


def _live(rank: int, host: str | None, store: TCPStore) -> list[Any]:
    timeout = timedelta(seconds=NEVER_S)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    votes = GlooVotes(group, host=host, deadline_s=NEVER_S)
    ends = own_ends()
    assert votes.cast([1]).poll(NEVER_S) == (Outcome.VALUE, [1])
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while not votes.dead():
        threading.Event().wait(0.001)
    dead = sorted(votes.dead())
    votes.close()
    return [ends, dead]


RANK = """
import os, signal, sys, threading
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from rebalance.protocol.gloo_votes import GlooVotes

rank, timeout = int(sys.argv[1]), timedelta(hours=1)
os.environ["GLOO_SOCKET_IFNAME"] = f"end{rank}"
store = TCPStore("10.77.0.1", 29777, is_master=rank == 0, timeout=timeout, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
votes = GlooVotes(dist.new_group(backend="gloo", timeout=timeout), deadline_s=3600)
votes.cast([1]).poll(3600)
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
while not votes.dead():
    threading.Event().wait(0.001)
print("dead:", sorted(votes.dead()))
votes.close()
"""

# Two name spaces with a cable between them; the second one lives for as long as ``cat`` waits.
TWO_MACHINES = """
set -e
coproc unshare --net sh -c 'echo is there; exec cat'
read -u ${COPROC[0]} _
other="nsenter --net --target $COPROC_PID"
ip link add end0 type veth peer name end1 netns $COPROC_PID
ip address add 10.77.0.1/24 dev end0
$other ip address add 10.77.0.2/24 dev end1
for machine in "" "$other"; do $machine ip link set lo up; done
ip link set end0 up
$other ip link set end1 up
[ -n "$1" ] || exit 0
"$1" "$2" 0 &
$other "$1" "$2" 1 || true
wait $!
"""


@pytest.mark.system
def test_ranks_of_two_machines_connect_and_detect_a_death(tmp_path: Path) -> None:
    own = ["unshare", "--user", "--map-root-user", "--net", "bash", "-c", TWO_MACHINES, "two"]
    run = partial(subprocess.run, capture_output=True, text=True, check=False)
    if not all(map(shutil.which, ("unshare", "nsenter", "ip", "bash"))) or run(own).returncode:
        pytest.skip("this machine lets nobody join two name spaces of a network")
    script = tmp_path / "rank.py"
    script.write_text(RANK)

    ended = run(
        [*own, sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )

    assert ended.stdout == "dead: [1]\n", ended.stderr


def outward() -> str:
    """This machine's own address towards others; nobody is called."""
    try:
        return address_towards("203.0.113.1", 9)
    except RankError as exc:
        pytest.skip(f"this machine has no way out: {exc}")


@pytest.mark.system
@pytest.mark.parametrize(
    ("towards", "hosts", "end"),
    [
        ("127.0.0.1", ["127.0.0.2", "127.0.0.3"], "127.0.0.2"),  # the first is called there
        ("outward", [None, None], "outward"),  # by default, the address towards the rendezvous
        ("127.0.0.1", [None, None], "127.0.0.1"),
    ],
    ids=["given", "outward", "loopback"],
)
def test_ranks_connect_at_their_addresses_and_detect_a_death(
    towards: str, hosts: list[str | None], end: str
) -> None:
    own = outward() if towards == "outward" else towards

    ends, dead = run_pair(own, hosts)

    assert (own if end == "outward" else end) in ends
    assert dead == [1]
    assert towards == "outward" or all(is_loopback(one) for one in ends)


def test_unreachable_host_is_named() -> None:
    with pytest.raises(RankError, match=r"255\.255\.255\.255 port 9"):
        address_towards("255.255.255.255", 9)


@pytest.mark.parametrize(
    ("own", "is_advised"), [("127.0.0.1", False), ("outward", True)], ids=["same", "another"]
)
def test_rank_at_a_remote_loopback_address_gets_advice(own: str, is_advised: bool) -> None:
    host = outward() if own == "outward" else own
    with socket.create_server(("127.0.0.1", 0)) as probe:
        nobody = ("127.0.0.1", probe.getsockname()[1], b"k" * 16)

    with pytest.raises(RankError, match=r"rank 0 at 127") as refusal:
        LivenessConnections(1, lambda mine: [nobody, mine], host=host, deadline_s=NEVER_S)

    assert ("configure" in str(refusal.value)) == is_advised
