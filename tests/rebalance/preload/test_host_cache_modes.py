"""A host cache smaller than the model, its record file, its statistics, and host failures."""

from __future__ import annotations

import itertools
import json
import logging
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from eplb.core.model import ModelShape
from eplb.errors import CheckpointError, ConfigError, MigrationError
from rebalance.preload.cache.server import (
    HostCacheAddress,
    HostCacheClient,
    HostCacheServer,
    HostCacheSettings,
)
from rebalance.preload.disk.expert_loader import make_all
from rebalance.preload.disk.record_file import RecordFile
from rebalance.preload.disk.record_origin import RecordOrigin
from rebalance.preload.first_fill import fill_bank
from runtime.checkpoints.checkpoint import INDEX_FILE, Checkpoint
from runtime.experts import ExpertBank, ExpertSchema
from runtime.memory.shared import SharedArena, digest
from tests.support.repository import ROOT

DEADLINE_S = 30.0
FORK = multiprocessing.get_context("fork")
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
            settings: HostCacheSettings, weights: Checkpoint | None = None
        ) -> tuple[HostCacheServer, Callable[..., HostCacheClient]]:
            address = HostCacheAddress(f"modes-{os.getpid()}-{next(names)}", os.urandom(16))
            host_cache = HostCacheServer(
                address, weights or checkpoint, small_model, small_schema, settings
            )
            stack.callback(host_cache.close)

            def reader(num_experts: int = 8) -> HostCacheClient:
                size = small_schema.record_bytes
                return stack.enter_context(
                    closing(HostCacheClient(address, num_experts, size, deadline_s=DEADLINE_S))
                )

            return host_cache, reader

        yield start


def ring(num_records: int, record_file: Path | None = None) -> HostCacheSettings:
    return HostCacheSettings(mode="ring", ring_records=num_records, record_file=record_file)


def bytes_of(reader: HostCacheClient, record: tuple[int, int], size: int) -> torch.Tensor:
    into = torch.zeros(size, dtype=torch.uint8)
    reader.read(record, into)
    return into


