"""Which ranks have fallen silent: decided here from times alone, sent and read by ``liveness``.

A killed process is known by its closed connection. A process that is stopped, and a host that has
vanished, close nothing: they are known by the beats that they no longer send. Each rank sends beats
to its nearest neighbours on a ring of the live ranks, and is watched by them:

    0 -- 1 -- 2 -- 3 -- 4 -- 5 -- 0     rank 2 sends to 0, 1, 3 and 4

A neighbour that finds a rank silent tells all others. So the work of a rank does not grow with the
number of ranks, and all know of a silent one within a message.
"""

from __future__ import annotations

from collections.abc import Collection

BEATS = 5  # in the time of silence after which a rank is dead: four may come late or never
_REACH = (-2, -1, 1, 2)  # two on each side: one of them may die with the silent rank


def neighbours(rank: int, live: Collection[int]) -> frozenset[int]:
    """The ranks that a rank sends beats to, and is watched by; ``live`` includes the rank."""
    ring = sorted(live)
    place = ring.index(rank)
    return frozenset(ring[(place + by) % len(ring)] for by in _REACH) - {rank}


class Heartbeats:
    """What one rank knows of its neighbours' beats.

    A rank is watched from its first beat on, and sends none before it has served once. So one that
    still loads or compiles is never silent, however long that takes.

    Args:
        rank: this one.
        num_ranks: of the group.
        silence_s: without a beat, after which a neighbour is dead; 0: never.
    """

    def __init__(self, rank: int, num_ranks: int, silence_s: float) -> None:
        self._rank, self._silence_s = rank, silence_s
        self._live = set(range(num_ranks))
        self._heard_at: dict[int, float] = {}  # of ranks that have sent a beat
        self.neighbours = neighbours(rank, self._live)
        self._send_at: float | None = None  # None: beats are not sent yet

    def begin(self, now: float) -> None:
        """Send beats from now on."""
        if self._silence_s and self._send_at is None:
            self._send_at = now

    def heard(self, rank: int, now: float) -> None:
        """Note a beat of a rank."""
        self._heard_at[rank] = now

    def gone(self, rank: int, now: float) -> None:
        """Note that a rank died or has left: the ring closes behind it."""
        self._live.discard(rank)
        self._heard_at.pop(rank, None)
        self.neighbours = neighbours(self._rank, self._live)
        for other in self._heard_at:
            self._heard_at[other] = now  # who becomes a neighbour has sent nothing until now

    def are_due(self, now: float) -> bool:
        """Whether beats are to be sent now; the next ones are due one interval later."""
        if self._send_at is None or now < self._send_at:
            return False
        self._send_at = now + self._silence_s / BEATS
        return True

    def wait_s(self, now: float) -> float | None:
        """How long nothing is to be sent; None: no beats are sent yet."""
        return None if self._send_at is None else max(0.0, self._send_at - now)

    def silent(self, now: float) -> frozenset[int]:
        """Neighbours that are dead by their silence.

        Call it once all that has arrived was read: then a delay of this rank accuses nobody.
        """
        if self._send_at is None:
            return frozenset()
        heard = self._heard_at
        return frozenset(
            one for one in self.neighbours & heard.keys() if now - heard[one] > self._silence_s
        )
