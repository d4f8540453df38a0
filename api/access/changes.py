"""Changes over HTTP: each is in the audit, and one that is repeated is done once.

    Authentication -> Guard -> DeploymentLookup -> Changes -> route

A change is in the audit before it is done, and its outcome after it. Where the audit cannot be
written nothing is changed, but for a pause: its lines follow. A POST with an ``Idempotency-Key`` is
done once: the same request again gets the stored answer, another body under the same key is
refused.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.access.audit import Audit, AuditEntry, AuditError, AuditLines
from api.access.authentication import client_address
from api.http.guard import SAFE_METHODS
from api.http.problems import ProblemType
from api.http.refusals import problem
from api.http.service import AdminService
from api.operations.printing import words
from api.operations.switches import pause
from eplb.clock import Clock
from eplb.errors import StoreError

KEPT_ANSWERS, KEPT_ANSWERS_S = 1000, 24 * 3600.0
MOST_KEY = 200  # characters of an idempotency key
HEADER = "idempotency-key"

log = logging.getLogger(__name__)

_Place = tuple[str, str, str, str]  # actor, deployment, path and key of a request


@dataclass
class _Answer:
    """A request with an idempotency key, and what it was answered with."""

    body: str  # its digest
    time: float
    messages: list[Message] = field(default_factory=list)
    is_done: bool = False

    def kept(self, send: Send) -> Send:
        """Keep what is sent."""

        async def keep(message: Message) -> None:
            self.messages.append(message)
            # Before the answer is sent: its receiver may repeat the request at once.
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                self.is_done = self.messages[0]["status"] < 500
            await send(message)

        return keep


class Changes:
    """ASGI middleware around the routes: actor, body and deployment are in ``scope["state"]``.

    Args:
        audit: None: there is none.
        clock: seconds since the epoch, of the audit.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        audit: Audit | None,
        clock: Clock = time.time,
    ) -> None:
        self._app, self._clock, self._audit = app, clock, audit
        self._answers: OrderedDict[_Place, _Answer] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass the request on."""
        if scope["type"] != "http" or scope["method"] in SAFE_METHODS:
            await self._app(scope, receive, send)
            return
        state = scope["state"]
        try:
            asked = _checked(state["body"])
        except ValueError as exc:
            await problem(ProblemType.INVALID_REQUEST, str(exc))(scope, receive, send)
            return
        key = Headers(scope=scope).get(HEADER)
        if key is None or scope["method"] != "POST":
            await self._audited(scope, receive, send, asked)
            return
        if not 1 <= len(key) <= MOST_KEY:
            detail = f"an idempotency key of {len(key)} characters, expected 1 to {MOST_KEY}"
            await problem(ProblemType.INVALID_REQUEST, detail)(scope, receive, send)
            return
        place = state["actor"].name, state["deployment"], scope["path"], key
        digest = sha256(state["body"]).hexdigest()
        known = self._known(place)
        if known is None:
            answer = self._answers[place] = _Answer(digest, time.monotonic())
            try:
                await self._audited(scope, receive, answer.kept(send), asked)
            finally:
                if not answer.is_done:  # a fault of the service: the client may try again
                    self._answers.pop(place, None)
        elif known.body != digest:
            detail = "this idempotency key was used for another body, expected the same"
            await problem(ProblemType.KEY_REUSED, detail)(scope, receive, send)
        elif not known.is_done:
            detail = "the request with this idempotency key is in progress, expected its end first"
            await problem(ProblemType.REQUEST_IN_PROGRESS, detail)(scope, receive, send)
        else:
            for message in known.messages:
                await send(_marked(message))

    def _known(self, place: _Place) -> _Answer | None:
        limit = time.monotonic() - KEPT_ANSWERS_S
        while self._answers:
            oldest = next(iter(self._answers.values()))
            if len(self._answers) <= KEPT_ANSWERS and oldest.time >= limit:
                break
            self._answers.popitem(last=False)
        return self._answers.get(place)

    async def _audited(
        self, scope: Scope, receive: Receive, send: Send, asked: dict[str, Any]
    ) -> None:
        audit, actor = self._audit, scope["state"]["actor"]
        if audit is None:
            await self._app(scope, receive, send)
            return
        entry = AuditEntry(
            time=self._clock(),
            deployment=scope["state"]["deployment"],
            actor=actor.name,
            role=actor.role.label,
            address=client_address(scope),
            request=uuid.uuid4().hex,
            action=f"{scope['method']} {scope['path']}",
            reason=str(asked.pop("reason", "")),
            outcome="asked",
            detail=words(asked),
        )
        service: AdminService = scope["state"]["service"]
        kept, waiting = AuditLines(audit, service.store), list[AuditEntry]()
        try:
            await run_in_threadpool(audit.append, entry)
        except AuditError as exc:
            if entry.action != pause.route:
                log.error("%s", exc)
                refusal = problem(ProblemType.AUDIT_UNAVAILABLE, f"nothing was changed: {exc}")
                await refusal(scope, receive, send)
                return
            waiting.append(entry)
        status, is_noted = 500, False

        def done(status: int) -> None:
            """Note the outcome, in a thread: before the answer, which may wait for ranks."""
            nonlocal is_noted
            is_noted = True
            detail = scope["state"].get("detail", entry.detail)
            answered = replace(entry, time=self._clock(), outcome=str(status), detail=detail)
            for one in (*waiting, answered):
                service.audit_lost += not kept.keep(one)
            if not waiting:
                with suppress(StoreError):  # they wait on
                    kept.catch_up()

        scope["state"]["done"] = done

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = entry.request
            elif not message.get("more_body", False) and not is_noted:
                # Before the answer is sent: its receiver finds the change in the audit.
                await run_in_threadpool(done, status)
            await send(message)

        try:
            await self._app(scope, receive, note)
        finally:
            if not is_noted:
                await run_in_threadpool(done, status)


def _checked(body: bytes) -> dict[str, Any]:
    """The object in a body; the route refuses what is no body of it.

    Raises:
        ValueError: no answer, event or audit could repeat the body.
    """
    constants: list[str] = []
    try:
        found = json.loads(body, parse_constant=constants.append)
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError as exc:
        raise ValueError("the body has half of a surrogate pair, expected Unicode text") from exc
    except ValueError:
        return {}
    if constants:
        raise ValueError(f"the body has {constants[0]}, expected JSON, which lacks it")
    return found if isinstance(found, dict) else {}


def _marked(message: Message) -> Message:
    if message["type"] != "http.response.start":
        return message
    marked = dict(message) | {"headers": list(message["headers"])}
    MutableHeaders(raw=marked["headers"])["Idempotency-Replayed"] = "true"
    return marked