def wait_until(what: str, is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline, f"no {what} in {DEADLINE_S:.0f} s"


# -- less room than records


def test_ring_of_two_brings_every_record_right(
    start_host_cache: StartHostCache, checkpoint: Checkpoint, small_schema: ExpertSchema
) -> None:
    host_cache, new_reader = start_host_cache(ring(2))
    reader, repacked = new_reader(), torch.zeros(small_schema.record_bytes, dtype=torch.uint8)

    for record in EVERYTHING * 2:
        reader.load([record], deadline_s=DEADLINE_S)
        checkpoint.repack(*record, small_schema, repacked)
        assert torch.equal(bytes_of(reader, record, len(repacked)), repacked)
        reader.release([record])

    assert reader.num_entries == 2
    found = reader.stats(deadline_s=DEADLINE_S)
    assert (found.misses, found.hits, found.evictions) == (32, 0, 30)
    assert found.resident_bytes == found.room_bytes == 2 * small_schema.record_bytes
    assert found.bytes_from_checkpoint == 32 * small_schema.record_bytes
    assert host_cache.stats() == found


def test_record_is_not_read_without_a_lease(start_host_cache: StartHostCache) -> None:
    _, new_reader = start_host_cache(ring(2))
    reader, into = new_reader(), torch.zeros(4096, dtype=torch.uint8)
    reader.load([(0, 1)], deadline_s=DEADLINE_S)
    reader.release([(0, 1)])

    for record in ((0, 1), (1, 1)):
        with pytest.raises(
            MigrationError, match=r"is read without a lease, expected a load\(\) first"
        ):
            reader.read(record, into)


def test_more_than_fits_is_refused_with_the_figures(start_host_cache: StartHostCache) -> None:
    _, new_reader = start_host_cache(ring(2))

    with pytest.raises(MigrationError, match=r"3 records asked for .* expected at most 2"):
        new_reader().load(EVERYTHING[:3], deadline_s=DEADLINE_S)


def test_request_without_room_waits_and_times_out(
    start_host_cache: StartHostCache,
) -> None:
    _, new_reader = start_host_cache(ring(2))
    first, second = new_reader(), new_reader()
    first.load(EVERYTHING[:2], deadline_s=DEADLINE_S)

    with pytest.raises(MigrationError, match="no room for 1 records: 2 of 2 entries are held"):
        second.load([(1, 0)], deadline_s=0.2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.load, [(1, 0)], deadline_s=DEADLINE_S)
        wait_until("wait", lambda: first.stats(deadline_s=DEADLINE_S).waits == 2)
        first.release([(0, 0)])

        assert waiting.result(DEADLINE_S)[1] > 0


def test_disconnected_rank_releases_its_leases(start_host_cache: StartHostCache) -> None:
    _, new_reader = start_host_cache(ring(2))
    first = new_reader()
    first.load(EVERYTHING[:2], deadline_s=DEADLINE_S)

    first.close()

    assert len(new_reader().load(EVERYTHING[2:4], deadline_s=DEADLINE_S)[0]) == 2


def test_two_ranks_fill_their_banks_through_a_small_ring(
    start_host_cache: StartHostCache, small_schema: ExpertSchema, checkpoint: Checkpoint
) -> None:
    _, new_reader = start_host_cache(ring(2))
    held = [[0, 1, 2, 3, 4, 5], [7, 6, 5, -1, 3, 2]]
    banks = [ExpertBank(small_schema, 2, 6, num_staging=1) for _ in range(2)]
    readers = [new_reader() for _ in range(2)]

    with ThreadPoolExecutor(2) as pool:
        filled = [
            pool.submit(fill_bank, bank, held, reader, deadline_s=DEADLINE_S)
            for bank, reader in zip(banks, readers, strict=True)
        ]
        digests = [fill.result(DEADLINE_S) for fill in filled]

    repacked = torch.zeros(small_schema.record_bytes, dtype=torch.uint8)
    checkpoint.repack(1, 6, small_schema, repacked)
    assert digests[0] == digests[1]
    assert banks[1].digest(1, 1) == digest(repacked) == digests[0][1, 6]


def test_two_slots_of_one_rank_with_the_same_expert_are_both_filled(
    start_host_cache: StartHostCache, small_schema: ExpertSchema
) -> None:
    _, new_reader = start_host_cache(ring(4))
    held = [[0, 5, 5, 1], [2, 2, 2, 3]]
    bank = ExpertBank(small_schema, 2, 4, num_staging=1)

    digests = fill_bank(bank, held, new_reader(), deadline_s=DEADLINE_S)

    found = [[bank.digest(layer, slot) for slot in range(4)] for layer in (0, 1)]
    assert found == [[digests[n, expert] for expert in held[n]] for n in (0, 1)]


def test_budget_counts_bytes(start_host_cache: StartHostCache, small_schema: ExpertSchema) -> None:
    size = small_schema.record_bytes
    _, new_reader = start_host_cache(HostCacheSettings(mode="hot", budget_bytes=3 * size + 1))
    reader = new_reader()

    for record in ((0, 0), (0, 1), (0, 2), (0, 0), (0, 3)):
        reader.load([record], deadline_s=DEADLINE_S)
        reader.release([record])

    assert reader.num_entries == 3
    assert reader.load([(0, 0), (0, 2), (0, 3)], deadline_s=DEADLINE_S)[1] == 0
    assert reader.stats(deadline_s=DEADLINE_S).evictions == 1  # expert 1, used longest ago


def test_settings_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="host cache mode 'warm', expected one of full, hot, ring"
    ):
        HostCacheSettings(mode="warm")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="hot with budget_bytes None"):
        HostCacheSettings(mode="hot")
    with pytest.raises(ConfigError, match="full has no ring_records"):
        HostCacheSettings(ring_records=3)
    with pytest.raises(ConfigError, match="0 readers"):
        HostCacheSettings(num_readers=0)
    with pytest.raises(ConfigError, match="100 bytes, expected room for one record"):
        HostCacheSettings(mode="hot", budget_bytes=100).num_entries(16, 4096)


def test_rank_of_another_model_is_refused(start_host_cache: StartHostCache) -> None:
    _, new_reader = start_host_cache(ring(2))

    with pytest.raises(MigrationError, match="holds 8 experts a layer of 4096 bytes, expected 9"):
        new_reader(num_experts=9)


