"""Sources of a record, best first, and their quarantine.

Order: the rank's own slot, then peers on the host (all of them in turn, chunk by chunk), then the
host cache. A move that was planned from the host takes that first. A slot with a wrong digest is
never used again by this rank in this run: memory that was corrupted once may be corrupted again. A
host's record is retried after a while, and a correct digest ends its quarantine.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from eplb.clock import Clock
from eplb.core.topology import Topology
from eplb.migration.build import Move, Source
from rebalance.weights.sources import HOST, Place

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3  # the first, and two from elsewhere
HOST_RETRY_S = 60.0  # until a host's record that was wrong is tried again
Key = tuple[int, int, int]  # (layer, rank, slot), or (layer, NO_RANK, expert) of a host's record


class SourceChoice:
    """Chooses the sources of one rank's pulls.

    Args:
        rank: the receiver.
        topology: defines the slots of each rank.
        readable: ranks whose live slots can be read from here, including this one.
        dead: returns the ranks that are known to be dead.
        clock: of seconds.
    """

    def __init__(
        self,
        rank: int,
        topology: Topology,
        readable: frozenset[int],
        dead: Callable[[], frozenset[int]],
        clock: Clock = time.monotonic,
    ) -> None:
        self._rank, self._topology = rank, topology
        self._readable, self._dead, self._clock = readable, dead, clock
        self._quarantined: dict[Key, float] = {}  # until when it is not read
        self._suspects: set[Key] = set()  # one of several that gave wrong bytes together

    @property
    def num_quarantined(self) -> int:
        """Slots and host records that gave wrong bytes, and no right ones since."""
        return len(self._quarantined)

    def is_alive(self, place: Place) -> bool:
        """Return whether a place can be read; a dead peer's memory may vanish at any moment."""
        return place.rank not in self._dead()

    def choose(
        self, move: Move, held: NDArray[np.int32], failed: Sequence[Place], num_tried: int
    ) -> tuple[Place, ...]:
        """Return the places to pull from next, in turn; () when there is none left.

        Args:
            move: what is to be brought.
            held: [L, S] experts in the slots that may be read for it, EMPTY in others.
            failed: places that have already failed for this move.
            num_tried: attempts so far.
        """

        def is_usable(place: Place) -> bool:
            if place in failed or self._clock() < self._quarantined.get(_key(move, place), 0.0):
                return False
            return self.is_alive(place)

        if num_tried >= MAX_ATTEMPTS:
            return ()
        is_last = num_tried == MAX_ATTEMPTS - 1
        for places in self._in_order(move, held, host_first=is_last):
            usable = tuple(place for place in places if is_usable(place))
            if usable:
                return usable
        return ()

    def _in_order(
        self, move: Move, held: NDArray[np.int32], *, host_first: bool
    ) -> Iterator[tuple[Place, ...]]:
        holders = self.holders(move, held)
        is_from_host = move.source in (Source.HOST, Source.DISK)
        if is_from_host or host_first:
            yield (HOST,)
        yield from ((place,) for place in holders if place.source is Source.SAME_RANK)
        peers = [place for place in holders if place.source is Source.PEER]
        yield tuple(place for place in peers if _key(move, place) not in self._suspects)
        yield from ((place,) for place in peers)
        yield (HOST,)

    def holders(self, move: Move, held: NDArray[np.int32]) -> list[Place]:
        """Slots in reach that hold a move's expert, by ``held`` [L, S]; the planned one first."""
        slots = np.flatnonzero(held[move.layer] == move.expert).tolist()
        places = [self._place(slot) for slot in sorted(slots, key=lambda s: s != move.src_slot)]
        alive = self._topology.alive
        return [place for place in places if place.rank in self._readable and alive[place.rank]]

    def _place(self, slot: int) -> Place:
        owner = int(self._topology.rank_of_slot[slot])
        source = Source.SAME_RANK if owner == self._rank else Source.PEER
        return Place(source, owner, slot - int(self._topology.first_slot[owner]))

    def wrong(self, move: Move, places: Sequence[Place]) -> None:
        """Note that the bytes from ``places`` together were not the expert's."""
        if len(places) > 1:
            # Any of them may be the cause: none is read together with others any more.
            self._suspects |= {_key(move, place) for place in places}
            return
        rest_s = HOST_RETRY_S if places[0] == HOST else math.inf
        self._quarantined[_key(move, places[0])] = self._clock() + rest_s
        log.warning(
            "layer %d expert %d: digest mismatch from %s; rank %d quarantines it for %g s",
            move.layer,
            move.expert,
            places[0],
            self._rank,
            rest_s,
        )

    def right(self, move: Move, place: Place, suspected: Sequence[Place]) -> None:
        """Note that ``place`` alone gave right bytes, after ``suspected`` together had not."""
        self._suspects.discard(_key(move, place))
        self._quarantined.pop(_key(move, place), None)  # correct when tried again
        others = [other for other in suspected if other != place]
        left = [other for other in others if _key(move, other) not in self._quarantined]
        if len(others) < len(suspected) and len(left) == len(others) == 1:
            self.wrong(move, left)


def _key(move: Move, place: Place) -> Key:
    return move.layer, place.rank, move.expert if place == HOST else place.slot
