"""Counters of a spool and its reporter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass
class Tally:
    """Counters; each only grows."""

    added: int = 0
    recovered: int = 0  # left by an earlier process
    stored: int = 0  # ``repeated`` and ``replayed`` ones are among them
    repeated: int = 0  # that the store had already
    replayed: int = 0  # that were stored after they had waited on disk
    spooled: int = 0  # could not be stored at once, and waited on disk
    dropped: int = 0  # removed for newer ones, for lack of room
    refused: int = 0  # samples that cannot be packed or stored, or records that cannot be read
    last_refusal: str = ""  # why


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
    errors: int  # failures of the disk
    last_error: str  # why a sample was refused, else of the disk
    waiting: int  # not stored yet
    waiting_in_memory: int  # of these: without a disk, so that they would die with the process
    torn: int  # writes that a death cut off
    damaged: int  # stretches of segments, and whole files, that hold no record
    bytes_on_disk: int


@dataclass(frozen=True)
class ReporterStats:
    """Outcome of the samples so far.

    ``offered + recovered == stored + dropped + refused + waiting``, but for what is on its way
    while the counts are read.
    """

    offered: int
    recovered: int  # left on disk by an earlier process of this rank
    stored: int  # acknowledged by the store, including repeats
    repeated: int
    replayed: int  # stored after they had waited on disk
    spooled: int  # could not be stored at once, and waited on disk
    dropped: int  # for lack of room, or offered after close
    refused: int  # impossible samples, and records that cannot be read
    damaged: int  # torn and damaged writes that an earlier process left
    waiting: int
    waiting_in_memory: int  # of these: would be lost with the process
    bytes_on_disk: int
    errors: int  # failed writes, to the store and to the disk
    errors_by_kind: Mapping[str, int]  # the store's by type of error; "disk"
    last_error: str  # "" before the first
