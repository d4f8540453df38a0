"""The host cache's book: leases, room, hints and versions, without a disk and without ranks."""

from __future__ import annotations

import random

import pytest

from rebalance.types import Record
from rebalance.weights.cache.cache import WRITER, HostCache, Request
from rebalance.weights.cache.entries import CacheEntry

RECORDS = [(0, expert) for expert in range(8)]


def ask(cache: HostCache, holder: int, *records: Record, version: int = 0) -> Request:
    request = Request(holder, 1, records, lambda _: None, version)
    cache.ask(request)
    return request


def load_one(cache: HostCache, record: Record) -> CacheEntry:
    """As a reader of the disk would; the digest names the record."""
    entry = cache.take()
    assert entry is not None
    assert entry.record == record
    cache.loaded(entry, record, "checkpoint")
    return entry


def asked_and_loaded(cache: HostCache, holder: int, *records: Record) -> Request:
    request = ask(cache, holder, *records)
    for record in sorted(request.missing, key=records.index):
        load_one(cache, record)
    assert request.is_ended
    assert request.error is None
    return request


def test_request_ends_when_all_its_records_are_there() -> None:
    cache = HostCache(4)
    request = ask(cache, 1, (0, 3), (0, 5))

    load_one(cache, (0, 3))
    assert not request.is_ended
    load_one(cache, (0, 5))

    assert (request.is_ended, request.error, request.num_from_disk) == (True, None, 2)
    assert request.found == {(0, 3): ((0, 3), 0), (0, 5): ((0, 5), 1)}


def test_second_rank_finds_what_the_first_is_having_loaded() -> None:
    cache = HostCache(4)
    first, second = ask(cache, 1, (0, 3)), ask(cache, 2, (0, 3))

    load_one(cache, (0, 3))

    assert (first.num_from_disk, second.num_from_disk) == (1, 0)
    assert first.found == second.found


def test_record_used_longest_ago_makes_room() -> None:
    cache = HostCache(2)
    asked_and_loaded(cache, 1, (0, 0))
    asked_and_loaded(cache, 1, (0, 1))
    cache.release(1, [(0, 0)])
    cache.release(1, [(0, 1)])
    asked_and_loaded(cache, 1, (0, 0))
    cache.release(1, [(0, 0)])

    assert asked_and_loaded(cache, 1, (0, 2)).found[0, 2][1] == 1  # where expert 1 was
    assert asked_and_loaded(cache, 1, (0, 0)).num_from_disk == 0
    assert cache.figures()["evictions"] == 1


def test_leased_record_makes_no_room_until_it_is_released() -> None:
    cache = HostCache(2)
    asked_and_loaded(cache, 1, (0, 0), (0, 1))
    waiting = ask(cache, 2, (0, 2))

    assert not waiting.missing
    cache.release(1, [(0, 1)])

    load_one(cache, (0, 2))
    assert waiting.found == {(0, 2): ((0, 2), 1)}


def test_disconnected_rank_makes_room() -> None:
    cache = HostCache(2)
    asked_and_loaded(cache, 1, (0, 0), (0, 1))
    waiting = ask(cache, 2, (0, 2), (0, 3))

    cache.drop(1)

    assert waiting.missing == {(0, 2), (0, 3)}


def test_closing_host_cache_ends_requests_that_wait_or_are_loaded() -> None:
    cache = HostCache(1)
    loaded, waiting = ask(cache, 1, (0, 0)), ask(cache, 2, (0, 1))

    cache.close()

    assert {request.error for request in (loaded, waiting)} == {"the host cache is closing"}
    assert cache.take() is None


def test_request_that_can_never_fit_is_refused_with_figures() -> None:
    cache = HostCache(4)
    asked_and_loaded(cache, 1, (0, 0))

    refused = ask(cache, 1, (0, 1), (0, 2), (0, 3), (0, 4))

    assert refused.error == (
        "4 records asked for beside 1 that this rank holds, expected at most 4, the capacity of "
        "the host cache"
    )
    assert ask(cache, 1, *[(0, 0)] * 9, (0, 1), (0, 2), (0, 3)).error is None


