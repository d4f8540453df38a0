"""Survivors that serve on, in random interleavings: the claims hold, and broken ones are found."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from benchmarks.schedules.membership import MembershipSchedule
from benchmarks.schedules.mutants import MUTANTS_OF_SURVIVORS
from benchmarks.schedules.run import run_one

FOUND_BY = {  # a schedule that finds it
    "not refilled": 1,
    "dead slots kept": 1,
    "steps not agreed": 0,
    "not committed": 16,
    "a minority decides": 72,
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Ranks say a lot of the faults that they are given."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def total_of(seeds: range) -> Counter[str]:
    total = Counter[str]()
    for seed in seeds:
        found = run_one(seed, make=MembershipSchedule)
        assert not found.violation, found.story(seed)
        total.update(found.counts)
    return total


def test_no_order_of_deaths_and_cut_links_gives_wrong_bytes_or_a_hang() -> None:
    total = total_of(range(40))

    wanted = ("committed", "deaths", "cuts", "served on", "started again", "refusals")
    assert [what for what in wanted if not total[what]] == []


@pytest.mark.slow
def test_no_order_of_events_does_so_in_many_schedules_either() -> None:
    total_of(range(1_000_000, 1_005_000))


@pytest.mark.parametrize("name", MUTANTS_OF_SURVIVORS)
def test_broken_survivor_is_found(name: str) -> None:
    with MUTANTS_OF_SURVIVORS[name]():
        assert run_one(FOUND_BY[name], make=MembershipSchedule).violation
