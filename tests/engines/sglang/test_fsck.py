"""The placement check in SGLang's real balancer: planted faults are found, right maps have none."""

from __future__ import annotations

from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("sglang") is None:
    pytest.skip(
        "run `make test-engines`: it has sglang 0.5.23 in .venv-sglang", allow_module_level=True
    )

# First: the engine imports torchvision.
import tests.support.engines.cpu_torchvision  # noqa: F401  # isort: skip
import numpy as np
import torch
import torch.distributed as dist
from sglang.srt.eplb import expert_location_dispatch

from rebalance.engines.common.fsck import check
from rebalance.engines.common.gauge import value_of
from telemetry import open_store
from tests.support.engines.sglang_ranks import (
    DENSE,
    INTERVAL,
    NUM_EXPERTS,
    NUM_LAYERS,
    NUM_RANKS,
    NUM_SLOTS,
    config_text,
    make_rank,
    on_ranks,
    popularity_of,
)

pytestmark = pytest.mark.slow
EACH = NUM_SLOTS // NUM_RANKS
MOE = [layer for layer in range(NUM_LAYERS) if layer not in DENSE]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "eplb.toml"
    file.write_text(config_text(f"sqlite:{tmp_path / 'store.sqlite'}"))
    return file


def until_maps(made: Any, times: int) -> None:
    """Step until so many maps were installed and checked."""
    last = made.rounds.generation + times
    while made.rounds.generation < last or made.rounds._checked < last:
        made.forward(popularity_of(made.passes // INTERVAL))
        assert not made.rounds.stopped, made.rounds.stopped


def result(made: Any) -> dict[str, Any]:
    """What is found: by the visits so far, and by a sweep."""
    visited, checked = list(made.rounds.checks.faults), made.rounds.checks.num_checked
    swept = made.rounds.checks.sweep()
    found = {
        "visited": [str(one) for one in visited],
        "checked": checked,
        "swept": sorted({(one.kind, one.row, one.slot, one.name) for one in swept}),
        "gauge": value_of("sglang", "placement"),
        "map": made.map.physical_to_logical_map.tolist(),
    }
    made.rounds.close()
    return found


def right(rank: int, config: Path) -> dict[str, Any]:
    check.PART = 1e6  # a slot in every pass
    made = make_rank(rank, config=config)
    until_maps(made, 5)
    return result(made)


def test_right_maps_have_no_fault(config: Path) -> None:
    for found in on_ranks(right, config):
        assert (found["visited"], found["swept"], found["gauge"]) == ([], [], 1.0)
        assert found["checked"] > 0, "slots were looked at between passes"


def lost_scales(rank: int, config: Path) -> dict[str, Any]:
    made = make_rank(rank, config=config, model={"forgets": True})
    until_maps(made, 3)
    return result(made)


def wrong_slots(rank: int, found: dict[str, Any], name: str) -> list[tuple[str, int, int, str]]:
    """Slots whose expert is not the one of the start."""
    held = np.array(found["map"])
    first = np.arange(NUM_SLOTS) % NUM_EXPERTS
    own = range(rank * EACH, (rank + 1) * EACH)
    return [
        ("slot", row, slot, name) for row in MOE for slot in own if held[row, slot] != first[slot]
    ]


def test_scales_that_a_rebalance_forgets_are_found_in_every_moved_slot(config: Path) -> None:
    found = on_ranks(lost_scales, config)

    for rank, one in enumerate(found):
        assert one["swept"] == wrong_slots(rank, one, "scale")
        assert one["gauge"] == float(not one["swept"])
    assert any(one["swept"] for one in found)


def reloaded(rank: int, config: Path) -> dict[str, Any]:
    """The loader puts weights where they were at the start, after they have moved."""
    made = make_rank(rank, config=config)
    first = made.map.physical_to_logical_map.clone()
    until_maps(made, 3)
    made.model.load(first)
    return result(made)


def test_reload_by_the_first_map_after_a_rebalance_is_found(config: Path, tmp_path: Path) -> None:
    found = on_ranks(reloaded, config)

    for rank, one in enumerate(found):
        both = wrong_slots(rank, one, "weight") + wrong_slots(rank, one, "scale")
        assert one["swept"] == sorted(both)
    with closing(open_store(f"sqlite:{tmp_path / 'store.sqlite'}", "test")) as store:
        events = [event for event in store.events() if event.kind == "placement_fault"]
    assert events, "an operator sees it in the store"
    assert "expected those of the expert that the map names" in str(events[0].detail["text"])


def own_factor(rank: int, config: Path) -> dict[str, Any]:
    made = make_rank(rank, config=config, model={"factor": 2.0 if rank == 2 else 1.0})
    until_maps(made, 1)
    return result(made)


def test_factor_of_one_rank_is_found_at_the_start(config: Path) -> None:
    for found in on_ranks(own_factor, config):
        assert len(found["visited"]) == len(MOE)
        assert "factor has another value on ranks [2] than on rank 0" in found["visited"][0]


def outputs(made: Any) -> torch.Tensor:
    """[L, N] what the layers add up to on all ranks, as without an all-to-all."""
    generator = torch.Generator().manual_seed(7)  # the same tokens on all ranks
    experts = torch.stack([torch.randperm(NUM_EXPERTS, generator=generator)[:2] for _ in range(64)])
    part = torch.rand((64, 2), generator=generator, dtype=torch.float64)
    found = torch.zeros((len(MOE), 64), dtype=torch.float64)
    for place, layer in enumerate(MOE):
        info = expert_location_dispatch.ExpertLocationDispatchInfo.init_new(layer)
        slots = expert_location_dispatch.topk_ids_logical_to_physical(experts, info)
        local = slots - made.rank * EACH
        weight = made.model.layers[place].weight.data.double().mean(dim=1)
        mine = (local >= 0) & (local < EACH)
        found[place] = (part * mine * weight[local.clamp(0, EACH - 1)]).sum(dim=1)
    dist.all_reduce(found)
    return found


def shared(rank: int, config: Path, is_fixed: bool) -> dict[str, Any]:
    """Without an all-to-all; unless fixed, each rank chooses replicas for itself (#32962)."""
    flags = {"ep_dispatch_algorithm": "dynamic", "moe_a2a_backend": "none"}
    if not is_fixed:
        info = expert_location_dispatch.ExpertLocationDispatchInfo
        right = info.init_new.__func__

        def before_the_fix(cls: Any, *args: Any, **given: Any) -> Any:
            found = right(cls, *args, **given)
            found.rank_invariant = False
            return found

        info.init_new = classmethod(before_the_fix)
    torch.manual_seed(rank)
    made = make_rank(rank, config=config, **flags)
    expected = torch.zeros((len(MOE), 64), dtype=torch.float64)
    generator = torch.Generator().manual_seed(7)
    experts = torch.stack([torch.randperm(NUM_EXPERTS, generator=generator)[:2] for _ in range(64)])
    part = torch.rand((64, 2), generator=generator, dtype=torch.float64)
    from tests.support.engines.sglang_ranks import weights_of

    for place, layer in enumerate(MOE):
        means = torch.stack([weights_of(layer, one)[0].mean() for one in range(NUM_EXPERTS)])
        expected[place] = (part * means.double()[experts]).sum(dim=1)
    before = outputs(made)
    until_maps(made, 2)
    after = outputs(made)
    wrong = [float((one - expected).abs().max() / expected.abs().max()) for one in (before, after)]
    return result(made) | {"wrong": wrong}


def test_logits_stay_where_ranks_choose_alike(config: Path) -> None:
    for found in on_ranks(shared, config, True):
        assert max(found["wrong"]) < 1e-6
        assert found["visited"] == []


def test_wrong_path_of_redundant_experts_is_found_where_logits_differ(config: Path) -> None:
    found = on_ranks(shared, config, False)

    assert all(min(one["wrong"]) > 0.01 for one in found), "no error, and wrong logits"
    for one in found:
        assert any("without an all-to-all ranks add their parts" in it for it in one["visited"])
        assert one["gauge"] == 0.0
