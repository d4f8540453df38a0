"""What an operation of the admin API is: its route, arguments, answer, refusals and command.

    @operation(route, ...)      a function, which a request calls    api/http/routes.py
    @command(words, ...)        a function, which prints the answer  api/cli/admin/commands.py

The signature of a function declares the arguments: each has its meaning, bounds and default, and is
part of the path if the path names it, else of the query; a parameter that is ``Arguments`` is the
body. The first sentence of the docstring is the summary in the OpenAPI document, the rest is the
description.

The operations of one theme are a module beside this one; ``table.py`` lists them. None of these
modules imports a library when it is imported, nor a part of the project that does, because the
command line lists its commands with them: their functions import what they need when they run.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Literal, NamedTuple, TypeVar
from typing import get_type_hints as hints_of

from api.access.keys import Role
from api.http.problems import ProblemType, Refused
from api.operations.printing import changed
from eplb.declared import Meaning, Named

if TYPE_CHECKING:
    from starlette.requests import Request

    from api.access.keys import Actor
    from api.http.service import AdminService
    from telemetry.state.live import LiveState
    from telemetry.state.store import StateStore

T = TypeVar("T")

V1 = "/api/v1"
JSON = "application/json"
ANY = "*"  # entity tag that any revision matches
REVISION_TAG = r'(\*|"[0-9]{1,19}")'
NOT_GIVEN: Any = None  # default of a key that may be left out, and is never null
MAX_ID = 2**53 - 1  # largest integer that every reader of JSON holds exactly
MAX_INDEX = 2**31 - 1  # indices of layers and experts are int32 in a placement
MOST_LASTS_S = 7 * 86_400


def _whole(value: Any) -> Any:
    """A value of JSON in which 1.0 is an integer, as a JSON document has it; "1" is none."""
    if isinstance(value, dict):
        return {name: _whole(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_whole(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Arguments:
    """Base of the arguments of operations, which are frozen dataclasses.

    pydantic checks them and reads this class by the names below. Types of a body are strict: the
    text "no" must not be read as true or false, because it decides whether a rebalance is a dry
    run. An unknown key is refused.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "strict": True}
    shown: ClassVar[dict[str, Any]] = {}  # more of the JSON schema of the body

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: Callable[[Any], dict[str, Any]]
    ) -> dict[str, Any]:
        """Accept an object of JSON, whose values are strict."""
        schema = handler(source) | {"strict": False}
        name = {"ref": schema.pop("ref")} if "ref" in schema else {}  # in the OpenAPI document
        whole = {"type": "no-info", "function": _whole}
        return {"type": "function-before", "function": whole, "schema": schema} | name

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> dict[str, Any]:
        """Add ``shown`` to the JSON schema, and leave out defaults of keys that are not given."""
        found: dict[str, Any] = handler(schema)
        resolved = handler.resolve_ref_schema(found)
        resolved.update(cls.shown)
        for name, value in resolved["properties"].items():
            resolved["properties"][name] = {
                key: one for key, one in value.items() if (key, one) != ("default", None)
            }
        return found


Id = Annotated[int, Meaning("number of the item", at_least=0, at_most=MAX_ID)]
MOST_RANK = 999_999
Rank = Annotated[int, Meaning("number of a rank", at_least=0, at_most=MOST_RANK, example=3)]
Limit = Annotated[int, Meaning("most items that are returned", at_least=1, at_most=1000)]
Before = Annotated[
    int | None, Meaning("only items before this number; null: all", at_least=0, at_most=MAX_ID)
]
After = Annotated[int, Meaning("only items past this number", at_least=0, at_most=MAX_ID)]
Reason = Annotated[
    str, Meaning("reason of the change, stored with it", min_length=1, max_length=500)
]
Policy = Annotated[
    str | None,
    Named(
        "placement policy; null: the controller's own",
        max_length=100,
        names="eplb.policies.table:POLICIES",
    ),
]


@dataclass(frozen=True)
class ReasonRequest(Arguments):
    """A reason for the change."""

    reason: Reason


@dataclass(frozen=True)
class LiveAnswer:
    """Entries of a live setting that is a list; the revision is also the entity tag."""

    revision: Annotated[int, Meaning("revision of the live settings, of which these are one")]
    unmet: Annotated[list[str], Meaning("reasons why plans of the current run leave an entry out")]
    time: Annotated[
        float | None, Meaning("time of the latest change; null: the configuration applies")
    ]
    reason: str | None


@dataclass(frozen=True)
class Page(Generic[T]):
    """A part of a list; ``next`` is given as ``before`` or ``after`` to continue."""

    items: Sequence[T]
    next: int | None

    @classmethod
    def of(cls, found: Sequence[T], limit: int, number: Callable[[T], int]) -> Page[T]:
        """Make a page of the first ``limit`` items; more items mean that there is a next page."""
        page = found[:limit]
        return cls(page, number(page[-1]) if len(found) > limit else None)


