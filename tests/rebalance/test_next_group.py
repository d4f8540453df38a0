"""Planned changes of a group: the rule of its next members, and what the old groups leave open."""

from __future__ import annotations

import multiprocessing
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.errors import RankError, StoreError
from eplb.migration.serialisation import topology_to_dict
from rebalance.assembly import next_group
from rebalance.assembly.config import NetworkConfig, RankConfig
from rebalance.assembly.meeting import Attendance
from rebalance.assembly.next_group import (
    Formed,
    NextGroup,
    be_admitted,
    change_group,
    form,
    next_members,
)
from rebalance.assembly.process import RankProcess
from rebalance.assembly.survivors import Stages, agree_on_start
from rebalance.rank.group import Group
from rebalance.rank.rank import Rank
from rebalance.recovery import StoreRendezvous, let_go, rejoin
from runtime.counters import PassCounter
from runtime.dispatch.all_to_all import AllToAllDispatcher
from runtime.experts import ExpertSchema
from runtime.group import gathered
from telemetry.state.groups import GroupProposal, Joiner
from telemetry.state.runs import GROUP_STAYS, RunInfo
from telemetry.state.store import StateStore
from tests.support.agent_group import AgentGroup, records_of
from tests.support.limits import NEVER_S
from tests.support.local_group import LocalVotes
from tests.support.stores import MemoryStore, sqlite_store

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


# -- proposals that fail

SCHEMA = ExpertSchema.swiglu(hidden=8, intermediate=4)


TWO_OF_THREE = (True, True, False)


def attend_as_rank_0(ranks: Sequence[int]) -> Attendance:
    return Attendance(0, ranks, "host", b"", {})


def is_called_off() -> None:
    """Nothing calls it off."""


CONFIG = RankConfig("test", 4, 1, network=NetworkConfig(hosts=("127.0.0.1",) * 3))


def rejoined(name: str, store: StateStore, rank: int, members: Sequence[int], number: int) -> Group:
    """The next group of a rank that was alone."""
    before = Group(rank, "run", Topology.uniform(1, 3, 2), LocalVotes(3).member(rank))
    rendezvous = StoreRendezvous(store, number, is_called_off, NEVER_S)
    return rejoin(name, before, members, rendezvous, run="run", config=CONFIG)


class LowestMember:
    """Rank 0 of two that serve, which looks for a third one; seconds pass as the test says."""

    def __init__(self, store: StateStore | None = None) -> None:
        self.now = 1000.0
        topology = replace(Topology.uniform(1, 3, 2), alive=np.array([True, True, False]))
        start = Placement(np.array([[0, 1, 1, 0, -1, -1]]), 2)
        group = AgentGroup(start, topology)
        self.store = group.store = store or MemoryStore("test", clock=lambda: self.now)  # type: ignore[assignment]
        self.store.commit(start, expected=None, reason="start")
        group.add_all(SCHEMA, records_of(SCHEMA, 1, 2), num_staging=1)
        self.store.begin_run(RunInfo("run", 0.0, {}, topology_to_dict(topology), 1))
        self.rank = group.agents[0]
        self.part = NextGroup(self.rank, attend_as_rank_0)

    def look(self) -> GroupProposal | None:
        """Look once, and fail at once at what is proposed; a second passes."""
        self.store.offer_to_join(Joiner(2, "host", "process"))
        self.part.look()
        if self.part._forming.ident is not None:
            self.part._forming.join(NEVER_S)
        self.now += 1.0
        return self.store.proposed_group()


def test_operation_fails_after_five_proposals_of_a_rank_that_never_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(next_group, "FORM_DEADLINE_S", 0.001)
    monkeypatch.setattr(next_group, "GATHER_S", 0.0)
    member = LowestMember()
    member.store.change_membership("none", (0, 1), asked=0, alive=TWO_OF_THREE, reason="", by="")
    asked = member.store.change_membership(
        "grow", (0, 1, 2), asked="grow", alive=TWO_OF_THREE, reason="test", by="test"
    )

    seen = [member.look() for _ in range(70)]

    times = sorted({one.time for one in seen if one is not None and one.members == (0, 1, 2)})
    assert [after - before for before, after in pairwise(times)] == [2.0, 4.0, 8.0, 16.0]
    ended = member.store.change_of_id(asked.id)
    assert ended is not None
    assert ended.ended == "failed"
    assert ended.why.startswith("5 times in a row ranks [0, 1, 2] formed no group: ")


