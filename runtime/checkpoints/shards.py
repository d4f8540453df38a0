"""Weight files of a checkpoint: found by the index, read by byte ranges, told apart between starts.

Nothing is mapped: a read past the end of a file that was cut short is an error here, while a mapped
file would end the process with a signal.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eplb.core.bounded_json import decode_json
from eplb.errors import CheckpointError
from runtime.checkpoints.header import StoredTensor, read_header

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"  # small checkpoints have one file, and no index
MAX_INDEX_BYTES = 256 * 2**20  # 91,000 tensors of the largest published model take 9 MB


@dataclass(frozen=True)
class Identity:
    """State of a checkpoint's files at one time, to be compared at the next start; JSON-ready."""

    index: str  # hex digest of the index
    files: tuple[tuple[str, int, int], ...]  # name, bytes, time of change in ns
    digest: str  # hex digest of all of it

    @staticmethod
    def parse(found: Any, where: str) -> Identity:
        """Read what ``dataclasses.asdict`` and JSON made of one.

        Raises:
            CheckpointError: it is none.
        """
        try:
            files = tuple((str(name), int(size), int(time)) for name, size, time in found["files"])
            return Identity(str(found["index"]), files, str(found["digest"]))
        except (KeyError, TypeError, ValueError) as exc:
            raise CheckpointError(
                f"{where}: {found!r:.200} is no identity of a checkpoint, "
                "expected index, files and digest"
            ) from exc

    def difference(self, found: Identity) -> str:
        """Return in what ``found`` differs from this earlier state, or nothing."""
        before, after = ({f[0]: f[1:] for f in one.files} for one in (self, found))
        changes = [f"{name} is missing" for name in before.keys() - after.keys()]
        changes += [f"{name} is new" for name in after.keys() - before.keys()]
        for name in sorted(before.keys() & after.keys()):
            (size, changed), (new_size, newly_changed) = before[name], after[name]
            if size != new_size:
                changes.append(f"{name} has {new_size} bytes, expected {size}")
            elif changed != newly_changed:
                changes.append(f"{name} was written again")
        if self.index != found.index:
            changes.append(f"{INDEX_FILE} has other content")
        return ", ".join(sorted(changes))


class Shards:
    """Opened weight files. Every header is read at once, so damage shows at the start.

    Raises:
        CheckpointError: no index, or a file is missing, truncated or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptors: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        weakref.finalize(self, _close, self._descriptors)
        has_index = (path / INDEX_FILE).exists() or not (path / SINGLE_FILE).exists()
        shard_of = _read_index(path / INDEX_FILE) if has_index else None
        files = [SINGLE_FILE] if shard_of is None else sorted(set(shard_of.values()))
        headers = {file: self._open(file) for file in files}
        if shard_of is None:
            shard_of = dict.fromkeys(headers[SINGLE_FILE], SINGLE_FILE)
        self._shard_of: Mapping[str, str] = shard_of
        # None: the index names a tensor that its file lacks, refused when it is used.
        self._tensors = {name: headers[file].get(name) for name, file in shard_of.items()}

    def _open(self, file: str) -> dict[str, StoredTensor]:
        path = self.path / file
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would block for ever
            self._descriptors[file] = descriptor
            self._sizes[file] = os.fstat(descriptor).st_size
            return read_header(path, descriptor)
        except FileNotFoundError as exc:
            raise CheckpointError(f"weight file {path} is missing, the index names it") from exc
        except (OSError, ValueError) as exc:  # ValueError: a name with a zero byte
            raise CheckpointError(f"weight file {path} cannot be read: {exc}") from exc

    def __contains__(self, name: str) -> bool:
        return name in self._shard_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._shard_of)

    def stored(self, name: str) -> StoredTensor:
        """Type, shape and place of a tensor, without reading it.

        Raises:
            CheckpointError: the index or its file has no such tensor.
        """
        found = self._tensors.get(name)
        if found is None:
            file = self._shard_of.get(name)
            where = f" in {file}, where the index has it" if file else ""
            raise CheckpointError(f"{self.path}: tensor {name} is missing{where}")
        return found

    def read(self, stored: StoredTensor, start: int, into: torch.Tensor) -> None:
        """Fill contiguous uint8 ``into`` on the host from byte ``start`` of a file.

        Raises:
            CheckpointError: a file of the checkpoint is shorter than when it was opened, or the
                disk cannot be read.
        """
        self._check_sizes()
        view = into.numpy().data
        done = 0
        try:
            while done < len(view):
                count = os.preadv(self._descriptors[stored.file], [view[done:]], start + done)
                if not count:
                    raise CheckpointError(
                        f"weight file {self.path / stored.file} is truncated: "
                        f"tensor {stored.name} ends at byte {stored.end}"
                    )
                done += count
        except OSError as exc:
            raise CheckpointError(f"weight file {self.path / stored.file}: {exc}") from exc

    def _check_sizes(self) -> None:
        for file, size in self._sizes.items():
            found = os.fstat(self._descriptors[file]).st_size
            if found < size:
                raise CheckpointError(
                    f"weight file {self.path / file} is truncated: {found} bytes, expected {size}"
                )

    def identity(self) -> Identity:
        """State of the files as they are on disk now.

        Raises:
            CheckpointError: a file is missing.
        """
        digest = hashlib.blake2b(digest_size=16)
        with suppress(FileNotFoundError):
            digest.update((self.path / INDEX_FILE).read_bytes())
        index, files = digest.hexdigest(), []
        for file in sorted(self._sizes):
            try:
                found = (self.path / file).stat()
            except OSError as exc:
                raise CheckpointError(
                    f"weight file {self.path / file} cannot be read: {exc}"
                ) from exc
            files.append((file, found.st_size, found.st_mtime_ns))
            digest.update(repr(files[-1]).encode())
        return Identity(index, tuple(files), digest.hexdigest())


def _close(descriptors: dict[str, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)


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
