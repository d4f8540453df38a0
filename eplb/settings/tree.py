"""The tree of settings: sections of one file, made of the dataclasses that components take.

A component's dataclass declares its settings (``eplb/declared.py``); its other fields are given by
code. A subclass of ``SettingsTree`` names the sections, and the classes of each::

    class Settings(SettingsTree):
        planner = Section("What a plan aims at.", CostModel, Budget)
        agent = Section("The vote of a rank.", RankConfig)

    settings = load(Settings, ...)                      # eplb/settings/loader.py
    settings.planner.pay_back_s                         # the first class of a section
    settings[Budget].target_imbalance                   # any class
    settings.make(RankConfig, deployment=..., sample_steps=...)  # one with fields of code

``section.name`` is the full name of a setting. A name that only one section has stands for it
without the section. A number whose type allows None is None where 0 is given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import (
    Any,
    ClassVar,
    Generic,
    Self,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from eplb.declared import Setting, declared_fields, expected_of, without_none
from eplb.errors import ConfigError, UnfitSetting, shown

T = TypeVar("T")
DEFAULTS = "the defaults"  # the place of a value that nobody has given
_WORDS = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}


class Section(Generic[T]):
    """One table of the file: what it is about, and the classes whose settings it has.

    Args:
        text: for the reference page.
        first: the class that ``settings.NAME`` gives.
        others: further classes.
    """

    def __init__(self, text: str, first: type[T], *others: type[Any]) -> None:
        self.text, self.first, self.classes = text, first, (first, *others)

    @overload
    def __get__(self, settings: None, owner: type) -> Self: ...
    @overload
    def __get__(self, settings: SettingsTree, owner: type) -> T: ...
    def __get__(self, settings: SettingsTree | None, owner: type) -> Self | T:
        return self if settings is None else settings[self.first]


@dataclass(frozen=True)
class Known:
    """One setting of a tree."""

    path: str  # section.name
    short: str  # the name without a section that stands for it; "" where none does
    cls: type[Any]  # the dataclass that declares the setting
    kind: Any  # type, without None
    default: Any
    about: Setting

    @property
    def section(self) -> str:
        """The table that it is in."""
        return self.path.partition(".")[0]

    @property
    def name(self) -> str:
        """Its name in that table."""
        return self.path.partition(".")[2]

    @property
    def shown(self) -> str:
        """The name under which messages report it."""
        return self.short or self.path

    def masked(self, value: Any) -> Any:
        """A value as it may be shown."""
        return without_password(str(value)) if self.about.secret else value

    def read(self, value: Any, place: str) -> Any:
        """A value of the setting's type, from a file, a variable, a flag or a request.

        Raises:
            ConfigError: of another type, or out of range.
        """
        read, expected = _converted(self.kind, value)
        expected = expected or expected_of(self.kind, self.about, read)
        if expected:
            raise self.unfit(value, place, expected)
        if self.about.check is not None:
            self.about.check(read)
        return read

    def unfit(self, value: Any, place: str, expected: str) -> ConfigError:
        """What refuses a value."""
        found = shown(self.masked(value))
        return ConfigError(f"{self.shown} is {found} in {place}, expected {expected}")


class SettingsTree:
    """The value of every setting, and where it came from; see the module.

    Args:
        values: by full name; the others are defaults.
        places: where each of them was given.
    """

    # Defaults by full name where they are not the component's own, and others where a setting has a
    # value.
    defaults: ClassVar[Mapping[str, Any]] = {}
    defaults_at: ClassVar[Mapping[tuple[str, Any], Mapping[str, Any]]] = {}
    # Sections that are known completely, where the file has settings of others too; None: all.
    whole: ClassVar[frozenset[str] | None] = None

    sections: ClassVar[Mapping[str, Section[Any]]]  # name -> section, in the order of the file
    known: ClassVar[Mapping[str, Known]]  # every setting by its full name, in order
    names: ClassVar[Mapping[str, Known]]  # name -> setting, the short names first
    _fields: ClassVar[dict[type[Any], dict[str, Known]]]  # component -> its fields
    _parts: ClassVar[dict[type[Any], dict[str, type[Any]]]]  # fields that are components too

    def __init__(
        self, values: Mapping[str, Any] | None = None, places: Mapping[str, str] | None = None
    ) -> None:
        self.values, self.places = dict(values or {}), dict(places or {})
        self._made: dict[type[Any], Any] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self.values == other.values

    __hash__ = None  # type: ignore[assignment]

    def __init_subclass__(cls) -> None:
        """Index the settings of a tree: its sections, names, and the fields of its components."""
        cls.sections = {name: one for name, one in vars(cls).items() if isinstance(one, Section)}
        found = [
            (component, about.section or section, name, kind, about)
            for section, declared in cls.sections.items()
            for component in declared.classes
            for name, (kind, about) in declared_fields(component).items()
            if isinstance(about, Setting)
        ]
        times = Counter(name for _, _, name, _, _ in found)
        cls._fields = {component: {} for component, *_ in found}
        for component, section, name, kind, about in found:
            path, own = f"{section}.{name}", component.__dataclass_fields__[name].default
            cls._fields[component][name] = Known(
                path,
                about.short or (name if times[name] == 1 else ""),
                component,
                without_none(kind)[0],
                _as_given(kind, cls.defaults.get(path, own)),
                about,
            )
        order = list(cls.sections)
        known = [one for of_class in cls._fields.values() for one in of_class.values()]
        cls.known = {one.path: one for one in sorted(known, key=lambda k: order.index(k.section))}
        short = {one.short: one for one in cls.known.values() if one.short}
        cls.names = short | cls.known
        cls._parts = {}
        for component in cls._fields:
            hints = get_type_hints(component)
            cls._parts[component] = {n: kind for n, kind in hints.items() if kind in cls._fields}

    def __getitem__(self, component: type[T]) -> T:
        """A component's settings."""
        if component not in self._made:
            self._made[component] = self.make(component)
        made: T = self._made[component]
        return made

    def make(self, component: type[T], **given: Any) -> T:
        """A component's settings, and what of it is given by code.

        Its fields that are components of the tree themselves are made too.

        Raises:
            ConfigError: values that do not fit, with the place of one.
        """
        values = dict(given)
        for name, known in self._fields[component].items():
            if name not in given:
                value = self.values.get(known.path, known.default)
                values[name] = _as_field(component, name, value)
        for name, part in self._parts[component].items():
            if name not in given:
                values[name] = self[part]
        try:
            return component(**values)
        except UnfitSetting as exc:
            if (unfit := self._fields[component].get(exc.name)) is None:
                raise
            raise unfit.unfit(exc.found, self.place_of(unfit), exc.expected) from exc

    def check(self) -> None:
        """Make each component that needs nothing of code.

        Raises:
            ConfigError: values that do not fit, with the place of one.
        """
        for component in self._fields:
            if not self._needs_code(component):
                _ = self[component]

    def value(self, known: Known) -> Any:
        """The value of a setting, as its component has completed it."""
        if self._needs_code(known.cls):
            return self.values.get(known.path, known.default)
        kind, _ = declared_fields(known.cls)[known.name]
        return _as_given(kind, getattr(self[known.cls], known.name))

    def place_of(self, known: Known) -> str:
        """Where the value of a setting came from."""
        return self.places.get(known.path, DEFAULTS)

    @classmethod
    def _needs_code(cls, component: type[Any]) -> bool:
        known = cls._fields[component].keys() | cls._parts[component].keys()
        return any(
            one.name not in known and one.default is MISSING and one.default_factory is MISSING
            for one in fields(component)
        )


