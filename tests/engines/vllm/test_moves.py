"""Experts that peers have lost, or send late or wrong, come from the records kept at the load."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

pytest.importorskip("vllm", reason="run `make test-engines`: it has vllm 0.33.0 in .venv-vllm")

from rebalance.engines.common.fsck import check
from rebalance.engines.common.gauge import value_of
from rebalance.engines.vllm import mover as mover_module
from rebalance.weights.cache.address import place_of_records
from rebalance.weights.cache.cache_settings import HostCacheSettings
from rebalance.weights.cache.engine_records import EngineRecords
from rebalance.weights.link.secret import Secret
from tests.support.engines.vllm_ranks import (
    NUM_LAYERS,
    NUM_RANKS,
    make_rank,
    on_ranks,
    popularity_of,
    replace,
    settings_for,
)
from tests.support.processes import ForkedProcess

INTERVAL, LOST_RANK, LOST_LAYER = 8, 1, 2
SECRET = "0123456789abcdef"
pytestmark = pytest.mark.slow


def settings_in(folder: Path, *, disk: bool = False, **engine: Any) -> Any:
    """Settings of a deployment in a folder, whose name no other test has on this machine."""
    records = folder / "records" if disk else None
    (folder / "secret").write_text(SECRET)
    (folder / "secret").chmod(0o600)
    settings = settings_for(f"sqlite:{folder / 'store.sqlite'}", **{"records": "on"} | engine)
    return replace(
        settings,
        deployment=f"moves-{os.getpid()}",
        host_cache=HostCacheSettings(record_folder=records),
        secret_file=folder / "secret",
    )


@contextmanager
def host_cache(settings: Any) -> Iterator[None]:
    """What ``eplb host-cache`` runs, in a process of its own."""

    def run(pipe: Any) -> None:
        secret = Secret(SECRET.encode(), is_given=True)
        place = place_of_records(settings.deployment, secret)
        with closing(EngineRecords(place, settings.host_cache)):
            pipe.send("ready")
            pipe.recv()

    process = ForkedProcess(run)
    try:
        assert process.receive() == "ready"
        yield
    finally:
        process.kill()


def started(rank: int, meet: Path, settings: Any, *, is_async: bool = False) -> Any:
    return make_rank(rank, meet, settings, is_async=is_async, interval=INTERVAL)


def steps(made: Any, intervals: int, *, first: int = 0, **checked: Any) -> None:
    for step in range(first * INTERVAL, (first + intervals) * INTERVAL):
        made.forward(step, popularity_of(step // INTERVAL))
        made.state.step()
        if checked["is_checked"]:
            made.check_weights(checked.get("added", 0))


def result(made: Any) -> dict[str, Any]:
    """What the mover of a rank did; bytes by source are of kept records."""
    mover, kept = made.model_state.communicator, made.process.kept
    server = None if kept is None else kept.server
    return {
        "from": {} if kept is None else kept.records.bytes_by_source,
        "server": None if server is None else server.stats(),
        "checked": mover.num_checked,
        "wrong": mover.num_wrong,
        "repeated": mover.num_repeated,
        "records": value_of("vllm", "records"),
        "mover": value_of("vllm", "mover"),
    }


def num_from_host(found: list[dict[str, Any]]) -> int:
    return sum(one["from"].get("host", 0) for one in found)


def lost(rank: int, meet: Path, settings: Any, damaged: str) -> dict[str, Any]:
    """Before anything moves, a rank loses all its experts of a layer."""
    made = started(rank, meet, settings)
    if rank == LOST_RANK:
        for tensor in made.model.expert_weights[LOST_LAYER]:
            tensor.zero_()
    server = made.process.kept.server
    if damaged and server is not None:
        server.arena.bytes[:] ^= 1
    steps(made, 6, is_checked=rank != LOST_RANK)
    return result(made)


@pytest.mark.parametrize(
    ("disk", "damaged"), [(False, ""), (True, ""), (True, "memory")], ids=["memory", "disk", "both"]
)
def test_experts_that_a_rank_has_lost_come_from_kept_records(
    disk: bool, damaged: str, tmp_path: Path
) -> None:
    found = on_ranks(lost, settings_in(tmp_path, disk=disk), damaged)

    assert num_from_host(found) > 0
    assert [one["repeated"] for one in found] == [0] * NUM_RANKS
    assert [one["records"] for one in found] == [1.0] * NUM_RANKS
    (server,) = [one["server"] for one in found if one["server"] is not None]
    assert (server.bytes_from_record_file > 0) == bool(damaged)


def test_lost_experts_without_records_are_left_to_vllm_on_all_ranks(tmp_path: Path) -> None:
    found = on_ranks(lost_later, settings_in(tmp_path, records="off"))

    assert found[0]["repeated"] > 0
    assert len({one["repeated"] for one in found}) == 1
    assert [one["from"] for one in found] == [{}] * NUM_RANKS


def lost_later(rank: int, meet: Path, settings: Any) -> dict[str, Any]:
    """The same loss, and no records."""
    made = started(rank, meet, settings)
    steps(made, 2, is_checked=True)
    if rank == LOST_RANK:
        for tensor in made.model.expert_weights[LOST_LAYER]:
            tensor.zero_()
    steps(made, 8, first=2, is_checked=False)
    return result(made)


def damaged_slot(rank: int, meet: Path, settings: Any) -> dict[str, Any]:
    """A live slot gets a wrong byte, while the placement check looks at a slot in each step."""
    check.PART = 1e6
    made = started(rank, meet, settings)
    steps(made, 2, is_checked=True)
    if rank == LOST_RANK:
        made.model.expert_weights[LOST_LAYER][0][3, 5] += 1
        checks = made.process.checks
        while not made.process.kept.records.bytes_by_source.get("host") or checks.faults:
            checks.visit(is_idle=True)
    dist.barrier()  # the first rank has the records
    made.check_weights()
    return result(made) | {"placement": value_of("vllm", "placement")}


def test_slot_that_the_check_finds_damaged_is_repaired_without_a_rebalance(tmp_path: Path) -> None:
    found = on_ranks(damaged_slot, settings_in(tmp_path))

    assert [one["from"].get("host", 0) > 0 for one in found] == [False, True, False, False]
    assert [one["placement"] for one in found] == [1.0] * NUM_RANKS


def silence() -> None:
    """From now on this rank neither sends nor receives; what vLLM gathers itself arrives."""
    from vllm.distributed.eplb import eplb_communicator

    eplb_communicator.batch_isend_irecv = lambda operations: []


def silent(rank: int, meet: Path, settings: Any) -> dict[str, Any]:
    mover_module.PEER_DEADLINE_S = 2.0
    made = started(rank, meet, settings)
    steps(made, 2, is_checked=True)
    if rank == LOST_RANK:
        silence()
    steps(made, 4, first=2, is_checked=True)
    return result(made)


def test_late_peer_is_replaced_by_records_and_asked_no_more(tmp_path: Path) -> None:
    found = on_ranks(silent, settings_in(tmp_path))

    assert all(one["from"]["host"] > 0 for one in found)
    assert [one["repeated"] for one in found] == [0] * NUM_RANKS
    assert [one["mover"] for one in found] == [0.0] * NUM_RANKS


def replaced(rank: int, meet: Path, settings: Any) -> dict[str, Any]:
    """All weights are replaced while they serve, as a trainer does."""
    made = started(rank, meet, settings)
    steps(made, 2, is_checked=True)
    for layer in made.model.expert_weights:
        for tensor in layer:
            tensor += 1
    steps(made, 4, first=2, is_checked=True, added=1)
    return result(made)


def test_records_of_replaced_weights_are_never_used(tmp_path: Path) -> None:
    found = on_ranks(replaced, settings_in(tmp_path))

    assert num_from_host(found) == 0
    assert [one["records"] for one in found] == [0.0] * NUM_RANKS
    assert 0 < found[0]["repeated"] <= NUM_LAYERS


def kept(rank: int, meet: Path, settings: Any) -> dict[str, Any]:
    """What the load keeps."""
    made = started(rank, meet, settings)
    steps(made, 2, is_checked=True)
    return result(made)


def test_second_start_finds_the_records_on_the_disk(tmp_path: Path) -> None:
    settings = settings_in(tmp_path, disk=True)
    first, second = on_ranks(kept, settings), on_ranks(kept, settings)

    assert sum(one["server"].bytes_offered for one in first if one["server"]) > 0
    assert sum(one["server"].bytes_offered for one in second if one["server"]) == 0
    assert [one["records"] for one in second] == [1.0] * NUM_RANKS


def test_rank_that_cannot_keep_records_leaves_all_ranks_without(tmp_path: Path) -> None:
    (tmp_path / "records").write_text("no folder")

    found = on_ranks(kept, settings_in(tmp_path, disk=True))

    assert [one["records"] for one in found] == [0.0] * NUM_RANKS
    assert [one["repeated"] for one in found] == [0] * NUM_RANKS


def test_without_a_host_cache_ranks_keep_records_only_when_asked_to(tmp_path: Path) -> None:
    found = on_ranks(kept, settings_in(tmp_path, records="auto"))

    assert [one["records"] for one in found] == [0.0] * NUM_RANKS


def hundred(rank: int, meet: Path, settings: Any, is_async: bool, fault: str) -> dict[str, Any]:
    """A hundred rebalances, from the third on with a fault of a peer or of the host's memory."""
    mover_module.PEER_DEADLINE_S = 2.0
    made = started(rank, meet, settings, is_async=is_async)
    steps(made, 2, is_checked=True)
    if rank == LOST_RANK and fault == "damaged peer":
        damage_each_fifth()
    elif rank == LOST_RANK and fault:
        silence()
    server = made.process.kept.server
    if fault == "damaged memory" and server is not None:
        server.arena.bytes[:] ^= 1
    steps(made, 98, first=2, is_checked=True)
    return result(made) | {"generation": made.process.generation}


