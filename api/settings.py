"""Settings of the demo: flags over environment over a TOML file over defaults.

Every value remembers the place it came from, so that a refusal can name it: one sentence with the
setting, the value found, the place, and what was expected. A key that nobody knows is refused too,
because a misspelt setting that is ignored is a wrong result that looks right.

This is the only file of the project that reads settings from files or the environment.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from api.demo.settings import CUDA_DEFAULTS, DemoSettings
from eplb.errors import ConfigError

ENV_PREFIX = "EPLB_"
NOT_SETTINGS = frozenset({"EPLB_DATA"})  # where tests and benchmarks find recorded traces


def load_settings(
    flags: Mapping[str, Any],
    *,
    config: Path | None,
    environ: Mapping[str, str],
    named: Mapping[str, Any] | None = None,
) -> DemoSettings:
    """Merge flags, environment, TOML file and defaults, in this order of precedence.

    Args:
        flags: by setting name; None and an empty list mean that the flag was not given.
        config: the TOML file, or None for no file.
        environ: the process environment; ``EPLB_RANKS`` is the setting ``ranks``, and
            ``EPLB_TEXT`` holds paths with the system's path separator between them.
        named: values of ``--setting NAME=VALUE``, which stand above all others.

    Raises:
        ConfigError: a key that nobody knows, a value of the wrong type or range, or a file that
            cannot be read.
    """
    given_flags = {key: value for key, value in flags.items() if value is not None and value != []}
    values: dict[str, Any] = {}
    place_of: dict[str, str] = {}
    sources = (
        _from_file(config),
        _from_environment(environ),
        {key: (value, f"flag {flag_name(key)}") for key, value in given_flags.items()},
        {key: (value, f"--setting {key}") for key, value in (named or {}).items()},
    )
    for source in sources:
        for key, (value, place) in source.items():
            _check_known(key, key, place)
            values[key], place_of[key] = value, place
    if values.get("device") == "cuda":
        values = CUDA_DEFAULTS | values
    try:
        return DemoSettings(**values)
    except ValidationError as exc:
        raise ConfigError(_sentence(exc, place_of)) from exc


def flag_name(key: str) -> str:
    """Give the command-line flag of a setting."""
    return "--json" if key == "json_path" else "--" + key.replace("_", "-")


def _from_file(config: Path | None) -> dict[str, tuple[Any, str]]:
    if config is None:
        return {}
    try:
        table = tomllib.loads(config.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"settings file {config} cannot be read: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"settings file {config} is not TOML: {exc}") from exc
    return {key: (value, str(config)) for key, value in table.items()}


def _from_environment(environ: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    found: dict[str, tuple[Any, str]] = {}
    for name, text in sorted(environ.items()):
        if not name.startswith(ENV_PREFIX) or name in NOT_SETTINGS:
            continue
        key = name.removeprefix(ENV_PREFIX).lower()
        _check_known(key, name, "the environment")
        value = [part for part in text.split(os.pathsep) if part] if key == "text" else text
        found[key] = (value, f"environment variable {name}")
    return found


def _check_known(key: str, written: str, place: str) -> None:
    known = list(DemoSettings.model_fields)
    if key in known:
        return
    closest = difflib.get_close_matches(key, known, n=3, cutoff=0.5) or known
    if written.startswith(ENV_PREFIX):
        closest = [ENV_PREFIX + name.upper() for name in closest]
    raise ConfigError(f"unknown key {written!r} in {place}, closest known: {', '.join(closest)}")


def _sentence(exc: ValidationError, place_of: Mapping[str, str]) -> str:
    """Say the first refusal in one sentence."""
    error = exc.errors(include_url=False)[0]
    key = str(error["loc"][0])
    place = place_of.get(key, "the defaults")
    return f"{key} is {_shown(error['input'])} in {place}, {_expected(error)}"


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, str) else str(value)


def _range(key: str) -> str:
    """Say what the bounds of a setting are."""
    words = {"ge": "at least {}", "gt": "more than {}", "le": "at most {}", "lt": "less than {}"}
    known = [
        said.format(getattr(bound, name))
        for bound in DemoSettings.model_fields[key].metadata
        for name, said in words.items()
        if hasattr(bound, name)
    ]
    return " and ".join(known)


def _expected(error: Mapping[str, Any]) -> str:
    """Put pydantic's finding into the words of this project."""
    limits, kind = error.get("ctx", {}), str(error["type"])
    if kind in ("greater_than_equal", "greater_than", "less_than_equal", "less_than"):
        return f"expected {_range(str(error['loc'][0]))}"
    words = {
        "literal_error": "{expected}",
        "finite_number": "a finite number",
        "string_too_short": "at least {min_length} character",
    }
    if kind == "value_error":
        return str(limits["error"])
    if kind in words:
        return "expected " + words[kind].format(**limits)
    kinds = {"int": "a whole number", "float": "a number", "bool": "true or false"}
    kinds |= {"path": "a path", "list": "a list of paths", "string": "text"}
    wanted = kinds.get(kind.split("_")[0])
    return f"expected {wanted}" if wanted else str(error["msg"])