@dataclass(frozen=True)
class Raw:
    """An answer that is encoded already."""

    content: bytes | Iterator[bytes]
    media_type: str = JSON


class Call:
    """One request, as the function of an operation gets it.

    Args:
        operation: that the request asks for.
        encode: makes the JSON of its answer.
        sent: the request of Starlette, whose actor is known, and the deployment of its path; None:
            this process asks ``service``.
        service: the answers of a deployment; None: that of the request.
    """

    def __init__(
        self,
        operation: Operation,
        encode: Callable[[Any], bytes],
        sent: Request | None = None,
        service: AdminService | None = None,
    ) -> None:
        self.operation, self.encode, self._sent, self._service = operation, encode, sent, service
        self.headers: dict[str, str] = {}  # headers of the answer
        self.status = operation.status

    @property
    def request(self) -> Request:
        """The request of Starlette."""
        assert self._sent is not None, "an operation that needs a request is asked for over HTTP"
        return self._sent

    @property
    def service(self) -> AdminService:
        """The answers of the deployment of the path."""
        return self._service or self.request.state.service

    @property
    def store(self) -> StateStore:
        """The store of that deployment."""
        return self.service.store

    @property
    def actor(self) -> Actor:
        """Who sends the request."""
        actor: Actor = self.request.state.actor
        return actor

    def done(self) -> None:
        """Note in the audit that the change is made: the answer may wait for ranks."""
        getattr(self.request.state, "done", lambda status: None)(self.status)

    def note(self, detail: str) -> None:
        """Note in the audit what is done."""
        self.request.state.detail = detail

    def tag(self, number: int) -> None:
        """Give the answer a number as its entity tag (RFC 9110, 8.8.3)."""
        self.headers["ETag"] = f'"{number}"'

    def expected_revision(self) -> int | None:
        """Return the revision of live settings, or the epoch, in ``If-Match``; None: any.

        Raises:
            Refused: the header is missing where it is required (RFC 6585), or is no entity tag. An
                optional header that is no tag of a revision is a failed precondition (RFC 9110).
        """
        is_required = self.operation.if_match == "known revision"
        tag = self.request.headers.get("if-match", "" if is_required else ANY)
        if is_required and not tag:
            why = "found no If-Match, expected the ETag of GET, or *"
            raise Refused(ProblemType.PRECONDITION_REQUIRED, why)
        if not re.fullmatch(REVISION_TAG, tag):
            why = f'header.if-match: found {tag[:40]!r}, expected the ETag of GET, as "7", or *'
            kind = ProblemType.INVALID_REQUEST if is_required else self.operation.stale
            raise Refused(kind, why)
        return None if tag == ANY else int(tag.strip('"'))

    def change_live(
        self, changes: Mapping[str, Any], *, expected: int | None = None, **given: Any
    ) -> LiveState:
        """Change live settings at the revision of the request, whose new one is its entity tag.

        Args:
            changes: by name.
            expected: another revision.
            given: reason of the change, and how long it lasts.

        Raises:
            StaleRevision: another change came first; the request is refused.
        """
        expected = self.expected_revision() if expected is None else expected
        before = self.store.live().effective
        state = self.store.change_live(changes, expected=expected, by=self.actor.name, **given)
        self.note(changed(changes, before, state.effective))
        self.tag(state.revision)
        return state

    def if_generation(self) -> str:
        """Return the entity tag of the generation that must serve; ANY without one."""
        return str(self.request.headers.get("if-match", ANY))

    def once_a_reading(self, name: str, make: Callable[[], Any]) -> Raw:
        """Make an answer once for each reading of the store: many clients may ask for it."""
        reader = self.service.reader
        if not reader.is_running:  # each look is a reading of its own
            return Raw(self.encode(make()))
        made = self.service.of_reading.get(reader.reading(), name, lambda: self.encode(make()))
        return Raw(made)


