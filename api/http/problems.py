"""The types of problems (RFC 9457) that the service answers with, and the exception for one.

``api/http/refusals.py`` makes answers of problems.
"""

from __future__ import annotations

from enum import Enum, unique

from eplb.errors import EplbError

V1 = "/api/v1"
PATH = f"{V1}/problems"  # below which each type is described
RETRY = "Retry-After"


@unique
class ProblemType(Enum):
    """Every problem that the service answers with: status, title, and what it means."""

    BAD_REQUEST = 400, "Bad request", "the request cannot be read"
    FOREIGN_HOST = (
        400,
        "Host not allowed",
        "the `Host` header is no loopback name, and the deployment has no secret",
    )
    NOT_AUTHENTICATED = 401, "Not authenticated", "no key or token, or a wrong one"
    FOREIGN_ORIGIN = 403, "Sent by another site", "a page of another origin sent the change"
    ROLE_TOO_LOW = 403, "Role too low", "the key has a lower role than the request needs"
    NOT_FOUND = 404, "Not found", "there is no such route, or the service keeps no audit"
    NO_SUCH_DEPLOYMENT = 404, "No such deployment", "the service shows none of this name"
    NO_SUCH_PLACEMENT = 404, "No such placement", "the store holds no placement of this generation"
    NO_SUCH_PROPOSAL = 404, "No such proposal", "the store keeps no proposal of this number"
    NO_SUCH_TASK = 404, "No such task", "the store keeps no task of this number"
    NO_SUCH_EXPERT = 404, "No such expert", "the model has no such layer or expert"
    NO_SUCH_RANK = 404, "No such rank", "the current run has no rank of this number"
    METHOD_NOT_ALLOWED = 405, "Method not allowed", "the route has other methods: see `Allow`"
    REQUEST_TOO_SLOW = (
        408,
        "Request too slow",
        "its body has not arrived within 10 s; the connection is closed",
    )
    MOVEMENT_OFF = (
        409,
        "Movement is off",
        "the kill switch is off, or `observe` is on; a dry run is possible",
    )
    MIGRATION_OPEN = 409, "A migration is open", "it must commit or abort before the next plan"
    PROPOSAL_ENDED = 409, "Proposal has ended", "it was approved or rejected, or has expired"
    BASE_MOVED_ON = (
        409,
        "Base moved on",
        "another placement was committed since the proposal was made",
    )
    LOSES = (
        409,
        "Loses by its price",
        "by the load of now it costs more than it saves; `accept_loss` has it carried out",
    )
    TASK_BEGUN = 409, "Task is not queued", "the controller has begun or ended the task"
    CONTROLLER_REFUSED = (
        409,
        "Refused by the controller",
        "the controller worked on the task and refused it for a reason without a type of its own",
    )
    NO_LOAD = 409, "No load yet", "no complete window of load to plan on: ask again later"
    NO_PLAN = (
        409,
        "No plan",
        "constraints, cordons or ranks that are gone leave no placement that can serve",
    )
    CANNOT_SERVE = (
        409,
        "Placement cannot serve",
        "the target of a rollback or proposal cannot serve on these ranks, or cordons forbid it",
    )
    NOTHING_TO_PROPOSE = 409, "Nothing to propose", "the plan is KEEP; the detail has its reason"
    NOT_PUBLISHED = (
        409,
        "Not published",
        "another plan came first, or the ranks' weights differ in version: ask again",
    )
    IMPOSSIBLE_THROTTLE = (
        409,
        "Impossible throttle",
        "a limit is out of range, or the mode of migrations has no such limit",
    )
    TASK_EXPIRED = 409, "Task expired", "no controller began it within `task_expiry_s`: ask again"
    TASK_ABANDONED = 409, "Task abandoned", "the controller exited during it: ask again"
    TASK_CANCELLED = 409, "Task cancelled", "it was cancelled while it was queued"
    REQUEST_IN_PROGRESS = (
        409,
        "Request in progress",
        "a request with this idempotency key is in progress; see `Retry-After`",
    )
    NO_RUN = 409, "No run", "no run has begun, or its model or topology cannot be read"
    OTHER_SHAPE = (
        409,
        "Another shape",
        "a placement of another model or other ranks than the current run",
    )
    NOT_EXPRESSIBLE = 409, "Not expressible", "the engine's format cannot express the placement"
    IMPOSSIBLE_PIN = (
        409,
        "Impossible pin",
        "the ranks of the current run cannot hold what is pinned; the detail names the pin",
    )
    IMPOSSIBLE_CORDON = (
        409,
        "Impossible cordon",
        "the rank is not alive, or the ranks that may take experts have too few slots for all that "
        "no cordoned rank holds",
    )
    IMPOSSIBLE_MEMBERSHIP = (
        409,
        "Impossible membership",
        "the ranks that are wanted cannot hold every expert, or ranks of this deployment cannot "
        "change while they serve; the detail has what to do instead",
    )
    OTHER_OPERATION = (
        409,
        "Another operation",
        "an operation on the ranks is open, it has ended, or its id was used for another request",
    )
    GENERATION_MOVED_ON = (
        412,
        "Another generation serves",
        "it is not the one in `If-Match`",
    )
    SETTINGS_CHANGED = (
        412,
        "Settings were changed",
        "the revision of the live settings is not the one in `If-Match`",
    )
    MEMBERSHIP_CHANGED = (
        412,
        "Membership changed",
        "the epoch of the ranks is not the one in `If-Match`",
    )
    BODY_TOO_LARGE = 413, "Body too large", "the body is larger than 64 KiB"
    NOT_JSON = 415, "Not JSON", "the body of a change is not `application/json`"
    INVALID_REQUEST = (
        422,
        "Invalid request",
        "a parameter, a header or the body has a value that is not accepted, or an unknown name",
    )
    KEY_REUSED = 422, "Idempotency key reused", "the key was used for another body"
    PRECONDITION_REQUIRED = (
        428,
        "Precondition required",
        "the change needs `If-Match`: the `ETag` that was read, or `*`",
    )
    TOO_MANY_FAILED_LOGINS = (
        429,
        "Too many failed logins",
        "ten of this address within a minute; a right key is answered nevertheless",
    )
    NOT_READY = 503, "Not ready", "ranks do not serve, or no controller leads"
    STORE_UNAVAILABLE = 503, "Store unavailable", "the store does not answer or cannot be used"
    TOO_BUSY = (
        503,
        "Too busy",
        "too many requests or event streams are in progress; see `Retry-After`",
    )
    AUDIT_UNAVAILABLE = (
        503,
        "Audit unavailable",
        "the audit cannot be written, a full disk for example; nothing was changed",
    )
    KEYS_UNAVAILABLE = 503, "Access keys unavailable", "the file of access keys cannot be used"

    def __init__(self, status: int, title: str, meaning: str) -> None:
        self.status, self.title, self.meaning = status, title, meaning

    @property
    def label(self) -> str:
        """The last part of its URI."""
        return self.name.lower().replace("_", "-")

    @property
    def uri(self) -> str:
        """A reference to its description, relative to the service."""
        return f"{PATH}/{self.label}"


class Refused(EplbError):
    """A request that cannot be served."""

    exit_status = 1  # exit status of a command that this error ends

    def __init__(self, kind: ProblemType, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