# -- hints


def test_hinted_record_is_in_memory_when_requested(start_host_cache: StartHostCache) -> None:
    host_cache, new_reader = start_host_cache(ring(4))
    reader = new_reader()

    reader.hint([(1, 4), (1, 5)])
    wait_until("record that was hinted", lambda: host_cache.stats().resident_bytes == 2 * 4096)

    assert reader.load([(1, 5), (1, 4)], deadline_s=DEADLINE_S)[1] == 0
    reader.hint(EVERYTHING)
    wait_until("end of the hints", lambda: host_cache.stats().hints_dropped == 12)
    assert host_cache.stats().evictions == 0


# -- versions


def test_no_rank_gets_a_record_of_void_weights(start_host_cache: StartHostCache) -> None:
    host_cache, new_reader = start_host_cache(ring(4))
    first, second = new_reader(), new_reader()
    first.load([(0, 0)], deadline_s=DEADLINE_S)

    with pytest.raises(MigrationError, match="weights version 1 is not in the host cache"):
        second.load([(0, 0)], deadline_s=DEADLINE_S, weights_version=1)
    first.invalidate(1, deadline_s=DEADLINE_S)

    with pytest.raises(
        MigrationError,
        match=r"weights version 0 was invalidated by version 1: .* checkpoint again, restart the h",
    ):
        second.load([(0, 0)], deadline_s=DEADLINE_S)
    with pytest.raises(MigrationError, match="without a lease"):
        first.read((0, 0), torch.zeros(4096, dtype=torch.uint8))
    assert host_cache.stats().resident_bytes == 0


def test_ranks_that_start_again_after_an_update_load_once_the_cache_was_restarted(
    start_host_cache: StartHostCache,
) -> None:
    host_cache, new_reader = start_host_cache(ring(4))
    new_reader().invalidate(1, deadline_s=DEADLINE_S)

    with pytest.raises(MigrationError, match="restart the host caches of all hosts first"):
        new_reader().load([(0, 0)], deadline_s=DEADLINE_S)
    host_cache.close()
    _, reader_after = start_host_cache(ring(4))
    found, _ = reader_after().load([(0, 0)], deadline_s=DEADLINE_S)

    assert len(found) == 1


# -- the record file


def test_repacked_record_is_read_from_the_record_file_later(
    start_host_cache: StartHostCache, tmp_path: Path, small_schema: ExpertSchema
) -> None:
    settings = HostCacheSettings(record_file=tmp_path / "records")
    first, new_reader = start_host_cache(settings)
    reader = new_reader()
    digests, _ = reader.load(EVERYTHING, deadline_s=DEADLINE_S)
    reader.release(EVERYTHING)
    wait_until("end of the writing", lambda: first.stats().leased_bytes == 0)
    first.close()

    second, new_reader = start_host_cache(settings)
    assert new_reader().load(EVERYTHING, deadline_s=DEADLINE_S)[0] == digests

    found = second.stats()
    assert (found.bytes_from_checkpoint, found.bytes_from_record_file) == (0, 16 * 4096)


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
        digests, _ = reader.load([record], deadline_s=DEADLINE_S)
        assert digest(bytes_of(reader, record, small_schema.record_bytes)) == digests[0]
        reader.release([record])

    found = host_cache.stats()
    assert (found.bytes_from_checkpoint, found.bytes_from_record_file) == (0, 16 * 4096)


def test_full_disk_disables_the_record_file_and_is_logged(
    tmp_path: Path, checkpoint: Checkpoint, small_model: ModelShape, small_schema: ExpertSchema
) -> None:
    ours, theirs = FORK.Pipe(duplex=False)
    path, log_file = tmp_path / "records", tmp_path / "log"

    def run() -> None:
        is_refused = threading.Event()  # records may all be read before the first is written
        noted = logging.FileHandler(log_file)
        noted.addFilter(lambda line: is_refused.set() is None)
        logging.basicConfig(handlers=[noted], level=logging.ERROR, force=True)
        address = HostCacheAddress(f"modes-{os.getpid()}-full", b"key")
        host_cache = HostCacheServer(
            address, checkpoint, small_model, small_schema, HostCacheSettings(record_file=path)
        )
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 * 4096, 4 * 4096))
        reader = HostCacheClient(address, 8, 4096, deadline_s=DEADLINE_S)
        digests, _ = reader.load(EVERYTHING, deadline_s=DEADLINE_S)
        is_refused.wait(DEADLINE_S)
        host_cache.close()
        theirs.send(len(digests))
        os._exit(0)

    FORK.Process(target=run, daemon=True).start()
    theirs.close()

    assert ours.poll(DEADLINE_S)
    assert ours.recv() == 16
    assert "write failed, no more records are appended: " in log_file.read_text()