def test_ranks_that_wait_for_each_other_get_an_error_at_once() -> None:
    cache = HostCache(4)
    asked_and_loaded(cache, 1, (0, 0), (0, 1))
    asked_and_loaded(cache, 2, (0, 2), (0, 3))

    first = ask(cache, 1, (0, 4))
    assert not first.is_ended
    second = ask(cache, 2, (0, 5))

    assert second.error == (
        "no room for 1 records: 4 of 4 entries are held, by 2 ranks, and all holders are waiting"
    )
    cache.release(2, [(0, 2)])
    load_one(cache, (0, 4))
    assert first.error is None


def test_large_request_is_overtaken_only_by_ranks_with_leases() -> None:
    cache = HostCache(4)
    asked_and_loaded(cache, 1, (0, 0), (0, 1))
    large = ask(cache, 2, (0, 2), (0, 3), (0, 4))
    newcomer = ask(cache, 3, (0, 5))
    must_finish = ask(cache, 1, (0, 6))

    assert [bool(r.missing) for r in (large, newcomer, must_finish)] == [False, False, True]


def test_late_request_leaves_no_lease_behind() -> None:
    cache = HostCache(2)
    late = ask(cache, 1, (0, 0), (0, 1))

    entry = cache.take()
    cache.expire(late)

    assert late.error == "timed out: 2 records are still being read"
    assert entry is not None
    cache.loaded(entry, (0, 0), "checkpoint")
    assert asked_and_loaded(cache, 2, (0, 0), (0, 1)).num_from_disk == 1


def test_rank_that_gave_up_just_as_its_answer_left_holds_nothing() -> None:
    cache = HostCache(1)
    answered = asked_and_loaded(cache, 1, (0, 0))

    cache.withdraw(answered)

    assert asked_and_loaded(cache, 2, (0, 1)).num_from_disk == 1


def test_record_that_fails_is_refused_to_all_and_tried_again() -> None:
    cache = HostCache(4)
    first, second = ask(cache, 1, (0, 0), (0, 1)), ask(cache, 2, (0, 1))
    load_one(cache, (0, 0))

    entry = cache.take()
    assert entry is not None
    cache.failed(entry, "the disk is damaged")

    assert first.error == second.error == "the disk is damaged"
    assert cache.figures()["leased"] == 0
    assert asked_and_loaded(cache, 1, (0, 0), (0, 1)).num_from_disk == 1


# -- hints


def test_hint_is_loaded_after_what_ranks_wait_for_and_is_then_there() -> None:
    cache = HostCache(4)
    cache.hint([(0, 7), (0, 6)], 0)
    request = ask(cache, 1, (0, 0))

    for record in ((0, 0), (0, 7), (0, 6)):
        load_one(cache, record)

    assert request.error is None
    assert ask(cache, 1, (0, 7), (0, 6)).num_from_disk == 0


def test_hints_take_no_leased_place_nor_each_others() -> None:
    cache = HostCache(3)
    asked_and_loaded(cache, 1, (0, 0), (0, 1))
    cache.hint([(0, 5), (0, 6)], 0)
    load_one(cache, (0, 5))
    assert cache.try_take() is None  # no place for expert 6

    waiting = ask(cache, 2, (0, 2))  # a request may take the place of a hinted record

    load_one(cache, (0, 2))
    assert waiting.error is None
    cache.release(2, [(0, 2)])
    cache.hint([(0, 7)], 0)
    load_one(cache, (0, 7))
    assert (cache.counts["hints_dropped"], cache.figures()["evictions"]) == (1, 2)


def test_later_hint_replaces_an_earlier_unused_one() -> None:
    cache = HostCache(1)
    cache.hint([(0, 5), (0, 6)], 0)
    load_one(cache, (0, 5))
    cache.hint([(0, 7)], 0)
    load_one(cache, (0, 7))

    assert cache.counts["hints_dropped"] == 1  # of expert 6, when expert 5 had the only place


# -- versions


def test_record_of_older_weights_is_never_handed_out_again() -> None:
    cache = HostCache(4)
    asked_and_loaded(cache, 1, (0, 0))
    under_way = ask(cache, 1, (0, 1))
    entry = cache.take()
    assert entry is not None

    cache.invalidate(1)
    cache.loaded(entry, (0, 1), "checkpoint")

    assert under_way.error == "weights version 0 was invalidated by version 1"
    assert str(ask(cache, 2, (0, 0)).error).startswith(f"{under_way.error}: ranks replaced the")
    unknown = ask(cache, 2, (0, 0), version=1)
    assert unknown.error == (
        "weights version 1 is not in the host cache, which is filled from the checkpoint, version 0"
    )
    cache.hint([(0, 2)], 0)
    cache.drop(1)
    figures = cache.figures()
    assert (figures["resident"], figures["leased"], cache.counts["hints_dropped"]) == (0, 0, 1)


