"""Planned changes of a group: the rule of its next members, and what the old groups leave open."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from threading import Event
from typing import NoReturn

import pytest
import torch

from rebalance.assembly.next_group import next_members
from rebalance.recovery import StoreRendezvous, let_go, rejoin
from runtime.group import gathered
from telemetry.state.store import StateStore
from tests.support.limits import NEVER_S
from tests.support.stores import sqlite_store

FORK = multiprocessing.get_context("fork")
NONE = frozenset[int]()


def ranks(*numbers: int) -> frozenset[int]:
    return frozenset(numbers)


@pytest.mark.parametrize(
    ("members", "wanted", "ready", "holding", "following"),
    [
        (ranks(0, 1), ranks(0, 1), NONE, ranks(0, 1), ranks(0, 1)),
        (ranks(0, 1), ranks(0, 1, 2), ranks(2), ranks(0, 1), ranks(0, 1, 2)),
        (ranks(0, 1), ranks(0, 1), ranks(2), ranks(0, 1), ranks(0, 1)),
        (ranks(0, 1, 2), ranks(0, 1), NONE, ranks(0, 1, 2), ranks(0, 1, 2)),
        (ranks(0, 1, 2), ranks(0, 1), NONE, ranks(0, 1), ranks(0, 1)),
        (ranks(0, 1, 2), ranks(0), NONE, ranks(0, 1), ranks(0, 1, 2)),
        (ranks(0, 1, 2), ranks(0, 1, 3), ranks(3), ranks(0, 1), ranks(0, 1, 3)),
        (ranks(0, 1, 2), ranks(0, 1, 3), ranks(3), ranks(0, 1, 2), ranks(0, 1, 2, 3)),
        (ranks(0, 1), ranks(2, 3), NONE, NONE, ranks(0, 1)),
    ],
    ids=[
        "nothing to do",
        "a ready rank joins",
        "a ready rank that should not serve waits",
        "a rank that holds an expert stays",
        "a drained rank leaves",
        "leavers leave together",
        "one joins and one leaves at once",
        "a join does not wait for a drain",
        "the last ranks stay",
    ],
)
def test_next_group_has_ready_ranks_that_should_serve_and_lacks_drained_ones_that_should_not(
    members: frozenset[int],
    wanted: frozenset[int],
    ready: frozenset[int],
    holding: frozenset[int],
    following: frozenset[int],
) -> None:
    assert next_members(members, wanted, ready, holding, gathers=False) == following


def test_ready_ranks_wait_for_the_others_that_should_serve_while_they_gather() -> None:
    members, wanted = ranks(0, 1), ranks(0, 1, 2, 3)

    assert next_members(members, wanted, ranks(2), members, gathers=True) == members
    assert next_members(members, wanted, ranks(2, 3), members, gathers=True) == wanted
    assert next_members(members, wanted, ranks(2), members, gathers=False) == ranks(0, 1, 2)


# -- groups that the next ones replace


class Used:
    """Open files and threads of this process."""

    def __init__(self) -> None:
        self.files = len(list(Path("/proc/self/fd").iterdir()))
        self.threads = len(list(Path("/proc/self/task").iterdir()))

    def until_no_more(self) -> bool:
        """Wait until this process uses no more than then."""
        deadline = time.monotonic() + NEVER_S
        while time.monotonic() < deadline:
            now = Used()
            if now.files <= self.files and now.threads <= self.threads:
                return True
            Event().wait(0.01)
        return False


def form_and_let_go(store: StateStore, rank: int, number: int, *, waits: bool) -> None:
    """Form groups with the other rank and let them go; rank 0 in an exchange that rank 1 lacks."""
    rendezvous = StoreRendezvous(store, number, lambda: None, NEVER_S)
    groups = rejoin("test", (0, 1), rendezvous, rank, deadline_s=NEVER_S)
    if waits and rank == 0:
        groups.tokens.allreduce([torch.ones(1)])
    gathered("the exchange has begun", groups.control)
    groups.votes.close()
    held: list[object] = [groups]
    del groups
    let_go(held)


def serve_in_four_groups(path: Path, rank: int, waits: bool) -> NoReturn:
    """Be a rank; exits with 0 if nothing of the last three groups is left open."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = sqlite_store(path, "test")
    form_and_let_go(store, rank, 0, waits=False)  # what torch opens once stays open
    before = Used()
    for number in range(1, 4):
        form_and_let_go(store, rank, number, waits=waits)
    os._exit(0 if before.until_no_more() else 1)


@pytest.mark.system
@pytest.mark.parametrize("waits", [False, True], ids=["idle", "in an exchange"])
def test_groups_that_are_let_go_leave_no_open_file_and_no_thread(
    tmp_path: Path, waits: bool
) -> None:
    path = tmp_path / "store.sqlite"
    ranks = [FORK.Process(target=serve_in_four_groups, args=(path, r, waits)) for r in (0, 1)]

    for one in ranks:
        one.start()
    for one in ranks:
        one.join(NEVER_S)

    assert [one.exitcode for one in ranks] == [0, 0]
