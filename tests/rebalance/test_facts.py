"""Facts that all ranks of a group must have alike, as they are compared for every change."""

from __future__ import annotations

from typing import Any

import pytest

from eplb.errors import RankError
from rebalance.assembly.facts import compare_facts

SERVED = {"weights": 2, "placement": "a", "refusal": ""}


def told(**other: Any) -> dict[int, dict[str, Any]]:
    """The facts of ranks 0, 2 and 5, of which the last one differs."""
    return {0: SERVED, 2: SERVED, 5: SERVED | other}


def test_rank_that_joins_takes_the_placement_of_the_others() -> None:
    compare_facts(0, told(placement=""))
    compare_facts(5, told(placement=""))


@pytest.mark.parametrize("rank", [0, 5])
@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"placement": "b"}, r"ranks would serve placements \['a', 'b'\], expected one"),
        ({"weights": 3}, r"ranks would serve weights of versions \[2, 3\], expected one"),
        ({"refusal": "no room"}, "the ranks cannot serve on: rank 5: no room"),
    ],
    ids=["placement", "weights", "refusal"],
)
def test_ranks_that_would_not_serve_the_same_are_refused_on_all_alike(
    rank: int, other: dict[str, Any], words: str
) -> None:
    with pytest.raises(RankError, match=words):
        compare_facts(rank, told(**other))
