"""What routes of the admin API depend on, in the order in which a request meets it.

    router = reading()                  its routes read
    router = changing(operator)         its routes change something

    once         a POST with an ``Idempotency-Key`` is done once         ``Change``
    check        known parameters, JSON, from no other site             ``guard.check_request``
    role         the least role that may                                ``operator``, ``admin``
    audit        who asks what, before it is done                       ``audited``
    revision     what ``If-Match`` names                                ``Revision``, ``Epoch`` ...
    the route
    audit        the outcome, before the answer is sent                 ``Change``

A change whose role is too low is not in the audit. Who asks is known before a route is:
``authentication.py``.
"""

import json
import logging
import re
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Request, Response
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool

from api.access.audit import AuditEntry, AuditError, AuditLines, changed, words
from api.access.keys import Actor, Role
from api.http.authentication import client_address
from api.http.document import refused_with
from api.http.guard import check_request
from api.http.problems import V1, ProblemType, Refused
from api.http.refusals import refusal_of
from eplb.clock import Clock
from eplb.errors import StoreError

if TYPE_CHECKING:
    from api.http.service import AdminService
    from telemetry.state.live import LiveState

ANY = "*"  # entity tag that any revision matches
REVISION_TAG = r'(\*|"[0-9]{1,19}")'
KEPT_ANSWERS, KEPT_ANSWERS_S = 1000, 24 * 3600.0
MOST_KEY = 200  # characters of an idempotency key
KEY = "idempotency-key"

log = logging.getLogger(__name__)


# -- the deployment of the path, and who asks


async def service_of(request: Request) -> "AdminService":
    """Answers of the deployment of the path."""
    service: AdminService = request.state.service
    return service


async def actor_of(request: Request) -> Actor:
    """Who sends the request."""
    actor: Actor = request.state.actor
    return actor


if TYPE_CHECKING:
    Service = AdminService
else:  # the help of a command reads the routes, and needs no service
    Service = Annotated[Any, Depends(service_of)]
Asker = Annotated[Actor, Depends(actor_of)]


# -- roles


async def operator(request: Request) -> None:
    """An operator or an admin may."""
    _check_role(request.state.actor, Role.OPERATOR)


async def admin(request: Request) -> None:
    """An admin may."""
    _check_role(request.state.actor, Role.ADMIN)


ROLE_OF: Mapping[Callable[..., Any], Role] = {operator: Role.OPERATOR, admin: Role.ADMIN}


def _check_role(actor: Actor, least: Role) -> None:
    if actor.role < least:
        raise Refused(
            ProblemType.ROLE_TOO_LOW,
            f"the key {actor.name!r} has the role {actor.role.label}, expected {least.label}",
        )


def least_role(route: APIRoute) -> Role:
    """Return the least role that may use a route."""
    of_route = (ROLE_OF.get(one.dependency) for one in route.dependencies if one.dependency)
    return max((role for role in of_route if role is not None), default=Role.VIEWER)


# -- the audit


class ChangeAudit:
    """The audit of one change: what is asked, then the outcome.

    Args:
        service: of the deployment.
        lines: of its audit; None: the service keeps none.
        entry: what is asked.
        clock: seconds since the epoch.
    """

    def __init__(
        self, service: "AdminService", lines: AuditLines | None, entry: AuditEntry, clock: Clock
    ) -> None:
        self._service, self._lines, self._entry = service, lines, entry
        self._clock = clock
        self._waiting: list[AuditEntry] = []  # the file did not take them
        self._is_ended = lines is None

    @property
    def request_id(self) -> str | None:
        """The same in both lines; None: there are none."""
        return None if self._lines is None else self._entry.request

    def begin(self, *, must_be_written: bool) -> None:
        """Write what is asked.

        Raises:
            Refused: it must be written before it is done, and cannot be.
        """
        if self._lines is None:
            return
        try:
            self._lines.append(self._entry)
        except AuditError as exc:
            if must_be_written:
                log.error("%s", exc)
                why = f"nothing was changed: {exc}"
                raise Refused(ProblemType.AUDIT_UNAVAILABLE, why) from exc
            self._waiting.append(self._entry)

    def describe(self, detail: str) -> None:
        """State what is done, in place of what was asked."""
        self._entry = replace(self._entry, detail=detail)

    def end(self, status: int) -> None:
        """Write the outcome, once; a change whose answer waits for ranks has it written before."""
        if self._is_ended or self._lines is None:
            return
        self._is_ended = True
        ended = replace(self._entry, time=self._clock(), outcome=str(status))
        for entry in (*self._waiting, ended):
            self._service.audit_lost += not self._lines.keep(entry)
        if not self._waiting:
            with suppress(StoreError):  # they wait on
                self._lines.catch_up()


def audited(request: Request) -> ChangeAudit:
    """Write a change to the audit before it is done; what cannot be written is refused."""
    return _begun(request, must_be_written=True)


