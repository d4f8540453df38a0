"""A draft model of the target's shape, in vLLM's real balancer: each model has its own plans."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engines.ranks import NUM_LAYERS, NUM_SLOTS, config_in, on_ranks
from tests.support.engines.vllm_ranks import make_rank

pytestmark = pytest.mark.slow
MAX_MOVED, MAPS = 0.1, 6


def moved(rank: int, config: Path, is_async: bool) -> list[list[int]]:
    """Moves of draft and target by their first plans, and then with each map of the target."""
    made = make_rank(rank, config, is_async=is_async, has_draft=True, draft_layers=NUM_LAYERS)
    states, found = list(made.state.model_states.values()), []
    for maps in (2, *[1] * MAPS):  # of both models after the switches were read
        before = [state.physical_to_logical_map.clone() for state in states]
        made.until_maps(maps)
        pairs = zip(states, before, strict=True)
        found.append([int((state.physical_to_logical_map != old).sum()) for state, old in pairs])
    made.close()
    return found


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_later_plans_of_draft_and_target_keep_the_limit(is_async: bool, tmp_path: Path) -> None:
    found = on_ranks(moved, config_in(tmp_path, engine__max_moved=MAX_MOVED), is_async)

    first, *later = found[0]
    most = MAX_MOVED * NUM_LAYERS * NUM_SLOTS
    assert all(one == found[0] for one in found)
    assert min(first) > most, "the first plan of each moves any number"
    assert max(max(moves) for moves in later) <= most
    assert all(any(moves[model] for moves in later) for model in (0, 1))
