"""Limits of the HTTP service."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HttpLimits:
    """Limits of connections and of requests."""

    max_connections: int = 256
    max_requests: int = 32  # in progress; anyio has 40 threads: no request waits for a thread
    max_body_bytes: int = 65_536
    request_deadline_s: float = 10.0  # for all of a request, headers and body
    max_streams: int = (
        128  # of events; they take no thread, and must leave connections for requests
    )
    stream_s: float = 600.0  # then a stream ends, and its client connects again
    unread_deadline_s: float = 20.0  # then the kernel closes a connection that is not read


DEFAULT_LIMITS = HttpLimits()