IfMatch = Literal["", "generation", "revision", "known revision", "epoch"]
IF_MATCH_MEANING: dict[IfMatch, str] = {
    "generation": "the generation that must serve, in quotes; *: any",
    "revision": "the ETag that was read; without it, or *: whatever the revision is",
    "known revision": "the ETag that was read, or *",
    "epoch": "the ETag that was read; without it, or *: whatever the epoch is",
}
OF_ALL = (
    ProblemType.BAD_REQUEST,
    ProblemType.FOREIGN_HOST,
    ProblemType.NO_SUCH_DEPLOYMENT,
    ProblemType.REQUEST_TOO_SLOW,
    ProblemType.INVALID_REQUEST,
)
OF_KEYS = (ProblemType.NOT_AUTHENTICATED, ProblemType.TOO_MANY_FAILED_LOGINS)
OF_STORE = (ProblemType.STORE_UNAVAILABLE, ProblemType.TOO_BUSY, ProblemType.KEYS_UNAVAILABLE)
OF_CHANGES = (
    ProblemType.FOREIGN_ORIGIN,
    ProblemType.ROLE_TOO_LOW,
    ProblemType.BODY_TOO_LARGE,
    ProblemType.NOT_JSON,
    ProblemType.KEY_REUSED,
    ProblemType.AUDIT_UNAVAILABLE,
)
OF_TASKS = (
    ProblemType.CONTROLLER_REFUSED,
    ProblemType.NO_LOAD,
    ProblemType.NO_PLAN,
    ProblemType.TASK_EXPIRED,
    ProblemType.TASK_ABANDONED,
    ProblemType.TASK_CANCELLED,
)


class Argument(NamedTuple):
    """One argument of an operation or a command."""

    hint: Any  # its annotated type
    default: Any  # ...: it must be given
    place: Literal["path", "query", "body", ""] = ""


def arguments_of(function: Callable[..., Any], *, skip: int = 1) -> dict[str, Argument]:
    """Read the arguments of a function from its signature, but for the first so many."""
    named = list(inspect.signature(function).parameters.values())[skip:]
    # Other annotations, of the answer for one, may name what is imported for types alone.
    given = {one.name: one.annotation for one in named}
    hints = hints_of(_Annotated(given), function.__globals__, include_extras=True)
    return {
        one.name: Argument(hints[one.name], ... if one.default is one.empty else one.default)
        for one in named
    }


class _Annotated:
    def __init__(self, annotations: Mapping[str, Any]) -> None:
        self.__annotations__ = dict(annotations)


def fields_of(kind: Any) -> dict[str, Argument]:
    """Read the arguments that are the fields of a dataclass."""
    hints = hints_of(kind, include_extras=True)
    defaults = {one.name: ... if one.default is MISSING else one.default for one in fields(kind)}
    return {name: Argument(hints[name], default, "body") for name, default in defaults.items()}


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation of the admin API.

    Args:
        do: does it, given the ``Call`` and the arguments by name.
        route: method and path.
        answer: type of its JSON, or of each item of the page, as ``module:name`` where the module
            imports a library; None: what the function returns.
        page: name of the list, where the answer is a page.
        problems: types of refusals beside those that every operation of its kind has.
        if_match: what the header ``If-Match`` of a change names.
        is_task: the controller does it; the answer may come before, as 202 with the task.
        status: of an answer that is done.
        role: the least that may ask; None: a viewer to read, an operator to change.
        headers: that a request may have, as parameters of the OpenAPI document.
        media_types: of an answer that is a file, each with its JSON schema.
        body: type of the body, as ``module:name``, where the module imports a library.
    """

    do: Callable[..., Any]
    route: str
    answer: str | None = None
    page: str = ""
    problems: tuple[ProblemType, ...] = ()
    if_match: IfMatch = ""
    is_task: bool = False
    status: int = 200
    role: Role | None = None
    headers: tuple[Mapping[str, Any], ...] = ()
    media_types: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    body: str | None = None

    @property
    def name(self) -> str:
        """Its id in the OpenAPI document."""
        return self.do.__name__

    @property
    def method(self) -> str:
        """Method of the route."""
        return self.route.partition(" ")[0]

    @property
    def path(self) -> str:
        """Path of the route."""
        return self.route.partition(" ")[2]

    @property
    def tag(self) -> str:
        """Group of operations in the OpenAPI document."""
        if not self.path.startswith(V1):
            return "health"
        return "watch" if self.method == "GET" else "act"

    @property
    def summary(self) -> str:
        """First sentence of the docstring."""
        return about(self.do)[0].removesuffix(".")

    @property
    def description(self) -> str:
        """The rest of the docstring."""
        return about(self.do)[1]

    @property
    def answer_type(self) -> Any:
        """The type of the answer's JSON, or of each item of a page; None: it is none of JSON."""
        if self.answer is not None:
            return resolve_name(self.answer)
        returned = inspect.signature(self.do).return_annotation
        hints = hints_of(_Annotated({"answer": returned}), self.do.__globals__)
        found = hints["answer"]
        found = found.__args__[0] if self.page else found
        return None if found is Raw else found

    @cached_property
    def parameters(self) -> Mapping[str, Argument]:
        """What its function takes, ``body`` as a whole."""
        in_path = re.findall(r"{(\w+)}", self.path)
        found = arguments_of(self.do)
        if self.body is not None:
            found["body"] = Argument(resolve_name(self.body), ...)
        return {
            name: one._replace(
                place="path" if name in in_path else "body" if name == "body" else "query"
            )
            for name, one in found.items()
        }

    @cached_property
    def arguments(self) -> Mapping[str, Argument]:
        """What a request has, the keys of its body one by one."""
        found = dict[str, Argument]()
        for name, one in self.parameters.items():
            found |= fields_of(one.hint) if one.place == "body" else {name: one}
        return found

    @property
    def least_role(self) -> Role:
        """The least that may ask."""
        return self.role or (Role.VIEWER if self.method == "GET" else Role.OPERATOR)

    @property
    def stale(self) -> ProblemType:
        """Type of the refusal where ``If-Match`` names what is not current any more."""
        kinds = {
            "generation": ProblemType.GENERATION_MOVED_ON,
            "epoch": ProblemType.MEMBERSHIP_CHANGED,
        }
        return kinds.get(self.if_match, ProblemType.SETTINGS_CHANGED)

    @property
    def own_problems(self) -> tuple[ProblemType, ...]:
        """Types of refusals beside those of every operation of its kind."""
        found = self.problems + (OF_TASKS if self.is_task else ())
        if self.if_match:
            found += (self.stale,)
        if self.if_match == "known revision":
            found += (ProblemType.PRECONDITION_REQUIRED,)
        if self.role is not None and self.method == "GET":
            found += (ProblemType.ROLE_TOO_LOW,)
        if self.method == "POST":
            found += (ProblemType.REQUEST_IN_PROGRESS,)
        return found

    @property
    def all_problems(self) -> tuple[ProblemType, ...]:
        """Types of every refusal that it may be answered with."""
        if self.tag == "health":
            return OF_ALL + self.own_problems
        of_kind = OF_KEYS + OF_STORE + (OF_CHANGES if self.tag == "act" else ())
        return OF_ALL + of_kind + self.own_problems