def test_version_that_is_known_already_voids_nothing() -> None:
    cache = HostCache(4)
    asked_and_loaded(cache, 1, (0, 0))

    cache.invalidate(0)

    assert ask(cache, 2, (0, 0)).error is None


# -- memory


def test_host_cache_out_of_memory_continues_with_its_entries() -> None:
    cache = HostCache(4)
    asked_and_loaded(cache, 1, (0, 0))
    asked_and_loaded(cache, 1, (0, 1))
    cache.release(1, RECORDS)

    refused = ask(cache, 1, (0, 2), (0, 3), (0, 4))
    entry = cache.take()
    assert entry is not None
    cache.out_of_memory(entry, "no memory")

    assert refused.error == "no memory; host cache reduced to 3 records"
    assert asked_and_loaded(cache, 1, (0, 5), (0, 6)).error is None
    assert cache.figures()["room"] == 3


# -- everything at once


@pytest.mark.parametrize("seed", range(20))
def test_random_ranks_and_disks_never_share_a_place_and_never_hang(seed: int) -> None:
    rng = random.Random(seed)
    cache = HostCache(rng.randint(1, 6))
    live: dict[int, Request] = {}
    loading: list[CacheEntry] = []
    pinned: list[Record] = []
    for _ in range(400):
        holder = rng.randint(1, 3)
        choice = rng.random()
        if choice < 0.3 and (holder not in live or live[holder].is_ended):
            live[holder] = ask(cache, holder, *rng.sample(RECORDS, rng.randint(1, 3)))
        elif choice < 0.4:
            cache.release(holder, rng.sample(RECORDS, 4))
        elif choice < 0.45:
            cache.hint(rng.sample(RECORDS, 3), 0)
        elif choice < 0.5 and holder in live:
            rng.choice((cache.withdraw, cache.expire))(live[holder])
        elif choice < 0.55:
            cache.drop(holder)
        elif choice < 0.6 and pinned:
            cache.release(WRITER, [pinned.pop()])
        elif loading and choice < 0.8:
            finish_one(cache, loading, pinned, rng)
        elif len(loading) < 2:
            cache.hint([rng.choice(RECORDS)], 0)  # take never waits while something is hinted
            take_one(cache, loading)
        check(cache, loading)
    # Nothing is asked any more, all disks answer and all ranks let go: every request ends.
    cache.release(WRITER, pinned)
    for _ in range(100):
        for holder in live:
            if live[holder].is_ended:
                cache.drop(holder)
        while loading:
            finish_one(cache, loading, [], rng, may_pin=False)
        take_one(cache, loading)
    assert all(request.is_ended for request in live.values())


def take_one(cache: HostCache, loading: list[CacheEntry]) -> None:
    entry = cache.try_take()
    if entry is not None:
        loading.append(entry)


def finish_one(
    cache: HostCache,
    loading: list[CacheEntry],
    pinned: list[Record],
    rng: random.Random,
    *,
    may_pin: bool = True,
) -> None:
    entry = loading.pop(rng.randrange(len(loading)))
    if rng.random() < 0.2:
        cache.failed(entry, "the disk is damaged")
        return
    is_pinned = may_pin and rng.random() < 0.3
    cache.loaded(entry, entry.record, "checkpoint", for_writer=is_pinned)
    if is_pinned:
        pinned.append(entry.record)


def check(cache: HostCache, loading: list[CacheEntry]) -> None:
    table = cache.table
    known = [*table.entries.values(), *table.voided]
    used = [entry.index for entry in known]
    assert sorted(used + table.free_indices) == list(range(table.num_entries)), (
        "a place lost or shared"
    )
    assert set(loading) <= set(known), "the disk writes into a place that was given away"
    for entry in table.evictable.values():
        assert not entry.holders
        assert entry in table.entries.values()
    for holder in range(4):
        assert table.num_leases[holder] == sum(holder in entry.holders for entry in known)


def test_holder_that_has_released_everything_is_forgotten() -> None:
    cache = HostCache(2)
    for holder in range(1, 1001):
        asked_and_loaded(cache, holder, (0, 1))
        cache.release(holder, [(0, 1)])

    assert cache.table.holders() == set()
    assert len(cache.table.num_leases) == 0
