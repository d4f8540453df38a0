"""Who may ask: requests prove that they have the deployment's token, once it has one.

    Authorization: Bearer TOKEN          programs, Prometheus
    Authorization: Basic ANY:TOKEN       a browser, which asks its user for a name and a password

A browser sends the second only to the origin that it was entered for, so a page of another site
cannot use it for this service under another name (DNS rebinding).
"""

from __future__ import annotations

import base64
import binascii
import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from api.http.problems import problem

OPEN = frozenset({"/livez", "/readyz"})  # an orchestrator's probes have no token
CHALLENGE = 'Basic realm="eplb: any name, the token as password", charset="UTF-8"'


class Authentication:
    """ASGI middleware: answers 401 to a request without the token, before its body is read."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass the request on."""
        if scope["type"] != "http" or scope["path"] in OPEN or self._is_proved(scope):
            await self._app(scope, receive, send)
            return
        detail = "no token of this deployment, expected one (Authorization: Bearer, or Basic)"
        await problem(401, detail, {"WWW-Authenticate": CHALLENGE})(scope, receive, send)

    def _is_proved(self, scope: Scope) -> bool:
        kind, _, value = Headers(scope=scope).get("authorization", "").partition(" ")
        found = value.strip().encode()
        if kind.lower() == "basic":
            try:
                found = base64.b64decode(found, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif kind.lower() != "bearer":
            return False
        return hmac.compare_digest(found, self._token)