def applied(component: T, values: Mapping[str, Any]) -> T:
    """A component's settings with live values in place of their own, by name, also of its parts.

    Raises:
        ConfigError: a value that cannot be used.
    """
    changes: dict[str, Any] = {}
    for name, (_, about) in declared_fields(type(component)).items():
        if isinstance(about, Setting) and about.live and name in values:
            if about.check is not None:
                about.check(values[name])
            changes[name] = _as_field(type(component), name, values[name])
    for one in fields(component):  # type: ignore[arg-type]  # T is a dataclass
        part = getattr(component, one.name)
        if is_dataclass(part) and (new := applied(part, values)) != part:
            changes[one.name] = new
    return replace(component, **changes) if changes else component  # type: ignore[type-var]


def without_password(url: str) -> str:
    """A URL of any scheme as it may be shown."""
    scheme, separator, rest = url.partition("://") if "://" in url else ("", "", url)
    login, at, place = rest.rpartition("@")
    return f"{scheme}{separator}{login.partition(':')[0]}{at}{place.partition('?')[0]}"


def _as_given(kind: Any, value: Any) -> Any:
    """A field's value as it is given: 0 in place of None for a number."""
    return 0 if value is None and without_none(kind)[0] in (int, float) else value


def _as_field(component: type[Any], name: str, value: Any) -> Any:
    """A setting's value as the field has it: None in place of 0 where the type allows that."""
    _, is_optional = without_none(declared_fields(component)[name][0])
    return None if is_optional and type(value) in (int, float) and value == 0 else value


def _converted(kind: Any, value: Any) -> tuple[Any, str]:
    """A value as one of a type; or what was expected, where it cannot be one."""
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        if not isinstance(value, list | tuple) or not all(isinstance(v, str | Path) for v in value):
            return value, f"a list of {'paths' if item is Path else 'addresses'}"
        return tuple(item(one) for one in value), ""
    if kind is bool:
        word = str(value).lower()
        if isinstance(value, bool | int | str) and word in _WORDS:
            return _WORDS[word], ""
        return value, "true or false"
    if kind in (int, float):
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            return value, "a number"
        try:
            number = float(value) if kind is float or isinstance(value, float) else int(value)
        except (ValueError, OverflowError):
            return value, "a number" if kind is float else "a whole number"
        if kind is int and number % 1:
            return value, "a whole number"
        return kind(number), ""
    if kind is Path:
        return (Path(value), "") if isinstance(value, str | Path) else (value, "a path")
    if not isinstance(value, str):
        return value, "text"
    return value, ""
