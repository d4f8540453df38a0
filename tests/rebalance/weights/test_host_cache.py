"""The host cache and its readers: room, record file, statistics, damage, and who is refused."""

from __future__ import annotations

import gc
import itertools
import json
import logging
import os
import resource
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from eplb.core.model import ModelShape
from eplb.errors import CheckpointError, MigrationError
from rebalance.assembly.experts import fill_bank
from rebalance.weights.cache.address import PROTOCOL, HostCacheAddress, listen
from rebalance.weights.cache.cache_settings import HostCacheSettings
from rebalance.weights.cache.client import HostCacheClient
from rebalance.weights.cache.server import HostCacheServer
from rebalance.weights.link.listener import ConnectionListener
from runtime.checkpoints.checkpoint import INDEX_FILE, Checkpoint
from runtime.experts import ExpertBank, ExpertSchema
from runtime.memory import digest
from tests.support.limits import NEVER_S
from tests.support.processes import ForkedProcess
from tests.support.record_files import make_all

EVERYTHING = [(layer, expert) for layer in (0, 1) for expert in range(8)]
names = itertools.count()

StartHostCache = Callable[..., tuple[HostCacheServer, Callable[..., HostCacheClient]]]


@pytest.fixture
def checkpoint(small_checkpoint: Checkpoint, tmp_path: Path) -> Checkpoint:
    return Checkpoint(shutil.copytree(small_checkpoint.path, tmp_path / "weights"))


@pytest.fixture
def start_host_cache(
    checkpoint: Checkpoint, small_model: ModelShape, small_schema: ExpertSchema
) -> Iterator[StartHostCache]:
    """Start a host cache in this process; return it and what makes a rank's reader of it."""
    with ExitStack() as stack:

        def start(
            settings: HostCacheSettings,
            weights: Checkpoint | None = None,
            address: HostCacheAddress | None = None,
        ) -> tuple[HostCacheServer, Callable[..., HostCacheClient]]:
            address = address or HostCacheAddress(f"{os.getpid()}-{next(names)}", os.urandom(16))
            host_cache = HostCacheServer.of_checkpoint(
                address, weights or checkpoint, small_model, small_schema, settings
            )
            stack.callback(host_cache.close)

            def reader(num_experts: int = 8) -> HostCacheClient:
                size = small_schema.record_bytes
                return stack.enter_context(
                    closing(HostCacheClient(address, num_experts, size, deadline_s=NEVER_S))
                )

            return host_cache, reader

        yield start


def ring(num_records: int, record_file: Path | None = None) -> HostCacheSettings:
    return HostCacheSettings(records=num_records, record_file=record_file)


def bytes_of(reader: HostCacheClient, record: tuple[int, int], size: int) -> torch.Tensor:
    into = torch.zeros(size, dtype=torch.uint8)
    reader.read(record, into)
    return into


def wait_until(what: str, is_so: Callable[[], bool]) -> None:
    while not is_so():
        threading.Event().wait(0.001)


# -- less room than records


def test_ring_of_two_brings_every_record_right(
    start_host_cache: StartHostCache, checkpoint: Checkpoint, small_schema: ExpertSchema
) -> None:
    host_cache, new_reader = start_host_cache(ring(2))
    reader, repacked = new_reader(), torch.zeros(small_schema.record_bytes, dtype=torch.uint8)

    for record in EVERYTHING * 2:
        reader.load([record], deadline_s=NEVER_S)
        checkpoint.repack(*record, small_schema, repacked)
        assert torch.equal(bytes_of(reader, record, len(repacked)), repacked)
        reader.release([record])
        with pytest.raises(MigrationError, match="without a lease"):
            reader.read(record, repacked)

    assert reader.num_entries == 2
    assert reader.load([], deadline_s=0.0) == ([], 0)
    found = host_cache.stats()
    assert (found["misses"], found["hits"], found["evictions"]) == (32, 0, 30)
    assert found["resident"] == found["room"] == 2
    assert found["checkpoint"] == 32


def test_more_than_fits_is_refused_with_the_figures(start_host_cache: StartHostCache) -> None:
    _, new_reader = start_host_cache(ring(2))

    with pytest.raises(MigrationError, match=r"3 records .* at most 2"):
        new_reader().load(EVERYTHING[:3], deadline_s=NEVER_S)


