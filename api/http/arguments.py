"""Arguments that several routes have, and the base of their bodies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, model_validator

from eplb.declared import Meaning, Named

T = TypeVar("T")

MAX_ID = 2**53 - 1  # largest integer that every reader of JSON holds exactly
MAX_INDEX = 2**31 - 1  # indices of layers and experts are int32 in a placement
MOST_LASTS_S = 7 * 86_400
MOST_RANK = 999_999

Id = Annotated[int, Meaning("number of the item", at_least=0, at_most=MAX_ID)]
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
Next = Annotated[
    int | None, Meaning("give as `before` or `after` to continue; null: there are no more")
]


class Body(BaseModel):
    """Body of a request: an object of JSON, whose values are not converted.

    The text "no" must not be read as true or false, because it decides whether a rebalance is a dry
    run. An unknown key is refused.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _read_whole_numbers(cls, value: Any) -> Any:
        return _whole(value)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> dict[str, Any]:
        """Leave null out of the defaults: a key that is not given has none."""
        shown: dict[str, Any] = handler(schema)
        for value in handler.resolve_ref_schema(shown).get("properties", {}).values():
            if value.get("default", 0) is None:
                del value["default"]
        return shown


def _whole(value: Any) -> Any:
    """A value of JSON in which 1.0 is an integer, as a JSON document has it; "1" is none."""
    if isinstance(value, Mapping):
        return {name: _whole(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_whole(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def left_out() -> Any:
    """Give the default of a key that may be left out and is never null."""
    return None


class ReasonRequest(Body):
    """A reason for the change."""

    reason: Reason


def page_of(
    items: Sequence[T], limit: int, number: Callable[[T], int]
) -> tuple[list[T], int | None]:
    """Give the first ``limit`` items, and the number to continue with where there are more."""
    page = list(items[:limit])
    return page, number(page[-1]) if len(items) > limit else None
