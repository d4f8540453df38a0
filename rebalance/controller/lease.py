"""The lease of a deployment's controller: only its holder acts.

              another holds it              asked, and it is free
    STANDS BY <--------------- (asks) -----------------------------> LEADS
        ^                                                               |
        +------- another has it, or it was not renewed in time ---------+

Each turn of the controller asks for the lease. The leader renews it at a third of the time to live,
and every 10 s where that is longer: readiness and alerts judge a controller by its renewals. It
does so in the same thread as its work: a controller that hangs must lose the lease. Each write
carries the lease's fencing token, and the store rejects all but the newest. So a controller that
was suspended past the end of its lease cannot do harm.

Whoever acquires the controller's lease announces its version then. A store that lost its contents
has lost lease and announcement together, so the leader announces itself again when it renews.

A plan that takes longer than the time to live loses the lease to a standby: configure more.
"""

from __future__ import annotations

import logging
import time

from eplb.clock import Clock
from eplb.errors import FencedOut, StoreError
from eplb.versions import CONTROLLER, Announcement
from telemetry.state.holder import new_holder
from telemetry.state.lease import Lease
from telemetry.state.store import StateStore

__all__ = ["ControllerLease", "new_holder"]

RENEWALS = 3  # within one time to live
LONGEST_RENEWAL_S = 10.0  # less than the 30 s without a renewal after which a service is not ready

log = logging.getLogger(__name__)


class ControllerLease:
    """One process's hold on the lease.

    Args:
        holder: no two living processes share one.
        ttl_s: how long it holds without being renewed.
        clock: of seconds, which never jumps.
    """

    def __init__(
        self,
        store: StateStore,
        holder: str,
        ttl_s: float,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        self._store, self.holder, self._ttl_s, self._clock = store, holder, ttl_s, clock
        self._lease: Lease | None = None
        self._asked_at = 0.0  # when the store was last asked for the lease that is held
        self._unreported = ""  # how the last one was lost, until the store has it as an event
        self._is_standing_by = False

    @property
    def token(self) -> int:
        """The fencing token of the held lease."""
        assert self._lease is not None, "only who leads writes"
        return self._lease.token

    def is_held(self) -> bool:
        """Acquire or renew the lease if that is due; return whether this process holds it.

        Raises:
            StoreError: the store failed; no process may act until it answers.
        """
        now = self._clock()
        renews_after_s = min(self._ttl_s / RENEWALS, LONGEST_RENEWAL_S)
        if self._lease is not None and now < self._asked_at + renews_after_s:
            return True
        try:
            found = self._store.acquire_lease(self.holder, self._ttl_s)
        except StoreError as exc:
            if self._lease is not None and now >= self._asked_at + self._ttl_s:
                self.lose(f"not renewed within {self._ttl_s:g} s: {exc}")
            raise
        if found is None:
            self._stand_by()
        else:
            self._lead(found, now)
        return found is not None

    def check(self) -> None:
        """Make sure of the lease after something that took long.

        Raises:
            FencedOut: another holder has it now.
        """
        if not self.is_held():
            raise FencedOut(
                f"the lease of {self.holder!r} was taken: found another holder, expected this one"
            )

    def lose(self, reason: str) -> None:
        """Stop acting; log the reason now and write it to the store once it responds."""
        if self._lease is not None:
            self._unreported = reason
            log.warning("token=%d lease lost: %s", self._lease.token, reason)
        self._lease = None

    def give_up(self) -> None:
        """Release the lease."""
        if self._lease is not None:
            self._store.release_lease(self._lease)
        self._lease = None

    def _lead(self, lease: Lease, now: float) -> None:
        is_news = self._lease is None or self._lease.token != lease.token
        if is_news:
            # Before the lease counts as held: after a failure here the next turn tries again. And
            # before the event below, for which a joining process waits.
            self._store.announce(Announcement(CONTROLLER, self.holder))
        self._lease, self._asked_at, self._is_standing_by = lease, now, False
        self._report_loss()
        if is_news:
            log.info("token=%d %s holds the lease of the controller", lease.token, self.holder)
            self._report("leads", token=lease.token)

    def _stand_by(self) -> None:
        if self._lease is not None:
            self.lose("found another holder")
        self._report_loss()
        if not self._is_standing_by:
            self._is_standing_by = True
            log.info(
                "%s is standing by: another holder has the lease of the controller", self.holder
            )

    def _report_loss(self) -> None:
        if self._unreported:
            reason, self._unreported = self._unreported, ""
            self._report("lost", reason=reason)

    def _report(self, state: str, **more: object) -> None:
        detail = {"of": "controller", "state": state, "holder": self.holder}
        self._store.add_event("lease", detail | more)
