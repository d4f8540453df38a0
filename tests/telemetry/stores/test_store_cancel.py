"""Cancelling a task, and exactly one claim of each, in every LoadStore."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from telemetry.store import LoadStore, TaskResult

OpenStore = Callable[[str], LoadStore]


def test_queued_task_is_cancelled_and_never_claimed(store: LoadStore) -> None:
    task = store.submit("rebalance", {})

    assert store.cancel(task.id, reason="not now")

    ended = store.task(task.id)
    assert ended is not None
    assert (ended.state, ended.result.error) == ("failed", "cancelled: not now")
    assert store.claim() is None
    assert [one.id for one in store.tasks("failed")] == [task.id]


def test_claimed_ended_or_unknown_task_is_not_cancelled(store: LoadStore) -> None:
    task = store.submit("rebalance", {})
    store.claim()

    assert not store.cancel(task.id, reason="late")
    store.finish(task.id, "done", TaskResult())
    assert not store.cancel(task.id, reason="later")
    assert not store.cancel(task.id + 1, reason="unknown")

    ended = store.task(task.id)
    assert ended is not None
    assert ended.state == "done"


def test_each_task_is_claimed_or_cancelled_once_by_many_at_a_time(open_stores: OpenStore) -> None:
    stores = [open_stores("demo") for _ in range(3)]
    ids = [stores[0].submit("rebalance", {}).id for _ in range(12)]

    def claim_all(store: LoadStore) -> list[int]:
        found = []
        while (task := store.claim()) is not None:
            found.append(task.id)
        return found

    def cancel_all(store: LoadStore) -> list[int]:
        return [one for one in reversed(ids) if store.cancel(one, reason="race")]

    with ThreadPoolExecutor(3) as pool:
        work = (claim_all, claim_all, cancel_all)
        ends = pool.map(lambda pair: pair[0](pair[1]), zip(work, stores, strict=True))

    assert sorted(one for end in ends for one in end) == ids
