"""Checks of a request before a handler runs.

``Guard`` needs neither the store nor a thread: the host must be a loopback name, the body small and
complete in time, and the number of requests in progress below the limit. ``check_request`` checks
by route: query parameters must be known, and a change of state must be JSON and not sent by a page
of another site. A page can send JSON to another origin only after a preflight, which fails here.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.bodies import CLOSES, depth_refusal, framing_refusal
from api.http.problems import ProblemType, Refused
from api.http.refusals import place_of, problem

LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})
STREAM = "/api/v1/events/stream"
THREADLESS = frozenset({"/livez", "/readyz", STREAM})  # they take no thread
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True)
class HttpLimits:
    """Limits of connections and of requests."""

    max_connections: int = 256  # beyond it, those without a whole request are closed
    max_requests: int = 32  # requests in progress; anyio has 40 threads: none waits for a thread
    max_body_bytes: int = 65_536
    request_deadline_s: float = 10.0  # deadline for the headers, and another for the body
    # Streams of events take no thread; they must leave connections for requests.
    max_streams: int = 128
    max_streams_of_address: int = 64  # a client address may have 128 connections
    stream_s: float = 600.0  # then a stream ends, and its client connects again
    unread_deadline_s: float = 20.0  # then the kernel closes a connection that is not read


DEFAULT_LIMITS = HttpLimits()


class Guard:
    """ASGI middleware: refuses a request by its host and size, and one too many with 503.

    The body of a request that goes on is in ``scope["state"]["body"]``. A HEAD is answered as the
    GET, without its body; not that of a stream, which has no end.

    Args:
        any_host: where requests prove a token, a name that leads here by mistake leads nowhere.
    """

    def __init__(self, app: ASGIApp, limits: HttpLimits, *, any_host: bool = False) -> None:
        self._app, self._limits, self._any_host = app, limits, any_host
        self._under_way = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD" and scope["path"] != STREAM:
            scope, send = {**scope, "method": "GET"}, _without_body(send)
        headers = Headers(scope=scope)
        if refused := framing_refusal(headers):
            await problem(*refused, CLOSES)(scope, receive, send)
            return
        if refused := self._refusal(headers):
            await problem(*refused)(scope, receive, send)
            return
        # Before it counts as in progress: half-sent bodies take no place from whole requests.
        most_bytes, deadline_s = self._limits.max_body_bytes, self._limits.request_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                body = await _body_of(receive, most_bytes)
        except TimeoutError:
            detail = f"not whole after {deadline_s:g} s, expected it to be"
            closing = {"Connection": "close"}
            await problem(ProblemType.REQUEST_TOO_SLOW, detail, closing)(scope, receive, send)
            return
        if body is None:
            return
        if len(body) > most_bytes:
            detail = f"more than {most_bytes} bytes of body, expected fewer"
            await problem(ProblemType.BODY_TOO_LARGE, detail)(scope, receive, send)
            return
        if refused := depth_refusal(body, f"{scope['method']} {scope['path'][:100]}"):
            await problem(*refused)(scope, receive, send)
            return
        takes_thread = scope["path"] not in THREADLESS
        if takes_thread and self._under_way >= self._limits.max_requests:
            detail = f"{self._under_way} requests are in progress, expected fewer"
            await problem(ProblemType.TOO_BUSY, detail)(scope, receive, send)
            return
        scope.setdefault("state", {})["body"] = body
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Message:
            return messages.pop() if messages else await receive()

        self._under_way += takes_thread
        try:
            await self._app(scope, receive_again, send)
        finally:
            self._under_way -= takes_thread

    def _refusal(self, headers: Headers) -> tuple[ProblemType, str] | None:
        host = _name_of(headers.get("host", ""))
        if not self._any_host and host not in LOOPBACK_NAMES:
            known = ", ".join(sorted(LOOPBACK_NAMES))
            detail = f"the host is {host[:100]!r}, expected one of: {known}"
            return ProblemType.FOREIGN_HOST, detail
        length = headers.get("content-length", "0")  # h11 has checked that these are digits
        most_bytes = self._limits.max_body_bytes
        if int(length[:20]) > most_bytes:
            detail = f"a body of {length[:20]} bytes, expected at most {most_bytes}"
            return ProblemType.BODY_TOO_LARGE, detail
        return None


async def _body_of(receive: Receive, most_bytes: int) -> bytes | None:
    """The body of a request, not read on beyond a limit; None: the client has gone."""
    body, is_whole = b"", False
    while not is_whole and len(body) <= most_bytes:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        is_whole = not message.get("more_body", False)
    return body


def _without_body(send: Send) -> Send:
    async def send_head(message: Message) -> None:
        await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

    return send_head


async def check_request(request: Request) -> None:
    """Refuse a request that does not fit its route; a dependency of every route.

    Raises:
        Refused: 422, an unknown or repeated query parameter; 403, sent by a page of another
            site; 415, a change of state that is not JSON.
    """
    known = {param.alias for param in request.scope["route"].dependant.query_params}
    given = [name for name, _ in request.query_params.multi_items()]
    unknown = sorted(set(given) - known)
    if unknown:
        expected = f"one of: {', '.join(sorted(known))}" if known else "none"
        why = f"unknown query parameter {unknown[0][:100]!r}, expected {expected}"
        raise _refused(request, ProblemType.INVALID_REQUEST, why)
    if len(given) > len(set(given)):
        why = f"repeated query parameter in {sorted(given)}, expected each once"
        raise _refused(request, ProblemType.INVALID_REQUEST, why)
    if request.method in SAFE_METHODS:
        return
    headers = request.headers
    own_origin = f"{request.url.scheme}://{headers.get('host', '')}"
    if headers.get("origin", own_origin) != own_origin:
        why = f"the origin is another site, expected {own_origin}"
        raise _refused(request, ProblemType.FOREIGN_ORIGIN, why)
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        why = f"sent by a page of another site, expected {own_origin}"
        raise _refused(request, ProblemType.FOREIGN_ORIGIN, why)
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        why = f"a body of {media_type[:100]!r}, expected application/json"
        raise _refused(request, ProblemType.NOT_JSON, why)


def _refused(request: Request, kind: ProblemType, why: str) -> Refused:
    return Refused(kind, f"{place_of(request)}: {why}")


def _name_of(host: str) -> str:
    return host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
