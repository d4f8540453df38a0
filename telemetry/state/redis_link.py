"""Access to Redis: a client of redis-py, retries within a deadline, and one error message after.

The one file that imports redis-py. Its own ``Retry`` counts attempts; here a deadline ends them, by
the kind of the failure, and a circuit breaker stops all calls to a server that does not respond:

    closed --N failures in a row--> open --cool-down--> half open --success--> closed
                                     ^                      |
                                     +-------failure--------+

Closed, every call may go. Open, none may. Half open, one may, and the others wait for its outcome.

Whatever is retried must be idempotent: reads are, samples are distinguished by their sequence, and
changes carry an id that Redis remembers (``telemetry/state/redis_scripts.py``).
"""

from __future__ import annotations

import itertools
import os
import random
import re
import ssl
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from threading import Event, Lock
from typing import Any, Literal, TypeVar

from eplb.clock import Clock
from eplb.errors import StoreError
from eplb.packages import needed_for
from telemetry.state.redis_address import RedisAddress
from telemetry.state.redis_scripts import Script

_FIRST_BACKOFF_S = 0.02
_LONGEST_BACKOFF_S = 0.5
_SCANNED = 1000  # keys of a server that one request looks at
_HEALTH_CHECK_S = 15  # a connection that was idle for so long is checked before use

T = TypeVar("T")


@dataclass(frozen=True)
class Trait:
    """How to handle a kind of failure, and its message."""

    words: str
    is_passing: bool = False  # may be over at the next attempt
    is_absence: bool = False  # the server does not respond: other calls need not try


_KEPT = "what was acknowledged before is kept"


class Trouble(Enum):
    """Kinds of failure with their own message or handling."""

    UNREACHABLE = Trait("cannot be reached, expected a server that answers", True, True)
    SLOW = Trait("does not answer, expected an answer within the timeout", True, True)
    LOADING = Trait("is loading its data set, expected it to be loaded", True, True)
    CLUSTER_DOWN = Trait("is down as a cluster, expected a primary for every slot", True, True)
    BUSY = Trait("is busy with another script, expected it to end within the timeout", True)
    READ_ONLY = Trait("is a read-only replica, expected a primary", True)
    FULL = Trait(f"is full, expected room below its maxmemory; {_KEPT}")
    NOT_SAVING = Trait(f"cannot write its files, expected a disk with room; {_KEPT}")
    LOGIN = Trait("refuses the login, expected the URL's user and password to be known")
    FORBIDDEN = Trait("forbids the user a command, expected the permissions of the docs")
    NOT_TRUSTED = Trait("fails TLS, expected certificates and keys that fit those of the URL")
    NO_SOCKET = Trait("has no socket file, expected a server that listens on it", True, True)
    SOCKET_FORBIDDEN = Trait("forbids this user its socket file, expected the right to write to it")
    NODE_OF_CLUSTER = Trait("is a node of a cluster, expected a URL redis+cluster:// for it")
    NO_CLUSTER = Trait("is not a cluster, expected a URL redis:// for it")
    OTHER = Trait("failed, expected it to take the command")


# The first word of an error reply. A script's errors carry that of the command that failed; Redis
# 6.2 puts a dash before it and more words around it.
_BY_WORD = {
    "OOM": Trouble.FULL,
    "MISCONF": Trouble.NOT_SAVING,
    "LOADING": Trouble.LOADING,
    "BUSY": Trouble.BUSY,
    "READONLY": Trouble.READ_ONLY,
    "NOREPLICAS": Trouble.READ_ONLY,
    "MASTERDOWN": Trouble.CLUSTER_DOWN,
    "CLUSTERDOWN": Trouble.CLUSTER_DOWN,
    "TRYAGAIN": Trouble.CLUSTER_DOWN,
    "MOVED": Trouble.NODE_OF_CLUSTER,
    "ASK": Trouble.NODE_OF_CLUSTER,
    "WRONGPASS": Trouble.LOGIN,
    "NOAUTH": Trouble.LOGIN,
    "NOPERM": Trouble.FORBIDDEN,
}
_WORD = re.compile(rf"(?:^|-)({'|'.join(_BY_WORD)}) ")
# What has no such word.
_BY_PHRASE = {
    "Cluster mode is not enabled": Trouble.NO_CLUSTER,
    "slots are not covered": Trouble.CLUSTER_DOWN,
    "is not covered by the cluster": Trouble.CLUSTER_DOWN,
    "can't run this command": Trouble.FORBIDDEN,
    "can't access at least one of the keys": Trouble.FORBIDDEN,
    "max number of clients reached": Trouble.UNREACHABLE,
}


def trouble_in(text: str) -> Trouble | None:
    """Return the kind of an error reply; None when it is unknown."""
    found = _WORD.search(text)
    if found:
        return _BY_WORD[found.group(1)]
    return next((trouble for phrase, trouble in _BY_PHRASE.items() if phrase in text), None)


class LinkError(StoreError):
    """A StoreError with the kind of its failure."""

    def __init__(self, words: str, trouble: Trouble) -> None:
        super().__init__(words)
        self.trouble = trouble


