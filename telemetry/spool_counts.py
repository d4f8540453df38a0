"""What became of the samples of a spool, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Tally:
    """What happened so far; each only grows."""

    added: int = 0
    recovered: int = 0  # left by an earlier process
    stored: int = 0  # ``repeated`` and ``replayed`` ones are among them
    repeated: int = 0  # that the store had already
    replayed: int = 0  # that were stored after they had waited on disk
    spooled: int = 0  # could not be stored at once, and waited on disk
    dropped: int = 0  # gave way to newer ones, for want of room
    refused: int = 0  # samples that cannot be packed or stored, or records that cannot be read
    errors: int = 0  # failures of the disk
    last_error: str = ""  # of the disk, or why a sample was refused


@dataclass(frozen=True)
class SpoolCounts:
    """A tally, and how the spool stands.

    ``added + recovered == stored + dropped + refused + waiting``, always.
    """

    added: int
    recovered: int
    stored: int
    repeated: int
    replayed: int
    spooled: int
    dropped: int
    refused: int
    errors: int
    last_error: str
    waiting: int  # not stored yet
    waiting_in_memory: int  # of these: without a disk, so that they would die with the process
    torn: int  # writes that a death cut off
    damaged: int  # stretches of segments, and whole files, that hold no record
    bytes_on_disk: int
