"""The plug-in in four ranks of the real SGLang balancer: maps, weights, dispatch and samples."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if find_spec("sglang") is None:
    pytest.skip(
        "run `make test-engines`: it has sglang 0.5.23 in .venv-sglang", allow_module_level=True
    )

from telemetry import open_store
from tests.support.engines.sglang_ranks import (
    DENSE,
    NUM_EXPERTS,
    NUM_LAYERS,
    NUM_RANKS,
    config_text,
    make_rank,
    on_ranks,
    popularity_of,
)

pytestmark = pytest.mark.slow


def rebalances(rank: int, config: Path, times: int, flags: dict[str, Any]) -> dict[str, Any]:
    """Step until so many maps were installed; the weights match the map after each pass."""
    made = make_rank(rank, config=config, **flags)
    first = made.rounds.generation
    longest = 0
    while made.rounds.generation - first < times:
        made.forward(popularity_of(made.rounds.generation - first))
        made.check_weights()
        longest = max(longest, int(made.map.logical_to_all_physical_map_num_valid.max()))
        assert not made.rounds.stopped, made.rounds.stopped
    found = {
        "map": made.map.physical_to_logical_map.tolist(),
        # The engine's initial lists differ by rank; without routed experts they are not replaced.
        "lists": [
            made.map.logical_to_all_physical_map[layer].tolist()
            for layer in range(NUM_LAYERS)
            if layer not in DENSE
        ],
        "passes": made.passes,
        "longest": longest,
    }
    made.rounds.close()
    return found


def alike(found: list[dict[str, Any]], name: str) -> bool:
    return all(one[name] == found[0][name] for one in found)


@pytest.mark.parametrize(
    ("flags", "times"),
    [
        ({}, 100),
        ({"ep_dispatch_algorithm": "dynamic"}, 100),
        ({"chunk": 1}, 10),
        ({"ep_dispatch_algorithm": "dynamic", "moe_a2a_backend": "none"}, 10),
    ],
    ids=["static", "dynamic", "static in chunks", "dynamic without all-to-all"],
)
def test_weights_match_maps_on_every_rank_over_rebalances(
    flags: dict[str, Any], times: int, tmp_path: Path
) -> None:
    config = tmp_path / "eplb.toml"
    config.write_text(config_text(f"sqlite:{tmp_path / 'store.sqlite'}"))

    found = on_ranks(rebalances, config, times, flags)

    print(flags, times, "rebalances in", found[0]["passes"], "passes")
    assert alike(found, "map")
    assert alike(found, "lists")
    held = np.array(found[0]["map"])
    assert (held[list(DENSE)] == np.arange(held.shape[1]) % NUM_EXPERTS).all(), "dense rows stay"
    is_dynamic = flags.get("ep_dispatch_algorithm") == "dynamic"
    if times == 100:  # a single plan may have even shares
        assert (found[0]["longest"] > NUM_RANKS) == is_dynamic, "lists weigh by repeats"
    store = open_store(f"sqlite:{tmp_path / 'store.sqlite'}", "test")
    committed, run = store.committed(), store.current_run()
    assert committed is not None
    assert run is not None
    assert run.run.startswith("sglang-")
    counts = store.sample_counts(run.run)
    samples = [sample for _, sample in store.samples(run.run)]
    store.close()
    moe = [layer for layer in range(NUM_LAYERS) if layer not in DENSE]
    assert committed.placement.slot_to_expert.tolist() == held[moe].tolist()
    assert sorted(counts) == list(range(NUM_RANKS))
    assert {len(sample.tokens) for sample in samples} == {len(moe)}
    assert {sample.phase for sample in samples} == {"decode"}
