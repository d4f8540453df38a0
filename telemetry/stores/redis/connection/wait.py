"""Waiting for a change in the Redis store: a message is a hint to look, never what is looked at.

A hint may be lost, with a connection or in a failover, so a waiting thread looks now and then
anyhow.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from threading import Event, Lock

from eplb.errors import StoreError
from telemetry.stores.redis.connection.driver import Subscription
from telemetry.stores.redis.connection.link import RedisLink

_LOOK_S = 0.25  # poll interval while notifications arrive: also the time to detect a closed store
_DEAF_LOOK_S = 0.05  # poll interval without notifications
_DEAF_S = 5.0  # for so long after a failure

log = logging.getLogger(__name__)


class Waiter:
    """Lets threads wait for a version; each subscribes over its own connection, which is kept."""

    def __init__(self, link: RedisLink, channel: str, version: Callable[[], int]) -> None:
        self._link, self._channel, self._version = link, channel, version
        self._lock = Lock()
        self._idle: list[Subscription] = []
        self._deaf_until = 0.0
        self._closed = Event()

    def wait(self, version: int, timeout_s: float) -> int:
        """Return once the version differs from ``version``, or after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        subscription: Subscription | None = None
        try:
            while (found := self._version()) == version:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    break
                if subscription is None:
                    subscription = self._taken()
                    if subscription is not None:
                        continue  # changes before the subscription sent no notification
                if not self._heard(subscription, left_s):
                    subscription = None
            return found
        finally:
            self._give_back(subscription)

    def close(self) -> None:
        """Close unused connections; the others close at the end of their waits."""
        self._closed.set()
        with self._lock:
            idle, self._idle = self._idle, []
        for subscription in idle:
            subscription.close()

    def _taken(self) -> Subscription | None:
        """Someone's to listen with; None while hints cannot be had."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
            if time.monotonic() < self._deaf_until:
                return None
        try:
            return self._link.subscribe(self._channel)
        except StoreError as exc:
            self._turn_deaf(exc)
            return None

    def _heard(self, subscription: Subscription | None, left_s: float) -> bool:
        """Wait for a notification, or for the poll interval; False when the connection failed."""
        if subscription is None:
            self._closed.wait(min(left_s, _DEAF_LOOK_S))
            return False
        try:
            self._link.wait_for_message(subscription, min(left_s, _LOOK_S))
        except StoreError as exc:
            self._turn_deaf(exc)
            return False
        return True

    def _turn_deaf(self, exc: StoreError) -> None:
        with self._lock:
            self._deaf_until = time.monotonic() + _DEAF_S
        if not self._link.is_closed:
            log.warning(
                "no change notifications for %g s, polling every %g s: %s",
                _DEAF_S,
                _DEAF_LOOK_S,
                exc,
            )

    def _give_back(self, subscription: Subscription | None) -> None:
        if subscription is None:
            return
        with self._lock:
            if not self._closed.is_set():
                self._idle.append(subscription)
                return
        subscription.close()
