"""Why a task failed, as a reason on which an operator acts; its error has the words."""

from __future__ import annotations

from enum import StrEnum


class Refusal(StrEnum):
    """Reasons. A result without one is of a release before them, or of an unforeseen error."""

    NO_LOAD = "no-load"  # no complete window yet: ask again later
    NO_PLAN = "no-plan"  # constraints, cordons or dead ranks leave no placement
    CANNOT_SERVE = "cannot-serve"  # the placement asked for, on these ranks and cordons
    NO_SUCH_PLACEMENT = "no-such-placement"
    NO_SUCH_EXPERT = "no-such-expert"
    NOTHING_TO_PROPOSE = "nothing-to-propose"  # the plan is KEEP
    MOVEMENT_OFF = "movement-off"
    MIGRATION_OPEN = "migration-open"
    GENERATION_MOVED_ON = "generation-moved-on"  # another one serves than the request names
    BASE_MOVED_ON = "base-moved-on"  # of the proposal
    PROPOSAL_ENDED = "proposal-ended"
    NOT_PUBLISHED = "not-published"  # another plan came first: ask again
    IMPOSSIBLE_THROTTLE = "impossible-throttle"  # the ranks cannot take it
    EXPIRED = "expired"  # it was queued for too long
    ABANDONED = "abandoned"  # the controller exited during it
    CANCELLED = "cancelled"
