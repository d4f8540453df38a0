"""The placement check in vLLM's real balancer finds planted faults; ``test_contract`` has none."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="run `make test-engines`: it has vllm 0.33.0 in .venv-vllm")

from rebalance.engines.common.fsck import check
from rebalance.engines.common.fsck.report import Report, report_of
from rebalance.engines.common.gauge import value_of
from telemetry import open_store
from tests.support.engines.vllm_ranks import (
    NUM_EXPERTS,
    NUM_LAYERS,
    NUM_RANKS,
    NUM_SLOTS,
    make_rank,
    on_ranks,
    popularity_of,
    settings_for,
    weights_of,
)

pytestmark = pytest.mark.slow
INTERVAL, EACH = 8, NUM_SLOTS // NUM_RANKS
FIRST = np.arange(NUM_SLOTS) % NUM_EXPERTS  # the map of the start, on all layers
LAYER, SLOT, RANK = 2, 10, 1  # of the wrong slot, the slot by the numbers of all ranks
REPLICA = 18  # of expert 2, on rank 3; the other one is in slot 2


def started(rank: int, meet: Path, store: str, prepare: Any = None) -> Any:
    """A rank after some maps, which looks at a slot in each step."""
    check.PART = 1e6
    made = make_rank(
        rank, meet, settings_for(store), is_async=False, interval=INTERVAL, prepare=prepare
    )
    for step in range(4 * INTERVAL):
        made.forward(step, popularity_of(step // INTERVAL))
        made.state.step()
    return made


def result(made: Any) -> dict[str, Any]:
    """What visits to each slot find, as the ranks report it."""
    checks = made.process.checks
    for _ in range(2 * NUM_LAYERS * EACH):  # one looks, the next one judges
        checks.visit(is_idle=True)
    found = {
        "faults": {(one.kind, one.row, one.slot, one.name) for one in checks.faults},
        "gauge": value_of("vllm", "placement"),
        "status": len(checks.faults),
        "map": made.model_state.physical_to_logical_map.tolist(),
    }
    assert made.process.recorder.close(20), "the recorder ended"
    return found


def reported(store: str) -> Report:
    """What ``eplb fsck`` prints."""
    with closing(open_store(store, "contract")) as opened:
        return report_of(opened)


def wrong_slot(rank: int, meet: Path, store: str) -> dict[str, Any]:
    """One slot gets the tensors of another expert, after some maps."""
    made = started(rank, meet, store)
    if rank == RANK:
        held = int(made.model_state.physical_to_logical_map[LAYER, SLOT])
        other = weights_of(LAYER, (held + 5) % NUM_EXPERTS)
        for tensor, record in zip(made.model.expert_weights[LAYER], other, strict=True):
            tensor[SLOT - RANK * EACH] = record
    return result(made)


def test_slot_with_another_expert_is_found_and_reported(tmp_path: Path) -> None:
    url = f"sqlite:{tmp_path / 'store.sqlite'}"
    found = on_ranks(wrong_slot, url)

    planted = {("slot", LAYER, SLOT, "wide"), ("slot", LAYER, SLOT, "scales")}
    assert [one["faults"] for one in found] == [set(), planted, set(), set()]
    assert [one["gauge"] for one in found] == [1.0, 0.0, 1.0, 1.0]
    assert [one["status"] for one in found] == [0, 2, 0, 0]
    report = reported(url)
    expert = found[RANK]["map"][LAYER][SLOT]
    other = (expert + 5) % NUM_EXPERTS
    assert report.ranks == dict.fromkeys(range(NUM_RANKS), "")
    assert min(report.rounds.values()) >= 1
    assert report.faults[0] == (
        f"rank {RANK}: layer {LAYER} slot {SLOT} expert {expert}: wide has the bytes of expert "
        f"{other}, expected those of the expert that the map names"
    )
    assert report.lines[-1] == "2 faults"


def lost_scales(rank: int, meet: Path, store: str) -> dict[str, Any]:
    """The layers have a factor of each slot that vLLM is not told to move."""

    def derived(rank: int, layers: list[Any]) -> None:
        own = torch.from_numpy(FIRST[rank * EACH : (rank + 1) * EACH])
        for layer in layers:
            layer.alpha = own / 7.0 + 1.0

    return result(started(rank, meet, store, derived))


def test_scale_that_vllm_does_not_move_is_found_in_every_moved_slot(tmp_path: Path) -> None:
    found = on_ranks(lost_scales, f"sqlite:{tmp_path / 'store.sqlite'}")

    moved = np.argwhere(np.array(found[0]["map"]) != FIRST).tolist()
    assert moved, "plans have moved experts"
    for rank, one in enumerate(found):
        wrong = {(row, slot) for _, row, slot, _ in one["faults"]}
        assert wrong >= {(row, slot) for row, slot in moved if slot // EACH == rank}
        assert {(kind, name) for kind, _, _, name in one["faults"]} <= {("slot", "alpha")}


def unlike_replicas(rank: int, meet: Path, store: str) -> dict[str, Any]:
    """One replica was loaded with a wrong byte."""

    def loaded(rank: int, layers: list[Any]) -> None:
        if rank == REPLICA // EACH:
            layers[LAYER].scales[REPLICA % EACH, 3] += 1

    return result(started(rank, meet, store, loaded))


def test_replicas_that_differ_are_found_at_the_start(tmp_path: Path) -> None:
    url = f"sqlite:{tmp_path / 'store.sqlite'}"
    found = on_ranks(unlike_replicas, url)

    assert all(one["faults"] == {("replicas", LAYER, REPLICA, "scales")} for one in found)
    assert all(one["gauge"] == 0.0 for one in found)
    assert "differs from the replica in slot 2, expected the same bytes" in reported(url).faults[0]


def without_weights(rank: int, meet: Path, store: str) -> dict[str, Any]:
    """On one rank the layers have no modules to look into."""

    def hidden(rank: int, layers: list[Any]) -> None:
        if rank == RANK:
            layers[0].named_modules = None

    return result(started(rank, meet, store, hidden))


def test_rank_that_cannot_check_switches_the_check_off_on_all(tmp_path: Path) -> None:
    url = f"sqlite:{tmp_path / 'store.sqlite'}"
    found = on_ranks(without_weights, url)

    assert [(one["faults"], one["gauge"]) for one in found] == [(set(), 0.0)] * NUM_RANKS
    assert all(why.startswith(f"rank {RANK}: ") for why in reported(url).ranks.values())
