"""What a declared value means: the one place for its unit, bounds and description.

A setting, an argument of a request and a field of an answer are fields of frozen dataclasses. What
people are told about such a field stands beside its type, once::

    pay_back_s: Annotated[float, Setting("time within which a move must save its cost", live=True)]

Files, the environment, the command line, REST, the reference pages and the engines' plug-ins derive
from it. This module imports no library: an engine's process reads settings with it. pydantic finds
``Meaning`` in an annotation by the two methods whose names begin with ``__get_pydantic``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from eplb.errors import UnfitSetting

T = TypeVar("T")

MOST = 10**9
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
    """A field that users set. A number is 0 to ``MOST``, unless its bounds say otherwise.

    The upper bound is far above useful values: a typing error is refused at the start instead of
    exhausting the memory of a process.

    Args:
        section: of the file; "": that of its class.
        short: a name without a section that stands for the setting; "": its own name, where only
            one section has a setting of that name.
        live: kept in the store while a deployment runs; a change needs no restart.
        secret: the value may hold a password, which is never shown.
        check: reads the value of a text with a form of its own, and raises ConfigError.
    """

    at_most: float | None = MOST
    section: str = ""
    short: str = ""
    live: bool = False
    secret: bool = False
    check: Callable[[str], object] | None = None

    def __post_init__(self) -> None:
        if self.above is None and self.at_least is None:
            object.__setattr__(self, "at_least", 0)


_declared: dict[type[Any], Mapping[str, tuple[Any, Meaning]]] = {}  # class -> its fields


def declared_fields(cls: type[Any]) -> Mapping[str, tuple[Any, Meaning]]:
    """Type and meaning of each declared field of a dataclass, in their order."""
    if cls in _declared:
        return _declared[cls]
    found = _declared[cls] = dict[str, tuple[Any, Meaning]]()
    for name, hint in get_type_hints(cls, include_extras=True).items():
        meanings = [one for one in getattr(hint, "__metadata__", ()) if isinstance(one, Meaning)]
        if meanings:
            found[name] = get_args(hint)[0], meanings[0]
    return found


def documented(cls: type[T]) -> type[T]:
    """Have ``help`` show the meanings of declared fields as text, and not in two signatures."""
    for made, drawn in (
        (cls, inspect.signature(cls)),
        (cls.__init__, inspect.signature(cls.__init__)),
    ):
        names = [one.replace(annotation=one.empty) for one in drawn.parameters.values()]
        made.__signature__ = inspect.Signature(names)  # type: ignore[union-attr]
    meanings = (f"    {name}: {one.text}" for name, (_, one) in declared_fields(cls).items())
    cls.__doc__ = "\n".join([inspect.cleandoc(cls.__doc__ or ""), "", "Settings:", *meanings])
    return cls


def without_none(kind: Any) -> tuple[Any, bool]:
    """A type without None, and whether None was one of its values."""
    parts = [one for one in get_args(kind) if one is not NoneType]
    is_optional = NoneType in get_args(kind)
    return (parts[0], True) if is_optional else (kind, False)


def choices_of(kind: Any) -> tuple[str, ...]:
    """The values that a type lists; (): any."""
    kind, _ = without_none(kind)
    return get_args(kind) if get_origin(kind) is Literal else ()


def expected_of(kind: Any, meaning: Meaning, value: Any) -> str:
    """What was expected in place of a value of the right type; "": it can be used.

    Not by ``pattern``, which is for requests: ``check`` says more of what is wrong.
    """
    if (choices := choices_of(kind)) and value not in choices:
        *others, last = map(repr, choices)
        return f"{', '.join(others)} or {last}"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "" if meaning.is_within(value) else meaning.bounds or "a finite number"
    if isinstance(value, str):
        if meaning.min_length is not None and len(value) < meaning.min_length:
            return f"at least {meaning.min_length} character"
        if meaning.max_length is not None and len(value) > meaning.max_length:
            return f"at most {meaning.max_length} characters"
    return ""


def check_fields(component: Any) -> None:
    """Refuse a declared field that is out of its bounds; for ``__post_init__``.

    Raises:
        ConfigError: with the field, its value, and what was expected.
    """
    for name, (kind, meaning) in declared_fields(type(component)).items():
        value = getattr(component, name)
        if value is None:
            continue
        if expected := expected_of(kind, meaning, value):
            raise UnfitSetting(name, value, expected)
        if isinstance(meaning, Setting) and meaning.check is not None:
            meaning.check(value)


@dataclass(frozen=True)
class Named(Meaning):
    """A text that is one of known names. The component that has the names checks the text.

    Args:
        names: the names, or where they are, as ``module:attribute``, which is imported only when
            the OpenAPI document is made.
    """

    names: tuple[str, ...] | str = ()

    def __get_pydantic_json_schema__(
        self, schema: Mapping[str, Any], handler: Callable[[Any], dict[str, Any]]
    ) -> dict[str, Any]:
        """Give pydantic the names too; null is one of them where the value may be null."""
        shown = super().__get_pydantic_json_schema__(schema, handler)
        known = resolve_name(self.names) if isinstance(self.names, str) else self.names
        shown["enum"] = [*(sorted(known) if isinstance(self.names, str) else known)]
        return shown | {"enum": [*shown["enum"], None]} if "anyOf" in shown else shown


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
