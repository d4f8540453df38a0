"""Random interleavings of real agents hold what is claimed, and find agents that are broken."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from benchmarks.schedules.mutants import MUTANTS
from benchmarks.schedules.run import run_one

MOST_SEEDS = 6000  # that a mutant may survive
# A schedule that finds it. Where the ranks' order of turns changes, look for another one with
# ``seed_that_finds``.
FOUND_BY = {
    "own flag": 1,
    "deaf": 171,
    "ring freed when ordered": 4,
    "reads_after ignored": 29,
    "staged unadopted": 1,
    "digest not checked": 198,
    "applied when ordered": 68,
    "skipped when prepared": 1,
    "not drained": 421,
    "not rolled forward": 94,
}
RARE = ("adopted early",)  # takes thousands of schedules to be found


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Ranks say a lot of the faults that they are given."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def total_of(seeds: range) -> Counter[str]:
    total = Counter[str]()
    for seed in seeds:
        found = run_one(seed)
        assert not found.violation, found.story(seed)
        total.update(found.counts)
    return total


# Few of these in each, and all of them together: they are not right for want of trying.
EVENTS = ("committed", "dropped", "deaths", "recoveries", "updates", "bytes refused")


@pytest.mark.parametrize(
    "num_seeds", [20, pytest.param(100, marks=pytest.mark.system)], ids=lambda number: f"{number}"
)
def test_no_event_order_gives_wrong_bytes_two_placements_or_a_hang(num_seeds: int) -> None:
    total = total_of(range(num_seeds))

    assert [what for what in EVENTS if not total[what]] == []


@pytest.mark.slow
def test_no_order_of_events_does_so_in_many_schedules_either() -> None:
    total_of(range(1_000_000, 1_020_000))


def test_seed_is_the_same_schedule_every_time() -> None:
    first, again = run_one(7), run_one(7)

    assert first.trace == again.trace
    assert first.counts == again.counts


def finds(name: str, seed: int) -> bool:
    with MUTANTS[name]():
        found = run_one(seed)
    if found.violation:
        # A claim that was broken, or one of the ranks' own; not a mutant out of date.
        assert isinstance(found.cause, AssertionError), found.violation
        assert f"--first {seed} --count 1" in found.story(seed)
    return bool(found.violation)


def seed_that_finds(name: str) -> int:
    return next(seed for seed in range(MOST_SEEDS) if finds(name, seed))


@pytest.mark.parametrize("name", FOUND_BY)
def test_broken_rank_is_found(name: str) -> None:
    assert finds(name, FOUND_BY[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", RARE)
def test_rank_that_is_seldom_wrong_is_found_too(name: str) -> None:
    seed_that_finds(name)


def test_every_mutant_is_looked_for() -> None:
    assert {*FOUND_BY, *RARE} == set(MUTANTS)
