"""The lease of a deployment in a store, which its parent process holds while it runs.

A second start is refused; the error names the holder. The lease shows whether the holder is alive
(``telemetry/state/lease.py``): it is renewed at a third of its time to live, so a
refusal comes within that time. After an exit of the holder, a start on the same host continues at
once, and on another host after one time to live.
"""

from __future__ import annotations

import logging
import threading
import time

from eplb.errors import ConfigError, StoreError
from rebalance.controller.lease import RENEWALS, ControllerLease
from telemetry.state.holder import new_holder, shown
from telemetry.state.lease import Lease
from telemetry.state.store import StateStore

_ASK_S = 0.2  # while another holds it

log = logging.getLogger(__name__)


class DeploymentLease:
    """The lease of a parent process on its deployment; ``take`` it before anything is written."""

    def __init__(self, store: StateStore, ttl_s: float) -> None:
        self._store, self._ttl_s = store, ttl_s
        self._hold = ControllerLease(store, new_holder(), ttl_s, of="deployment")
        self._is_taken, self._lost_to = False, ""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="deployment-lease", daemon=True)

    def take(self) -> None:
        """Take the lease and keep it in a thread.

        Raises:
            ConfigError: another deployment is running.
            StoreError: the store failed.
        """
        first: Lease | None = None
        while not self._hold.is_held():
            found = self._store.lease("deployment")
            if first is not None and found is not None and _mark(found) != _mark(first):
                raise ConfigError(self._refusal(found))
            first = first or found
            self._closing.wait(_ASK_S)
        self._is_taken = True
        self._thread.start()

    def check(self) -> None:
        """Refuse to continue beside another deployment.

        Raises:
            StoreError: another has taken the deployment over, after this process was suspended.
        """
        if self._lost_to:
            raise StoreError(
                f"deployment {self._store.deployment!r} was taken over by {self._lost_to}, after "
                f"this process did not renew its lease for {self._ttl_s:g} s"
            )

    def release(self) -> None:
        """Release the lease, so that another start need not wait."""
        self._closing.set()
        if not self._is_taken:
            return
        self._thread.join(self._ttl_s)
        try:
            self._hold.give_up()
        except StoreError as exc:  # it runs out
            log.warning("the lease of the deployment was not released: %s", exc)

    def _keep(self) -> None:
        while not self._closing.wait(self._ttl_s / RENEWALS / 2):
            try:
                if not self._hold.is_held():
                    found = self._store.lease("deployment")
                    self._lost_to = shown(found.holder) if found else "another"
                    return
            except StoreError as exc:  # while the store is down, no other process can take it
                log.warning("the lease of the deployment was not renewed: %s", exc)

    def _refusal(self, lease: Lease) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(lease.since))
        return (
            f"deployment {self._store.deployment!r} of this store is run by {shown(lease.holder)} "
            f"since {since}, expected none: end that one, or use another store"
        )


def _mark(lease: Lease) -> tuple[str, int, int]:
    return lease.holder, lease.token, lease.renewals
