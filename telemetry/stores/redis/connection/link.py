"""Access to Redis with retries within a deadline, and one error message afterwards.

Whatever is retried must be idempotent: reads are, samples are distinguished by their sequence, and
changes carry an id that Redis remembers (``telemetry/stores/redis/scripts.py``).
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from threading import Event
from typing import Any, TypeVar

from eplb.errors import StoreError
from telemetry.stores.redis.connection.address import RedisAddress
from telemetry.stores.redis.connection.breaker import Breaker
from telemetry.stores.redis.connection.driver import RedisDriver, Subscription
from telemetry.stores.redis.connection.errors import Trouble
from telemetry.stores.redis.scripts import Script

_FIRST_BACKOFF_S = 0.02
_LONGEST_BACKOFF_S = 0.5

T = TypeVar("T")


class LinkError(StoreError):
    """A StoreError with the kind of its failure."""

    def __init__(self, words: str, trouble: Trouble) -> None:
        super().__init__(words)
        self.trouble = trouble


class RedisLink:
    """Commands with a deadline, behind a circuit breaker. Threads may share one."""

    def __init__(self, address: RedisAddress, *, jitter: random.Random | None = None) -> None:
        self.address = address
        self._limits = address.limits
        self._driver = RedisDriver(address)
        self.breaker = Breaker(self._limits.breaker_failures, self._limits.cool_down_s)
        # Unseeded unless a test says so: ranks that lost the server at once must not come back at
        # once.
        self._jitter = jitter or random.Random()
        self._closed = Event()
        self._last_failure = ""

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed.is_set()

    def read(self, *words: Any) -> Any:
        """Run a command that changes nothing; its second word is a key."""
        return self._tried(f"{words[0]} {words[1]}", lambda: self._driver.send(*words))

    def write(self, *words: Any) -> Any:
        """Run a command that may be run twice; its second word is a key."""
        return self._tried(
            f"{words[0]} {words[1]}", lambda: self._driver.send(*words), is_write=True
        )

    def run(
        self,
        what: str,
        script: Script,
        keys: Sequence[str],
        values: Sequence[Any] = (),
        *,
        is_write: bool = True,
    ) -> Any:
        """Run a script that may be run twice; ``what`` names it in errors."""
        return self._tried(what, lambda: self._driver.run(script, keys, values), is_write=is_write)

    def ask(self, key: str, *words: str) -> Any:
        """Run a command without a key on the server that holds ``key``."""
        return self._tried(" ".join(words), lambda: self._driver.ask(key, *words))

    def names(self, pattern: str) -> list[str]:
        """Return the keys that match a pattern, on every server."""
        return self._tried(f"SCAN {pattern}", lambda: self._driver.names(pattern))

    def subscribe(self, channel: str) -> Subscription:
        """Listen to a channel."""
        return self._tried(f"SUBSCRIBE {channel}", lambda: self._driver.subscribe(channel))

    def wait_for_message(self, subscription: Subscription, timeout_s: float) -> bool:
        """Wait for a message.

        Raises:
            StoreError: the connection is lost; the subscription is closed.
        """
        try:
            return subscription.wait_for_message(timeout_s)
        except Exception as exc:
            subscription.close()
            self._check_open(exc)
            if not isinstance(exc, self._driver.errors):
                raise
            raise self._failed("receiving change notifications", exc, 1, 0.0) from exc

    def close(self) -> None:
        """Close the connections and end every wait between attempts."""
        self._closed.set()
        self._driver.close()

    def _tried(self, what: str, attempt: Callable[[], T], *, is_write: bool = False) -> T:
        started = time.monotonic()
        self._check_open()
        is_probe = self._enter(what)
        backoff_s = _FIRST_BACKOFF_S
        for num_tried in itertools.count(1):
            try:
                result = attempt()
            except self._driver.errors as exc:
                if self.is_closed:
                    self.breaker.abandon()
                    self._check_open(exc)
                wait_s = self._jitter.uniform(0.5, 1.0) * backoff_s
                spent_s = time.monotonic() - started
                is_last = is_probe or spent_s + wait_s > self._limits.deadline_s
                failure = self._failed(what, exc, num_tried, spent_s, is_write=is_write)
                if is_last or not failure.trouble.value.is_passing:
                    raise failure from exc
            except BaseException as exc:
                self.breaker.abandon()  # a bug or Ctrl-C: not a failure of the server
                self._check_open(exc)
                raise
            else:
                self.breaker.succeed()
                return result
            self._closed.wait(wait_s)
            self._check_open()
            backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)
        raise AssertionError("the loop ends by a return or an error")

    def _enter(self, what: str) -> bool:
        """Ask the breaker; whether this call is its probe."""
        is_probe = self.breaker.is_probe()
        if is_probe is None:
            raise StoreError(
                f"Redis store {self.address}: {what} was not tried, because "
                f"{self._limits.breaker_failures} attempts in a row have failed and "
                f"{self._limits.cool_down_s:g} s have not passed since; the last: "
                f"{self._last_failure}"
            )
        return is_probe

    def _failed(
        self, what: str, exc: Exception, num_tried: int, spent_s: float, *, is_write: bool = False
    ) -> LinkError:
        """Count a failed attempt, and log it."""
        trouble = self._driver.trouble_of(exc)
        found = _shown(exc, self.address.password)
        tries = f" after {num_tried} attempts in {spent_s:.1f} s" if num_tried > 1 else ""
        words = (
            f"Redis store {self.address} {trouble.value.words}: {what} failed{tries}, found {found}"
        )
        # A refusal shows that the server is there: only a missing response counts against it.
        if not trouble.value.is_absence:
            self.breaker.succeed()
            return LinkError(words, trouble)
        self._last_failure = words
        self.breaker.fail()
        text = f"{words}; it may or may not have taken effect" if is_write else words
        return LinkError(text, trouble)

    def _check_open(self, exc: BaseException | None = None) -> None:
        # A client that is closed under a command in another thread may fail in any way.
        if self.is_closed and (exc is None or isinstance(exc, Exception)):
            raise StoreError(f"Redis store {self.address} is closed, expected an open one") from exc


def _shown(exc: Exception, password: str) -> str:
    """Text of an error. No known one contains the password; if one does, it is removed."""
    text = f"{type(exc).__name__}: {exc}"
    return text.replace(password, "***") if password else text
