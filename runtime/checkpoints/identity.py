"""Identity of a checkpoint: whether it is the same at the next start, or on another host.

Reading all weights would take minutes, and the time of a change differs between copies. So a file
is known by its size, its header (names, types and places of all tensors) and samples of its bytes:
another training step changes nearly all of them. Damage between the samples stays unseen: that
takes ``digest_of_bytes``. Needs no torch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from eplb.core.bounded_json import decode_json
from eplb.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"  # small checkpoints have one file, and no index
MAX_INDEX_BYTES = 256 * 2**20  # 91,000 tensors of the largest published model take 9 MB
LENGTH_BYTES = 8  # first bytes of a safetensors file: the length of its header
MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library
NUM_SAMPLES, SAMPLE_BYTES = 8, 4096  # samples of each file, evenly spread
SAMPLE_DIGITS = 8  # hexadecimal digits of a sample's digest


@dataclass(frozen=True)
class Identity:
    """State of a checkpoint's files at one time, to be compared at the next start; JSON-ready."""

    index: str  # hex digest of the index
    files: tuple[tuple[str, int, int], ...]  # name, bytes, time of change in ns
    digest: str  # hex digest of all of it
    contents: tuple[tuple[str, str], ...]  # digests of header and samples, by file

    @staticmethod
    def parse(found: Any, where: str) -> Identity:
        """Read what ``dataclasses.asdict`` and JSON made of one.

        Raises:
            CheckpointError: ``found`` is no identity.
        """
        try:
            files = tuple((str(name), int(size), int(time)) for name, size, time in found["files"])
            contents = tuple((str(header), str(samples)) for header, samples in found["contents"])
            if len(contents) != len(files):
                raise ValueError("contents of other files")
            return Identity(str(found["index"]), files, str(found["digest"]), contents)
        except (KeyError, TypeError, ValueError) as exc:
            raise CheckpointError(
                f"{where}: {found!r:.200} is no identity of a checkpoint, "
                "expected index, files, digest and contents"
            ) from exc

    def difference(self, found: Identity, folder: Path) -> str:
        """Return in what ``found`` differs from this earlier state, or nothing.

        Args:
            found: the state of ``folder`` now. Only the time of a change may differ: a copy on
                another host has its own.
            folder: is read for the names of tensors that differ.
        """
        before, after = self._by_name(), found._by_name()
        changes = [f"{name} is missing" for name in before.keys() - after.keys()]
        changes += [f"{name} is new" for name in after.keys() - before.keys()]
        for name in sorted(before.keys() & after.keys()):
            (size, (header, samples)), (new_size, (new_header, new_samples)) = (
                before[name],
                after[name],
            )
            if size != new_size:
                changes.append(f"{name} has {new_size} bytes, expected {size}")
            elif header != new_header:
                changes.append(f"{name} has tensors of other names, types or places")
            elif samples != new_samples:
                at = _first_difference(samples, new_samples)
                changes.append(f"{name} has other bytes{_tensor_at(folder / name, size, at)}")
        if self.index != found.index:
            changes.append(f"{INDEX_FILE} has other content")
        return ", ".join(sorted(changes))

    def _by_name(self) -> dict[str, tuple[int, tuple[str, str]]]:
        pairs = zip(self.files, self.contents, strict=True)
        return {name: (size, contents) for (name, size, _), contents in pairs}


def identity_of(folder: Path, files: Iterable[str] | None = None) -> Identity:
    """State of a checkpoint as it is on disk now.

    Args:
        folder: where the checkpoint lies.
        files: its weight files, if they are known; else those of its index.

    Raises:
        CheckpointError: a file is missing, or cannot be read.
    """
    if files is None:
        files = set((shards_of(folder) or {"": SINGLE_FILE}).values())
    digest = hashlib.blake2b(digest_size=16)
    if (folder / INDEX_FILE).exists():
        digest.update((folder / INDEX_FILE).read_bytes())
    index, found, contents = digest.hexdigest(), [], []
    for file in sorted(files):
        try:
            state = (folder / file).stat()
            contents.append(_contents(folder / file, state.st_size))
        except (OSError, ValueError) as exc:
            why = exc.strerror if isinstance(exc, OSError) else exc
            raise CheckpointError(
                f"weight file {folder / file} cannot be read: {why}, expected a whole file"
            ) from exc
        found.append((file, state.st_size, state.st_mtime_ns))
        digest.update(repr(found[-1]).encode())
    return Identity(index, tuple(found), digest.hexdigest(), tuple(contents))


