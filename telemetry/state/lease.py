"""Leases: who acts as the one controller, and who owns the deployment.

A lease ends when its holder releases it, when it was not renewed for its time to live by the
*watcher's own* monotonic clock, or at once when the holder is a process of the same host that has
exited. The time in a lease is for display: a wall clock that is set back by an hour would leave
the deployment without a leader for that hour, and one that is set forward would take the lease
from a live leader. The price: a new watcher waits for one time to live before a takeover.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, replace
from threading import Lock
from typing import Literal, get_args

from eplb.clock import Clock
from eplb.errors import ConfigError, FencedOut
from telemetry.state.backend import Change, Reader
from telemetry.state.holder import is_dead
from telemetry.state.part import Part, Single

LeaseOf = Literal["controller", "deployment"]
_MAX_SECONDS = 2**32 - 1  # a token fits into 63 bits


@dataclass(frozen=True)
class Lease:
    """The right to act as the deployment's one controller, or to run it at all, for a while.

    ``token`` is the fencing token: it grows with each new holder and is never given out again, not
    by a store that lost its contents either (``first_token``). A controller passes it with each
    write; once another controller holds the lease, that is refused.
    """

    holder: str
    token: int  # 1 or more
    expires: float  # seconds since the epoch, by the store's clock, for display
    ttl_s: float  # without being renewed; 0: given up
    since: float  # when this holder took it, by the store's clock
    renewals: int  # grows with each change
    of: LeaseOf = "controller"


LEASES: dict[LeaseOf, Single[Lease]] = {  # the latest that was given out
    of: Single(Lease, f"lease_of_{of}", f"the lease of the {of}") for of in get_args(LeaseOf)
}


class LeaseWatch:
    """Remembers since when each lease of a deployment stands as it is, by a monotonic clock."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock, self._lock = clock or time.monotonic, Lock()
        self._seen: dict[LeaseOf, tuple[tuple[str, int, int], float]] = {}

    def is_over(self, lease: Lease) -> bool:
        """Return whether another may take this lease, the last one that was given out."""
        return self.age_s(lease) >= lease.ttl_s or is_dead(lease.holder)

    def age_s(self, lease: Lease) -> float:
        """Note a lease; return how long it was seen unchanged."""
        mark, now = (lease.holder, lease.token, lease.renewals), self._clock()
        with self._lock:
            if lease.of not in self._seen or self._seen[lease.of][0] != mark:
                self._seen[lease.of] = mark, now
            return now - self._seen[lease.of][1]


class LeasePart(Part):
    """Leases of a deployment."""

    _watch: LeaseWatch

    def acquire_lease(self, holder: str, ttl_s: float, of: LeaseOf = "controller") -> Lease | None:
        """Acquire a lease, or renew one's own; None while another holder has it.

        Renewing keeps the token as long as no other holder had the lease in between, even if it had
        expired. A takeover gets a greater token. Two processes must not share a name.

        Raises:
            ConfigError: a holder without a name, or a time to live that is not positive.
        """
        if not holder or not ttl_s > 0:
            raise ConfigError(
                f"holder {holder!r} asked for the lease for {ttl_s} s, expected a name and more "
                "than 0"
            )

        def decision(change: Change) -> Lease | None:
            now, latest = change.time, LEASES[of].get(change)
            if latest is not None and latest.holder == holder:
                lease = replace(
                    latest, expires=now + ttl_s, ttl_s=ttl_s, renewals=latest.renewals + 1
                )
            elif latest is None or self._watch.is_over(latest):
                token = first_token(now) if latest is None else change.last(_counter(of)) + 1
                renewals = 0 if latest is None else latest.renewals + 1
                change.give_out(_counter(of), token)
                lease = Lease(holder, token, now + ttl_s, ttl_s, now, renewals, of)
            else:
                return None
            LEASES[of].put(change, lease)
            return lease

        lease = self.backend.decide(f"lease for {holder!r}", decision)
        if lease is not None:
            self._watch.age_s(lease)
        return lease

    def release_lease(self, lease: Lease) -> bool:
        """Release the lease; False if it has expired, was released or has another holder."""

        def decision(change: Change) -> bool:
            latest = LEASES[lease.of].get(change)
            if latest is None or (latest.holder, latest.token) != (lease.holder, lease.token):
                return False
            if self._watch.is_over(latest):
                return False
            ended = replace(latest, expires=change.time, ttl_s=0.0, renewals=latest.renewals + 1)
            LEASES[lease.of].put(change, ended)
            return True

        return self.backend.decide(f"end of the lease of {lease.holder!r}", decision)

    def lease(self, of: LeaseOf = "controller") -> Lease | None:
        """Return the lease that holds now, as far as this object has seen, or None."""
        latest = self.latest_lease(of)
        return None if latest is None or self._watch.is_over(latest) else latest

    def latest_lease(self, of: LeaseOf = "controller") -> Lease | None:
        """Return the lease that was given out last, also where it is over; None before any."""
        return LEASES[of].get(self.backend)


def first_token(now: float) -> int:
    """Return the first fencing token of a store that has no earlier one.

    Such a store is new, or has lost its contents. Seconds since the epoch stand above 31 random
    bits, so that no earlier token is repeated: while the clock is right the seconds differ. Where
    the clock shows a second of an earlier draw again, two tokens are equal with a chance of 1 in
    2^31; each takeover since that draw, which adds one to the token, adds as much.
    """
    return min(max(int(now), 0), _MAX_SECONDS) << 31 | max(1, secrets.randbits(31))


def check_fence(reader: Reader, fence: int | None) -> None:
    """Refuse a writer whose token is not the newest; None: a writer that needs none.

    A greater one is refused too: a store that lost its newest tokens, to a restore for example,
    gives them out a second time.

    Raises:
        FencedOut: another controller has taken the lease since.
    """
    if fence is None:
        return
    latest = LEASES["controller"].get(reader)
    if latest is not None and latest.token == fence:
        return
    newest = f"{latest.token}, of {latest.holder!r}," if latest else "none"
    raise FencedOut(
        f"a controller writes with fencing token {fence}, found {newest} as the newest given out: "
        "expected it to stop acting"
    )


def _counter(of: LeaseOf) -> str:
    return f"token_of_{of}"
