"""The staging ring: which entries are free, and which hold which move's bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from eplb.migration.build import Move
from runtime.streams import Completion


class StagingRing:
    """Tracks free staging entries and the move that each other one holds. Guarded by SharedPhase.

    An entry that was swapped from is free only once that copy is complete, not when it is ordered:
    on a GPU the host runs ahead (vLLM pull 32881 is a buffer overwritten while it was copied).
    """

    def __init__(self, num_entries: int) -> None:
        self.num_entries = num_entries
        self._free = list(range(num_entries))
        self._held: dict[Move, int] = {}
        self._copying: deque[tuple[Completion, list[int]]] = deque()

    @property
    def num_free(self) -> int:
        """Entries that may be written now."""
        while self._copying and self._copying[0][0].is_complete():
            self._free.extend(self._copying.popleft()[1])
        return len(self._free)

    @property
    def num_in_use(self) -> int:
        """Entries that hold bytes or are being copied from, as of the latest poll."""
        return self.num_entries - len(self._free)

    @property
    def oldest_copy(self) -> Completion | None:
        """The copy that will free entries next, if one is under way."""
        return self._copying[0][0] if self._copying else None

    def take(self, move: Move) -> int:
        """Reserve an entry for a move."""
        entry = self._free.pop()
        self._held[move] = entry
        return entry

    def release(self, moves: Sequence[Move], completion: Completion) -> None:
        """Free the entries of moves once their copy into the live slots is complete."""
        self._copying.append((completion, [self._held.pop(move) for move in moves]))

    def release_all(self) -> None:
        """Free every entry: the plan was dropped."""
        self._free.extend(self._held.values())
        self._held.clear()

    def entry(self, move: Move) -> int:
        """Return the entry that holds a move's bytes."""
        return self._held[move]

    def borrow(self) -> int | None:
        """Reserve an entry outside of migrations; None while none is free.

        ``release_all`` does not free it: the borrower gives it back.
        """
        return self._free.pop() if self.num_free else None

    def give_back(self, entry: int, completion: Completion | None = None) -> None:
        """End a loan: at once, or when the copy out of the entry is complete."""
        if completion is None:
            self._free.append(entry)
        else:
            self._copying.append((completion, [entry]))
