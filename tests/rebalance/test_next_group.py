"""Planned changes of a group: the rule of its next members."""

from __future__ import annotations

import pytest

from rebalance.assembly.next_group import next_members

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