def digest_of_bytes(path: Path) -> str:
    """Return the digest of all bytes of a weight file, which takes as long as reading them.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as exc:
        raise CheckpointError(
            f"weight file {path} cannot be read: {exc.strerror}, expected a whole file"
        ) from exc


def _contents(path: Path, size: int) -> tuple[str, str]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would block for ever
    try:
        data = _data_start(descriptor, size)
        header = hashlib.blake2b(os.pread(descriptor, data, 0), digest_size=8)
        samples = [
            hashlib.blake2b(
                os.pread(descriptor, SAMPLE_BYTES, start), digest_size=SAMPLE_DIGITS // 2
            )
            for start in _sample_starts(data, size)
        ]
    finally:
        os.close(descriptor)
    return header.hexdigest(), "".join(sample.hexdigest() for sample in samples)


def _data_start(descriptor: int, size: int) -> int:
    length = int.from_bytes(os.pread(descriptor, LENGTH_BYTES, 0), "little")
    return min(size, LENGTH_BYTES + min(length, MAX_HEADER_BYTES))


def _sample_starts(data: int, size: int) -> Iterator[int]:
    room = max(0, size - data - SAMPLE_BYTES)
    return (data + room * number // (NUM_SAMPLES - 1) for number in range(NUM_SAMPLES))


def _first_difference(samples: str, found: str) -> int:
    places = range(0, NUM_SAMPLES * SAMPLE_DIGITS + 1, SAMPLE_DIGITS)
    return next(
        (number for number, (a, b) in enumerate(pairwise(places)) if samples[a:b] != found[a:b]), 0
    )


def _tensor_at(path: Path, size: int, sample: int) -> str:
    """Name the first tensor that a sample has bytes of; "" where that cannot be read."""
    try:
        with path.open("rb") as file:
            data = _data_start(file.fileno(), size)
            header = decode_json(file.read(data)[LENGTH_BYTES:], max_bytes=MAX_HEADER_BYTES)
        at = list(_sample_starts(data, size))[sample] - data
        ends = {name: entry["data_offsets"] for name, entry in header.items() if name[:2] != "__"}
        near = [
            name for name, (start, end) in ends.items() if start < at + SAMPLE_BYTES and at < end
        ]
        return f", of tensor {near[0]} among others" if near else ""
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return ""


def shards_of(folder: Path) -> dict[str, str] | None:
    """Give the file of each tensor by the index; None: one file and no index.

    Raises:
        CheckpointError: there is neither, or the index cannot be used.
    """
    if (folder / INDEX_FILE).exists():
        return _read_index(folder / INDEX_FILE)
    if not (folder / SINGLE_FILE).exists():
        raise CheckpointError(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}, expected one of them"
        )
    return None


def _read_index(index: Path) -> dict[str, str]:
    """Shard of each tensor, by name."""
    refusal = f"{index} cannot be read as a checkpoint index"
    try:
        size = index.stat().st_size
        if size > MAX_INDEX_BYTES:
            raise CheckpointError(f"{refusal}: {size} bytes, expected at most {MAX_INDEX_BYTES}")
        found = decode_json(index.read_bytes(), max_bytes=MAX_INDEX_BYTES)
    except (OSError, ValueError) as exc:
        raise CheckpointError(f"{refusal}: {exc}") from exc
    shard_of = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(shard_of, dict) or not all(isinstance(s, str) for s in shard_of.values()):
        raise CheckpointError(f'{refusal}, expected a "weight_map" from tensor names to files')
    outside = next((name for name in shard_of.values() if Path(name).name != name), None)
    if outside is not None:
        raise CheckpointError(f"{refusal}: it names file {outside!r}, expected one beside it")
    return shard_of