class RedisLink:
    """Commands with a deadline, behind a circuit breaker. Threads may share one.

    Nothing is connected before the first command.

    Args:
        jitter: of the pauses between attempts; not seeded unless a test does, because ranks that
            lost the server at once must not come back at once.
    """

    def __init__(self, address: RedisAddress, *, jitter: random.Random | None = None) -> None:
        self.address = address
        self._limits = address.limits
        self.breaker = Breaker(self._limits.breaker_failures, self._limits.cool_down_s)
        self._jitter = jitter or random.Random()
        self._closed = Event()
        self._last_failure = ""
        self._redis = _library()
        self._making = Lock()
        self._client: Any = None
        self._process = os.getpid()
        self._at_hand: deque[Any] = deque()  # connections that no thread uses
        # OSError: a TLS file that is not there. RedisClusterException is no RedisError.
        exceptions = self._redis.exceptions
        self._errors: tuple[type[Exception], ...] = (
            exceptions.RedisError,
            exceptions.RedisClusterException,
            OSError,
        )

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed.is_set()

    def read(self, *words: Any) -> Any:
        """Run a command that changes nothing; its second word is a key."""
        what = f"{words[0]} {words[1]}"
        return self._tried(what, lambda: self._connected().execute_command(*words))

    def write(self, *words: Any) -> Any:
        """Run a command that may be run twice; its second word is a key."""
        what = f"{words[0]} {words[1]}"
        return self._tried(what, lambda: self._connected().execute_command(*words), is_write=True)

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

        def attempt() -> Any:
            client, words = self._connected(), (len(keys), *keys, *values)
            run = client.execute_command if self.address.is_cluster else self._run_directly
            try:
                return run("EVALSHA", script.digest, *words)
            except self._redis.exceptions.NoScriptError:
                return run("EVAL", script.text, *words)

        return self._tried(what, attempt, is_write=is_write)

    def ask(self, key: str, *words: str) -> Any:
        """Run a command without a key on the server that holds ``key``."""

        def attempt() -> Any:
            client = self._connected()
            if self.address.is_cluster:
                client = client.get_redis_connection(client.get_node_from_key(key))
            return client.execute_command(*words)

        return self._tried(" ".join(words), attempt)

    def names(self, pattern: str) -> list[str]:
        """Return the keys that match a pattern, on every server; those made meanwhile may lack."""

        def attempt() -> list[str]:
            names = self._connected().scan_iter(match=pattern, count=_SCANNED)
            return [name.decode() if isinstance(name, bytes) else name for name in names]

        return self._tried(f"SCAN {pattern}", attempt)

    def subscribe(self, channel: str) -> Any:
        """Return redis-py's subscription to a channel, over a connection of its own."""

        def attempt() -> Any:
            subscription = self._connected().pubsub(ignore_subscribe_messages=True)
            subscription.subscribe(channel)
            return subscription

        return self._tried(f"SUBSCRIBE {channel}", attempt)

    def wait_for_message(self, subscription: Any, timeout_s: float) -> None:
        """Wait for messages, and drop them all.

        Raises:
            StoreError: the connection is lost; the subscription is closed.
        """
        try:
            while subscription.get_message(timeout=timeout_s) is not None:
                timeout_s = 0.0
        except Exception as exc:
            subscription.close()
            self._check_open(exc)
            if not isinstance(exc, self._errors):
                raise
            raise self._failed("receiving change notifications", exc, 1, 0.0) from exc

    def close(self) -> None:
        """Close the connections and end every wait between attempts."""
        self._closed.set()
        with self._making:
            if self._client is not None:
                self._client.close()

    def _tried(self, what: str, attempt: Callable[[], T], *, is_write: bool = False) -> T:
        started = time.monotonic()
        self._check_open()
        is_probe = self.breaker.is_probe()
        if is_probe is None:
            raise StoreError(
                f"Redis store {self.address}: {what} was not tried, because "
                f"{self._limits.breaker_failures} attempts in a row have failed and "
                f"{self._limits.cool_down_s:g} s have not passed since; the last: "
                f"{self._last_failure}"
            )
        backoff_s = _FIRST_BACKOFF_S
        for num_tried in itertools.count(1):
            try:
                result = attempt()
            except self._errors as exc:
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

    def _failed(
        self, what: str, exc: Exception, num_tried: int, spent_s: float, *, is_write: bool = False
    ) -> LinkError:
        """Count a failed attempt, and describe it."""
        trouble = self._trouble_of(exc)
        # No known error contains the password; if one does, it is removed.
        shown, password = f"{type(exc).__name__}: {exc}", self.address.password
        shown = shown.replace(password, "***") if password else shown
        tries = f" after {num_tried} attempts in {spent_s:.1f} s" if num_tried > 1 else ""
        words = (
            f"Redis store {self.address} {trouble.value.words}: {what} failed{tries}, found {shown}"
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

    def _trouble_of(self, exc: Exception) -> Trouble:
        """The kind of failure of an error."""
        errors = self._redis.exceptions
        trouble = trouble_in(f"{getattr(exc, 'status_code', None) or ''} {exc}".lstrip())
        if trouble is not None:
            return trouble
        if isinstance(exc, errors.AuthenticationError):
            return Trouble.LOGIN
        if self.address.tls is not None and _is_behind(
            exc, ssl.SSLError, FileNotFoundError, PermissionError
        ):
            return Trouble.NOT_TRUSTED
        if self.address.socket_path and _is_behind(exc, FileNotFoundError):
            return Trouble.NO_SOCKET
        if self.address.socket_path and _is_behind(exc, PermissionError):
            return Trouble.SOCKET_FORBIDDEN
        if isinstance(exc, errors.TimeoutError):
            return Trouble.SLOW
        cause = exc.__cause__
        if isinstance(exc, errors.RedisClusterException) and isinstance(cause, Exception):
            return self._trouble_of(cause)
        is_gone = isinstance(exc, (errors.ConnectionError, errors.ClusterError))
        return Trouble.UNREACHABLE if is_gone else Trouble.OTHER

    def _run_directly(self, *words: Any) -> Any:
        """Run a script over a connection that is kept open.

        To take one from redis-py's pool for each command doubles what a command costs here: 77 us
        of CPU where this takes 39. Every sample comes this way.
        """
        if os.getpid() != self._process:
            # Those of the process that this one was forked from are its own.
            self._at_hand, self._process = deque(), os.getpid()
        try:
            connection = self._at_hand.pop()
        except IndexError:
            connection = self._connected().connection_pool.get_connection()
        try:
            connection.send_command(*words)
            return connection.read_response()
        except self._redis.exceptions.ResponseError:
            raise  # an answer like any other: the connection is as good as before
        except BaseException:
            connection.disconnect()  # what it would read next may be the answer to this command
            raise
        finally:
            self._at_hand.append(connection)
            if self.is_closed:
                connection.disconnect()

    def _connected(self) -> Any:
        with self._making:
            # A cluster's client asks for the map of the cluster when it is made, and may fail.
            if self._client is None:
                self._client = self._new_client()
            return self._client

    def _new_client(self) -> Any:
        redis, address = self._redis, self.address
        options = self._options()
        if address.is_cluster:
            nodes = [redis.cluster.ClusterNode(host, port) for host, port in address.hosts]
            return redis.cluster.RedisCluster(startup_nodes=nodes, **options)
        if address.socket_path:
            options["unix_socket_path"] = address.socket_path
        else:
            options["host"], options["port"] = address.hosts[0]
        return redis.Redis(db=address.database, **options)

    def _options(self) -> dict[str, Any]:
        address, limits = self.address, self.address.limits
        options: dict[str, Any] = {
            "username": address.username or None,
            "password": address.password or None,
            "socket_timeout": limits.timeout_s,
            "socket_connect_timeout": limits.connect_timeout_s,
            "health_check_interval": _HEALTH_CHECK_S,
            # The link retries, with a deadline and by the kind of the failure.
            "retry": self._redis.retry.Retry(self._redis.backoff.NoBackoff(), 0),
            "protocol": 2,
        }
        if address.tls is not None:
            options |= {
                "ssl": True,
                "ssl_ca_certs": address.tls.ca_certs or None,
                "ssl_certfile": address.tls.certfile or None,
                "ssl_keyfile": address.tls.keyfile or None,
                "ssl_check_hostname": address.tls.check_hostname,
            }
        return options


BreakerState = Literal["closed", "open", "half open"]


class Breaker:
    """Counts failures in a row; all threads of a store share one."""

    def __init__(self, failures: int, cool_down_s: float, *, clock: Clock = time.monotonic) -> None:
        self._most, self._cool_down_s, self._clock = failures, cool_down_s, clock
        self._lock = Lock()
        self._failures = 0  # consecutive failures
        self._open_until: float | None = None
        self._is_probing = False

    @property
    def state(self) -> BreakerState:
        """Where it stands."""
        with self._lock:
            if self._open_until is None:
                return "closed"
            return "open" if self._clock() < self._open_until else "half open"

    def is_probe(self) -> bool | None:
        """Whether a call that starts now is the one probe; None when it must not start."""
        with self._lock:
            if self._open_until is None:
                return False
            if self._is_probing or self._clock() < self._open_until:
                return None
            self._is_probing = True
            return True

    def succeed(self) -> None:
        """Count a success, which closes it."""
        with self._lock:
            self._failures, self._open_until, self._is_probing = 0, None, False

    def fail(self) -> None:
        """Count a failure, which may open it."""
        with self._lock:
            self._failures += 1
            self._is_probing = False
            if self._failures >= self._most:
                self._open_until = self._clock() + self._cool_down_s

    def abandon(self) -> None:
        """Cancel a call that has no outcome."""
        with self._lock:
            self._is_probing = False


def _library() -> Any:
    with needed_for("a Redis store"):
        import redis
        import redis.backoff
        import redis.cluster
        import redis.retry
    return redis


def _is_behind(exc: BaseException | None, *kinds: type[Exception]) -> bool:
    """Whether an error of one of these kinds is behind an error."""
    while exc is not None:
        if isinstance(exc, kinds):
            return True
        exc = exc.__cause__ or exc.__context__
    return False