def test_record_file_that_cannot_be_made_is_done_without(
    start_host_cache: StartHostCache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "no-folder").write_text("")
    _, new_reader = start_host_cache(ring(4, tmp_path / "no-folder" / "records"))

    assert len(new_reader().load([(0, 0)], deadline_s=DEADLINE_S)[0]) == 1
    assert "preload continues without a record file" in caplog.text


# -- damage


def test_damaged_host_record_is_read_again_from_the_disk(
    start_host_cache: StartHostCache, small_schema: ExpertSchema
) -> None:
    host_cache, new_reader = start_host_cache(ring(4))
    reader = new_reader()
    ((plain, weighted),), _ = reader.load([(1, 2)], deadline_s=DEADLINE_S)
    assert reader.reload((1, 2), deadline_s=DEADLINE_S) == (plain, weighted)
    assert host_cache.stats().bytes_from_checkpoint == 4096  # it was intact: nothing was read

    host_cache.arena.bytes[17] ^= 255

    assert reader.reload((1, 2), deadline_s=DEADLINE_S) == (plain, weighted)
    assert digest(bytes_of(reader, (1, 2), 4096)) == (plain, weighted)
    with pytest.raises(MigrationError, match="layer 1 expert 3 is not leased"):
        reader.reload((1, 3), deadline_s=DEADLINE_S)


def test_host_record_that_is_damaged_on_disk_too_is_refused(
    start_host_cache: StartHostCache, checkpoint: Checkpoint
) -> None:
    host_cache, new_reader = start_host_cache(ring(4))
    reader = new_reader()
    reader.load([(1, 2)], deadline_s=DEADLINE_S)
    host_cache.arena.bytes[17] ^= 255
    for shard in checkpoint.path.glob("*.safetensors"):
        with shard.open("r+b") as file:
            header = int.from_bytes(file.read(8), "little")
            file.seek(8 + header)
            file.write(bytes(shard.stat().st_size - 8 - header))

    with pytest.raises(MigrationError, match="layer 1 expert 2: the checkpoint's bytes have"):
        reader.reload((1, 2), deadline_s=DEADLINE_S)
    with pytest.raises(MigrationError, match="without a lease"):
        reader.read((1, 2), torch.zeros(4096, dtype=torch.uint8))
    assert host_cache.stats().damaged > 0


def test_missing_tensor_is_an_error_at_the_rank_and_others_load(
    start_host_cache: StartHostCache, checkpoint: Checkpoint
) -> None:
    index = checkpoint.path / INDEX_FILE
    found = json.loads(index.read_text())
    del found["weight_map"]["model.layers.0.mlp.experts.6.gate_proj.weight"]
    index.write_text(json.dumps(found))
    _, new_reader = start_host_cache(ring(4), Checkpoint(checkpoint.path))
    reader = new_reader()

    with pytest.raises(MigrationError, match=r"failed: .*experts\.6\.gate_proj.weight is missing"):
        reader.load([(0, 1), (0, 6)], deadline_s=DEADLINE_S)

    assert len(reader.load([(0, 1), (0, 2)], deadline_s=DEADLINE_S)[0]) == 2


def test_weights_truncated_while_mapped_are_rejected_without_a_crash(
    start_host_cache: StartHostCache, checkpoint: Checkpoint
) -> None:
    _, new_reader = start_host_cache(ring(4))
    reader = new_reader()
    for shard in checkpoint.path.glob("*.safetensors"):
        os.truncate(shard, 10)

    for _ in range(2):
        with pytest.raises(MigrationError, match="is truncated: 10 bytes, expected"):
            reader.load([(0, 0)], deadline_s=DEADLINE_S)


