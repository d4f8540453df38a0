"""Records that an engine's ranks offer: kept in memory and on disk, read by the staging sources."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eplb.errors import MigrationError
from rebalance.engines.common.records import Kept
from rebalance.types import Digest, Record
from rebalance.weights.cache.address import place_of_records
from rebalance.weights.cache.cache_settings import HostCacheSettings
from rebalance.weights.cache.engine_records import EngineRecords, EngineRecordsClient
from rebalance.weights.disk.offered_records import OfferedRecords
from rebalance.weights.disk.record_file import RecordOrigin
from rebalance.weights.link.secret import Secret
from runtime.memory import PAGE_BYTES, SharedArena, digest
from tests.support.limits import NEVER_S
from tests.support.processes import ForkedProcess

ORIGIN = RecordOrigin("kinds", "model", num_layers=2, num_experts=3, record_bytes=PAGE_BYTES)
RECORDS = [(layer, expert) for layer in range(2) for expert in range(3)]
SECRET = Secret(b"0123456789abcdef", is_given=True)
POOL = 16  # threads of torch's pool
PLACE = place_of_records(f"test-{os.getpid()}", SECRET)


def record_of(record: Record) -> torch.Tensor:
    """Bytes [record_bytes] of a record."""
    return torch.full((PAGE_BYTES,), 1 + 10 * record[0] + record[1], dtype=torch.uint8)


def digest_table() -> torch.Tensor:
    """[L, E, 2] of all records."""
    return torch.tensor([digest(record_of(record)) for record in RECORDS]).view(2, 3, 2)


def offered(
    client: EngineRecordsClient,
    records: list[Record],
    found: Digest | None = None,
    num_unused: int = 0,
) -> list[str]:
    arena = SharedArena("offer", (len(records) + num_unused) * PAGE_BYTES)
    for number, record in enumerate(records):
        arena.bytes[number * PAGE_BYTES :][:PAGE_BYTES] = record_of(record)
    named = [(record, found or digest(record_of(record))) for record in records]
    with closing(arena):
        return client.offer(named, arena, deadline_s=NEVER_S)


def attached(origin: RecordOrigin = ORIGIN) -> EngineRecordsClient:
    return EngineRecordsClient(PLACE, origin, deadline_s=NEVER_S)


def reader(client: EngineRecordsClient) -> Kept:
    return Kept(client, None, digest_table())


@pytest.fixture(params=[False, True], ids=["memory", "disk"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> HostCacheSettings:
    return HostCacheSettings(record_folder=tmp_path / "records" if request.param else None)


@pytest.fixture
def library(settings: HostCacheSettings) -> Iterator[EngineRecords]:
    with closing(EngineRecords(PLACE, settings)) as made:
        yield made


def test_record_that_one_rank_offers_is_read_by_another(library: EngineRecords) -> None:
    with closing(attached()) as first, closing(attached()) as second:
        assert first.lacks(RECORDS, deadline_s=NEVER_S) == RECORDS
        assert offered(first, RECORDS) == ["memory"] * 6

        assert second.lacks(RECORDS, deadline_s=NEVER_S) == []
        kept = reader(second)
        assert torch.equal(kept.bring(1, 2), record_of((1, 2)))
        assert kept.figures.bytes_by_source == {"host": PAGE_BYTES, "disk": 0}


def test_record_that_nobody_has_offered_is_refused(library: EngineRecords) -> None:
    with closing(attached()) as client:
        offered(client, RECORDS[:2])

        with pytest.raises(MigrationError, match="layer 1 expert 2"):
            reader(client).bring(1, 2)
        assert torch.equal(reader(client).bring(0, 1), record_of((0, 1)))


def test_offer_with_a_wrong_digest_is_refused(library: EngineRecords) -> None:
    with closing(attached()) as client:
        with pytest.raises(MigrationError, match="was offered with digest"):
            offered(client, RECORDS[:1], (1, 2))
        assert client.lacks(RECORDS[:1], deadline_s=NEVER_S) == RECORDS[:1]


def test_damaged_memory_is_replaced_by_the_disk_or_refused(
    library: EngineRecords, settings: HostCacheSettings
) -> None:
    with closing(attached()) as client:
        offered(client, RECORDS)
        assert library.server is not None
        library.server.arena.bytes[:] ^= 1

        if settings.record_folder is None:
            with pytest.raises(MigrationError):
                reader(client).bring(0, 0)
        else:
            assert torch.equal(reader(client).bring(0, 0), record_of((0, 0)))
            assert library.server.stats()["record_file"] == 1


@pytest.mark.parametrize("settings", [True], indirect=True)
def test_full_memory_leaves_further_offers_to_the_disk(
    library: EngineRecords, settings: HostCacheSettings
) -> None:
    library._settings = replace(settings, records=2)
    with closing(attached()) as client:
        assert offered(client, RECORDS) == ["memory"] * 2 + ["disk"] * 4

        kept = reader(client)
        for record in RECORDS:
            assert torch.equal(kept.bring(*record), record_of(record))
        assert kept.figures.bytes_by_source["disk"] >= 4 * PAGE_BYTES


@pytest.mark.parametrize("settings", [False], indirect=True)
def test_record_without_a_disk_is_never_evicted(
    library: EngineRecords, settings: HostCacheSettings
) -> None:
    library._settings = replace(settings, records=2)
    with closing(attached()) as client:
        assert offered(client, RECORDS) == ["memory"] * 2 + [""] * 4

        assert torch.equal(reader(client).bring(*RECORDS[0]), record_of(RECORDS[0]))
        assert client.lacks(RECORDS, deadline_s=NEVER_S) == RECORDS[2:]


@pytest.mark.parametrize("settings", [True], indirect=True)
def test_restarted_process_gives_the_records_of_its_disk(settings: HostCacheSettings) -> None:
    with closing(EngineRecords(PLACE, settings)), closing(attached()) as client:
        offered(client, RECORDS)
    with closing(EngineRecords(PLACE, settings)), closing(attached()) as again:
        assert again.lacks(RECORDS, deadline_s=NEVER_S) == []
        assert torch.equal(reader(again).bring(1, 0), record_of((1, 0)))


@pytest.mark.parametrize("settings", [True], indirect=True)
def test_client_attaches_to_a_restarted_process(settings: HostCacheSettings) -> None:
    first = EngineRecords(PLACE, settings)
    with closing(attached()) as client:
        offered(client, RECORDS)
        first.close()
        with closing(EngineRecords(PLACE, settings)):
            assert torch.equal(reader(client).bring(1, 0), record_of((1, 0)))


def test_two_hosts_share_a_folder_and_write_files_of_their_own(tmp_path: Path) -> None:
    settings = HostCacheSettings(record_folder=tmp_path)
    places = [replace(PLACE, name=f"{PLACE.name}-{number}") for number in range(2)]
    servers = [EngineRecords(place, settings) for place in places]
    clients = [EngineRecordsClient(place, ORIGIN, deadline_s=NEVER_S) for place in places]
    offered(clients[0], RECORDS[:3])
    offered(clients[1], RECORDS[3:])

    assert len(list(tmp_path.iterdir())) == 2
    for client in clients:
        kept = reader(client)
        for record in RECORDS:
            assert torch.equal(kept.bring(*record), record_of(record))
    for part in (*clients, *servers):
        part.close()


def test_other_origin_replaces_one_that_no_rank_uses(library: EngineRecords) -> None:
    other = replace(ORIGIN, checkpoint="other")
    with closing(attached()) as client:
        offered(client, RECORDS)
        with pytest.raises(MigrationError, match="1 ranks use records of another origin"):
            attached(other)
    while library.num_ranks:
        pass

    with closing(attached(other)) as client:
        assert client.lacks(RECORDS, deadline_s=NEVER_S) == RECORDS


def test_last_batch_of_offers_may_leave_a_part_of_the_arena_unused(library: EngineRecords) -> None:
    with closing(attached()) as client:
        assert offered(client, RECORDS[:2], num_unused=3) == ["memory"] * 2
        assert torch.equal(reader(client).bring(0, 1), record_of((0, 1)))


def test_error_of_the_host_cache_is_what_the_rank_is_told(library: EngineRecords) -> None:
    def fails(*_: object) -> list[str]:
        raise RuntimeError("planted")

    with closing(attached()) as client:
        assert library.server is not None
        library.server.keep = fails  # type: ignore[method-assign]
        with pytest.raises(MigrationError, match="RuntimeError: planted"):
            offered(client, RECORDS)
        assert client.lacks(RECORDS, deadline_s=NEVER_S) == RECORDS


@pytest.mark.parametrize("settings", [True], indirect=True)
def test_records_are_kept_in_a_forked_process_without_threads_of_torch(
    settings: HostCacheSettings,
) -> None:
    """As vLLM's worker is forked: after a fork two threads that remake torch's pool may find none.

    A thread that uses the pool shows itself: the pool's own threads begin with its first use.
    """
    torch.set_num_threads(POOL)
    torch.zeros(2**20).add_(1)  # the pool of the parent

    def keep(pipe: object) -> None:
        with closing(EngineRecords(PLACE, settings)), closing(attached()) as client:
            places = offered(client, RECORDS)
            kept, brought = reader(client), list[bool]()

            def bring() -> None:  # as a repair does, on a thread of its own
                found = [(one, kept.bring(*one).numpy()) for one in RECORDS]
                brought.extend((data == record_of(one).numpy()).all() for one, data in found)

            repair = threading.Thread(target=bring)
            repair.start()
            repair.join()
            others = len(list(Path("/proc/self/task").iterdir())) - threading.active_count()
            # One that ends just now is in one of the two numbers alone.
            is_without = others < POOL // 2
            pipe.send((places, all(brought), is_without))  # type: ignore[attr-defined]

    process = ForkedProcess(keep)
    assert process.receive() == (["memory"] * 6, True, True)
    process.ends()
    torch.set_num_threads(1)


def test_proven_record_is_used_where_the_host_cache_ends_before_its_release(
    tmp_path: Path,
) -> None:
    library = EngineRecords(PLACE, HostCacheSettings(record_folder=tmp_path))

    class Ending(EngineRecordsClient):
        def release(self, records: Collection[Record] | None = None) -> None:
            library.close()
            super().release(records)

    with closing(Ending(PLACE, ORIGIN, deadline_s=NEVER_S)) as client:
        offered(client, RECORDS)
        assert torch.equal(reader(client).bring(1, 1), record_of((1, 1)))


def test_host_that_reads_the_file_of_another_leaves_it_to_that_host(tmp_path: Path) -> None:
    reads, writes = OfferedRecords(ORIGIN, tmp_path), OfferedRecords(ORIGIN, tmp_path)
    for _ in range(3):
        writes.close()
        assert reads.digest_of(RECORDS[0]) is None  # it opens what others have made meanwhile
        writes = OfferedRecords(ORIGIN, tmp_path)

    assert len(list(tmp_path.iterdir())) == 2
    for host in (reads, writes):
        host.close()
