"""Ranks that choose different replicas for the same tokens are found where outputs differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.engines.ranks import (
    EACH,
    NUM_EXPERTS,
    config_in,
    look_in_every_pass,
    on_ranks,
    weights_of,
)
from tests.support.engines.sglang_ranks import MOE, expert_location_dispatch, make_rank

pytestmark = pytest.mark.slow


def error_of(made: Any) -> float:
    """The largest error of what the layers add up to on all ranks, as without an all-to-all."""
    generator = torch.Generator().manual_seed(7)  # the same tokens on all ranks
    experts = torch.stack([torch.randperm(NUM_EXPERTS, generator=generator)[:2] for _ in range(64)])
    part = torch.rand((64, 2), generator=generator, dtype=torch.float64)
    found, expected = torch.zeros((2, len(MOE), 64), dtype=torch.float64)
    for place, layer in enumerate(MOE):
        info = expert_location_dispatch.ExpertLocationDispatchInfo.init_new(layer)
        slots = expert_location_dispatch.topk_ids_logical_to_physical(experts, info)
        local = slots - made.rank * EACH
        weight = made.model.layers[place].weight.data.double().mean(dim=1)
        mine = (local >= 0) & (local < EACH)
        found[place] = (part * mine * weight[local.clamp(0, EACH - 1)]).sum(dim=1)
        means = torch.stack([weights_of(layer, one)[0].mean() for one in range(NUM_EXPERTS)])
        expected[place] = (part * means.double()[experts]).sum(dim=1)
    dist.all_reduce(found)
    return float((found - expected).abs().max() / expected.abs().max())


def shared(rank: int, config: Path, is_fixed: bool) -> dict[str, Any]:
    """Without an all-to-all; unless fixed, each rank chooses replicas for itself (#32962)."""
    torch.manual_seed(rank)
    look_in_every_pass()
    made = make_rank(rank, config, ep_dispatch_algorithm="dynamic", moe_a2a_backend="none")
    if not is_fixed:  # once the plug-in is loaded: it refuses what another package has replaced
        info = expert_location_dispatch.ExpertLocationDispatchInfo
        right = info.init_new.__func__

        def before_the_fix(cls: Any, *args: Any, **given: Any) -> Any:
            found = right(cls, *args, **given)
            found.rank_invariant = False
            return found

        info.init_new = classmethod(before_the_fix)
    before = error_of(made)
    made.until_maps(2)
    made.until(lambda: made.plugin._checked == made.generation)
    return made.result() | {"errors": [before, error_of(made)]}


@pytest.mark.parametrize("is_fixed", [True, False], ids=["as released", "before the fix"])
def test_wrong_choices_of_replicas_are_found_where_outputs_differ(
    is_fixed: bool, tmp_path: Path
) -> None:
    for found in on_ranks(shared, config_in(tmp_path), is_fixed):
        if is_fixed:
            assert (max(found["errors"]) < 1e-6, found["faults"]) == (True, [])
            continue
        assert min(found["errors"]) > 0.01, "no error is raised, and the output is wrong"
        assert any("without an all-to-all ranks add" in str(fault) for fault in found["faults"])
        assert found["placement"] == 0.0