def test_proposal_is_void_once_its_operation_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_group, "FORM_DEADLINE_S", 0.001)
    monkeypatch.setattr(next_group, "GATHER_S", 0.0)
    member = LowestMember()
    member.store.change_membership("none", (0, 1), asked=0, alive=TWO_OF_THREE, reason="", by="")
    member.store.change_membership("grow", (0, 1, 2), asked=1, alive=TWO_OF_THREE, reason="", by="")
    assert member.look() is not None
    assert member.part._standing() is not None

    member.store.end_membership_change("grow", "cancelled", why="test")

    assert member.part._standing() is None


def test_operation_that_retires_another_rank_outlives_the_failed_returns_of_a_dead_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(next_group, "FORM_DEADLINE_S", 0.001)
    monkeypatch.setattr(next_group, "GATHER_S", 0.0)
    member = LowestMember()
    member.store.change_membership(
        "retire", (0, 2), asked=1, alive=TWO_OF_THREE, reason="test", by="test"
    )

    seen = [member.look() for _ in range(140)]

    assert max(one.tries for one in seen if one is not None) > next_group.MAX_TRIES
    operation = member.store.membership_change()
    assert operation is not None
    assert not operation.ended


class Interrupted(MemoryStore):
    """A store during whose reads something else happens."""

    meanwhile: Callable[[], Any] = staticmethod(lambda: None)

    def proposed_group(self) -> GroupProposal | None:
        self.meanwhile()
        return super().proposed_group()


@pytest.mark.parametrize("is_taken", [True, False], ids=["taken", "not taken"])
def test_groups_that_are_taken_during_a_look_are_not_given_up_by_it(is_taken: bool) -> None:
    store, votes, nothing = Interrupted("test"), LocalVotes(1), Any
    member = LowestMember(store)
    group = Group(0, "run", Topology.uniform(1, 1, 2), votes.member(0))
    proposal = GroupProposal(0, "run", (0,), {}, "its operation was cancelled", id=1)
    member.part._formed = formed = Formed(proposal, group, nothing, nothing)  # type: ignore[arg-type]
    member.part.look()
    taken: list[Formed | None] = []
    if is_taken:
        store.meanwhile = lambda: taken.append(member.part.take())

    member.part.look()

    assert {id(one) for one in taken if one} == ({id(formed)} if is_taken else set())
    assert votes.dead() == (set() if is_taken else {0})


def test_groups_that_were_taken_are_freed_by_whoever_took_them() -> None:
    """The part lives on until the next group serves: it would free them on the serving thread."""
    member, nothing = LowestMember(), Any
    group = Group(0, "run", Topology.uniform(1, 1, 2), LocalVotes(1).member(0))
    proposal = GroupProposal(0, "run", (0,), {}, "a test", id=1)
    member.part._formed = Formed(proposal, group, nothing, nothing)  # type: ignore[arg-type]
    taken = member.part.take()
    assert taken is not None

    left = weakref.ref(taken)
    del taken

    assert left() is None


# -- what a rank reports of its group


def process_of(rank: Rank) -> RankProcess:
    """Its process, which reports to no launcher."""
    return RankProcess(rank, None, None, {})  # type: ignore[arg-type]


def test_rank_reports_that_its_group_stays_by_what_the_engine_has_made_until_its_start() -> None:
    rank = LowestMember().rank
    rank.config = replace(rank.config, serve_on=True)
    rank.process = process_of(rank)
    rank.passes = PassCounter()  # the engine gives it between the build and the start

    rank.start()
    rank.leave()

    assert rank.describe().detail[GROUP_STAYS] == ""


def test_rank_on_a_gpu_reports_that_ranks_cannot_join_its_group_of_nccl() -> None:
    """It may serve on after a death, by the dispatcher that the engine has made."""
    rank = LowestMember().rank
    rank.config, rank.passes = replace(rank.config, serve_on=True), PassCounter()
    rank._group = replace(rank.group, device=torch.device("cuda"))
    rank.process = process = process_of(rank)
    rank.dispatchers.append(AllToAllDispatcher(rank.topology, Any, 0, rank.counter))  # type: ignore[arg-type]

    rank.start()
    rank.leave()

    assert process._refusal() == ""
    assert rank.describe().detail[GROUP_STAYS].startswith("its group is of NCCL, expected ranks on")


# -- a change that fails once its groups are formed


def run_in(process: Callable[[Any, int, Path], None], ranks: Sequence[int], path: Path) -> Any:
    """What processes tell, sorted: a process that has formed gloo groups must not fork."""
    told = FORK.SimpleQueue()
    started = [FORK.Process(target=process, args=(told, rank, path)) for rank in ranks]
    for one in started:
        one.start()
    for one in started:
        one.join(NEVER_S)
    return sorted(told.get() for _ in ranks)


