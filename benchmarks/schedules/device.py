"""A rank's memory and its stream of work, in place of a GPU: orders are done later, in order.

Bytes name what they are: every 32-bit lane of a record tells weights version, layer, expert and
its own position, so that half a record or another one's is never taken for the right one.

Shapes:  L MoE layers, C slots of a rank, K staging entries, S slots of all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from eplb.core.placement import Placement
from runtime.memory.shared import digest
from runtime.streams import Completion

LANES = 4
RECORD_BYTES = 4 * LANES
MOST_LAYERS, MOST_EXPERTS = 8, 8


@cache
def record_words(version: int) -> NDArray[np.int32]:
    """[MOST_LAYERS, MOST_EXPERTS, LANES] of every expert of a weights version."""
    count = MOST_LAYERS * MOST_EXPERTS * LANES
    words = 1 + version * count + np.arange(count, dtype=np.int32)
    return words.reshape(MOST_LAYERS, MOST_EXPERTS, LANES)


@cache
def digest_table(version: int, num_layers: int, num_experts: int) -> torch.Tensor:
    """[L, E, 2] of a weights version."""
    words = record_words(version)
    return torch.tensor(
        [
            [digest(torch.from_numpy(words[layer, expert])) for expert in range(num_experts)]
            for layer in range(num_layers)
        ]
    )


class Event(Completion):
    """A point of a rank's stream."""

    def __init__(self, *, is_done: bool) -> None:
        super().__init__(is_cuda=False)
        self.is_done = is_done

    def is_complete(self) -> bool:
        """Say whether the stream has passed it."""
        return self.is_done


@dataclass(frozen=True)
class Copy:
    """The copy of a staging entry into a live slot, by their rows in the bank."""

    entry: int
    row: int


@dataclass(frozen=True, eq=False)
class Step:
    """The kernels of one step: they route by this table, and read the slots that it names."""

    number: int
    rows: NDArray[np.int32]  # [L, S] expert of each slot, EMPTY where no token goes
    identity: tuple[bytes, int]  # the rows' bytes, and the weights version


@dataclass
class Stream:
    """What a rank's device was told to do and has not done yet."""

    is_immediate: bool  # as on a CPU: a copy is done when it is ordered
    queue: deque[Copy | Event | Step] = field(default_factory=deque)
    watch: Callable[[Copy], None] = lambda copy: None  # told of a copy when ordered and when made

    @property
    def num_steps(self) -> int:
        """Steps that were begun by the host and not made."""
        return sum(isinstance(order, Step) for order in self.queue)


class Bank:
    """Live slots and staging entries, row by row: [L x C live, K staging]."""

    def __init__(self, num_layers: int, num_slots: int, num_staging: int, stream: Stream) -> None:
        self.num_layers, self.num_slots, self.num_staging = num_layers, num_slots, num_staging
        self.num_live = num_layers * num_slots
        self.words = np.zeros((self.num_live + num_staging, LANES), dtype=np.int32)
        whole = torch.from_numpy(self.words.view(np.uint8))
        self.records = list(whole.unbind())
        self._start, self.stream = whole.data_ptr(), stream

    def row_of(self, into: torch.Tensor) -> tuple[int, int]:
        """(row, byte in it) that a part of a record begins at."""
        return divmod(into.data_ptr() - self._start, RECORD_BYTES)

    def live(self, layer: int, slot: int) -> torch.Tensor:
        """Record of a live slot."""
        return self.records[layer * self.num_slots + slot]

    def staging(self, entry: int) -> torch.Tensor:
        """Record of a staging entry."""
        return self.records[self.num_live + entry]

    def swap(self, layer: int, slot: int, entry: int) -> None:
        """Order the copy of a staged record into a live slot."""
        copy = Copy(self.num_live + entry, layer * self.num_slots + slot)
        self.stream.watch(copy)
        if self.stream.is_immediate:
            self.make(copy)
        else:
            self.stream.queue.append(copy)

    def make(self, copy: Copy) -> None:
        """Copy now."""
        self.words[copy.row] = self.words[copy.entry]

    def mark(self) -> Completion:
        """Return what tells when all that was ordered so far is made."""
        event = Event(is_done=self.stream.is_immediate or not self.stream.queue)
        if not event.is_done:
            self.stream.queue.append(event)
        return event

    def digest(self, layer: int, slot: int) -> tuple[int, int]:
        """Digest of a live slot."""
        return digest(self.live(layer, slot))


@dataclass(frozen=True)
class TableLayers:
    """Rows of some layers, ready to be copied into a table."""

    layers: list[int]
    rows: NDArray[np.int32]
    generation: int


class Table:
    """Which expert each slot is routed to for; it stands in for the tensors of a routing table."""

    strays = torch.zeros(1, dtype=torch.int32)

    def __init__(self, placement: Placement) -> None:
        self.rows = placement.slot_to_expert.copy()
        self.generation = placement.generation

    def prepare(self, placement: Placement, layers: Iterable[int]) -> TableLayers:
        """Work out the rows of some layers."""
        chosen = sorted(layers)
        return TableLayers(chosen, placement.slot_to_expert[chosen], placement.generation)

    def swap(self, prepared: TableLayers) -> None:
        """Let prepared layers serve. Steps that were begun keep what they were begun with."""
        self.rows = self.rows.copy()
        self.rows[prepared.layers] = prepared.rows
        self.generation = prepared.generation
