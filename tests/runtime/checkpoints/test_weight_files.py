"""Weight files: damaged ones are refused, and a checkpoint that changed between two starts."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from random import Random

import pytest
import torch

from eplb.errors import CheckpointError
from runtime import Checkpoint, ExpertSchema
from runtime.checkpoints.identity import SINGLE_FILE, Identity, identity_of
from tests.support.folders import INDEX, rewrite_header, shard_of, write_shards

Tensors = dict[str, torch.Tensor]
EXPERT = "model.layers.2.mlp.experts.1.up_proj.weight"


def test_checkpoint_in_one_file_needs_no_index(
    folder: Path, tensors: Tensors, tmp_path_factory: pytest.TempPathFactory
) -> None:
    single = tmp_path_factory.mktemp("single")
    write_shards(single, tensors, num_files=1)
    (single / "part-0.safetensors").rename(single / "model.safetensors")
    (single / INDEX).unlink()
    shutil.copy(folder / "config.json", single)

    checkpoint = Checkpoint(single)

    checkpoint.check(checkpoint.model_shape(), checkpoint.schema())
    assert torch.equal(checkpoint.part(2, 1, "up_proj.weight"), tensors[EXPERT])


def test_shard_cut_short_under_a_reader_is_refused(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    shard = shard_of(folder, EXPERT)
    size = shard.stat().st_size
    os.truncate(shard, size - 1)

    with pytest.raises(
        CheckpointError, match=rf"{shard.name} is truncated: {size - 1} bytes, expected {size}"
    ):
        checkpoint.part(2, 1, "up_proj.weight")


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (7, "has no description"),
        ({"dtype": "BF16", "shape": [32, -1], "data_offsets": [0, 4]}, r"has shape \[32, -1\]"),
        ({"dtype": "BF16", "shape": [2], "data_offsets": [0]}, r"has data_offsets \[0\]"),
        ({"dtype": "BF16", "shape": [2], "data_offsets": [0, 5]}, "has 5 bytes, expected 4"),
        ({"dtype": "BF16", "shape": [2], "data_offsets": [4, 0]}, "has -4 bytes, expected 4"),
        ({"dtype": "C3", "shape": [2], "data_offsets": [0, 4]}, "has dtype 'C3', expected one of"),
        ({"dtype": [], "shape": [2], "data_offsets": [0, 4]}, r"has dtype \[\], expected one of"),
        ({"dtype": "U8", "shape": [10**9], "data_offsets": [0, 10**9]}, "ends at byte"),
    ],
)
def test_hostile_header_is_refused(folder: Path, entry: object, why: str) -> None:
    shard = shard_of(folder, EXPERT)
    rewrite_header(shard, lambda header: header.update({EXPERT: entry}))

    with pytest.raises(CheckpointError, match=f"truncated or damaged: tensor {EXPERT} .*{why}"):
        Checkpoint(folder)


@pytest.mark.parametrize("head", [b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"[]"])
def test_file_that_is_none_is_refused(folder: Path, head: bytes) -> None:
    shard = shard_of(folder, EXPERT)
    shard.write_bytes(head)

    with pytest.raises(CheckpointError, match=rf"{shard.name} of {len(head)} bytes is truncated"):
        Checkpoint(folder)


def test_pipe_in_place_of_a_weight_file_is_refused(folder: Path) -> None:
    shard = shard_of(folder, EXPERT)
    shard.unlink()
    os.mkfifo(shard)

    with pytest.raises(CheckpointError, match=f"weight file .*{shard.name}"):
        Checkpoint(folder)


def test_random_damage_of_a_header_is_refused_or_harmless(folder: Path) -> None:
    shard = shard_of(folder, EXPERT)
    whole, random = shard.read_bytes(), Random(5)
    length = int.from_bytes(whole[:8], "little")
    num_refused = 0

    for _ in range(100):
        damaged = bytearray(whole)
        for _ in range(random.randint(1, 4)):
            damaged[random.randrange(8 + length)] = random.randrange(256)
        shard.write_bytes(damaged)
        try:
            checkpoint = Checkpoint(folder)
            checkpoint.check(checkpoint.model_shape(), checkpoint.schema())
        except CheckpointError:
            num_refused += 1

    assert num_refused > 65  # the rest hit text that nobody reads, or offsets that fit


def test_four_bit_floats_are_carried_as_bytes(folder: Path) -> None:
    shard = shard_of(folder, EXPERT)
    packed = {"dtype": "F4", "shape": [32, 256]}
    rewrite_header(shard, lambda header: header[EXPERT].update(packed))

    found = Checkpoint(folder).part(2, 1, "up_proj.weight")

    assert (found.shape, found.dtype) == ((32, 128), torch.uint8)


# -- between two starts


def test_unchanged_checkpoint_is_taken_at_the_next_start(folder: Path) -> None:
    identity = Checkpoint(folder).identity()
    before = Identity.parse(json.loads(json.dumps(asdict(identity))), "store")

    assert before == identity
    assert Checkpoint(folder, expected=before).identity() == before


@pytest.mark.parametrize("found", [None, 7, {}, {"files": [["a"]]}, {"files": [["a", "b", 1]]}])
def test_identity_that_is_none_is_refused(found: object) -> None:
    with pytest.raises(CheckpointError, match=r"store: .* is no identity of a checkpoint"):
        Identity.parse(found, "store")


def test_changed_checkpoint_is_refused_at_the_next_start(folder: Path, tensors: Tensors) -> None:
    before = Checkpoint(folder).identity()

    write_shards(folder, {name: tensor + 1 for name, tensor in tensors.items()})
    with pytest.raises(
        CheckpointError, match=r"start: .*part-\d.safetensors has other bytes, of tensor model"
    ):
        Checkpoint(folder, expected=before)

    write_shards(folder, tensors | {"model.norm.weight": torch.ones(64)})
    with pytest.raises(
        CheckpointError, match=rf"{INDEX} has other content, .*part-\d.* has \d+ bytes, expected"
    ):
        Checkpoint(folder, expected=before)

    write_shards(folder, tensors, num_files=4)
    with pytest.raises(CheckpointError, match=r"changed .*: .*part-3\.safetensors is new"):
        Checkpoint(folder, expected=before)


@pytest.mark.parametrize("place", [0, -1], ids=["first", "last"])
def test_file_with_another_byte_at_one_end_is_another(tmp_path: Path, place: int) -> None:
    header, data = b"\x02" + b"\0" * 7 + b"{}", bytearray(2**20)  # of which 32 KiB are read
    weights = tmp_path / SINGLE_FILE
    weights.write_bytes(header + data)
    os.utime(weights, ns=(0, 0))
    before = identity_of(tmp_path)

    data[place] = 1
    weights.write_bytes(header + data)
    os.utime(weights, ns=(0, 0))
    now = identity_of(tmp_path)

    assert now.files == before.files, "its size and time are the same"
    assert now.contents != before.contents
    assert before.difference(now, tmp_path)


# -- two layouts of one expert


def test_record_as_stored_and_fused_record_have_the_same_bytes(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    stored, fused = checkpoint.schema(), ExpertSchema.swiglu(64, 32, torch.bfloat16)
    one, other = (torch.zeros(s.record_bytes, dtype=torch.uint8) for s in (stored, fused))

    checkpoint.repack(1, 2, stored, one)
    checkpoint.repack(1, 2, fused, other)

    assert torch.equal(one, other)  # gate, up and down follow each other in both