def test_missing_weight_file_is_refused_at_the_start(checkpoint: Checkpoint) -> None:
    next(iter(checkpoint.path.glob("*.safetensors"))).unlink()

    with pytest.raises(CheckpointError, match="is missing, the index names it"):
        Checkpoint(checkpoint.path)


SMALL_MEMORY = """
import os, sys
from pathlib import Path
from eplb.errors import MigrationError
from eplb.core.model import ModelShape
from rebalance.preload.cache.server import (
    HostCacheAddress, HostCacheClient, HostCacheServer, HostCacheSettings
)
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.experts import ExpertSchema

weights, memory = map(Path, sys.argv[1:])
address = HostCacheAddress(f"small-{os.getpid()}", b"key")
model = ModelShape((0, 1), 8, 2, hidden=16, intermediate=8, num_shared_experts=1)
schema = ExpertSchema.swiglu(16, 8)
settings = HostCacheSettings(memory_folder=memory)
host_cache = HostCacheServer(address, Checkpoint(weights), model, schema, settings)
reader = HostCacheClient(address, 8, schema.record_bytes, deadline_s=30)
held = 0
try:
    for layer, expert in [(l, e) for l in (0, 1) for e in range(8)]:
        reader.load([(layer, expert)], deadline_s=30)
        held += 1
except MigrationError as exc:
    print(held, exc)
reader.release([(0, e) for e in range(8)])
reader.load([(1, 6), (1, 7)], deadline_s=30)
print("reduced to", reader.stats(deadline_s=30).room_bytes // schema.record_bytes)
reader.close()
host_cache.close()  # its threads end before the interpreter does, which would break them off in C++
"""


def test_full_shared_memory_is_an_error_and_not_a_signal(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """A tmpfs of four pages, in a name space of its own, takes the place of a host's memory."""
    memory = tmp_path / "memory"
    memory.mkdir()
    mount = f"mount -t tmpfs -o size=16k none {memory}"
    own = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run([*own, mount], check=False).returncode:
        pytest.skip("this machine lets nobody mount a tmpfs in a name space")
    script = tmp_path / "script.py"
    script.write_text(SMALL_MEMORY)

    ended = subprocess.run(
        [*own, f"{mount} && exec {sys.executable} {script} {checkpoint.path} {memory}"],
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE_S,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )

    assert ended.returncode == 0, ended.stderr
    refusal, room = ended.stdout.splitlines()
    assert refusal.startswith("4 preload on host small-"), refusal
    assert "No space left on device; host cache reduced to" in refusal
    assert room == "reduced to 4"


def test_host_cache_killed_while_writing_leaves_complete_records(
    tmp_path: Path, checkpoint: Checkpoint, small_model: ModelShape, small_schema: ExpertSchema
) -> None:
    path = tmp_path / "records"
    for number in range(5):
        ours, theirs = FORK.Pipe(duplex=False)
        address = HostCacheAddress(f"modes-{os.getpid()}-killed-{number}", b"key")

        def run(address: HostCacheAddress = address, pipe: Connection = theirs) -> None:
            settings = HostCacheSettings(mode="ring", ring_records=4, record_file=path)
            HostCacheServer(address, checkpoint, small_model, small_schema, settings)
            pipe.send("ready")
            signal.pause()

        process = FORK.Process(target=run, daemon=True)
        process.start()
        assert ours.poll(DEADLINE_S)
        with closing(HostCacheClient(address, 8, 4096, deadline_s=DEADLINE_S)) as reader:
            for record in EVERYTHING[: 3 * number + 1]:
                reader.load([record], deadline_s=DEADLINE_S)
                reader.release([record])
            process.kill()
            process.join()
            with pytest.raises(MigrationError, match="disconnected"):
                reader.load([(0, 0)], deadline_s=DEADLINE_S)

    assert make_all(checkpoint, small_model, small_schema, path) < 16
    origin = RecordOrigin.of(checkpoint, small_model, small_schema)
    with closing(RecordFile(path, origin)) as file:
        assert file.num_complete == 16
        for record in EVERYTHING:
            into = SharedArena("test", origin.record_bytes).bytes
            assert file.read(record, into) == file.digest_of(record)
