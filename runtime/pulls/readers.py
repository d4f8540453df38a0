"""How the records of peers come into the spare slots of a rank."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple, Protocol

import torch

from runtime.experts import ExpertBank


class Read(NamedTuple):
    """One record to pull."""

    rank: int  # that serves the expert
    slot: int  # among its own, 0..C-1
    spare: int  # of this rank, 0..J-1


class Peer(Protocol):
    """Live slots of another rank (``runtime.experts.PeerBank``)."""

    def read(self, layer: int, slot: int, into: torch.Tensor, offset: int = 0) -> None:
        """Copy a record."""


class HostReader:
    """Copies on a thread of its own, while the rank's thread dispatches and computes.

    Args:
        peers: banks of the ranks of this host, by rank.
        spare: of this rank: one layer of J slots.
        deadline_s: from the end of the resident experts' product on.
    """

    def __init__(self, peers: Mapping[int, Peer], spare: ExpertBank, *, deadline_s: float) -> None:
        self._peers, self._spare, self._deadline_s = peers, spare, deadline_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="eplb-pull")
        self._layer = -1
        self._under_way: list[tuple[Read, Future[None]]] = []

    def begin(self, layer: int, reads: list[Read]) -> None:
        """Start the pulls of a layer; those of the layer before are finished."""
        assert not self._under_way, "a layer is closed before the next one pulls"
        self._layer = layer
        self._under_way = [(read, self._thread.submit(self._pull, layer, read)) for read in reads]

    def _pull(self, layer: int, read: Read) -> None:
        self._peers[read.rank].read(layer, read.slot, self._spare.live(0, read.spare))

    def finish(self) -> str:
        """Wait for the pulls. Returns "", or what was not pulled and why."""
        under_way, self._under_way = self._under_way, []
        done, late = wait([future for _, future in under_way], self._deadline_s)
        for read, future in under_way:
            where = f"the pull of layer {self._layer} slot {read.slot} of rank {read.rank}"
            if future in late:
                return f"{where} was not complete within {self._deadline_s:g} s"
            if future in done and (exc := future.exception()) is not None:
                return f"{where} failed: {exc}"
        return ""

    def close(self) -> None:
        """End the thread, once the read under way has ended."""
        self._thread.shutdown(wait=False, cancel_futures=True)