def test_request_without_room_waits_and_times_out(
    start_host_cache: StartHostCache,
) -> None:
    host_cache, new_reader = start_host_cache(ring(2))
    first, second = new_reader(), new_reader()
    first.load(EVERYTHING[:2], deadline_s=NEVER_S)

    with pytest.raises(MigrationError, match="2 of 2 entries"):
        second.load([(1, 0)], deadline_s=0.2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.load, [(1, 0)], deadline_s=NEVER_S)
        wait_until("wait", lambda: host_cache.stats()["waits"] == 2)
        first.release([(0, 0)])

        assert waiting.result()[1] > 0


def test_disconnected_rank_releases_its_leases(start_host_cache: StartHostCache) -> None:
    _, new_reader = start_host_cache(ring(2))
    first = new_reader()
    first.load(EVERYTHING[:2], deadline_s=NEVER_S)

    first.close()

    assert len(new_reader().load(EVERYTHING[2:4], deadline_s=NEVER_S)[0]) == 2


def test_two_ranks_fill_their_banks_through_a_small_ring(
    start_host_cache: StartHostCache, small_schema: ExpertSchema, checkpoint: Checkpoint
) -> None:
    _, new_reader = start_host_cache(ring(2))
    held = [[0, 1, 2, 3, 4, 5], [7, 6, 7, -1, 3, 7]]
    banks = [ExpertBank(small_schema, 2, 6, num_staging=1) for _ in range(2)]
    readers = [new_reader() for _ in range(2)]

    with ThreadPoolExecutor(2) as pool:
        filled = [
            pool.submit(fill_bank, bank, held, reader, deadline_s=NEVER_S)
            for bank, reader in zip(banks, readers, strict=True)
        ]
        digests = [fill.result() for fill in filled]

    repacked = torch.zeros(small_schema.record_bytes, dtype=torch.uint8)
    checkpoint.repack(1, 6, small_schema, repacked)
    assert digests[0] == digests[1]
    assert banks[1].digest(1, 1) == digest(repacked) == digests[0][1, 6]
    found = {slot: banks[0].digest(1, slot) for slot in (0, 2, 5)}  # one expert in three slots
    assert found == dict.fromkeys((0, 2, 5), digests[0][1, 7])
    assert not banks[0].live(1, 3).any()


def test_hot_cache_evicts_the_record_used_longest_ago(start_host_cache: StartHostCache) -> None:
    host_cache, new_reader = start_host_cache(HostCacheSettings(records=3))
    reader = new_reader()

    for record in ((0, 0), (0, 1), (0, 2), (0, 0), (0, 3)):
        reader.load([record], deadline_s=NEVER_S)
        reader.release([record])

    assert reader.num_entries == 3
    assert reader.load([(0, 0), (0, 2), (0, 3)], deadline_s=NEVER_S)[1] == 0
    assert host_cache.stats()["evictions"] == 1  # expert 1, used longest ago


def test_rank_of_another_model_is_refused(start_host_cache: StartHostCache) -> None:
    _, new_reader = start_host_cache(ring(2))

    with pytest.raises(MigrationError, match=r"8 experts .* expected 9"):
        new_reader(num_experts=9)


# -- hints


def test_hinted_record_is_in_memory_when_requested(start_host_cache: StartHostCache) -> None:
    host_cache, new_reader = start_host_cache(ring(4))
    reader = new_reader()

    reader.hint([(1, 4), (1, 5)])
    wait_until("record that was hinted", lambda: host_cache.stats()["resident"] == 2)

    assert reader.load([(1, 5), (1, 4)], deadline_s=NEVER_S)[1] == 0
    reader.hint(EVERYTHING)
    wait_until("end of the hints", lambda: host_cache.stats()["hints_dropped"] == 12)
    assert host_cache.stats()["evictions"] == 0


# -- versions


def test_no_rank_gets_a_record_of_void_weights_until_the_cache_was_restarted(
    start_host_cache: StartHostCache,
) -> None:
    host_cache, new_reader = start_host_cache(ring(4))
    first, second = new_reader(), new_reader()
    first.load([(0, 0)], deadline_s=NEVER_S)

    with pytest.raises(MigrationError, match="weights version 1"):
        second.load([(0, 0)], deadline_s=NEVER_S, weights_version=1)
    first.invalidate(1, deadline_s=NEVER_S)

    with pytest.raises(
        MigrationError, match=r"weights version 0 .* version 1: .* restart the host caches"
    ):
        second.load([(0, 0)], deadline_s=NEVER_S)
    with pytest.raises(MigrationError, match="without a lease"):
        first.read((0, 0), torch.zeros(4096, dtype=torch.uint8))
    assert host_cache.stats()["resident"] == 0

    host_cache.close()
    _, reader_after = start_host_cache(ring(4))
    assert len(reader_after().load([(0, 0)], deadline_s=NEVER_S)[0]) == 1


