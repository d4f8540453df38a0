"""Experts that the ranks of SGLang have lost come from the records kept at the load."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

if find_spec("sglang") is None:
    pytest.skip(
        "run `make test-engines`: it has sglang 0.5.23 in .venv-sglang", allow_module_level=True
    )

from rebalance.engines.common.fsck import check
from rebalance.engines.common.fsck.report import report_of
from rebalance.engines.common.gauge import value_of
from rebalance.weights.cache.address import place_of_records
from rebalance.weights.cache.cache_settings import HostCacheSettings
from rebalance.weights.cache.engine_records import EngineRecords
from rebalance.weights.link.secret import Secret
from telemetry import open_store
from tests.support.engines.sglang_ranks import (
    NUM_RANKS,
    NUM_SLOTS,
    config_text,
    make_rank,
    on_ranks,
    popularity_of,
    weights_of,
)
from tests.support.processes import ForkedProcess

SECRET = "0123456789abcdef"
NAME = f"records-{os.getpid()}"  # no other test on this machine has it
LOST_RANK, LOST_LAYER, EACH = 1, 2, NUM_SLOTS // NUM_RANKS
pytestmark = pytest.mark.slow


def config_in(folder: Path, records: str = "on") -> Path:
    """The file of a deployment with records in memory and in a folder."""
    (folder / "secret").write_text(SECRET)
    (folder / "secret").chmod(0o600)
    text = config_text(f"sqlite:{folder / 'store.sqlite'}", records=f'"{records}"')
    file = folder / "eplb.toml"
    file.write_text(
        text.replace('name = "test"', f'name = "{NAME}"')
        + f'[host_cache]\nrecord_folder = "{folder / "records"}"\n'
        + f'[network]\nsecret_file = "{folder / "secret"}"\n'
    )
    return file


@contextmanager
def host_cache(folder: Path) -> Iterator[None]:
    """What ``eplb host-cache`` runs, in a process of its own."""

    def run(pipe: Any) -> None:
        place = place_of_records(NAME, Secret(SECRET.encode(), is_given=True))
        settings = HostCacheSettings(record_folder=folder / "records")
        with closing(EngineRecords(place, settings)):
            pipe.send("ready")
            pipe.recv()

    process = ForkedProcess(run)
    try:
        assert process.receive() == "ready"
        yield
    finally:
        process.kill()


def steps(made: Any, maps: int, *, is_checked: bool = True) -> None:
    """Step until so many further maps were installed."""
    first = made.rounds.generation
    while made.rounds.generation - first < maps:
        made.forward(popularity_of(made.rounds.generation - first))
        if is_checked:
            made.check_weights()
        assert not made.rounds.stopped, made.rounds.stopped


def result(made: Any) -> dict[str, Any]:
    kept = made.rounds.kept
    found = {
        "from": {} if kept is None else kept.records.bytes_by_source,
        "offered": 0 if kept is None or kept.server is None else kept.server.stats().bytes_offered,
        "file": 0
        if kept is None or kept.server is None
        else kept.server.stats().bytes_from_record_file,
        "records": value_of("sglang", "records"),
        "faults": []
        if made.rounds.checks is None
        else [str(it) for it in made.rounds.checks.faults],
        "placement": value_of("sglang", "placement"),
    }
    made.rounds.close()
    return found


def num_from_host(found: list[dict[str, Any]]) -> int:
    return sum(one["from"].get("host", 0) for one in found)


def lost(rank: int, config: Path, damaged: bool) -> dict[str, Any]:
    """Before anything moves, a rank loses all its experts of a layer, the only ones of some."""
    made = make_rank(rank, config=config)
    made.forward(popularity_of(0))
    if rank == LOST_RANK:
        for tensor in made.model.routed_experts_weights_of_layer[LOST_LAYER]:
            tensor.zero_()
    if damaged and made.rounds.kept.server is not None:
        made.rounds.kept.server.arena.bytes[:] ^= 1
    steps(made, 1, is_checked=rank != LOST_RANK)
    made.check_weights()
    steps(made, 5)
    return result(made)


@pytest.mark.parametrize("damaged", [False, True], ids=["memory", "disk"])
def test_experts_that_a_rank_has_lost_come_from_kept_records_with_the_next_map(
    damaged: bool, tmp_path: Path
) -> None:
    found = on_ranks(lost, config_in(tmp_path), damaged)

    assert num_from_host(found) > 0
    assert [one["records"] for one in found] == [1.0] * NUM_RANKS
    assert (sum(one["file"] for one in found) > 0) == damaged


def repaired(rank: int, config: Path) -> dict[str, Any]:
    """A slot gets a wrong byte, while the placement check looks at a slot in each pass."""
    check.PART = 1e6
    made = make_rank(rank, config=config, eplb_rebalance_num_iterations=10**6)
    while made.rounds.checks is None:
        made.forward(popularity_of(0))
    if rank == LOST_RANK:
        made.model.routed_experts_weights_of_layer[LOST_LAYER][0][3, 5] += 1
    is_right = False
    while not is_right:
        made.forward(popularity_of(0))
        wrong = torch.tensor(int(not seems_right(made)))
        dist.all_reduce(wrong)
        is_right = not wrong.item()
    for _ in range(2 * len(made.model.layers) * EACH):  # every slot is looked at once more
        made.rounds.checks.visit(is_idle=True)
    return result(made)


def seems_right(made: Any) -> bool:
    try:
        made.check_weights()
    except AssertionError:
        return False
    return True


def test_slot_that_the_check_finds_damaged_is_repaired_without_a_map(tmp_path: Path) -> None:
    found = on_ranks(repaired, config_in(tmp_path))

    assert [one["from"].get("host", 0) > 0 for one in found] == [False, True, False, False]
    assert [(one["faults"], one["placement"]) for one in found] == [([], 1.0)] * NUM_RANKS
    with closing(open_store(f"sqlite:{tmp_path / 'store.sqlite'}", NAME)) as store:
        report = report_of(store)
    assert (report.faults, report.num_repaired) == ((), 1)
    assert sorted(report.parts) == list(range(NUM_RANKS)), "each rank says which parts are off"


def replaced(rank: int, config: Path) -> dict[str, Any]:
    """All weights are replaced while they serve, as a trainer does."""
    made = make_rank(rank, config=config)
    steps(made, 1)
    for tensors in made.model.routed_experts_weights_of_layer.values():
        tensors[0] += 1
    steps(made, 3, is_checked=False)
    held = made.map.physical_to_logical_map
    for layer, tensors in made.model.routed_experts_weights_of_layer.items():
        for slot, one in enumerate(tensors[0]):
            expert = int(held[layer, rank * EACH + slot])
            assert torch.equal(one, weights_of(layer, expert)[0] + 1)
    return result(made)


def test_records_of_replaced_weights_are_never_used(tmp_path: Path) -> None:
    found = on_ranks(replaced, config_in(tmp_path))

    assert num_from_host(found) == 0
    assert [one["records"] for one in found] == [0.0] * NUM_RANKS


def started(rank: int, config: Path) -> dict[str, Any]:
    made = make_rank(rank, config=config)
    made.forward(popularity_of(0))
    return result(made)


def test_rank_that_cannot_keep_records_leaves_all_ranks_without(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    (tmp_path / "records").write_text("no folder")

    assert [one["records"] for one in on_ranks(started, config)] == [0.0] * NUM_RANKS


def test_second_start_finds_the_records_on_the_disk(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    first, second = on_ranks(started, config), on_ranks(started, config)

    assert sum(one["offered"] for one in first) > 0
    assert sum(one["offered"] for one in second) == 0
    assert [one["records"] for one in second] == [1.0] * NUM_RANKS


def hundred(rank: int, config: Path, is_damaged: bool) -> dict[str, Any]:
    """A hundred maps; weights are compared after each pass."""
    made = make_rank(rank, config=config)
    steps(made, 2)
    if rank == LOST_RANK and is_damaged:
        damage_each_fifth()
    steps(made, 98)
    return result(made)


def damage_each_fifth() -> None:
    """From now on every fifth tensor that this rank sends to a peer has a wrong byte."""
    exchange, sent = dist.batch_isend_irecv, []

    def damaged(operations: list[Any]) -> Any:
        for one in operations:
            if one.op is dist.isend:
                sent.append(one)
                if len(sent) % 5 == 0:
                    one.tensor = one.tensor.clone()
                    one.tensor.view(-1)[0] += 1
        return exchange(operations)

    dist.batch_isend_irecv = damaged


@pytest.mark.parametrize("is_damaged", [False, True], ids=["right peers", "damaged peer"])
def test_hundred_maps_with_the_host_cache_of_a_process_leave_no_wrong_byte(
    is_damaged: bool, tmp_path: Path
) -> None:
    config = config_in(tmp_path, "auto")
    with host_cache(tmp_path):
        found = on_ranks(hundred, config, is_damaged)

    assert [one["records"] for one in found] == [1.0] * NUM_RANKS
    assert (num_from_host(found) > 0) == is_damaged


def test_without_a_host_cache_ranks_keep_records_only_when_asked_to(tmp_path: Path) -> None:
    found = on_ranks(started, config_in(tmp_path, "auto"))

    assert [one["records"] for one in found] == [0.0] * NUM_RANKS
