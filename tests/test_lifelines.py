"""Ranks learn of each other's end from the connection that closes: real processes, real kills."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import pytest

from eplb.errors import RankError
from rebalance.lifelines import HELLO, LEAVING, Address, Lifelines

FORK = get_context("fork")
DEADLINE_S = 20.0


class Ranks:
    """Forked ranks with lifelines; a pipe exchanges their addresses and asks who is gone."""

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

    lines = Lifelines(rank, exchange, deadline_s=DEADLINE_S)
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


def test_every_survivor_learns_who_was_killed(ranks: Ranks) -> None:
    os.kill(ranks.processes[2].pid, signal.SIGKILL)
    assert [ranks.dead(rank, expected=1) for rank in (0, 1, 3)] == [[2]] * 3

    os.kill(ranks.processes[0].pid, signal.SIGKILL)
    assert [ranks.dead(rank, expected=2) for rank in (1, 3)] == [[0, 2]] * 2


def test_a_rank_that_takes_its_leave_is_not_taken_for_dead(ranks: Ranks) -> None:
    ranks.pipes[1].send(None)
    assert ranks.hear(1) == "left"
    os.kill(ranks.processes[3].pid, signal.SIGKILL)

    # The leave came before the kill, on connections that keep their order with the thread's.
    assert [ranks.dead(rank, expected=1) for rank in (0, 2)] == [[3]] * 2


def refused(exchange: Callable[[Address], list[Address]], rank: int, deadline_s: float) -> str:
    with pytest.raises(RankError) as refusal:
        Lifelines(rank, exchange, deadline_s=deadline_s)
    return str(refusal.value)


def test_a_rank_that_cannot_be_reached_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        nobody = ("127.0.0.1", probe.getsockname()[1], b"k" * 16)

    told = refused(lambda mine: [nobody, mine], 1, DEADLINE_S)

    assert told.startswith(f"rank 1 cannot reach rank 0 at 127.0.0.1:{nobody[1]}")


def test_ranks_that_do_not_connect_are_named() -> None:
    nobody = ("127.0.0.1", 1, b"k" * 16)

    told = refused(lambda mine: [mine, nobody, nobody], 0, 0.05)

    assert told == "rank 0: ranks [1, 2] did not connect: timed out"


def test_strangers_are_turned_away() -> None:
    callers: list[socket.socket] = []

    def exchange(mine: Address) -> list[Address]:
        for words in (b"GET / HTTP/1.1\r\n\r\n\r\n", b"\x00\x00\x00\x01" + b"x" * 16, b"short"):
            caller = socket.create_connection(mine[:2])
            caller.sendall(words)
            caller.shutdown(socket.SHUT_WR)
            callers.append(caller)
        return [mine, ("127.0.0.1", 1, b"k" * 16)]

    told = refused(exchange, 0, 0.2)

    assert "ranks [1] did not connect" in told
    for caller in callers:
        caller.close()


def hang_up_hard(caller: socket.socket) -> None:
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    caller.close()  # by a reset, not by an end


@pytest.mark.parametrize("behave", [hang_up_hard, lambda caller: None], ids=["resets", "is silent"])
def test_a_stranger_does_not_keep_ranks_from_one_another(
    behave: Callable[[socket.socket], None],
) -> None:
    callers: list[socket.socket] = []

    def exchange(mine: Address) -> list[Address]:
        callers.append(socket.create_connection(mine[:2]))
        behave(callers[0])
        callers.append(socket.create_connection(mine[:2]))
        callers[1].sendall(HELLO.pack(1, mine[2]))
        return [mine, ("127.0.0.1", 1, b"k" * 16)]

    lines = Lifelines(0, exchange, deadline_s=0.5)

    assert lines.dead() == frozenset()
    lines.close()
    assert callers[1].recv(1) == LEAVING
    for caller in callers:
        caller.close()
