"""Folders with weight files, as checkpoints have them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

INDEX = "model.safetensors.index.json"


def write_shards(folder: Path, tensors: Mapping[str, torch.Tensor], num_files: int = 3) -> None:
    """Write tensors in several files with an index."""
    names, shard_of = sorted(tensors), {}
    for number in range(num_files):
        file = f"part-{number}.safetensors"
        mine = names[number::num_files]
        save_file({name: tensors[name].contiguous() for name in mine}, folder / file)
        shard_of |= dict.fromkeys(mine, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": shard_of}))


def change_config(folder: Path, **values: object) -> None:
    """Set keys of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def shard_of(folder: Path, name: str) -> Path:
    """Return the file that the index names for a tensor."""
    index = json.loads((folder / INDEX).read_text())
    return folder / index["weight_map"][name]


def rewrite_header(shard: Path, change: Any) -> None:
    """Apply ``change`` to the header of a file and leave the data."""
    data = shard.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
