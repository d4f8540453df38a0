"""One controller at a time: the lease and its fencing token, in every LoadStore."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.errors import ConfigError, FencedOut
from eplb.migration.build import Migration, build_migration
from telemetry.store import Lease, LoadStore, TaskResult
from telemetry.stores.commit_rules import first_token
from telemetry.stores.holder import is_dead, new_holder
from tests.support.processes import ForkedProcess
from tests.support.stores import StoreClock

TWO_RANKS = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2)
LONG_S, SHORT_S = 30.0, 0.2
PAST_SHORT_S = 0.3

OpenStore = Callable[[str], LoadStore]
PassTime = Callable[[float], None]
Write = Callable[[LoadStore, int], object]


def acquired(store: LoadStore, holder: str, ttl_s: float = LONG_S) -> Lease:
    lease = store.acquire_lease(holder, ttl_s)
    assert lease is not None
    return lease


def make_migration(store: LoadStore) -> Migration:
    base = Placement(np.array([[0, 1, 0, 2]]), num_experts=3, generation=1)
    store.commit(base, expected=None, reason="first")
    target = Placement(np.array([[0, 1, 2, 1]]), num_experts=3)
    return build_migration(base, target, TWO_RANKS, plan_id=store.next_plan_id())


def test_first_holder_gets_a_token_and_is_known_by_it(store: LoadStore) -> None:
    assert store.lease() is None

    lease = acquired(store, "one")

    assert (lease.holder, lease.ttl_s, lease.renewals) == ("one", LONG_S, 0)
    assert 0 < lease.token < 2**63
    assert lease.expires == lease.since + LONG_S
    assert store.lease() == lease


def test_while_one_holds_the_lease_another_gets_none(open_stores: OpenStore) -> None:
    store, elsewhere = open_stores("demo"), open_stores("demo")
    lease = acquired(store, "one")

    assert elsewhere.acquire_lease("two", LONG_S) is None
    assert elsewhere.lease() == lease


def test_one_of_many_concurrent_requests_gets_the_lease(store: LoadStore) -> None:
    with ThreadPoolExecutor(8) as pool:
        asked = list(pool.map(lambda n: store.acquire_lease(str(n), LONG_S), range(8)))

    assert len([lease for lease in asked if lease is not None]) == 1


def test_renewing_keeps_the_token_and_moves_the_end(store: LoadStore, pass_time: PassTime) -> None:
    first = acquired(store, "one")
    pass_time(0.1)

    again = acquired(store, "one")

    assert again.token == first.token
    assert again.expires > first.expires


def test_lease_that_ran_out_is_renewed_with_its_token(
    store: LoadStore, pass_time: PassTime
) -> None:
    first = acquired(store, "one", SHORT_S)
    pass_time(PAST_SHORT_S)
    assert store.lease() is None

    assert acquired(store, "one").token == first.token


def test_takeover_of_a_lease_gets_a_greater_token(store: LoadStore, pass_time: PassTime) -> None:
    tokens = []
    for holder in ("one", "two", "one"):
        tokens.append(acquired(store, holder, SHORT_S).token)
        pass_time(PAST_SHORT_S)

    assert [token - tokens[0] for token in tokens] == [0, 1, 2]


def test_lease_is_given_up_once(store: LoadStore) -> None:
    lease = acquired(store, "one")

    assert store.release_lease(lease)
    assert not store.release_lease(lease)

    assert store.lease() is None
    assert acquired(store, "two").token == lease.token + 1


def test_lease_that_ran_out_or_was_taken_over_cannot_be_given_up(
    store: LoadStore, pass_time: PassTime
) -> None:
    lease = acquired(store, "one", SHORT_S)
    pass_time(PAST_SHORT_S)

    assert not store.release_lease(lease)
    after = acquired(store, "two")
    assert not store.release_lease(lease)
    assert store.lease() == after


@pytest.mark.parametrize(("holder", "ttl_s"), [("", 1.0), ("one", 0.0), ("one", -1.0)])
def test_lease_without_a_holder_or_without_time_is_refused(
    store: LoadStore, holder: str, ttl_s: float
) -> None:
    with pytest.raises(ConfigError, match="expected a name and more than 0"):
        store.acquire_lease(holder, ttl_s)

    assert store.lease() is None


def test_each_deployment_has_a_lease_of_its_own(open_stores: OpenStore) -> None:
    assert acquired(open_stores("demo"), "one").holder == "one"
    assert acquired(open_stores("other"), "two").holder == "two"


def test_owner_s_lease_and_the_controller_s_are_apart(
    store: LoadStore, pass_time: PassTime
) -> None:
    owner = store.acquire_lease("parent", LONG_S, "deployment")
    controller = acquired(store, "one", SHORT_S)
    pass_time(PAST_SHORT_S)

    assert store.lease("deployment") == owner
    assert store.lease() is None
    assert store.acquire_lease("another", LONG_S, "deployment") is None
    assert owner is not None
    assert store.release_lease(owner)
    assert store.lease("deployment") is None
    store.claim(fence=controller.token)  # whoever owns the deployment fences no controller out


# -- clocks: each store object is another process, with a monotonic clock that never jumps

JUMPS = pytest.mark.parametrize("jump_s", [-3600.0, 3600.0], ids=["back", "ahead"])


@JUMPS
def test_clock_change_does_not_end_a_renewed_lease(
    open_stores: OpenStore, store_clock: StoreClock, pass_time: PassTime, jump_s: float
) -> None:
    leader, challenger = open_stores("demo"), open_stores("demo")
    first = acquired(leader, "one", 3.0)
    assert challenger.acquire_lease("two", 3.0) is None
    store_clock.now += jump_s

    for _ in range(6):
        pass_time(1.0)
        assert acquired(leader, "one", 3.0).token == first.token
        assert challenger.acquire_lease("two", 3.0) is None


@JUMPS
def test_standby_leads_within_one_ttl_although_the_clock_was_set(
    open_stores: OpenStore, store_clock: StoreClock, pass_time: PassTime, jump_s: float
) -> None:
    leader, challenger = open_stores("demo"), open_stores("demo")
    lease = acquired(leader, "one", 3.0)
    store_clock.now += jump_s
    assert challenger.acquire_lease("two", 3.0) is None

    pass_time(2.9)
    assert challenger.acquire_lease("two", 3.0) is None
    pass_time(0.2)

    assert acquired(challenger, "two").token == lease.token + 1


def test_lease_of_a_process_of_this_host_that_ended_is_another_s_at_once(
    open_stores: OpenStore, fork: Callable[..., ForkedProcess]
) -> None:
    child = fork(lambda pipe: pipe.send(new_holder()) or pipe.recv())
    holder = child.receive()
    lease = acquired(open_stores("demo"), holder)
    challenger = open_stores("demo")
    assert challenger.acquire_lease("two", LONG_S) is None

    child.kill()

    assert challenger.lease() is None
    assert acquired(challenger, "two").token == lease.token + 1


# -- fencing


def submitted(store: LoadStore) -> int:
    return store.submit("rebalance", {}).id


# What a controller writes; each takes the fencing token.
WRITES: dict[str, Write] = {
    "publish": lambda store, fence: store.publish(make_migration(store), fence=fence),
    "withdraw": lambda store, fence: store.withdraw(
        1, outcome="aborted", reason="late", fence=fence
    ),
    "claim": lambda store, fence: store.claim(fence=fence),
    "finish": lambda store, fence: store.finish(
        submitted(store), "done", TaskResult(), fence=fence
    ),
}
EVERY_WRITE = pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)


@EVERY_WRITE
def test_holder_writes(store: LoadStore, write: Write) -> None:
    write(store, acquired(store, "one").token)


@EVERY_WRITE
def test_expired_lease_without_a_takeover_still_writes(
    store: LoadStore, write: Write, pass_time: PassTime
) -> None:
    lease = acquired(store, "one", SHORT_S)
    pass_time(PAST_SHORT_S)

    write(store, lease.token)


@EVERY_WRITE
def test_holder_that_was_superseded_is_fenced_out(
    store: LoadStore, write: Write, pass_time: PassTime
) -> None:
    old = acquired(store, "one", SHORT_S)
    pass_time(PAST_SHORT_S)
    acquired(store, "two")

    with pytest.raises(FencedOut, match=r"fencing token \d+, found \d+, of 'two', as the newest"):
        write(store, old.token)


@EVERY_WRITE
def test_token_that_was_never_given_out_is_fenced_out(store: LoadStore, write: Write) -> None:
    with pytest.raises(FencedOut, match="fencing token 7, found none as the newest given out"):
        write(store, 7)


def test_fenced_out_write_changes_nothing(store: LoadStore, pass_time: PassTime) -> None:
    old = acquired(store, "one", SHORT_S)
    migration = make_migration(store)
    store.publish(migration, fence=old.token)
    queued, running = store.submit("rebalance", {"n": 1}), store.submit("rebalance", {"n": 2})
    assert store.claim(fence=old.token) == store.task(queued.id)
    pass_time(PAST_SHORT_S)
    acquired(store, "two")
    before = store.version(), store.events()

    for write in (
        lambda: store.withdraw(1, outcome="aborted", reason="late", fence=old.token),
        lambda: store.claim(fence=old.token),
        lambda: store.finish(queued.id, "done", TaskResult(), fence=old.token),
        lambda: store.publish(migration, fence=old.token),
    ):
        with pytest.raises(FencedOut):
            write()

    assert (store.version(), store.events()) == before
    published = store.published()
    assert published is not None
    assert published.hash == migration.hash
    assert [task.id for task in store.tasks("running")] == [queued.id]
    assert store.task(running.id) == running


def test_writer_without_a_token_needs_no_lease(store: LoadStore) -> None:
    acquired(store, "one")

    store.publish(make_migration(store))

    assert store.published() is not None


# -- tokens and names that never come again


def test_fencing_token_differs_while_the_clock_does_not_move() -> None:
    tokens = [first_token(1000.0) for _ in range(1000)]

    assert len(set(tokens)) == len(tokens)
    assert all(token >> 31 == 1000 for token in tokens)
    assert max(first_token(1e300), first_token(2.0**33)) < 2**63
    assert first_token(-5.0) > 0


def test_later_second_gives_a_greater_token() -> None:
    assert first_token(1001.0) > first_token(1000.0)


@pytest.mark.parametrize(
    "holder", ["one", "host:0:00000000-0-aaaaaa", "elsewhere:1:12345678-1-aaaaaa"]
)
def test_holder_of_whom_nothing_can_be_known_is_not_called_dead(holder: str) -> None:
    assert not is_dead(holder)


def test_process_number_that_was_given_out_again_is_another_process() -> None:
    mine = new_holder()
    name, _, random = mine.rpartition("-")
    place, _, started = name.rpartition("-")

    assert not is_dead(mine)
    assert is_dead(f"{place}-{int(started) + 1}-{random}")
