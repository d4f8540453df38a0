"""Wrong entries of vLLM's maps on the device are found, and named, before the next commit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engines.ranks import (
    NUM_EXPERTS,
    NUM_RANKS,
    NUM_SLOTS,
    config_in,
    look_in_every_pass,
    on_ranks,
)
from tests.support.engines.vllm_ranks import make_rank

pytestmark = pytest.mark.slow
LAYER, SLOT, RANK = 1, 7, 2


def planted(rank: int, config: Path, fault: str) -> list[tuple[str, int, int, int]]:
    """After some maps one rank has a wrong entry; what its check finds."""
    look_in_every_pass()
    made = make_rank(rank, config)
    made.until_maps(3)
    state, expert = made.model_state, int(made.held[LAYER, SLOT])
    if rank == RANK:
        other = (expert + 1) % NUM_EXPERTS
        if fault == "map":
            state.physical_to_logical_map[LAYER, SLOT] = other
        elif fault == "count":
            state.logical_replica_count[LAYER, expert] += 1
        else:
            slot = int((made.held[LAYER] == other).argmax())
            state.logical_to_physical_map[LAYER, expert, 0] = slot
    made.visit_all()
    return [(it.kind, it.row, it.slot, it.expert) for it in made.result()["faults"]]


@pytest.mark.parametrize("fault", ["map", "list", "count"])
def test_wrong_entry_of_a_device_map_is_found_on_its_rank(fault: str, tmp_path: Path) -> None:
    found = on_ranks(planted, config_in(tmp_path), fault)

    assert [bool(one) for one in found] == [rank == RANK for rank in range(NUM_RANKS)]
    assert {row for _, row, _, _ in found[RANK]} == {LAYER}
    if fault == "map":
        assert [(kind, slot) for kind, _, slot, _ in found[RANK]] == [("map", SLOT)]
    else:
        assert {kind for kind, *_ in found[RANK]} == {"list"}
        assert any(0 <= expert < NUM_EXPERTS for *_, expert in found[RANK])
        assert all(slot < NUM_SLOTS for _, _, slot, _ in found[RANK])
