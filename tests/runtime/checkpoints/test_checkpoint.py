"""Weights on disk: what is written is read back, and every kind of damage is one sentence."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from eplb.core.model import ModelShape
from eplb.errors import CheckpointError
from runtime.checkpoints.checkpoint import INDEX_FILE, Checkpoint
from runtime.checkpoints.identity import SINGLE_FILE
from runtime.checkpoints.own_model import expert_name, write_random_checkpoint
from runtime.experts import ExpertSchema

NOBODY = 65534
SECOND_SHARD = "model-00002-of-00003.safetensors"  # layer 0


@pytest.fixture
def copied(small_checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """A checkpoint that a test may damage."""
    return shutil.copytree(small_checkpoint.path, tmp_path / "copied")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that any user can reach, which pytest's own are not."""
    folder = Path(tempfile.mkdtemp(prefix="eplb-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def what_a_child_is_told(function: Callable[[], None]) -> str:
    """Run ``function`` in a forked process and return the CheckpointError that it ended with."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def run() -> None:
        try:
            function()
            theirs.send("it succeeded")
        except CheckpointError as exc:
            theirs.send(str(exc))
        except BaseException as exc:
            theirs.send(f"not a CheckpointError: {exc!r}")
        os._exit(0)

    process = context.Process(target=run)
    process.start()
    theirs.close()
    try:
        told: str = ours.recv()
    finally:
        process.kill()
        process.join()
    return told


# -- right


def test_checkpoint_round_trips(
    small_checkpoint: Checkpoint, small_model: ModelShape, small_schema: ExpertSchema
) -> None:
    small_checkpoint.check(small_model, small_schema)

    name = f"{expert_name(1, 7)}.down_proj.weight"
    assert name in small_checkpoint
    assert small_checkpoint.shape(name) == (16, 8)
    assert tuple(small_checkpoint.tensor(name).shape) == (16, 8)
    # Two layers of eight experts of three tensors, and what every rank holds.
    assert len(small_checkpoint.reference_weights()) == 48 + len(small_checkpoint.dense_weights())
    assert not any(".experts." in name for name in small_checkpoint.dense_weights())


def test_one_seed_writes_the_same_weights_again(
    small_checkpoint: Checkpoint,
    small_model: ModelShape,
    small_schema: ExpertSchema,
    tmp_path: Path,
) -> None:
    write_random_checkpoint(tmp_path / "again", small_model, small_schema, vocabulary=64, seed=1)
    write_random_checkpoint(tmp_path / "other", small_model, small_schema, vocabulary=64, seed=2)

    first = small_checkpoint.reference_weights()
    again, other = (Checkpoint(tmp_path / name).reference_weights() for name in ("again", "other"))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_record_holds_gate_and_up_fused_then_down(
    small_checkpoint: Checkpoint, small_schema: ExpertSchema
) -> None:
    record = torch.zeros(small_schema.record_bytes, dtype=torch.uint8)

    small_checkpoint.repack(0, 3, small_schema, record)

    repacked, where = small_schema.views(record), expert_name(0, 3)
    gate, up, down = (
        small_checkpoint.tensor(f"{where}.{part}_proj.weight") for part in ("gate", "up", "down")
    )
    assert torch.equal(repacked["gate_up"], torch.cat([gate, up]))
    assert torch.equal(repacked["down"], down)


# -- damaged


def test_missing_shard_is_named(copied: Path) -> None:
    (copied / SECOND_SHARD).unlink()

    with pytest.raises(CheckpointError, match=f"{SECOND_SHARD} is missing, the index names it"):
        Checkpoint(copied)


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5, -1])
def test_shard_cut_short_anywhere_is_refused_at_the_start(copied: Path, kept: float) -> None:
    shard = copied / SECOND_SHARD
    size = shard.stat().st_size
    left = int(size * kept) if 0 < kept < 1 else int(kept) % size
    os.truncate(shard, left)

    with pytest.raises(CheckpointError, match=f"{SECOND_SHARD} of {left} bytes is truncated or"):
        Checkpoint(copied)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "7",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"model.embed_tokens.weight": 3}}',
        "\udc80",
    ],
)
def test_index_that_is_none_is_refused(copied: Path, text: str) -> None:
    (copied / INDEX_FILE).write_text(text, errors="surrogateescape")

    with pytest.raises(CheckpointError, match=f"{INDEX_FILE} cannot be read as a checkpoint index"):
        Checkpoint(copied)


def test_folder_without_an_index_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"has neither {SINGLE_FILE} nor {INDEX_FILE}"):
        Checkpoint(tmp_path)


# -- written in full or not at all


def test_full_disk_leaves_no_half_written_folder(
    small_model: ModelShape, small_schema: ExpertSchema, tmp_path: Path
) -> None:
    target = tmp_path / "weights"

    def write() -> None:
        # Files may not grow past this: the embedding fits, the first layer of 22 kB does not.
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
        write_random_checkpoint(target, small_model, small_schema, vocabulary=64, seed=1)

    told = what_a_child_is_told(write)

    assert told.startswith(f"weights cannot be written to {target}: ")
    assert "File too large" in told
    assert list(tmp_path.iterdir()) == []


def test_read_only_folder_is_an_error(
    small_model: ModelShape, small_schema: ExpertSchema, open_folder: Path
) -> None:
    target = open_folder / "weights"

    def write() -> None:
        if os.geteuid() == 0:  # nothing is read-only to root
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        else:
            open_folder.chmod(0o555)
        write_random_checkpoint(target, small_model, small_schema, vocabulary=64, seed=1)

    told = what_a_child_is_told(write)

    assert told.startswith(f"weights cannot be written to {target}: ")
    assert "Permission denied" in told
    open_folder.chmod(0o755)
    assert list(open_folder.iterdir()) == []


def test_weights_that_are_there_are_never_written_over(
    copied: Path, small_model: ModelShape, small_schema: ExpertSchema
) -> None:
    before = (copied / SECOND_SHARD).read_bytes()

    with pytest.raises(CheckpointError, match=f"weights cannot be written to {copied}"):
        write_random_checkpoint(copied, small_model, small_schema, vocabulary=64, seed=2)

    assert (copied / SECOND_SHARD).read_bytes() == before
    assert [path.name for path in copied.parent.iterdir()] == ["copied"]
