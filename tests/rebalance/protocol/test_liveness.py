"""Ranks learn of each other's end from the connection that closes: real processes, real kills."""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from eplb.errors import RankError
from rebalance.protocol.liveness import HELLO, LEAVING, Address, LivenessConnections
from tests.support.limits import NEVER_S
from tests.support.processes import ForkedProcess


def wait_for_deaths(lines: LivenessConnections, expected: int) -> list[int]:
    while len(lines.dead()) < expected:
        threading.Event().wait(0.001)
    return sorted(lines.dead())


class Ranks:
    """Forked ranks with liveness connections; a pipe exchanges addresses and reads the dead."""

    def __init__(self, size: int, fork: Callable[..., ForkedProcess]) -> None:
        self.processes = [fork(_live, rank) for rank in range(size)]
        addresses = [process.receive() for process in self.processes]
        for process in self.processes:
            process.send(addresses)
        assert [process.receive() for process in self.processes] == ["connected"] * size

    def dead(self, rank: int, *, expected: int) -> list[int]:
        """Who is gone, once ``expected`` ranks are."""
        self.processes[rank].send(expected)
        found: list[int] = self.processes[rank].receive()
        return found


def _live(pipe: Connection, rank: int) -> None:
    def exchange(mine: Address) -> list[Address]:
        pipe.send(mine)
        addresses: list[Address] = pipe.recv()
        return addresses

    lines = LivenessConnections(rank, exchange, deadline_s=NEVER_S)
    pipe.send("connected")
    while True:
        pipe.send(wait_for_deaths(lines, pipe.recv()))


@pytest.mark.system
def test_every_survivor_detects_the_killed_rank(fork: Callable[..., ForkedProcess]) -> None:
    ranks = Ranks(4, fork)
    ranks.processes[2].kill()
    assert [ranks.dead(rank, expected=1) for rank in (0, 1, 3)] == [[2]] * 3

    ranks.processes[0].kill()
    assert [ranks.dead(rank, expected=2) for rank in (1, 3)] == [[0, 2]] * 2


@pytest.fixture
def connected() -> Iterator[list[LivenessConnections]]:
    """Three ranks of this process, which know each other."""
    addresses: dict[int, Address] = {}
    all_of_them = threading.Barrier(3)

    def exchange(rank: int, mine: Address) -> list[Address]:
        addresses[rank] = mine
        all_of_them.wait()
        return [addresses[number] for number in range(3)]

    with ThreadPoolExecutor(3) as pool:
        lines = list(
            pool.map(
                lambda n: LivenessConnections(n, partial(exchange, n), deadline_s=NEVER_S), range(3)
            )
        )
    yield lines
    for line in lines:
        line.close()


def test_rank_that_closes_is_dead_after_a_failure_and_not_when_it_takes_its_leave(
    connected: list[LivenessConnections],
) -> None:
    # The leave comes first, and both arrive at a thread that reads one connection after another.
    connected[1].close()
    connected[2].close(is_failure=True)

    assert wait_for_deaths(connected[0], 1) == [2]


def test_host_counts_as_dead_after_30_s_and_five_unanswered_probes(
    connected: list[LivenessConnections],
) -> None:
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        if not entry.is_socket():
            continue
        with socket.socket(fileno=os.dup(int(entry.name))) as end:
            if end.family != socket.AF_INET:
                continue
            options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            idle, apart, count = (end.getsockopt(socket.IPPROTO_TCP, name) for name in options)
            is_probed = end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            found += is_probed and (count, idle + count * apart) == (5, 30)

    assert found == 6  # two ends of each of three connections


def refused(exchange: Callable[[Address], list[Address]], rank: int, deadline_s: float) -> str:
    with pytest.raises(RankError) as refusal:
        LivenessConnections(rank, exchange, deadline_s=deadline_s)
    return str(refusal.value)


def test_unauthenticated_clients_are_refused() -> None:
    clients: list[socket.socket] = []

    def exchange(mine: Address) -> list[Address]:
        for words in (b"GET / HTTP/1.1\r\n\r\n\r\n", b"\x00\x00\x00\x01" + b"x" * 16, b"short"):
            client = socket.create_connection(mine[:2])
            client.sendall(words)
            client.shutdown(socket.SHUT_WR)
            clients.append(client)
        return [mine, ("127.0.0.1", 1, b"k" * 16)]

    told = refused(exchange, 0, 0.2)

    assert "ranks [1]" in told
    for client in clients:
        client.close()


