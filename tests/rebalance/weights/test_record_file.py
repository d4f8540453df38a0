"""The expert record file: what it gives back, and what it refuses after any damage."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import resource
import shutil
import signal
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from eplb.core.model import ModelShape
from eplb.errors import CheckpointError
from rebalance.weights.disk.direct_io import DirectFile
from rebalance.weights.disk.record_file import RecordFile, RecordOrigin, record_file_beside
from rebalance.weights.disk.record_loader import RecordLoader
from runtime.checkpoints.checkpoint import INDEX_FILE, Checkpoint
from runtime.experts import ExpertSchema
from runtime.memory import PAGE_BYTES, SharedArena, digest
from tests.support.record_files import make_all

FORK = multiprocessing.get_context("fork")
EVERYTHING = [(layer, expert) for layer in (0, 1) for expert in range(8)]


@pytest.fixture
def checkpoint(small_checkpoint: Checkpoint, tmp_path: Path) -> Checkpoint:
    return Checkpoint(shutil.copytree(small_checkpoint.path, tmp_path / "weights"))


@pytest.fixture
def origin(
    checkpoint: Checkpoint, small_model: ModelShape, small_schema: ExpertSchema
) -> RecordOrigin:
    return RecordOrigin.of(checkpoint, small_model, small_schema)


@pytest.fixture
def path(checkpoint: Checkpoint) -> Path:
    return record_file_beside(checkpoint.path)


def record_of(origin: RecordOrigin, value: int = 0) -> torch.Tensor:
    """Page-aligned memory for a record."""
    return SharedArena("test", origin.record_bytes).bytes.fill_(value)


def in_a_process(run: Callable[[Connection], None]) -> tuple[int, Connection]:
    ours, theirs = FORK.Pipe(duplex=False)
    process = FORK.Process(target=lambda: (run(theirs), os._exit(0)), daemon=True)
    process.start()
    theirs.close()
    assert process.pid is not None
    return process.pid, ours


def test_record_round_trips_with_its_digest(path: Path, origin: RecordOrigin) -> None:
    sevens, into = record_of(origin, 7), record_of(origin)
    with closing(RecordFile.open_or_make(path, origin)) as file:
        file.write((1, 3), sevens, digest(sevens))

    with closing(RecordFile(path, origin)) as file:
        assert file.read((1, 3), into) == digest(sevens) == file.digest_of((1, 3))
        assert (file.num_complete, file.digest_of((1, 2))) == (1, None)
    assert torch.equal(into, sevens)


def test_file_is_sparse_until_records_are_written(path: Path, origin: RecordOrigin) -> None:
    large = replace(origin, num_experts=100_000)

    with closing(RecordFile.open_or_make(path, large)):
        found = path.stat()

    assert found.st_size > large.num_records * large.record_bytes
    assert found.st_blocks * 512 <= 4 * PAGE_BYTES


def test_every_record_is_made_once(
    path: Path, checkpoint: Checkpoint, small_model: ModelShape, small_schema: ExpertSchema
) -> None:
    assert make_all(checkpoint, small_model, small_schema, path) == 16
    assert make_all(checkpoint, small_model, small_schema, path) == 0

    loader = RecordLoader(checkpoint, small_model, small_schema, path)
    with closing(loader):
        into, repacked = record_of(loader.origin), record_of(loader.origin)
        for layer, expert in EVERYTHING:
            loaded = loader.load((layer, expert), into)
            checkpoint.repack(layer, expert, small_schema, repacked)
            assert (loaded.source, torch.equal(into, repacked)) == ("record_file", True)


# -- damage


def test_completion_mark_with_a_changed_byte_is_invalid(path: Path, origin: RecordOrigin) -> None:
    sevens = record_of(origin, 7)
    with closing(RecordFile.open_or_make(path, origin)) as file:
        file.write((0, 0), sevens, digest(sevens))
    whole = path.read_bytes()

    for byte in range(PAGE_BYTES, PAGE_BYTES + 32):
        path.write_bytes(whole[:byte] + bytes([whole[byte] ^ 1]) + whole[byte + 1 :])
        with closing(RecordFile(path, origin)) as file:
            assert file.digest_of((0, 0)) is None


@pytest.mark.parametrize("size", [0, 5, 4095, 4096, 4100, 8192, 9000, -1])
def test_truncated_record_file_is_rejected_and_recreated(
    path: Path, origin: RecordOrigin, size: int
) -> None:
    RecordFile.open_or_make(path, origin).close()
    os.truncate(path, size if size >= 0 else path.stat().st_size - 1)

    with pytest.raises(CheckpointError, match=r"records cannot be used: truncated: \d+ byte"):
        RecordFile(path, origin)
    with closing(RecordFile.open_or_make(path, origin)) as file:
        assert file.num_complete == 0


def test_damaged_header_is_refused(path: Path, origin: RecordOrigin) -> None:
    RecordFile.open_or_make(path, origin).close()
    with path.open("r+b") as file:
        file.seek(60)
        file.write(b"?")

    with pytest.raises(CheckpointError, match="cannot be used: corrupted header"):
        RecordFile(path, origin)


def test_records_of_another_schema_or_model_are_rejected(
    path: Path, origin: RecordOrigin, small_schema: ExpertSchema, checkpoint: Checkpoint
) -> None:
    RecordFile.open_or_make(path, origin).close()
    half = ExpertSchema.swiglu(16, 8, torch.bfloat16)
    other = RecordOrigin.of(checkpoint, ModelShape((0, 1), 8, 2, hidden=16, intermediate=8), half)

    with pytest.raises(CheckpointError, match=r"record origin differs: schema '.*', expected"):
        RecordFile(path, other)
    with pytest.raises(CheckpointError, match="num_experts 8, expected 9"):
        RecordFile(path, replace(origin, num_experts=9))


def test_touched_or_changed_checkpoint_is_another(
    checkpoint: Checkpoint, small_model: ModelShape, small_schema: ExpertSchema
) -> None:
    before = RecordOrigin.of(checkpoint, small_model, small_schema)
    shard = sorted(checkpoint.path.glob("*.safetensors"))[0]
    os.utime(shard, ns=(0, 0))

    touched = RecordOrigin.of(checkpoint, small_model, small_schema)
    (checkpoint.path / INDEX_FILE).write_text((checkpoint.path / INDEX_FILE).read_text() + " ")
    changed = RecordOrigin.of(checkpoint, small_model, small_schema)

    assert len({before.checkpoint, touched.checkpoint, changed.checkpoint}) == 3


def test_corrupted_record_is_repacked_and_a_changed_checkpoint_rejected(
    path: Path,
    checkpoint: Checkpoint,
    small_model: ModelShape,
    small_schema: ExpertSchema,
    caplog: pytest.LogCaptureFixture,
) -> None:
    make_all(checkpoint, small_model, small_schema, path)
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)  # of the last record
        file.write(b"?")

    with closing(RecordLoader(checkpoint, small_model, small_schema, path)) as loader:
        into, repacked = record_of(loader.origin), record_of(loader.origin)
        loaded = loader.load((1, 7), into)
        checkpoint.repack(1, 7, small_schema, repacked)

        assert (loaded.source, loader.num_damaged) == ("checkpoint", 1)
        assert torch.equal(into, repacked)
        assert "layer 1 expert 7: digest" in caplog.text

        loader._digests[1, 7] = 1, 2  # of its first read
        with pytest.raises(
            CheckpointError, match=r"digest .*, expected \(1, 2\) as in the first read"
        ):
            loader.load((1, 7), into)


def test_weight_file_cut_short_is_an_error_and_not_a_signal(
    checkpoint: Checkpoint, small_model: ModelShape, small_schema: ExpertSchema
) -> None:
    with closing(RecordLoader(checkpoint, small_model, small_schema)) as loader:
        into = record_of(loader.origin)
        for shard in checkpoint.path.glob("*.safetensors"):
            os.truncate(shard, 100)

        with pytest.raises(CheckpointError, match="is truncated: 100 bytes, expected"):
            loader.load((0, 0), into)


# -- crashes and other processes


@pytest.mark.system
@pytest.mark.parametrize("after", [1, 3, 9])
def test_writer_killed_at_any_record_leaves_complete_ones(
    path: Path,
    checkpoint: Checkpoint,
    small_model: ModelShape,
    small_schema: ExpertSchema,
    after: int,
) -> None:
    origin = RecordOrigin.of(checkpoint, small_model, small_schema)

    def write(pipe: Connection) -> None:
        file = RecordFile.open_or_make(path, origin)
        into = record_of(origin)
        for number, (layer, expert) in enumerate(EVERYTHING):
            checkpoint.repack(layer, expert, small_schema, into)
            file.write((layer, expert), into, digest(into))
            if number % 2 == 1:
                file.flush()
            if number == after:
                os.kill(os.getpid(), signal.SIGKILL)

    pid, pipe = in_a_process(write)
    with pytest.raises(EOFError):
        pipe.recv()
    os.waitpid(pid, 0)

    into = record_of(origin)
    with closing(RecordFile(path, origin)) as file:
        assert file.may_write
        assert file.num_complete == (after + 1) // 2 * 2
        for record in EVERYTHING[: file.num_complete]:
            assert file.read(record, into) == file.digest_of(record)
    assert make_all(checkpoint, small_model, small_schema, path) == 16 - (after + 1) // 2 * 2


def test_second_process_reads_what_the_first_adds(path: Path, origin: RecordOrigin) -> None:
    sevens, into = record_of(origin, 7), record_of(origin)
    with (
        closing(RecordFile.open_or_make(path, origin)) as first,
        closing(RecordFile.open_or_make(path, origin)) as second,
    ):
        assert (first.may_write, second.may_write) == (True, False)
        assert second.digest_of((0, 4)) is None
        first.write((0, 4), sevens, digest(sevens))
        first.flush()

        assert second.digest_of((0, 4)) == digest(sevens) == second.read((0, 4), into)
        with pytest.raises(CheckpointError, match="is in use for another origin"):
            RecordFile.open_or_make(path, replace(origin, num_layers=1))


def test_full_disk_is_an_error_and_what_was_complete_stays(
    path: Path, checkpoint: Checkpoint, small_model: ModelShape, small_schema: ExpertSchema
) -> None:
    origin = RecordOrigin.of(checkpoint, small_model, small_schema)
    RecordFile.open_or_make(path, origin).close()
    room = 2 * PAGE_BYTES + 5 * origin.record_bytes

    def fill(pipe: Connection) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
        with pytest.raises(CheckpointError, match=r"records: .*File too large"):
            make_all(checkpoint, small_model, small_schema, path, num_threads=1)
        pipe.send("refused")

    _, pipe = in_a_process(fill)

    assert pipe.recv() == "refused"
    with closing(RecordFile(path, origin)) as file:
        assert file.num_complete == 5


def test_record_whose_sync_fails_is_never_complete(
    path: Path, origin: RecordOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    sevens = record_of(origin, 7)
    with closing(RecordFile.open_or_make(path, origin)) as file:
        file.write((0, 4), sevens, digest(sevens))
        monkeypatch.setattr(os, "fdatasync", fail)
        with pytest.raises(OSError, match="broken"):
            file.flush()

        assert (file.num_complete, file.digest_of((0, 4))) == (0, None)
    with closing(RecordFile(path, origin)) as opened_again:
        assert (opened_again.num_complete, opened_again.digest_of((0, 4))) == (0, None)


def test_without_o_direct_the_page_cache_is_used_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 64)
    into = SharedArena("test", PAGE_BYTES).bytes.numpy()

    with closing(DirectFile(path, os.O_RDONLY)) as file, caplog.at_level(logging.WARNING):
        file.read_into(into, 1)  # no disk reads past the cache from the middle of a sector

    assert into[:3].tolist() == [1, 2, 3]
    assert "O_DIRECT is not supported" in caplog.text


def test_file_that_ends_early_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(PAGE_BYTES))
    into = SharedArena("test", 2 * PAGE_BYTES).bytes.numpy()

    with closing(DirectFile(path, os.O_RDONLY)) as file, pytest.raises(OSError, match="4096"):
        file.read_into(into, 0)
