"""Ranks that join and leave as planned, in random interleavings with deaths and other faults."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from benchmarks.schedules.mutants import MUTANTS_OF_PLANNED
from benchmarks.schedules.planned import PlannedSchedule
from benchmarks.schedules.run import run_one

FOUND_BY = {  # a schedule that finds it
    "left with experts": 28,
    "left on its own vote": 4,
}
# No schedule of the first 650 finds it: test_next_group.py has a test of the rule, which it fails.
FOUND_BY_A_TEST = ("proposal of another base",)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Ranks say a lot of the faults that they are given."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def total_of(seeds: range) -> Counter[str]:
    total = Counter[str]()
    for seed in seeds:
        found = run_one(seed, make=PlannedSchedule)
        assert not found.violation, found.story(seed)
        total.update(found.counts)
    return total


def test_no_order_of_joins_leaves_and_deaths_gives_wrong_bytes_or_a_hang() -> None:
    total = total_of(range(30))

    wanted = ("operations done", "operations refused", "joined", "left", "deaths", "served on")
    assert [what for what in wanted if not total[what]] == []


@pytest.mark.slow
def test_no_order_of_planned_changes_does_so_in_many_schedules_either() -> None:
    total_of(range(1_000_000, 1_002_000))


def finds(name: str, seed: int) -> bool:
    with MUTANTS_OF_PLANNED[name]():
        return bool(run_one(seed, make=PlannedSchedule).violation)


@pytest.mark.parametrize("name", FOUND_BY)
def test_broken_rule_of_planned_changes_is_found(name: str) -> None:
    assert finds(name, FOUND_BY[name])


def test_every_mutant_of_planned_changes_is_looked_for() -> None:
    assert {*FOUND_BY, *FOUND_BY_A_TEST} == set(MUTANTS_OF_PLANNED)