def audited_if_possible(request: Request) -> ChangeAudit:
    """Write a change to the audit before it is done; what cannot be written follows later."""
    return _begun(request, must_be_written=False)


def _begun(request: Request, *, must_be_written: bool) -> ChangeAudit:
    state, asked = request.state, dict(request.state.asked)
    service, audit = state.service, request.app.state.audit
    entry = AuditEntry(
        time=request.app.state.clock(),
        deployment=service.name,
        actor=state.actor.name,
        role=state.actor.role.label,
        address=client_address(request.scope),
        request=uuid.uuid4().hex,
        action=f"{request.method} {request.url.path}",
        reason=str(asked.pop("reason", "")),
        outcome="asked",
        detail=words(asked),
    )
    lines = None if audit is None else AuditLines(audit, service.store)
    begun = ChangeAudit(service, lines, entry, request.app.state.clock)
    begun.begin(must_be_written=must_be_written)
    state.change_audit = begun
    return begun


async def audit_of(request: Request) -> ChangeAudit:
    """The audit of the request, which a dependency of its router has begun."""
    begun: ChangeAudit = request.state.change_audit
    return begun


Audited = Annotated[ChangeAudit, Depends(audit_of)]


# -- revisions: a change is refused where another one came first (RFC 9110, 13.1)


async def if_revision(
    if_match: Annotated[
        str,
        Header(description="the ETag that was read; without it, or *: whatever the revision is"),
    ] = ANY,
) -> int | None:
    """Give the revision of live settings that a change names; None: any."""
    return _number_in(if_match, ProblemType.SETTINGS_CHANGED)


async def if_known_revision(
    if_match: Annotated[
        str, Header(description="the ETag that was read, or *", pattern=f"^{REVISION_TAG}$")
    ],
) -> int | None:
    """Give the revision of live settings that a change must name; None: any."""
    return _number_in(if_match, ProblemType.SETTINGS_CHANGED)


async def if_epoch(
    if_match: Annotated[
        str, Header(description="the ETag that was read; without it, or *: whatever the epoch is")
    ] = ANY,
) -> int | None:
    """Give the epoch of the ranks that a change names; None: any."""
    return _number_in(if_match, ProblemType.MEMBERSHIP_CHANGED)


def if_generation(
    service: Service,
    if_match: Annotated[
        str, Header(description="the generation that must serve, in quotes; *: any")
    ] = ANY,
) -> int | None:
    """Give the generation that a change names, which serves; None: any."""
    return service.check_generation(if_match)


def _number_in(tag: str, stale: ProblemType) -> int | None:
    if not re.fullmatch(REVISION_TAG, tag):
        why = f'header.if-match: found {tag[:40]!r}, expected the ETag of GET, as "7", or *'
        raise Refused(stale, why)
    return None if tag == ANY else int(tag.strip('"'))


Revision = Annotated[int | None, Depends(if_revision)]
KnownRevision = Annotated[int | None, Depends(if_known_revision)]
Epoch = Annotated[int | None, Depends(if_epoch)]
Generation = Annotated[int | None, Depends(if_generation)]


def tag_with(response: Response, number: int) -> None:
    """Give an answer a number as its entity tag (RFC 9110, 8.8.3)."""
    response.headers["ETag"] = f'"{number}"'


class LiveChange:
    """Changes live settings for one request, whose answer has the new revision as its tag."""

    def __init__(self, service: Service, asker: Asker, audit: Audited, response: Response) -> None:
        self.service, self.store, self._asker = service, service.store, asker
        self._audit, self._response = audit, response

    def make(
        self,
        changes: Mapping[str, Any],
        *,
        expected: int | None,
        reason: str,
        lasts_s: float | None = None,
    ) -> "LiveState":
        """Change them at a revision; None: at any.

        Raises:
            StaleRevision: another change came first.
        """
        before = self.store.live().effective
        state = self.store.change_live(
            changes, expected=expected, by=self._asker.name, reason=reason, lasts_s=lasts_s
        )
        self._audit.describe(changed(changes, before, state.effective))
        tag_with(self._response, state.revision)
        return state


Live = Annotated[LiveChange, Depends()]


# -- a change is done once


@dataclass
class _Kept:
    """A request with an idempotency key, and its answer once it is done."""

    asked: str  # digest of what it asks for: its body, and on which version
    time: float
    answer: Response | None = None