def damage_each_fifth() -> None:
    """From now on every fifth expert that this rank sends has a wrong byte."""
    from vllm.distributed.eplb.eplb_communicator import TorchDistGlooStagedEplbCommunicator

    add_send, sent = TorchDistGlooStagedEplbCommunicator.add_send, []

    def damage(self: Any, tensors: Any, dst_rank: int, expert_id: int) -> None:
        sent.append(expert_id)
        if len(sent) % 5 == 0:
            tensors = [tensor.clone() for tensor in tensors]
            tensors[0].view(-1)[0] += 1
        add_send(self, tensors, dst_rank, expert_id)

    TorchDistGlooStagedEplbCommunicator.add_send = damage


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("fault", ["", "silent peer", "damaged peer", "damaged memory"])
def test_hundred_rebalances_with_a_fault_move_no_wrong_byte(
    fault: str, is_async: bool, tmp_path: Path
) -> None:
    # Only a rank's own host cache can be damaged from here; else a process has it.
    is_embedded = fault == "damaged memory"
    settings = settings_in(tmp_path, disk=True, records="on" if is_embedded else "auto")
    with nullcontext() if is_embedded else host_cache(settings):
        found = on_ranks(hundred, settings, is_async, fault)

    assert [one["records"] for one in found] == [1.0] * NUM_RANKS
    assert [one["repeated"] for one in found] == [0] * NUM_RANKS
    assert found[0]["generation"] >= 90
    if fault != "damaged peer":  # then the second answer may be a fifth one too
        assert (num_from_host(found) > 0) == (fault in ("silent peer", "damaged memory"))
    num_wrong = sum(one["wrong"] for one in found)  # a silent rank finds what it did not receive
    assert num_wrong > 0 if fault == "damaged peer" else fault or not num_wrong
    servers = [one["server"] for one in found if one["server"] is not None]
    assert [one.bytes_from_record_file > 0 for one in servers] == [True] * is_embedded