def test_reader_attaches_again_to_a_host_cache_that_was_started_again(
    start_host_cache: StartHostCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rebalance.weights.cache.client.CONNECT_AGAIN_S", NEVER_S)
    address = HostCacheAddress(f"again-{os.getpid()}", b"key")
    host_cache, new_reader = start_host_cache(ring(4), address=address)
    reader = new_reader()
    digests, _ = reader.load([(0, 0), (1, 2)], deadline_s=NEVER_S)
    host_cache.close()
    with pytest.raises(MigrationError, match=f"{address.name} disconnected"):
        reader.load([(0, 1)], deadline_s=NEVER_S)
    with pytest.raises(MigrationError, match=f"{address.name} does not answer"):
        new_reader()
    assert digest(bytes_of(reader, (0, 0), 4096)) == digests[0]  # the mapping outlives its owner
    start_host_cache(ring(4), address=address)

    assert reader.load([(1, 2)], deadline_s=NEVER_S)[0] == digests[1:]
    assert digest(bytes_of(reader, (1, 2), 4096)) == digests[1]
    with pytest.raises(MigrationError, match=r"layer 0 expert 0 .* without a lease"):
        bytes_of(reader, (0, 0), 4096)


def test_rank_that_starts_before_its_host_cache_waits_for_it(
    start_host_cache: StartHostCache, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    address = HostCacheAddress(f"late-{os.getpid()}", b"key")
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(
            HostCacheClient, address, 8, 4096, deadline_s=NEVER_S, start_deadline_s=NEVER_S
        )
        wait_until("the rank waits", lambda: "does not listen yet" in caplog.text)
        start_host_cache(ring(2), address=address)

        with closing(connecting.result()) as reader:
            assert reader.num_entries == 2


def test_rank_leases_again_from_a_host_cache_that_was_started_again(
    start_host_cache: StartHostCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rebalance.weights.cache.client.CONNECT_AGAIN_S", NEVER_S)
    address = HostCacheAddress(f"lease-{os.getpid()}", b"key")
    host_cache, new_reader = start_host_cache(ring(4), address=address)
    reader = new_reader()
    assert reader.lease([(0, 0)], deadline_s=NEVER_S) == 4096
    assert reader.lease([(0, 0)], deadline_s=NEVER_S) == 0  # it has the lease
    host_cache.close()
    start_host_cache(ring(4), address=address)

    assert reader.lease([(1, 2)], deadline_s=NEVER_S) == 4096
    assert reader.lease([(1, 2), (0, 0)], deadline_s=NEVER_S) == 4096


def test_restarted_host_cache_receives_the_weights_version(
    start_host_cache: StartHostCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rebalance.weights.cache.client.CONNECT_AGAIN_S", NEVER_S)
    address = HostCacheAddress(f"version-{os.getpid()}", b"key")
    host_cache, new_reader = start_host_cache(ring(4), address=address)
    reader = new_reader()
    reader.invalidate(7, deadline_s=NEVER_S)
    host_cache.close()
    start_host_cache(ring(4), address=address)

    with pytest.raises(MigrationError, match=r"weights version 0 .* version 7"):
        reader.load([(0, 0)], deadline_s=NEVER_S, weights_version=0)


# -- who is refused


def test_second_host_cache_under_one_name_is_refused(start_host_cache: StartHostCache) -> None:
    address = HostCacheAddress(f"one-name-{os.getpid()}", b"key")
    start_host_cache(ring(2), address=address)

    with pytest.raises(MigrationError, match=f"process {os.getpid()} of this host has its place"):
        start_host_cache(ring(2), address=address)


@pytest.fixture
def silent() -> Iterator[HostCacheAddress]:
    """The address of a host cache that accepts nobody."""
    address = HostCacheAddress(f"silent-{os.getpid()}", b"key")
    with listen(address):
        yield address


def test_connect_to_a_suspended_host_cache_times_out(silent: HostCacheAddress) -> None:
    with pytest.raises(MigrationError, match="does not answer"):
        HostCacheClient(silent, 8, 4096, deadline_s=0.2)


def test_rank_refuses_a_host_cache_whose_greeting_has_no_version() -> None:
    address = HostCacheAddress(f"greeting-{os.getpid()}", b"key")
    other = ConnectionListener(
        listen(address),
        "local rank",
        PROTOCOL,
        b"key",
        hello=dict,
        serve=lambda wire: None,
        silence_s=NEVER_S,
    )

    with closing(other), pytest.raises(MigrationError, match=r"malformed response: .*version"):
        HostCacheClient(address, 8, 4096, deadline_s=NEVER_S)


def test_strangers_and_idle_clients_are_refused_and_ranks_are_served(
    start_host_cache: StartHostCache,
) -> None:
    address = HostCacheAddress(f"strangers-{os.getpid()}", b"a secret key")
    _, new_reader = start_host_cache(ring(2), address=address)
    with ExitStack() as stack:
        clients = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(5)]
        for client in clients:
            client.connect(address.socket)
        clients[-1].sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        with pytest.raises(MigrationError, match="the secrets differ"):
            HostCacheClient(replace(address, key=b"another"), 8, 4096, deadline_s=NEVER_S)

        assert len(new_reader().load([(0, 0)], deadline_s=NEVER_S)[0]) == 1
    assert "secret" not in repr(address)


# -- the record file


def test_repacked_record_is_read_from_the_record_file_later(
    start_host_cache: StartHostCache, tmp_path: Path, small_schema: ExpertSchema
) -> None:
    settings = HostCacheSettings(record_file=tmp_path / "records")
    first, new_reader = start_host_cache(settings)
    reader = new_reader()
    digests, _ = reader.load(EVERYTHING, deadline_s=NEVER_S)
    reader.release(EVERYTHING)
    wait_until("end of the writing", lambda: first.stats()["leased"] == 0)
    first.close()

    second, new_reader = start_host_cache(settings)
    assert new_reader().load(EVERYTHING, deadline_s=NEVER_S)[0] == digests

    found = second.stats()
    assert (found["checkpoint"], found["record_file"]) == (0, 16)


def test_finished_record_file_feeds_a_ring_without_the_checkpoint(
    start_host_cache: StartHostCache,
    tmp_path: Path,
    checkpoint: Checkpoint,
    small_model: ModelShape,
    small_schema: ExpertSchema,
) -> None:
    make_all(checkpoint, small_model, small_schema, tmp_path / "records")
    host_cache, new_reader = start_host_cache(ring(3, tmp_path / "records"))
    reader = new_reader()
    for record in EVERYTHING:
        digests, _ = reader.load([record], deadline_s=NEVER_S)
        assert digest(bytes_of(reader, record, small_schema.record_bytes)) == digests[0]
        reader.release([record])

    found = host_cache.stats()
    assert (found["checkpoint"], found["record_file"]) == (0, 16)


def test_full_disk_disables_the_record_file_and_is_logged(
    fork: Callable[..., ForkedProcess],
    tmp_path: Path,
    checkpoint: Checkpoint,
    small_model: ModelShape,
    small_schema: ExpertSchema,
) -> None:
    path, log_file = tmp_path / "records", tmp_path / "log"

    def run(pipe: Connection) -> None:
        is_refused = threading.Event()  # records may all be read before the first is written
        noted = logging.FileHandler(log_file)
        noted.addFilter(lambda line: is_refused.set() is None)
        logging.basicConfig(handlers=[noted], level=logging.ERROR, force=True)
        address = HostCacheAddress(f"full-{os.getpid()}", b"key")
        settings = HostCacheSettings(record_file=path)
        host_cache = HostCacheServer.of_checkpoint(
            address, checkpoint, small_model, small_schema, settings
        )
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 * 4096, 4 * 4096))
        reader = HostCacheClient(address, 8, 4096, deadline_s=NEVER_S)
        digests, _ = reader.load(EVERYTHING, deadline_s=NEVER_S)
        is_refused.wait()
        host_cache.close()
        pipe.send(len(digests))

    assert fork(run).receive() == 16
    assert "no more records are appended" in log_file.read_text()


def test_record_file_that_cannot_be_made_is_done_without(
    start_host_cache: StartHostCache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "no-folder").write_text("")
    _, new_reader = start_host_cache(ring(4, tmp_path / "no-folder" / "records"))

    assert len(new_reader().load([(0, 0)], deadline_s=NEVER_S)[0]) == 1
    assert "preload continues without a record file" in caplog.text


# -- damage


def test_damaged_host_record_is_read_again_from_the_disk(
    start_host_cache: StartHostCache, small_schema: ExpertSchema
) -> None:
    host_cache, new_reader = start_host_cache(ring(4))
    reader = new_reader()
    ((plain, weighted),), _ = reader.load([(1, 2)], deadline_s=NEVER_S)
    assert reader.reload((1, 2), deadline_s=NEVER_S) == (plain, weighted)
    assert host_cache.stats()["checkpoint"] == 1  # it was intact: nothing was read

    host_cache.arena.bytes[17] ^= 255

    assert reader.reload((1, 2), deadline_s=NEVER_S) == (plain, weighted)
    assert digest(bytes_of(reader, (1, 2), 4096)) == (plain, weighted)
    with pytest.raises(MigrationError, match="layer 1 expert 3 is not leased"):
        reader.reload((1, 3), deadline_s=NEVER_S)


def test_host_record_that_is_damaged_on_disk_too_is_refused(
    start_host_cache: StartHostCache, checkpoint: Checkpoint
) -> None:
    host_cache, new_reader = start_host_cache(ring(4))
    reader = new_reader()
    reader.load([(1, 2)], deadline_s=NEVER_S)
    host_cache.arena.bytes[17] ^= 255
    for shard in checkpoint.path.glob("*.safetensors"):
        with shard.open("r+b") as file:
            header = int.from_bytes(file.read(8), "little")
            file.seek(8 + header)
            file.write(bytes(shard.stat().st_size - 8 - header))

    with pytest.raises(MigrationError, match="layer 1 expert 2"):
        reader.reload((1, 2), deadline_s=NEVER_S)
    with pytest.raises(MigrationError, match="without a lease"):
        reader.read((1, 2), torch.zeros(4096, dtype=torch.uint8))
    assert host_cache.stats()["damaged"] > 0


def test_missing_tensor_or_expert_is_an_error_at_the_rank_and_others_load(
    start_host_cache: StartHostCache, checkpoint: Checkpoint
) -> None:
    index = checkpoint.path / INDEX_FILE
    found = json.loads(index.read_text())
    del found["weight_map"]["model.layers.0.mlp.experts.6.gate_proj.weight"]
    index.write_text(json.dumps(found))
    _, new_reader = start_host_cache(ring(4), Checkpoint(checkpoint.path))
    reader = new_reader()

    with pytest.raises(MigrationError, match=r"experts\.6\.gate_proj.weight"):
        reader.load([(0, 1), (0, 6)], deadline_s=NEVER_S)
    with pytest.raises(MigrationError, match="layer 0 expert 8"):  # of this model there are 8
        reader.load([(0, 1), (0, 8)], deadline_s=NEVER_S)

    assert len(reader.load([(0, 1), (0, 2)], deadline_s=NEVER_S)[0]) == 2


def test_missing_weight_file_is_refused_at_the_start(checkpoint: Checkpoint) -> None:
    next(iter(checkpoint.path.glob("*.safetensors"))).unlink()

    with pytest.raises(CheckpointError, match="is missing"):
        Checkpoint(checkpoint.path)


# -- a start that fails


def open_files() -> set[str]:
    """Everything that this process holds open, by number and by what it is."""
    gc.collect()  # a mapping goes with the last who names it, an exception's frames among them
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.add(f"{entry.name} {entry.readlink()}")
        except FileNotFoundError:  # the folder itself, while it was listed
            continue
    return found


@contextmanager
def no_more_threads() -> Iterator[None]:
    """Have every new thread ask for more stack than there are addresses."""
    usual = threading.stack_size(2**50)
    try:
        yield
    finally:
        threading.stack_size(usual)


@pytest.mark.parametrize("record_file", [None, "records"])
def test_host_cache_that_gets_no_thread_leaves_nothing_open(
    checkpoint: Checkpoint,
    small_model: ModelShape,
    small_schema: ExpertSchema,
    tmp_path: Path,
    record_file: str | None,
) -> None:
    address = HostCacheAddress(f"threads-{os.getpid()}", b"key")
    path = tmp_path / record_file if record_file else None
    settings = HostCacheSettings(records=4, record_file=path)
    before = open_files()

    with no_more_threads(), pytest.raises(RuntimeError, match="can't start new thread"):
        HostCacheServer.of_checkpoint(address, checkpoint, small_model, small_schema, settings)

    assert not open_files() - before
    with closing(
        HostCacheServer.of_checkpoint(address, checkpoint, small_model, small_schema, settings)
    ) as host_cache:
        # The record file's lock is free again.
        assert (host_cache.writer is None) == (path is None)