class KeptAnswers:
    """Answers to requests with an idempotency key: a repetition gets the same one.

    They are in the memory of the service: what a request did is in the store and in the audit, and
    a repetition after a restart of the service is done once more.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, ...], _Kept] = OrderedDict()

    async def once(
        self, request: Request, key: str, do: Callable[[], Coroutine[Any, Any, Response]]
    ) -> Response:
        """Do a request, or give its answer.

        Raises:
            Refused: the key was used for another body or version, or its request is in progress.
        """
        if not 1 <= len(key) <= MOST_KEY:
            why = f"an idempotency key of {len(key)} characters, expected 1 to {MOST_KEY}"
            raise Refused(ProblemType.INVALID_REQUEST, why)
        state = request.state
        place = state.actor.name, state.service.name, request.url.path, key
        version = request.headers.get("if-match", "").encode()
        digest = sha256(b"%d %s %s" % (len(version), version, state.body)).hexdigest()
        self._forget_old()
        known = self._kept.get(place)
        if known is None:
            known = self._kept[place] = _Kept(digest, time.monotonic())
            try:
                answer = await do()
                if answer.status_code < 500 and answer.status_code != HTTPStatus.FORBIDDEN:
                    known.answer = answer
                return answer
            finally:
                if known.answer is None:  # a fault of the service: the client may try again
                    self._kept.pop(place, None)
        if known.asked != digest:
            why = "this idempotency key was used for another body or If-Match, expected the same"
            raise Refused(ProblemType.KEY_REUSED, why)
        if known.answer is None:
            why = "the request with this idempotency key is in progress, expected its end first"
            raise Refused(ProblemType.REQUEST_IN_PROGRESS, why)
        answer = known.answer
        headers = dict(answer.headers) | {"Idempotency-Replayed": "true"}
        return Response(answer.body, answer.status_code, headers)

    def _forget_old(self) -> None:
        limit = time.monotonic() - KEPT_ANSWERS_S
        while self._kept:
            oldest = next(iter(self._kept.values()))
            if len(self._kept) <= KEPT_ANSWERS and oldest.time >= limit:
                return
            self._kept.popitem(last=False)


class Change(APIRoute):
    """A route that changes something: done once for a key, its outcome in the audit."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap what FastAPI makes of the function, its dependencies and its answer."""
        handle = super().get_route_handler()

        async def ended(request: Request) -> Response:
            """Answer, also a refusal, and write the outcome before the answer is sent."""
            status = 500
            try:
                answer = await answered(handle, request)
                status = answer.status_code
            finally:
                audit: ChangeAudit | None = getattr(request.state, "change_audit", None)
                if audit is not None:
                    await run_in_threadpool(audit.end, status)
            if audit is not None and audit.request_id is not None:
                answer.headers["X-Request-Id"] = audit.request_id
            return answer

        async def once(request: Request) -> Response:
            request.state.asked = read_asked(request.state.body)
            key = request.headers.get(KEY)
            if key is None or request.method != "POST":
                return await ended(request)
            kept: KeptAnswers = request.app.state.kept_answers
            return await kept.once(request, key, lambda: ended(request))

        return once


async def answered(
    handle: Callable[[Request], Coroutine[Any, Any, Response]], request: Request
) -> Response:
    """Answer a request, also with a refusal."""
    try:
        return await handle(request)
    except Exception as exc:
        refusal = refusal_of(request, exc)
        if refusal is None:
            raise
        return refusal


def read_asked(body: bytes) -> dict[str, Any]:
    """Read the object in a body; the route refuses what is no body of it.

    Raises:
        Refused: no answer, event or audit could repeat the body.
    """
    constants: list[str] = []
    try:
        asked = json.loads(body, parse_constant=constants.append)
        json.dumps(asked, ensure_ascii=False).encode()
    except UnicodeEncodeError as exc:
        why = "the body has half of a surrogate pair, expected Unicode text"
        raise Refused(ProblemType.INVALID_REQUEST, why) from exc
    except ValueError:
        return {}
    if constants:
        why = f"the body has {constants[0]}, expected JSON, which lacks it"
        raise Refused(ProblemType.INVALID_REQUEST, why)
    return asked if isinstance(asked, dict) else {}


# -- routers


def _name_of(route: APIRoute) -> str:
    return route.name


def reading(
    *needs: Callable[..., Any], prefix: str = V1, tag: Literal["watch", "health"] = "watch"
) -> APIRouter:
    """Make a router of routes that read; a viewer may, or who ``needs`` lets."""
    return APIRouter(
        prefix=prefix,
        tags=[tag],
        dependencies=[Depends(check_request), *map(Depends, needs)],
        responses=refused_with(ProblemType.INVALID_REQUEST),  # in place of FastAPI's own
        generate_unique_id_function=_name_of,
    )


def changing(*needs: Callable[..., Any]) -> APIRouter:
    """Make a router of routes that change something.

    Args:
        needs: the role, then how the audit is kept; without a role a viewer may.
    """
    return APIRouter(
        prefix=V1,
        tags=["act"],
        dependencies=[Depends(check_request), *map(Depends, needs)],
        responses=refused_with(ProblemType.INVALID_REQUEST),  # in place of FastAPI's own
        generate_unique_id_function=_name_of,
        route_class=Change,
    )
