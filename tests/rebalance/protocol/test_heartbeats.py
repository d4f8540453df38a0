"""Who is silent is decided from times alone; who stops is known to all others by its silence."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest

from rebalance.protocol.heartbeats import BEATS, Heartbeats, neighbours
from rebalance.protocol.liveness import Address, LivenessConnections
from tests.support.limits import NEVER_S
from tests.support.processes import ForkedProcess, wait_until_watched


def serving(rank: int, num_ranks: int, silence_s: float = 1.0) -> Heartbeats:
    beats = Heartbeats(rank, num_ranks, silence_s)
    beats.begin(0.0)
    return beats


def test_ring_of_many_ranks_gives_two_neighbours_on_each_side() -> None:
    assert neighbours(0, range(8)) == {1, 2, 6, 7}


def test_ring_closes_over_a_dead_rank() -> None:
    assert neighbours(3, {0, 1, 3, 5, 6, 7}) == {0, 1, 5, 6}


@pytest.mark.parametrize("num_ranks", range(1, 7))
def test_rank_that_watches_another_is_sent_its_beats(num_ranks: int) -> None:
    live = range(num_ranks)

    for one in live:
        assert neighbours(one, live) == {other for other in live if one in neighbours(other, live)}


def test_neighbour_is_silent_only_after_the_whole_time_without_a_beat() -> None:
    beats = serving(0, 3)
    beats.heard(1, 0.5)
    beats.heard(2, 1.4)

    assert beats.silent(1.5) == frozenset()
    assert beats.silent(1.6) == {1}


def test_rank_that_does_not_serve_yet_accuses_nobody() -> None:
    beats = Heartbeats(0, 3, 1.0)
    beats.heard(1, 0.0)

    assert beats.silent(1e6) == frozenset()


def test_rank_that_becomes_a_neighbour_has_the_whole_time_for_its_first_beat() -> None:
    beats = serving(0, 8)
    beats.heard(3, 0.0)  # no neighbour yet: it sent its beats to others

    beats.gone(1, 5.0)

    assert 3 in beats.neighbours
    assert beats.silent(5.9) == frozenset()
    assert beats.silent(6.1) == {3}


def test_beats_are_due_several_times_in_the_silence_that_kills() -> None:
    beats = serving(0, 3)

    assert sum(beats.are_due(tick / 100) for tick in range(100)) == BEATS


def test_without_a_silence_no_beat_is_sent() -> None:
    beats = serving(0, 3, silence_s=0.0)

    assert not beats.are_due(1e6)
    assert beats.wait_s(1e6) is None


# -- processes


def _serve(pipe: Connection, rank: int) -> None:
    def exchange(mine: Address) -> list[Address]:
        pipe.send(mine)
        addresses: list[Address] = pipe.recv()
        return addresses

    lines = LivenessConnections(rank, exchange, deadline_s=NEVER_S, silence_s=2.0)
    lines.begin_beats()
    wait_until_watched(lines)
    pipe.send(os.getpid())
    while True:
        expected = pipe.recv()
        while not expected <= lines.dead():
            threading.Event().wait(0.01)
        pipe.send(True)


@pytest.mark.system
def test_rank_that_is_stopped_is_dead_to_all_others_and_learns_it_when_it_goes_on(
    fork: Callable[..., ForkedProcess],
) -> None:
    ranks = [fork(_serve, rank) for rank in range(7)]
    addresses = [rank.receive() for rank in ranks]
    for rank in ranks:
        rank.send(addresses)
    pids = [rank.receive() for rank in ranks]
    os.kill(pids[3], signal.SIGSTOP)

    # Rank 0 is no neighbour: it is told.
    for rank in ranks[:3] + ranks[4:]:
        rank.send(frozenset({3}))
    assert all(rank.receive() for rank in ranks[:3] + ranks[4:])

    os.kill(pids[3], signal.SIGCONT)
    ranks[3].send(frozenset({0, 1, 2, 4, 5, 6}))
    assert ranks[3].receive()