def agree_twice(told: Any, rank: int, path: Path) -> None:
    """Agree with weights of other versions, and then of one."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    member = LowestMember().rank
    group = rejoined("test", sqlite_store(path, "test"), rank, (0, 1), 1)

    def agree_with(version: int, steps: int) -> int:
        member.shared.update(lambda state: replace(state, weights_version=version))
        member.passes.steps = steps  # type: ignore[union-attr]
        return agree_on_start(member, group, "hash", "")

    try:
        agree_with(rank + 3, 7)
    except RankError as exc:
        told.put(f"{exc}; then at step {agree_with(3, 7 + rank)}")


@pytest.mark.system
def test_ranks_refuse_a_group_whose_weights_were_updated_since_it_was_formed(
    tmp_path: Path,
) -> None:
    told = run_in(agree_twice, (0, 1), tmp_path / "store.sqlite")

    words = "ranks would serve weights of versions [3, 4], expected one; then at step 8"
    assert told == [f"rank {rank}: {words}" for rank in (0, 1)]


def fail_at_the_commit(told: Any, rank: int, path: Path) -> None:
    """Serve alone in the next group, in a store that fails when that is to be written."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    member = LowestMember(sqlite_store(path, "test"))
    group = rejoined("test", member.store, rank, (rank,), 1)
    proposal, nothing = GroupProposal(0, "run", (rank,), {}, "rank 1 leaves", id=1), Any
    ends: list[bool] = []

    class Noticed(Formed):
        def close(self) -> None:
            ends.append(True)

    member.store.close()
    try:
        change_group(member.rank, Noticed(proposal, group, nothing, nothing), Stages())  # type: ignore[arg-type]
    except StoreError as exc:
        told.put(f"closed: {ends}, {type(exc).__name__}")


@pytest.mark.system
def test_member_whose_store_fails_at_the_commit_leaves_the_new_group_as_a_dead_rank(
    tmp_path: Path,
) -> None:
    assert run_in(fail_at_the_commit, (0,), tmp_path / "store.sqlite") == [
        "closed: [True], StoreError"
    ]


# -- a rank that joins


class Unchanging(MemoryStore):
    """A store in which nothing happens: who waits for it waits for ever."""

    def wait(self, version: int, timeout_s: float) -> int:
        raise AssertionError("a rank waits")


def test_joiner_ends_where_a_controller_leads_and_no_rank_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(next_group, "UNSERVED_S", 0.0)
    member = LowestMember(Unchanging("test"))
    assert member.store.acquire_lease("controller", NEVER_S) is not None

    with pytest.raises(RankError, match="rank 0 cannot join: found no rank that serves"):
        be_admitted(member.rank, attend_as_rank_0, Stages())


# -- a member that hangs


def hang_once_the_groups_are_formed(path: Path, proposal: GroupProposal, seen: Any) -> NoReturn:
    """Be rank 2, which forms the groups of a proposal and then does nothing more."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = sqlite_store(path, "test")
    name = f"proposal-{proposal.id}"
    group = rejoined(name, store, 2, proposal.members, proposal.membership)
    seen.wait(NEVER_S)
    group.votes.close()
    os._exit(0)


@pytest.mark.system
def test_member_that_hangs_is_waited_for_until_the_proposal_is_void(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    path, seen, met = tmp_path / "store.sqlite", FORK.Event(), Event()
    proposal = GroupProposal(0, "run", (0, 2), {"2": "process"}, "a test", id=1)
    other = FORK.Process(target=hang_once_the_groups_are_formed, args=(path, proposal, seen))
    other.start()
    member = LowestMember(sqlite_store(path, "test"))

    def attend(ranks: Sequence[int]) -> Attendance:
        met.set()  # the groups are formed
        return Attendance(0, ranks, "host", b"", {})

    def check() -> None:
        if met.is_set():
            raise RankError("proposal 1 is void")

    with pytest.raises(RankError, match="proposal 1 is void"):
        form(member.rank, attend, proposal, check)

    seen.set()
    other.join(NEVER_S)
    assert other.exitcode == 0


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
    group = rejoined("test", store, rank, (0, 1), number)
    assert group.tokens is not None
    assert group.control is not None
    if waits and rank == 0:
        group.tokens.allreduce([torch.ones(1)])
    gathered("the exchange has begun", group.control)
    group.votes.close()
    held: list[object] = [group]
    del group
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
