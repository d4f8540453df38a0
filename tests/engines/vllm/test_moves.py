"""Experts that peers have lost, or send late, come from the records that were kept at the load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="run `make test-engines`: it has vllm 0.33.0 in .venv-vllm")

import torch.distributed as dist

from rebalance.engines.gauge import value_of
from rebalance.engines.vllm.moves import mover as mover_module
from tests.support.engines.vllm_ranks import (
    NUM_LAYERS,
    NUM_RANKS,
    make_rank,
    on_ranks,
    popularity_of,
    settings_for,
)

INTERVAL, LOST_RANK, LOST_LAYER = 8, 1, 2
GB = 0.001  # of a rank: more than its records, which have a page each
pytestmark = pytest.mark.slow


def started(rank: int, meet: Path, folder: Path, **engine: Any) -> Any:
    settings = settings_for(f"sqlite:{folder / 'store.sqlite'}", **engine)
    return make_rank(rank, meet, settings, is_async=False, interval=INTERVAL)


def steps(made: Any, intervals: int, *, first: int = 0, **checked: Any) -> None:
    for step in range(first * INTERVAL, (first + intervals) * INTERVAL):
        made.forward(step, popularity_of(step // INTERVAL))
        made.state.step()
        if checked["is_checked"]:
            made.check_weights(checked.get("added", 0))


def result(made: Any) -> dict[str, Any]:
    mover = made.model_state.communicator
    return {
        "from": dict(mover.num_from),
        "repeated": mover.num_repeated,
        "records": value_of("vllm", "records"),
        "mover": value_of("vllm", "mover"),
    }


def lost(rank: int, meet: Path, folder: Path, damaged: str, engine: Any) -> dict[str, Any]:
    """Before anything moves, a rank loses all its experts of a layer."""
    made = started(rank, meet, folder, **engine)
    if rank == LOST_RANK:
        for tensor in made.model.expert_weights[LOST_LAYER]:
            tensor.zero_()
        records = made.model_state.communicator._records
        if damaged == "memory":
            records._arena.bytes[:] ^= 1
    steps(made, 6, is_checked=rank != LOST_RANK)
    return result(made)


@pytest.mark.parametrize(
    ("kept_in", "damaged", "place"),
    [("memory", "", "memory"), ("disk", "", "disk"), ("both", "memory", "disk")],
)
def test_experts_that_a_rank_has_lost_come_from_kept_records(
    kept_in: str, damaged: str, place: str, tmp_path: Path
) -> None:
    engine: dict[str, Any] = {"records_gb": GB if kept_in != "disk" else 0.0}
    engine["records_dir"] = str(tmp_path / "records") if kept_in != "memory" else ""
    found = on_ranks(lost, tmp_path, damaged, engine)

    used = {name: sum(one["from"][name] for one in found) for name in ("memory", "disk")}
    assert used[place] > 0
    assert sum(used.values()) == used[place]
    assert [one["repeated"] for one in found] == [0] * NUM_RANKS
    assert [one["records"] for one in found] == [1.0] * NUM_RANKS


def without_records(rank: int, meet: Path, folder: Path) -> dict[str, Any]:
    """The same loss, and no records."""
    made = started(rank, meet, folder)
    steps(made, 2, is_checked=True)
    if rank == LOST_RANK:
        for tensor in made.model.expert_weights[LOST_LAYER]:
            tensor.zero_()
    steps(made, 8, first=2, is_checked=False)
    return result(made)


def test_lost_experts_without_records_are_left_to_vllm_on_all_ranks(tmp_path: Path) -> None:
    found = on_ranks(without_records, tmp_path)

    assert found[0]["repeated"] > 0
    assert len({one["repeated"] for one in found}) == 1
    assert [one["from"] for one in found] == [{"memory": 0, "disk": 0}] * NUM_RANKS


def silent(rank: int, meet: Path, folder: Path) -> dict[str, Any]:
    """A rank neither sends nor receives records any more; what vLLM exchanges itself arrives."""
    mover_module.PEER_DEADLINE_S = 2.0
    made = started(rank, meet, folder, records_gb=GB)
    steps(made, 2, is_checked=True)
    if rank == LOST_RANK:
        dist.batch_isend_irecv = lambda operations: []
    steps(made, 4, first=2, is_checked=True)
    return result(made)


def test_late_peer_is_replaced_by_records_and_asked_no_more(tmp_path: Path) -> None:
    found = on_ranks(silent, tmp_path)

    assert all(one["from"]["memory"] > 0 for one in found)
    assert [one["repeated"] for one in found] == [0] * NUM_RANKS
    assert [one["mover"] for one in found] == [0.0] * NUM_RANKS


def replaced(rank: int, meet: Path, folder: Path) -> dict[str, Any]:
    """All weights are replaced while they serve, as a trainer does."""
    made = started(rank, meet, folder, records_gb=GB)
    steps(made, 2, is_checked=True)
    for layer in made.model.expert_weights:
        for tensor in layer:
            tensor += 1
    steps(made, 4, first=2, is_checked=True, added=1)
    return result(made)


def test_records_of_replaced_weights_are_never_used(tmp_path: Path) -> None:
    found = on_ranks(replaced, tmp_path)

    assert [one["from"] for one in found] == [{"memory": 0, "disk": 0}] * NUM_RANKS
    assert [one["records"] for one in found] == [0.0] * NUM_RANKS
    assert 0 < found[0]["repeated"] <= NUM_LAYERS


def written(rank: int, meet: Path, folder: Path, blocked: str) -> dict[str, Any]:
    """What the load writes to the disk; a rank may have none."""
    records = folder / "records"
    if blocked and rank == 0:
        records.mkdir()
        (records / f"contract-0-{NUM_RANKS - 1}-{NUM_RANKS}-rank-0002.records").mkdir()
    made = started(rank, meet, folder, records_dir=str(records))
    steps(made, 2, is_checked=True)
    kept = made.model_state.communicator._records
    return result(made) | {"written": -1 if kept is None else kept.num_written}


def test_second_start_finds_the_records_on_the_disk(tmp_path: Path) -> None:
    first, second = on_ranks(written, tmp_path, ""), on_ranks(written, tmp_path, "")

    assert sum(one["written"] for one in first) > 0
    assert [one["written"] for one in second] == [0] * NUM_RANKS


def test_rank_that_cannot_keep_records_leaves_all_ranks_without(tmp_path: Path) -> None:
    found = on_ranks(written, tmp_path, "blocked")

    assert [one["written"] for one in found] == [-1] * NUM_RANKS
    assert [one["records"] for one in found] == [0.0] * NUM_RANKS
    assert [one["repeated"] for one in found] == [0] * NUM_RANKS
