"""Who may ask: requests prove an access key, or the token of the deployment, which is an admin's.

    Authorization: Bearer KEY          programs, Prometheus
    Authorization: Basic ANY:KEY       a browser, which asks its user for a name and a password

A browser sends the second only to the origin that it was entered for, so a page of another site
cannot use it for this service under another name (DNS rebinding).

Where there is neither a token nor a file of keys, only this host can ask, and may do everything.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import logging
import time
from collections import OrderedDict, deque
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from api.access.keys import AccessKeys, Actor, Role
from api.http.guard import SAFE_METHODS
from api.http.problems import ProblemType
from api.http.refusals import problem
from eplb.clock import Clock
from eplb.errors import ConfigError

OPEN = frozenset({"/livez", "/readyz"})  # an orchestrator's probes have no token
CHALLENGE = 'Basic realm="eplb: any name, the key or token as password", charset="UTF-8"'
OF_TOKEN = Actor("the deployment's token", Role.ADMIN)
OF_HOST = Actor("a user of this host", Role.ADMIN)

FAILURES, FAILURES_S = 10, 60.0  # failed logins of one address within a minute, then 429
ADDRESSES = 1024  # kept at most

log = logging.getLogger(__name__)


class FailedLogins:
    """Counts the failed logins of each client address. A right key is never refused for them."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._times: OrderedDict[str, deque[float]] = OrderedDict()

    def wait_s(self, address: str) -> float:
        """Note one failure more; return for how long further ones are refused, 0: they are not."""
        now = self._clock()
        times = self._times.setdefault(address, deque(maxlen=FAILURES))
        self._times.move_to_end(address)
        while len(self._times) > ADDRESSES:
            self._times.popitem(last=False)
        while times and now - times[0] >= FAILURES_S:
            times.popleft()
        if len(times) == FAILURES:
            return FAILURES_S - (now - times[0])
        times.append(now)
        return 0.0


class Authentication:
    """ASGI middleware: refuses a request by its key, before its body is read.

    The actor of a request that goes on is in ``scope["state"]["actor"]``.

    Args:
        token: of the deployment; None: it has no secret.
        state_dir: that has the access keys; None: there are none.
        actor: who sends every request: an application in the process of its one user asks for no
            proof.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str | None,
        state_dir: Path | None,
        actor: Actor | None = None,
    ) -> None:
        self._app, self._token = app, None if token is None else token.encode()
        self._keys = None if state_dir is None else AccessKeys(state_dir)
        self._failed, self._only = FailedLogins(), actor

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass the request on."""
        if scope["type"] != "http" or (scope["path"] in OPEN and scope["method"] in SAFE_METHODS):
            await self._app(scope, receive, send)
            return
        try:
            actor = self._actor(scope)
        except ConfigError as exc:
            log.error("access keys: %s", exc)
            detail = f"access keys cannot be used: {exc}"
            await problem(ProblemType.KEYS_UNAVAILABLE, detail)(scope, receive, send)
            return
        if actor is None:
            await self._unknown(scope)(scope, receive, send)
            return
        scope.setdefault("state", {})["actor"] = actor
        await self._app(scope, receive, send)

    def _actor(self, scope: Scope) -> Actor | None:
        if self._only is not None:
            return self._only
        has_keys = self._keys is not None and self._keys.exists
        if self._token is None and not has_keys:
            return OF_HOST
        given = _proof(scope)
        if given is None:
            return None
        if self._token is not None and hmac.compare_digest(given, self._token):
            return OF_TOKEN
        if not has_keys or self._keys is None:
            return None
        return self._keys.actor(given.decode("utf-8", "replace"))

    def _unknown(self, scope: Scope) -> Response:
        address = client_address(scope)
        # A browser asks once without anything, which is no failed login.
        wait_s = 0.0 if _proof(scope) is None else self._failed.wait_s(address)
        if wait_s:
            detail = (
                f"{FAILURES} failed logins of {address} within {FAILURES_S:g} s, expected fewer"
            )
            after = {"Retry-After": str(int(wait_s) + 1)}
            return problem(ProblemType.TOO_MANY_FAILED_LOGINS, detail, after)
        if _proof(scope) is not None:
            log.warning("failed login of %s: %s %s", address, scope["method"], scope["path"][:100])
        detail = (
            "no key or token of this deployment, expected one "
            "(Authorization: Bearer, or Basic; of a command: EPLB_KEY)"
        )
        return problem(ProblemType.NOT_AUTHENTICATED, detail, {"WWW-Authenticate": CHALLENGE})


def client_address(scope: Scope) -> str:
    """Return the address that a request comes from."""
    client = scope.get("client")
    return str(client[0]) if client else "unknown"


def _proof(scope: Scope) -> bytes | None:
    """What a request gives as its key; None: nothing that could be one."""
    kind, _, value = Headers(scope=scope).get("authorization", "").partition(" ")
    found = value.strip().encode()
    if kind.lower() == "basic":
        try:
            return base64.b64decode(found, validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    if kind.lower() == "bearer":
        return found
    return b"" if kind else None
