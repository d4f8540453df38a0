"""Experts that ranks have lost, or that peers send wrong, come from the records of the load."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from rebalance.engines.common.fsck.report import report_of
from telemetry import open_store
from tests.support.engines.installed import engine
from tests.support.engines.ranks import (
    NAME,
    NUM_RANKS,
    config_with_records,
    host_cache,
    look_in_every_pass,
    on_ranks,
    settings_in,
)

LOST_RANK, LOST_LAYER = 1, 2
pytestmark = pytest.mark.slow


def num_from_host(found: list[dict[str, Any]]) -> int:
    return sum(one["from host"] for one in found)


def lost(rank: int, config: Path, is_damaged: bool) -> dict[str, Any]:
    """Before anything moves, a rank loses all its experts of a layer, the only ones of some."""
    made = engine.make_rank(rank, config)
    made.steps()
    if rank == LOST_RANK:
        made.lose(LOST_LAYER)
    if is_damaged and made.kept.server is not None:
        made.kept.server.server.arena.bytes[:] ^= 1
    made.until_maps(6, is_checked=rank != LOST_RANK)
    if engine.NAME == "sglang":  # its ranks compare all slots of a row, those of vLLM what they get
        made.check_weights()
    return made.result()


@pytest.mark.parametrize(
    ("disk", "is_damaged"),
    [(False, False), (True, False), (True, True)],
    ids=["memory", "disk", "damaged memory"],
)
def test_experts_that_a_rank_has_lost_come_from_kept_records(
    disk: bool, is_damaged: bool, tmp_path: Path
) -> None:
    found = on_ranks(lost, config_with_records(tmp_path, disk=disk), is_damaged)

    assert num_from_host(found) > 0
    assert [one["records"] for one in found] == [1.0] * NUM_RANKS
    assert (sum(one["from disk"] for one in found) > 0) == is_damaged
    assert not any(one.get("unchecked") for one in found)


def repaired(rank: int, config: Path) -> dict[str, Any]:
    """Two live slots get a wrong byte, while the placement check looks at a slot in each pass."""
    look_in_every_pass()
    made = engine.make_rank(rank, config, **engine.WITH_TASKS_ALONE)
    while made.checks is None:
        made.steps()
    if rank == LOST_RANK:
        for slot in (1, 3):
            made.layers[LOST_LAYER][0][slot, 5] += 1
        while made.checks.faults or not made.kept.figures.bytes_by_source.get("host"):
            made.checks.visit(is_idle=True)
    dist.barrier()  # the first rank of the host has the records
    made.check_weights()
    made.visit_all()
    return made.result()


def test_slots_that_the_check_finds_damaged_are_repaired_without_a_map(tmp_path: Path) -> None:
    config = config_with_records(tmp_path)
    found = on_ranks(repaired, config)

    assert [one["from host"] > 0 for one in found] == [False, True, False, False]
    assert [(one["faults"], one["placement"]) for one in found] == [([], 1.0)] * NUM_RANKS
    with closing(open_store(settings_in(config).deployment.store, NAME)) as store:
        report = report_of(store)
    assert (report.faults, report.num_repaired) == ((), 2)


def replaced(rank: int, config: Path) -> dict[str, Any]:
    """All weights are replaced while they serve, as a trainer does; no slot gets the old ones."""
    made = engine.make_rank(rank, config)
    made.until_maps(2)
    for tensors in made.layers.values():
        for tensor in tensors:
            tensor += 1
    made.until_maps(4, added=1)
    return made.result()


def test_records_of_replaced_weights_are_never_used(tmp_path: Path) -> None:
    found = on_ranks(replaced, config_with_records(tmp_path))

    assert [one["records"] for one in found] == [0.0] * NUM_RANKS


def started(rank: int, config: Path) -> dict[str, Any]:
    made = engine.make_rank(rank, config)
    made.steps(2)
    return made.result()


def test_second_start_finds_the_records_on_the_disk(tmp_path: Path) -> None:
    config = config_with_records(tmp_path)
    first, second = on_ranks(started, config), on_ranks(started, config)

    assert sum(one["offered"] for one in first) > 0
    assert sum(one["offered"] for one in second) == 0
    assert [one["records"] for one in second] == [1.0] * NUM_RANKS


def test_rank_that_cannot_keep_records_leaves_all_ranks_without(tmp_path: Path) -> None:
    config = config_with_records(tmp_path)
    (tmp_path / "records").write_text("no folder")

    assert [one["records"] for one in on_ranks(started, config)] == [0.0] * NUM_RANKS


def test_without_a_host_cache_ranks_keep_records_only_when_asked_to(tmp_path: Path) -> None:
    found = on_ranks(started, config_with_records(tmp_path, "auto"))

    assert [one["records"] for one in found] == [0.0] * NUM_RANKS


def hundred(rank: int, config: Path, way: dict[str, Any], fault: str) -> dict[str, Any]:
    """A hundred maps, from the third on with a fault of a peer, or with no transfer at all."""
    made = engine.make_rank(rank, config, **way)
    made.until_maps(2)
    if rank == LOST_RANK and fault == "damaged peer":
        engine.damage_each_fifth()
    elif fault == "no transfer":
        engine.transfer_nothing()
    made.until_maps(98)
    return made.result()


FAULTS = {
    "vllm": [
        (way, fault)
        for way in ("sync", "async", "sync nccl", "async nccl")
        for fault in ("", "damaged peer", "no transfer")
    ],
    "sglang": [("static", ""), ("static", "damaged peer")],
}


@pytest.mark.parametrize(("way", "fault"), FAULTS[engine.NAME])
def test_hundred_maps_with_a_fault_move_no_wrong_byte(way: str, fault: str, tmp_path: Path) -> None:
    config = config_with_records(tmp_path, "auto")
    with host_cache(config):
        found = on_ranks(hundred, config, engine.WAYS[way][0], fault)

    assert [one["records"] for one in found] == [1.0] * NUM_RANKS
    assert not any(one.get("unchecked") for one in found)
    if engine.NAME == "sglang":
        assert (num_from_host(found) > 0) == (fault == "damaged peer")
        return
    # The slots that vLLM has copied from have the right bytes still.
    assert num_from_host(found) == 0
    assert (sum(one["wrong"] for one in found) > 0) == bool(fault)
    assert sum(one["checked"] for one in found) > 0
    assert [one["mover"] for one in found] == [1.0] * NUM_RANKS
