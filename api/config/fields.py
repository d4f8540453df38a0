"""Declaration of a setting: type, default, bounds, unit, meaning, and whether it is live."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from eplb.errors import ConfigError

HOUR_S, YEAR_S = 3600, 31_536_000
MOST = 10**12  # bytes and bytes per second: a terabyte, above any link
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


def _not_a_switch(value: object) -> object:
    """Refuse true and false for a number; pydantic would read them as 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("expected a number")
    return value


Whole = Annotated[int, BeforeValidator(_not_a_switch)]
Number = Annotated[float, BeforeValidator(_not_a_switch), Field(allow_inf_nan=False)]


class Section(BaseModel):
    """One table of the tree; a field stands after those it is checked against.

    Every number has an upper bound, far above useful values: a typing error is refused at the start
    instead of exhausting the memory of a process.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


def setting(
    default: Any,
    meaning: str,
    *,
    unit: str = "",
    short: str = "",
    live: bool = False,
    secret: bool = False,
    **bounds: float,
) -> Any:
    """Declare a setting.

    Args:
        unit: of a number; without it the name's suffix gives the unit.
        short: a name without a section that stands for it; without it the name itself, where only
            one section has a setting of that name.
        live: stored in the load store while a deployment runs; a change needs no restart.
        secret: the value may hold a password, which is never shown.
    """
    about = {"unit": unit, "short": short, "live": live, "secret": secret}
    return Field(default, description=meaning, json_schema_extra=about, **bounds)  # type: ignore[call-overload]


def about(field: FieldInfo, key: str) -> Any:
    """Give the argument ``key`` of ``setting``."""
    assert isinstance(field.json_schema_extra, dict), "every setting is declared by setting()"
    return field.json_schema_extra[key]


def unit_of(name: str, field: FieldInfo) -> str:
    """Give the unit of a setting, or "" where it has none."""
    given = str(about(field, "unit"))
    found = [unit for suffix, unit in UNIT_OF_SUFFIX.items() if name.endswith(suffix)]
    return given or (found[0] if found else "")


def bounds_of(field: FieldInfo) -> str:
    """Give the bounds of a setting as text, or "" where it has none."""
    words = {"ge": "at least {}", "gt": "more than {}", "le": "at most {}", "lt": "less than {}"}
    known = [
        text.format(getattr(bound, name))
        for bound in field.metadata
        for name, text in words.items()
        if getattr(bound, name, None) is not None
    ]
    return " and ".join(known)


def values_of(section: Section) -> dict[str, Any]:
    """Give a section's values by name, for a dataclass that has the same names."""
    return {name: getattr(section, name) for name in type(section).model_fields}


def files_together(section: Section, table: str, *names: str) -> list[Path]:
    """Give files that are of use only together: all of them, absolute, or none.

    Raises:
        ConfigError: one is given and another one is not.
    """
    found = {f"{table}.{name}": getattr(section, name) for name in names}
    given = {name: path.absolute() for name, path in found.items() if path is not None}
    if given and len(given) < len(names):
        missing = next(name for name in found if name not in given)
        raise ConfigError(
            f"{missing} is not set and {next(iter(given))} is, expected both or none of them"
        )
    return list(given.values())
