"""One controller at a time: who leads, and whose writes the fencing token lets through."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.errors import ConfigError, FencedOut
from eplb.migration.build import Migration, build_migration
from telemetry.state.holder import is_dead, new_holder
from telemetry.state.lease import Lease, first_token
from telemetry.state.store import StateStore
from telemetry.state.tasks import TaskResult
from tests.support.processes import ForkedProcess
from tests.support.stores import make_placement

TWO_RANKS = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2)
TTL_S = 30.0

PassTime = Callable[[float], None]
Write = Callable[[StateStore, int], object]


def acquired(store: StateStore, holder: str, ttl_s: float = TTL_S) -> Lease:
    lease = store.acquire_lease(holder, ttl_s)
    assert lease is not None
    return lease


def make_migration(store: StateStore) -> Migration:
    base = make_placement(1)
    store.commit(base, expected=None, reason="first")
    target = Placement(np.array([[0, 1, 2, 1]]), num_experts=3)
    return build_migration(base, target, TWO_RANKS, plan_id=store.next_plan_id())


def test_lease_that_ran_out_or_was_given_up_is_another_s_with_the_next_token(
    store: StateStore, pass_time: PassTime
) -> None:
    first = acquired(store, "one")
    pass_time(TTL_S + 1.0)
    assert store.lease() is None
    assert not store.release_lease(first)

    second = acquired(store, "two")
    assert not store.release_lease(first)
    assert store.release_lease(second)
    assert not store.release_lease(second)
    third = acquired(store, "one")

    assert [lease.token - first.token for lease in (second, third)] == [1, 2]


@pytest.mark.parametrize(("holder", "ttl_s"), [("", 1.0), ("one", 0.0), ("one", -1.0)])
def test_lease_without_a_holder_or_without_time_is_refused(
    store: StateStore, holder: str, ttl_s: float
) -> None:
    with pytest.raises(ConfigError):
        store.acquire_lease(holder, ttl_s)

    assert store.lease() is None


def test_owner_s_lease_and_the_controller_s_are_apart(
    store: StateStore, pass_time: PassTime
) -> None:
    owner = store.acquire_lease("parent", 100.0, "deployment")
    controller = acquired(store, "one")
    pass_time(TTL_S + 1.0)

    assert (store.lease("deployment"), store.lease()) == (owner, None)
    assert store.acquire_lease("another", TTL_S, "deployment") is None
    assert owner is not None
    assert store.release_lease(owner)
    assert store.lease("deployment") is None
    store.claim(fence=controller.token)  # whoever owns the deployment fences no controller out


# -- fencing

# What a controller writes; each takes the fencing token.
WRITES: dict[str, Write] = {
    "publish": lambda store, fence: store.publish(make_migration(store), fence=fence),
    "withdraw": lambda store, fence: store.withdraw(
        1, outcome="aborted", reason="late", fence=fence
    ),
    "claim": lambda store, fence: store.claim(fence=fence),
    "finish": lambda store, fence: store.finish(
        store.submit("rebalance", {}).id, "done", TaskResult(), fence=fence
    ),
}
EVERY_WRITE = pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)


@EVERY_WRITE
@pytest.mark.parametrize("age_s", [0.0, TTL_S + 1.0], ids=["within its time", "after it"])
def test_holder_writes_until_another_takes_over(
    store: StateStore, write: Write, age_s: float, pass_time: PassTime
) -> None:
    lease = acquired(store, "one")
    pass_time(age_s)

    write(store, lease.token)


@EVERY_WRITE
def test_holder_that_was_superseded_and_a_token_never_given_out_are_fenced_out(
    store: StateStore, write: Write, pass_time: PassTime
) -> None:
    with pytest.raises(FencedOut, match="token 7"):
        write(store, 7)
    old = acquired(store, "one")
    pass_time(TTL_S + 1.0)
    acquired(store, "two")

    with pytest.raises(FencedOut, match=rf"token {old.token}, found {old.token + 1}, of 'two'"):
        write(store, old.token)


@EVERY_WRITE
@pytest.mark.parametrize("has_lease", [False, True], ids=["none on record", "one on record"])
def test_token_beyond_the_newest_is_fenced_out(
    store: StateStore, write: Write, has_lease: bool
) -> None:
    newest = acquired(store, "one").token if has_lease else 0

    for beyond in (1, 2**31):
        with pytest.raises(FencedOut, match=rf"\b{newest + beyond}\b"):
            write(store, newest + beyond)


def test_fenced_out_write_changes_nothing(store: StateStore, pass_time: PassTime) -> None:
    old = acquired(store, "one")
    migration = make_migration(store)
    store.publish(migration, fence=old.token)
    running, queued = (store.submit("rebalance", {"n": n}) for n in (1, 2))
    store.claim(fence=old.token)
    pass_time(TTL_S + 1.0)
    acquired(store, "two")
    before = store.version(), store.events()

    for write in (
        lambda: store.withdraw(1, outcome="aborted", reason="late", fence=old.token),
        lambda: store.claim(fence=old.token),
        lambda: store.finish(running.id, "done", TaskResult(), fence=old.token),
        lambda: store.publish(migration, fence=old.token),
    ):
        with pytest.raises(FencedOut):
            write()

    assert (store.version(), store.events()) == before
    published = store.published()
    assert published is not None
    assert published.hash == migration.hash
    assert [task.id for task in store.tasks("running")] == [running.id]
    assert store.task(queued.id) == queued


def test_writer_without_a_token_needs_no_lease(store: StateStore) -> None:
    acquired(store, "one")

    store.publish(make_migration(store))

    assert store.published() is not None


# -- tokens and names that never come again


def test_fencing_token_differs_while_the_clock_does_not_move() -> None:
    tokens = [first_token(1000.0) for _ in range(1000)]

    assert len(set(tokens)) == len(tokens)
    assert all(token >> 31 == 1000 for token in tokens)
    assert first_token(1001.0) > max(tokens)
    assert max(first_token(1e300), first_token(2.0**33)) < 2**63
    assert first_token(-5.0) > 0


def test_lease_of_a_process_of_this_host_that_ended_is_another_s_at_once(
    store: StateStore, fork: Callable[..., ForkedProcess]
) -> None:
    child = fork(lambda pipe: pipe.send(new_holder()) or pipe.recv())
    lease = acquired(store, child.receive())
    assert store.acquire_lease("two", TTL_S) is None

    child.kill()

    assert store.lease() is None
    assert acquired(store, "two").token == lease.token + 1


def test_holder_is_dead_only_if_this_host_knows_that_its_process_ended() -> None:
    mine = new_holder()
    name, _, random = mine.rpartition("-")
    place, _, started = name.rpartition("-")

    assert is_dead(f"{place}-{int(started) + 1}-{random}")  # the number was given out again
    unknown = ("one", "host:0:00000000-0-aaaaaa", "elsewhere:1:12345678-1-aaaaaa")
    assert not any(is_dead(holder) for holder in (mine, *unknown))
