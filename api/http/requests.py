"""Bodies of HTTP requests. An unknown key is an error."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from eplb.policies.table import POLICIES
from telemetry.state.proposals import LASTS_S

MAX_ID = 2**53 - 1  # of tasks, events and generations: what every reader of JSON holds exactly
MOST_LASTS_S = 7 * 86_400
NOTES = "Eplb-Notes"  # header of a file: what it cannot express
MAX_INDEX = 2**31 - 1  # of layers and experts, which are int32 in a placement


def _not_null(value: object) -> object:
    if value is None:
        raise ValueError("expected true or false, or no such key")
    return value


def _number(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("expected a whole number")
    return value


# 1.0 is an integer of a JSON document; "1" and true are none. Bounds come first, or the document
# would lack them.
WHOLE = (Field(strict=False), BeforeValidator(_number))
Index = Annotated[int, Field(ge=0, le=MAX_INDEX), *WHOLE]
# The names are documented here and checked by the service, which names them in its refusal.
Policy = Annotated[
    str | None,
    Field(
        max_length=100,
        description="none: the controller's own",
        json_schema_extra={"enum": [*sorted(POLICIES), None]},
    ),
]
Switch = Annotated[bool | None, BeforeValidator(_not_null), WithJsonSchema({"type": "boolean"})]
Reason = Annotated[str, Field(min_length=1, max_length=500, description="stored with the change")]


class Body(BaseModel):
    """A request body: unknown keys and other types are refused.

    Types are strict: the text "no" must not be read as true or false, because it decides whether a
    rebalance is a dry run.
    """

    model_config = ConfigDict(extra="forbid", strict=True)


class ThrottleRequest(Body):
    """How much slower than the deployment's settings this migration is to go."""

    model_config = ConfigDict(
        json_schema_extra={
            "minProperties": 1,
            "examples": [{"experts_per_transaction": 2, "link_part": 0.25}],
        }
    )

    experts_per_transaction: Annotated[int, Field(ge=1, le=MAX_INDEX), *WHOLE] | None = Field(
        None, description="that a transaction brings to a rank, at most; copy mode only"
    )
    layers_per_transaction: Annotated[int, Field(ge=1, le=MAX_INDEX), *WHOLE] | None = Field(
        None, description="that swap together, at most"
    )
    link_part: Annotated[float, Field(gt=0, le=1), Field(strict=False)] | None = Field(
        None, description="part of the budget of each of a rank's links that staging may use"
    )

    @model_validator(mode="after")
    def _has_a_limit(self) -> ThrottleRequest:
        if not self.model_fields_set:
            raise ValueError("the throttle names no limit, expected one or more")
        return self


class RebalanceRequest(Body):
    """Ask the controller for a plan now, and unless this is a dry run, for its migration."""

    reason: Reason
    dry_run: bool = Field(True, description="true: plan only, move nothing")
    policy: Policy = None
    throttle: ThrottleRequest | None = Field(None, description="null: the deployment's pace")


class ProposalRequest(Body):
    """Ask the controller for a plan now, and store it until somebody decides on it."""

    reason: Reason
    policy: Policy = None
    expires_s: Annotated[int, Field(ge=1, le=MOST_LASTS_S), *WHOLE] = Field(
        int(LASTS_S), description="for how long it can be approved"
    )


class RollbackRequest(Body):
    """Ask the controller for the way back to an earlier placement, or for what it would cost.

    It is a migration forward: the earlier experts and shares serve as a new generation.
    """

    reason: Reason
    generation: Annotated[int, Field(ge=0, le=MAX_ID), *WHOLE] = Field(
        description="whose placement is to serve again"
    )
    dry_run: bool = Field(True, description="true: plan only, move nothing")
    throttle: ThrottleRequest | None = Field(None, description="null: the deployment's pace")


class ExplainRequest(Body):
    """Ask the controller to explain where a plan made now places an expert, and why."""

    layer: Index = Field(description="index in the placement, from 0")
    expert: Index = Field(description="a logical expert")
    policy: Policy = None


class ReasonRequest(Body):
    """Resume, cancel, approve or reject."""

    reason: Reason


class PauseRequest(Body):
    """Stop all movement, for a time or until it is resumed."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"reason": "change 4711", "expires_s": 7200}]}
    )

    reason: Reason
    expires_s: Annotated[int, Field(ge=1, le=MOST_LASTS_S), *WHOLE] | None = Field(
        None, description="after which movement resumes by itself; null: after a resume alone"
    )


class ControlRequest(Body):
    """Change switches; those that are not given stay.

    ``movement`` is the kill switch: false stops all movement. ``observe``: plan and report, publish
    nothing.
    """

    model_config = ConfigDict(
        json_schema_extra={"anyOf": [{"required": ["movement"]}, {"required": ["observe"]}]}
    )

    reason: Reason
    movement: Switch = None
    observe: Switch = None
