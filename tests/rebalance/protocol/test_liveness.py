"""Ranks learn of each other's end from the connection that closes: real processes, real kills."""

from __future__ import annotations

import logging
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from eplb.errors import RankError
from rebalance.protocol.liveness import HELLO, LEAVING, Address, LivenessConnections

FORK = get_context("fork")
DEADLINE_S = 20.0


class Ranks:
    """Forked ranks with liveness connections; a pipe exchanges addresses and reads the dead."""

    def __init__(self, size: int) -> None:
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(size):
            ours, theirs = FORK.Pipe()
            process = FORK.Process(target=_live, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        addresses = [self.hear(rank) for rank in range(size)]
        for pipe in self.pipes:
            pipe.send(addresses)
        assert [self.hear(rank) for rank in range(size)] == ["connected"] * size

    def hear(self, rank: int) -> Any:
        assert self.pipes[rank].poll(DEADLINE_S), f"rank {rank} says nothing"
        return self.pipes[rank].recv()

    def dead(self, rank: int, *, expected: int) -> list[int]:
        """Who is gone, once ``expected`` ranks are or the deadline has passed."""
        self.pipes[rank].send(expected)
        found: list[int] = self.hear(rank)
        return found

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _live(rank: int, pipe: Connection) -> None:
    def exchange(mine: Address) -> list[Address]:
        pipe.send(mine)
        addresses: list[Address] = pipe.recv()
        return addresses

    lines = LivenessConnections(rank, exchange, deadline_s=DEADLINE_S)
    pipe.send("connected")
    while (expected := pipe.recv()) is not None:
        deadline = time.monotonic() + DEADLINE_S
        while len(lines.dead()) < expected and time.monotonic() < deadline:
            threading.Event().wait(0.001)
        pipe.send(sorted(lines.dead()))
    lines.close()
    pipe.send("left")


@pytest.fixture
def ranks() -> Any:
    made = Ranks(4)
    yield made
    made.end()


def test_every_survivor_detects_the_killed_rank(ranks: Ranks) -> None:
    os.kill(ranks.processes[2].pid, signal.SIGKILL)
    assert [ranks.dead(rank, expected=1) for rank in (0, 1, 3)] == [[2]] * 3

    os.kill(ranks.processes[0].pid, signal.SIGKILL)
    assert [ranks.dead(rank, expected=2) for rank in (1, 3)] == [[0, 2]] * 2


def test_rank_that_takes_its_leave_is_not_taken_for_dead(ranks: Ranks) -> None:
    ranks.pipes[1].send(None)
    assert ranks.hear(1) == "left"
    os.kill(ranks.processes[3].pid, signal.SIGKILL)

    # The leave came before the kill, on connections that keep their order with the thread's.
    assert [ranks.dead(rank, expected=1) for rank in (0, 2)] == [[3]] * 2


def test_rank_that_closes_after_a_failure_is_taken_for_dead() -> None:
    addresses: dict[int, Address] = {}
    both = threading.Barrier(2)
    lines: dict[int, LivenessConnections] = {}

    def live(rank: int) -> None:
        def exchange(mine: Address) -> list[Address]:
            addresses[rank] = mine
            both.wait(DEADLINE_S)
            return [addresses[0], addresses[1]]

        lines[rank] = LivenessConnections(rank, exchange, deadline_s=DEADLINE_S)

    threads = [threading.Thread(target=live, args=(rank,)) for rank in (0, 1)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(DEADLINE_S)

    lines[1].close(is_failure=True)
    deadline = time.monotonic() + DEADLINE_S
    while not lines[0].dead() and time.monotonic() < deadline:
        threading.Event().wait(0.001)

    assert lines[0].dead() == {1}
    lines[0].close()


def test_host_counts_as_dead_after_30_s_and_five_unanswered_probes() -> None:
    lines: list[LivenessConnections] = []
    both = threading.Barrier(2)
    addresses: dict[int, Address] = {}

    def start(rank: int) -> None:
        def exchange(mine: Address) -> list[Address]:
            addresses[rank] = mine
            both.wait(DEADLINE_S)
            return [addresses[0], addresses[1]]

        lines.append(LivenessConnections(rank, exchange, deadline_s=DEADLINE_S))

    starts = [threading.Thread(target=start, args=(rank,)) for rank in (0, 1)]
    for one in starts:
        one.start()
    for one in starts:
        one.join(DEADLINE_S)

    for line in lines:
        found = [key.fileobj for key in line._selector.get_map().values() if key.data >= 0]
        (end,) = [one for one in found if isinstance(one, socket.socket)]
        idle, apart, count = (
            end.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert count == 5
        assert idle + count * apart == 30
    for line in lines:
        line.close()


def refused(exchange: Callable[[Address], list[Address]], rank: int, deadline_s: float) -> str:
    with pytest.raises(RankError) as refusal:
        LivenessConnections(rank, exchange, deadline_s=deadline_s)
    return str(refusal.value)


def test_rank_that_cannot_be_reached_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        nobody = ("127.0.0.1", probe.getsockname()[1], b"k" * 16)

    told = refused(lambda mine: [nobody, mine], 1, DEADLINE_S)

    assert told.startswith(f"rank 1 cannot reach rank 0 at 127.0.0.1:{nobody[1]}")


def test_ranks_that_do_not_connect_are_named() -> None:
    nobody = ("127.0.0.1", 1, b"k" * 16)

    told = refused(lambda mine: [mine, nobody, nobody], 0, 0.05)

    assert told == "rank 0: ranks [1, 2] did not connect: timed out"


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

    assert "ranks [1] did not connect" in told
    for client in clients:
        client.close()


def hang_up_hard(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()  # by a reset, not by an end


@pytest.mark.parametrize("behave", [hang_up_hard, lambda client: None], ids=["resets", "is silent"])
def test_unauthenticated_client_does_not_block_the_ranks(
    behave: Callable[[socket.socket], None],
) -> None:
    clients: list[socket.socket] = []

    def exchange(mine: Address) -> list[Address]:
        clients.append(socket.create_connection(mine[:2]))
        behave(clients[0])
        clients.append(socket.create_connection(mine[:2]))
        clients[1].sendall(HELLO.pack(1, mine[2]))
        return [mine, ("127.0.0.1", 1, b"k" * 16)]

    lines = LivenessConnections(0, exchange, deadline_s=0.5)

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
            LivenessConnections(1, fail, deadline_s=DEADLINE_S)
        refused(lambda mine: [below, nobody, mine], 2, DEADLINE_S)  # after it has reached rank 0
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

    with pytest.raises(
        RankError, match=r"^rank 3 cannot listen at 203\.0\.113\.1, expected an addr"
    ):
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
            assert may_go.wait(DEADLINE_S), "nobody lets go of the log"
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

    lines = LivenessConnections(0, exchange, deadline_s=DEADLINE_S)
    with a_log_that_blocks() as (is_held, may_go):
        clients[0].close()
        assert is_held.wait(DEADLINE_S), "the death was not seen"

        lines.close(deadline_s=0.05)

        assert (
            "rank 0: the thread of the liveness connections did not stop within 0.05 s"
            in caplog.text
        )
        may_go.set()
        for thread in threading.enumerate():
            if thread.name == "eplb-liveness":
                thread.join(DEADLINE_S)
        assert not open_files() - before  # late, the thread has cleared up all the same
