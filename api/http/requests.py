"""The body of a change of live settings: what its fields are made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from eplb.policies.table import POLICIES


def _number(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("expected a whole number")
    return value


# 1.0 is an integer of a JSON document; "1" and true are none. Bounds come first, or the document
# would lack them.
WHOLE = (Field(strict=False), BeforeValidator(_number))
# The names are documented here and checked by the service, which names them in its refusal.
Policy = Annotated[
    str | None,
    Field(
        max_length=100,
        description="none: the controller's own",
        json_schema_extra={"enum": [*sorted(POLICIES), None]},
    ),
]
Reason = Annotated[str, Field(min_length=1, max_length=500, description="stored with the change")]


class Body(BaseModel):
    """A request body: unknown keys and other types are refused.

    Types are strict: the text "no" must not be read as true or false, because it decides whether a
    rebalance is a dry run.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
