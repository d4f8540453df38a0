"""gloo's listeners: on the loopback address only, and closed once a group is formed."""

from __future__ import annotations

import select
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from runtime.group import gloo_listeners_closed, listeners
from tests.support.limits import NEVER_S

RunRanks = Callable[[int, Callable[[int], Any]], list[Any]]
STRAYS = 200  # connections to each rank
PATIENCE_MS = 100  # for a connection that is dropped, and so never answered
ERROR = (socket.SOL_SOCKET, socket.SO_ERROR)


def tried(address: tuple[str, int], num_times: int, patience_ms: int | None) -> int:
    """How many of so many connections were taken."""
    taken = 0
    with ExitStack() as stack:
        for _ in range(num_times):
            stray = stack.enter_context(socket.socket())
            stray.setblocking(False)
            stray.connect_ex(address)
            poll = select.poll()
            poll.register(stray, select.POLLOUT)
            taken += bool(poll.poll(patience_ms)) and stray.getsockopt(*ERROR) == 0
            if not taken:
                return 0
    return taken


def strays_of(rank: int, *, is_closed: bool) -> tuple[list[str], int, float]:
    """Form a group; return the hosts that gloo listens on, stray connections taken, and a sum."""
    before = {inode for inode, _ in listeners()}
    with ExitStack() as formed:
        if is_closed:
            formed.enter_context(gloo_listeners_closed())
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=NEVER_S))
    assert isinstance(group, dist.ProcessGroup)
    new = [end.getsockname() for inode, end in listeners() if inode not in before]
    patience_ms = PATIENCE_MS if is_closed else None
    taken = sum(tried(address, STRAYS, patience_ms) for address in new)
    dist.barrier(group)
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=group)
    return [host for host, *_ in new], taken, float(total)


def test_gloo_listener_takes_no_stray_connection_once_the_group_is_formed(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    said = run_ranks(3, lambda rank: strays_of(rank, is_closed=True))

    assert said == [(["127.0.0.1"], 0, 3.0)] * 3


def test_gloo_listener_takes_every_stray_connection_without_the_filter(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    said = run_ranks(2, lambda rank: strays_of(rank, is_closed=False))

    assert said == [(["127.0.0.1"], STRAYS, 1.0)] * 2


def test_listener_that_was_there_before_still_takes_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as before:
        with gloo_listeners_closed(), socket.create_server(("127.0.0.1", 0)) as inside:
            address = inside.getsockname()
        with socket.create_connection(before.getsockname()):
            assert address


def test_descriptor_limit_is_raised_to_the_hard_limit() -> None:
    code = (
        "import resource\n"
        "from api.processes.commands import raise_descriptor_limit\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512))\n"
        "raise_descriptor_limit()\n"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert ended.stdout.split() == ["512", "512"]