def operation(route: str, **more: Any) -> Callable[[Callable[..., Any]], Operation]:
    """Declare that a function is an operation; see ``Operation`` for the rest."""
    return lambda do: Operation(do, route, **more)


def header(name: str, meaning: str, schema: Mapping[str, Any], *, is_required: bool = False) -> Any:
    """Document a header that a function reads from the request itself."""
    described = {"name": name, "in": "header", "required": is_required, "schema": dict(schema)}
    return described | {"description": meaning}


@dataclass(frozen=True)
class Answer:
    """An answer of the API, as a command gets it."""

    status: int
    body: Any  # the decoded JSON
    content: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


Show = Callable[[Any], int | None]  # prints the body of an answer; its exit status, None: 0
Ask = Callable[..., Answer]  # an operation and its arguments by name; if_match: a number


@dataclass(frozen=True, eq=False)
class AdminCommand:
    """A command that asks the admin API and prints the answer.

    Args:
        words: what is typed after ``eplb``.
        about: the help.
        example: a call, for the help.
        show: prints the body of the answer.
        operation: that it asks for, or that has the wait and the precondition of its options.
        run: asks, for a command whose arguments are others than those of the operation.
        positional: arguments beside those of the path that are typed without an option's name.
        names: of options, by argument, where they are others.
        defaults: by argument, where they are others.
        is_of_service: a store alone cannot answer it.
    """

    words: str
    about: str
    example: str
    show: Show
    operation: Operation | None
    run: Callable[..., Answer] | None = None
    positional: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    is_of_service: bool = False

    @property
    def is_question(self) -> bool:
        """Whether it changes nothing: a change has a reason."""
        given = self.operation.do if self.run is None and self.operation is not None else self.run
        names = inspect.signature(given).parameters.keys() if given is not None else ()
        return not {"reason", "body"} & set(names)


def command(
    words: str, example: str, of: Operation | None = None, *, show: Show | None = None, **more: Any
) -> Callable[[Callable[..., Any]], AdminCommand]:
    """Declare a command; its docstring is the help, and ``AdminCommand`` has the rest.

    The function prints the answer of the operation, or else it asks, and ``show`` prints.
    """

    def made(function: Callable[..., Any]) -> AdminCommand:
        help_text = " ".join(about(function)).strip()
        if show is None:
            return AdminCommand(words, help_text, example, function, of, **more)
        return AdminCommand(words, help_text, example, show, of, function, **more)

    return made


def about(function: Callable[..., Any]) -> tuple[str, str]:
    """Return the first sentence of a docstring, and the others."""
    found = re.match(r"(.+?[.?])(?: (.+))?$", " ".join((inspect.getdoc(function) or "").split()))
    assert found is not None, f"{function.__name__} has a docstring of whole sentences"
    return found[1], found[2] or ""