def hang_up_hard(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()  # by a reset, not by an end


@pytest.mark.parametrize(
    ("behave", "deadline_s"),
    # The silent one is waited for, half of the time: that much of it passes here.
    [(hang_up_hard, NEVER_S), pytest.param(lambda client: None, 4.0, marks=pytest.mark.system)],
    ids=["resets", "is silent"],
)
def test_unauthenticated_client_does_not_block_the_ranks(
    behave: Callable[[socket.socket], None], deadline_s: float
) -> None:
    clients: list[socket.socket] = []

    def exchange(mine: Address) -> list[Address]:
        clients.append(socket.create_connection(mine[:2]))
        behave(clients[0])
        clients.append(socket.create_connection(mine[:2]))
        clients[1].sendall(HELLO.pack(1, mine[2]))
        return [mine, ("127.0.0.1", 1, b"k" * 16)]

    lines = LivenessConnections(0, exchange, deadline_s=deadline_s)

    assert lines.dead() == frozenset()
    lines.close()
    assert clients[1].recv(1) == LEAVING
    for client in clients:
        client.close()


# -- what is left open


def open_files() -> set[str]:
    """Everything that this process holds open, by number and by what it is."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.add(f"{entry.name} {entry.readlink()}")
        except FileNotFoundError:  # the folder itself, while it was listed
            continue
    return found


def test_start_that_fails_leaves_nothing_open() -> None:
    def fail(mine: Address) -> list[Address]:
        raise RuntimeError("the exchange broke")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        below = ("127.0.0.1", listening.getsockname()[1], b"k" * 16)
        nobody = ("127.0.0.1", 1, b"k" * 16)
        before = open_files()

        with pytest.raises(RuntimeError, match="the exchange broke"):
            LivenessConnections(1, fail, deadline_s=NEVER_S)
        refused(lambda mine: [below, nobody, mine], 2, NEVER_S)  # after it has reached rank 0
        refused(lambda mine: [below, mine, nobody], 1, 0.05)

        assert not open_files() - before


def test_others_learn_of_a_start_that_failed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        below = ("127.0.0.1", listening.getsockname()[1], b"k" * 16)
        refused(lambda mine: [below, mine, ("127.0.0.1", 1, b"k" * 16)], 1, 0.05)
        line, _ = listening.accept()

        with line:
            assert line.recv(HELLO.size, socket.MSG_WAITALL) == HELLO.pack(1, b"k" * 16)
            assert line.recv(1) == b""  # an end without a leave: it is dead


def test_address_of_another_machine_is_refused() -> None:
    before = open_files()

    with pytest.raises(RankError, match=r"rank 3 .*203\.0\.113\.1"):
        # An address of documentation only.
        LivenessConnections(3, lambda mine: [mine], host="203.0.113.1")

    assert not open_files() - before


def test_close_leaves_nothing_open() -> None:
    before = open_files()

    lines = LivenessConnections(0, lambda mine: [mine])
    lines.close()
    lines.close()

    assert not open_files() - before


@contextmanager
def a_log_that_blocks() -> Iterator[tuple[threading.Event, threading.Event]]:
    """Hold up whoever warns; say that somebody does, and let go once told to."""
    is_held, may_go = threading.Event(), threading.Event()

    def hold(record: logging.LogRecord) -> bool:  # a filter: no handler's lock is held meanwhile
        if record.levelno == logging.WARNING:
            is_held.set()
            may_go.wait()
        return True

    log = logging.getLogger("rebalance.protocol.liveness")
    log.addFilter(hold)
    try:
        yield is_held, may_go
    finally:
        may_go.set()
        log.removeFilter(hold)


def test_close_waits_no_longer_than_its_deadline(caplog: pytest.LogCaptureFixture) -> None:
    before, clients = open_files(), []

    def exchange(mine: Address) -> list[Address]:
        clients.append(socket.create_connection(mine[:2]))
        clients[0].sendall(HELLO.pack(1, mine[2]))
        return [mine, ("127.0.0.1", 1, b"k" * 16)]

    lines = LivenessConnections(0, exchange, deadline_s=NEVER_S)
    with a_log_that_blocks() as (is_held, may_go):
        clients[0].close()
        is_held.wait()

        lines.close(deadline_s=0.05)

        assert "0.05 s" in caplog.text
        may_go.set()
        for thread in threading.enumerate():
            if thread.name == "eplb-liveness":
                thread.join()
        assert not open_files() - before  # late, the thread has cleared up all the same
