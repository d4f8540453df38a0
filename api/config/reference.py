"""The reference page of the settings, and the effective settings as a TOML file."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic.fields import FieldInfo

from api.config.fields import bounds_of, unit_of
from api.config.tree import Known, Settings, known_settings, section_class

INTRODUCTION = """\
# Configuration

<!-- Written by `eplb config --reference`; a test compares this page with the code. -->

All settings form one tree. `eplb demo` and the commands of a deployment
([deployment.md](deployment.md)) read them, and `eplb config` prints the effective ones with the
place that each value came from. A later place wins over an earlier one:

1. the defaults below,
2. a TOML file (`--config FILE`, or the one that the environment variable `EPLB_CONFIG` names),
3. environment variables,
4. flags (`--ranks 4`),
5. `--setting NAME=VALUE`, for any setting.

The full name of a setting is `section.name`. Most settings also have a short name: the name alone.
Both work in every place:

```toml
ranks = 4               # short name
[planner]
policy = "greedy"       # section and name
[host_link]
deadline_s = 5.0        # no short name: transport.deadline_s exists too
```

An environment variable is `EPLB_` and either name in capitals, with two underscores for the point:
`EPLB_RANKS`, `EPLB_HOST_LINK__DEADLINE_S`. Paths in `EPLB_TEXT` are separated by colons,
addresses in `EPLB_TOPOLOGY__HOSTS` by commas. The secret of a deployment is no setting: the
variable `EPLB_SECRET` holds it, or the file that `network.secret_file` names.

A file may describe several deployments of one model as profiles, tables such as
`[profiles.decode.topology]`, one of which `--profile` or `EPLB_PROFILE` chooses; see
[deployment-profiles.md](deployment-profiles.md).

A *static* setting is read when a process starts. A *live* one can also be changed in the load store
while the deployment runs: the switches take effect at once, the others with the next turn of the
controller. A live value wins over the static one and outlasts restarts: no start switches on what
was switched off. Only a switch that lets weights move ends with the next start, whose own switches
then apply. `eplb config --live` shows what applies, from which source and revision; `--set` and
`--unset` change it, as `PATCH /api/v1/settings`, `eplb pause` and `eplb resume` do.

```sh
eplb config --live
eplb config --live --set plan_windows=8 --reason "the load drifts fast"
eplb config --live --unset plan_windows
```

An unknown name, a value of the wrong type and a value out of bounds end
the command before any process starts, with one line that names the setting, the value, the place
and what was expected.
"""


def reference_page() -> str:
    """Give ``docs/configuration.md``."""
    return INTRODUCTION + "".join(_section(name) for name in Settings.model_fields)


def _section(section: str) -> str:
    rows = [
        "| setting | short name | default | bounds | unit | kind | meaning |",
        "|---|---|---|---|---|---|---|",
    ]
    rows += [_row(one) for one in known_settings().values() if one.section == section]
    meaning = inspect.getdoc(section_class(section))
    heading = f"\n## {section}\n\n{meaning}\n\n".replace("``", "`")
    return heading + "\n".join(rows) + "\n"


def _row(known: Known) -> str:
    cells = (
        f"`{known.path}`",
        f"`{known.short}`" if known.short else "",
        f"`{toml_value(_default(known.field))}`",
        bounds_of(known.field) or _choices(known.field),
        unit_of(known.name, known.field),
        "live" if known.is_live else "static",
        known.field.description or "",
    )
    return "| " + " | ".join(cells) + " |"


def _default(field: FieldInfo) -> Any:
    return field.get_default(call_default_factory=True)


def _choices(field: FieldInfo) -> str:
    """Give the values that a setting may have, where they are listed."""
    choices = [one for one in get_args(field.annotation) if isinstance(one, str)]
    return ", ".join(f"`{one}`" for one in choices)


def toml_value(value: Any) -> str:
    """Give a value as TOML writes it; none for what has no value."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, list):
        return "[" + ", ".join(toml_value(one) for one in value) + "]"
    return json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)


def effective(settings: Settings, places: Mapping[str, str]) -> str:
    """Give all settings as TOML: each with the place that its value came from, secrets masked."""
    lines: list[str] = []
    for known in known_settings().values():
        if known.name == next(iter(section_class(known.section).model_fields)):
            lines += ["", f"[{known.section}]"]
        value = known.masked(known.value_in(settings))
        shown = f"{known.name} = {toml_value(value)}"
        lines.append(f"{'# ' * (value is None)}{shown:<40} # {places.get(known.path, 'default')}")
    return "\n".join(lines[1:]) + "\n"
