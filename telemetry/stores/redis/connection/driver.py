"""The one file that imports redis-py: a client for a server or a cluster, and what its errors mean.

The driver tries once. Whether to try again is decided in
``telemetry/stores/redis/connection/link.py``.
"""

from __future__ import annotations

import os
import ssl
from collections import deque
from collections.abc import Sequence
from threading import Lock
from typing import Any

from eplb.errors import ConfigError
from telemetry.stores.redis.connection.address import RedisAddress
from telemetry.stores.redis.connection.errors import Trouble, trouble_in
from telemetry.stores.redis.scripts import Script

_SCANNED = 1000  # keys of a server that one request looks at
_HEALTH_CHECK_S = 15  # a connection that was idle for so long is checked before use


class RedisDriver:
    """Sends commands, each once. Threads may share one; nothing is connected before the first."""

    def __init__(self, address: RedisAddress) -> None:
        self._redis = _library()
        self._address = address
        self._making = Lock()
        self._client: Any = None
        self._is_closed = False
        self._process = os.getpid()
        self._at_hand: deque[Any] = deque()  # connections that no thread uses
        # OSError: a TLS file that is not there. RedisClusterException is no RedisError.
        errors = self._redis.exceptions
        self.errors: tuple[type[Exception], ...] = (
            errors.RedisError,
            errors.RedisClusterException,
            OSError,
        )

    def send(self, *words: Any) -> Any:
        """Run a command whose second word is a key."""
        return self._connected().execute_command(*words)

    def run(self, script: Script, keys: Sequence[str], values: Sequence[Any]) -> Any:
        """Run a script; upload it first if the server does not have it."""
        client, words = self._connected(), (len(keys), *keys, *values)
        run = client.execute_command if self._address.is_cluster else self._run_directly
        try:
            return run("EVALSHA", script.digest, *words)
        except self._redis.exceptions.NoScriptError:
            return run("EVAL", script.text, *words)

    def ask(self, key: str, *words: str) -> Any:
        """Run a command without a key on the server that holds ``key``."""
        client = self._connected()
        if self._address.is_cluster:
            client = client.get_redis_connection(client.get_node_from_key(key))
        return client.execute_command(*words)

    def names(self, pattern: str) -> list[str]:
        """Return the keys that match a pattern, on every server; those made meanwhile may lack."""
        found = self._connected().scan_iter(match=pattern, count=_SCANNED)
        return [one.decode() if isinstance(one, bytes) else one for one in found]

    def subscribe(self, channel: str) -> Subscription:
        """Subscribe to a channel, over a separate connection."""
        pubsub = self._connected().pubsub(ignore_subscribe_messages=True)
        pubsub.subscribe(channel)
        return Subscription(pubsub)

    def trouble_of(self, exc: Exception) -> Trouble:
        """Return what kind of failure an error of this driver is."""
        errors = self._redis.exceptions
        trouble = trouble_in(f"{getattr(exc, 'status_code', None) or ''} {exc}".lstrip())
        if trouble is not None:
            return trouble
        if isinstance(exc, errors.AuthenticationError):
            return Trouble.LOGIN
        if self._address.tls is not None and _is_behind(
            exc, ssl.SSLError, FileNotFoundError, PermissionError
        ):
            return Trouble.NOT_TRUSTED
        if self._address.socket_path and _is_behind(exc, FileNotFoundError):
            return Trouble.NO_SOCKET
        if self._address.socket_path and _is_behind(exc, PermissionError):
            return Trouble.SOCKET_FORBIDDEN
        if isinstance(exc, errors.TimeoutError):
            return Trouble.SLOW
        cause = exc.__cause__
        if isinstance(exc, errors.RedisClusterException) and isinstance(cause, Exception):
            return self.trouble_of(cause)
        is_gone = isinstance(exc, (errors.ConnectionError, errors.ClusterError))
        return Trouble.UNREACHABLE if is_gone else Trouble.OTHER

    def close(self) -> None:
        """Close all connections."""
        with self._making:
            self._is_closed = True
            if self._client is not None:
                self._client.close()

    def _run_directly(self, *words: Any) -> Any:
        """Run a script over a connection that is kept open.

        To take one from redis-py's pool for each command doubles what a command costs here: 77 us
        of CPU where this takes 39, on the machine of benchmarks/telemetry/redis.py. Every sample
        comes this way.
        """
        connection = self._taken()
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
            if self._is_closed:
                connection.disconnect()

    def _taken(self) -> Any:
        if os.getpid() != self._process:
            # Those of the process that this one was forked from are its own.
            self._at_hand, self._process = deque(), os.getpid()
        try:
            return self._at_hand.pop()
        except IndexError:
            return self._connected().connection_pool.get_connection()

    def _connected(self) -> Any:
        with self._making:
            # A cluster's client asks for the map of the cluster when it is made, and may fail.
            if self._client is None:
                self._client = self._new_client()
            return self._client

    def _new_client(self) -> Any:
        redis, address = self._redis, self._address
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
        address, limits = self._address, self._address.limits
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


class Subscription:
    """A connection that listens. One thread at a time."""

    def __init__(self, pubsub: Any) -> None:
        self._pubsub = pubsub

    def wait_for_message(self, timeout_s: float) -> bool:
        """Wait for messages, drop them all, and return whether there were any."""
        is_any = False
        while self._pubsub.get_message(timeout=0.0 if is_any else timeout_s) is not None:
            is_any = True
        return is_any

    def close(self) -> None:
        """Close the connection."""
        self._pubsub.close()


def _library() -> Any:
    try:
        import redis
        import redis.backoff
        import redis.cluster
        import redis.retry
    except ImportError as exc:
        raise ConfigError(
            f"a Redis store needs redis-py, found {exc}, expected `pip install eplb[redis]`"
        ) from exc
    return redis


def _is_behind(exc: BaseException | None, *kinds: type[Exception]) -> bool:
    """Whether an error of one of these kinds is behind an error."""
    while exc is not None:
        if isinstance(exc, kinds):
            return True
        exc = exc.__cause__ or exc.__context__
    return False
