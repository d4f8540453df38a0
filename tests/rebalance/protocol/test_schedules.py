"""Random interleavings of real agents hold what is claimed, and find agents that are broken."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from benchmarks.schedules.mutants import MUTANTS
from benchmarks.schedules.run import run_one

MOST_SEEDS = 6000  # that a mutant may survive


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


def test_no_event_order_gives_wrong_bytes_two_placements_or_a_hang() -> None:
    total = total_of(range(100))

    # Not for want of trying: the seeds have everything in them.
    for what in ("committed", "dropped", "deaths", "recoveries", "updates", "bytes refused"):
        assert total[what] > 0, what


@pytest.mark.slow
def test_no_order_of_events_does_so_in_many_schedules_either() -> None:
    total_of(range(1_000_000, 1_020_000))


def test_seed_is_the_same_schedule_every_time() -> None:
    first, again = run_one(7), run_one(7)

    assert first.trace == again.trace
    assert first.counts == again.counts


# Take hundreds or thousands of schedules to be found.
RARE = ("adopted early", "applied when ordered", "deaf", "not drained", "not rolled forward")


def seed_that_finds(name: str) -> int:
    with MUTANTS[name]():
        for seed in range(MOST_SEEDS):
            found = run_one(seed)
            if found.violation:
                # A claim that was broken, or one of the ranks' own; not a mutant out of date.
                assert isinstance(found.cause, AssertionError), found.violation
                assert f"--first {seed} --count 1" in found.story(seed)
                return seed
    raise AssertionError(f"{MOST_SEEDS} schedules do not find {name!r}")


@pytest.mark.parametrize("name", [name for name in MUTANTS if name not in RARE])
def test_broken_rank_is_found(name: str) -> None:
    assert seed_that_finds(name) < 500


@pytest.mark.slow
@pytest.mark.parametrize("name", RARE)
def test_rank_that_is_seldom_wrong_is_found_too(name: str) -> None:
    seed_that_finds(name)
