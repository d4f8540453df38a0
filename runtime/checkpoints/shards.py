"""Weight files of a checkpoint: found by the index, read by byte ranges.

Nothing is mapped: a read past the end of a file that was cut short is an error here, while a mapped
file would end the process with a signal.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from eplb.errors import CheckpointError
from runtime.checkpoints.header import StoredTensor, read_header
from runtime.checkpoints.identity import SINGLE_FILE, Identity, identity_of, shards_of


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
        shard_of = shards_of(path)
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
        return identity_of(self.path, self._sizes)


def _close(descriptors: dict[str, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)
