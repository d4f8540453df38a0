"""What a declared value means: the one place for its unit, bounds and description.

A setting, an argument of a request and a field of an answer are fields of frozen dataclasses. What
people are told about such a field stands beside its type, once::

    pay_back_s: Annotated[float, Setting("time within which a move must save its cost", live=True)]

Files, the environment, the command line, REST, the reference pages and the engines' plug-ins derive
from it. This module imports no library: an engine's process reads settings with it. pydantic finds
``Meaning`` in an annotation by the two methods whose names begin with ``__get_pydantic``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

UNIT_OF_SUFFIX = {
    "_s": "s",
    "_ms": "ms",
    "_bytes": "bytes",
    "_mb": "MB",
    "_per_second": "bytes/s",
    "_steps": "steps",
    "_tokens": "tokens",
    "_windows": "windows",
}


@dataclass(frozen=True)
class Meaning:
    """Description and bounds of one field.

    Args:
        text: what the value says, in plain words; shown in references and in the OpenAPI document.
        unit: of a number; None: that of the name's suffix, see ``unit_of``.
        at_least: smallest value of a number.
        above: number that the value must exceed.
        at_most: largest value of a number.
        min_length: of a text or list.
        max_length: of a text or list.
        pattern: regular expression of a text.
        example: a value for the OpenAPI document.
    """

    text: str
    unit: str | None = None
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    min_length: int | None = None
    max_length: int | None = None
    pattern: str | None = None
    example: Any = None

    @property
    def bounds(self) -> str:
        """The bounds of a number in words; "": it has none."""
        words = (("at least", self.at_least), ("more than", self.above), ("at most", self.at_most))
        return " and ".join(f"{word} {limit}" for word, limit in words if limit is not None)

    def is_within(self, number: float) -> bool:
        """Whether a number keeps the bounds; one that is not finite does not."""
        return (
            number - number == 0  # neither infinite nor NaN
            and (self.at_least is None or number >= self.at_least)
            and (self.above is None or number > self.above)
            and (self.at_most is None or number <= self.at_most)
        )

    def unit_of(self, name: str) -> str:
        """The unit of the field with this name; "": it has none."""
        if self.unit is not None:
            return self.unit
        return next((unit for end, unit in UNIT_OF_SUFFIX.items() if name.endswith(end)), "")

    def __get_pydantic_core_schema__(
        self, source: Any, handler: Callable[[Any], dict[str, Any]]
    ) -> dict[str, Any]:
        """Give pydantic the bounds: in a copy of the type's schema, below ``None`` if it may be."""
        schema = handler(source)
        limits = {
            "int": {"ge": self.at_least, "gt": self.above, "le": self.at_most},
            "float": {"ge": self.at_least, "gt": self.above, "le": self.at_most},
            "str": _lengths(self) | {"pattern": self.pattern},
            "list": _lengths(self),
        }
        return _limited(schema, limits)

    def __get_pydantic_json_schema__(
        self, schema: Mapping[str, Any], handler: Callable[[Any], dict[str, Any]]
    ) -> dict[str, Any]:
        """Give pydantic the description for its JSON schema."""
        shown = handler(schema)
        shown["description"] = self.text
        if self.example is not None:
            shown["examples"] = [self.example]
        return shown


@dataclass(frozen=True)
class Setting(Meaning):
    """A field that users set.

    Args:
        short: a name without a section that stands for the setting; "": its own name, where only
            one section has a setting of that name.
        live: kept in the store while a deployment runs; a change needs no restart.
        secret: the value may hold a password, which is never shown.
    """

    short: str = ""
    live: bool = False
    secret: bool = False


def _lengths(of: Meaning) -> dict[str, Any]:
    return {"min_length": of.min_length, "max_length": of.max_length}


def _limited(schema: dict[str, Any], limits: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    kind = schema["type"]
    if kind in limits:
        given = {name: limit for name, limit in limits[kind].items() if limit is not None}
        return schema | given
    if "schema" in schema and isinstance(schema["schema"], dict):  # nullable, default, function
        return schema | {"schema": _limited(schema["schema"], limits)}
    return schema
