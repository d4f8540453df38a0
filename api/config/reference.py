"""The reference page of the settings, and the effective settings as a TOML file."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

from api.config.tree import Settings
from eplb.declared import MOST, Setting, choices_of
from eplb.settings.tree import Known

INTRODUCTION = """\
# Configuration

<!-- Written by `eplb config --reference`; a test compares this page with the code. -->

The commands of a deployment ([deployment.md](deployment.md)) and `eplb demo` read one tree of
settings. `eplb config` prints the effective ones with the place that each value came from. A later
place wins: the defaults below; a TOML file (`--config FILE`, or `EPLB_CONFIG`); the environment
(`EPLB_` and the name in capitals, two underscores for the point); flags; `--setting NAME=VALUE`.

A setting is named `section.name`. The name alone will do where only one section has it, and so do
the short names in brackets:

```toml
layers = 4              # model.layers, EPLB_LAYERS
[planner]
policy = "greedy"       # planner.policy, EPLB_POLICY
[host_cache]
records = 64            # EPLB_HOST_CACHE__RECORDS: engine.records exists too
```

Addresses in `EPLB_TOPOLOGY__HOSTS` are separated by commas. The secret of a deployment is no
setting: `EPLB_SECRET` has it, or the file that `network.secret_file` names. Numbers are 0 or more
where no range is given. An unknown name, a wrong type or a value out of range is refused before any
process starts.

Settings marked *live* can be changed in the store while the deployment runs: switches take effect
at once, others with the next turn of the controller. A live value wins over that of the start and
outlasts restarts; only a switch that lets weights move ends with the next start.

```sh
eplb config --live --set plan_windows=8 --reason "the load drifts fast"
eplb config --live --unset plan_windows
```
"""


def reference_page() -> str:
    """What ``docs/configuration.md`` has."""
    return INTRODUCTION + "".join(_section(name) for name in Settings.sections)


def _section(section: str) -> str:
    rows = [_row(one) for one in Settings.known.values() if one.section == section]
    text = textwrap.fill(Settings.sections[section].text, 100, break_long_words=False)
    return f"\n## {section}\n\n{text}\n\n" + "\n".join(rows) + "\n"


def _row(known: Known) -> str:
    about = known.about
    short = f" ({known.short})" if known.short not in ("", known.name) else ""
    live = "*live*: " if about.live else ""
    values = ", ".join(f"`{one}`" for one in choices_of(known.kind))
    if known.kind in (int, float):
        values = f"{_range(about)} {about.unit_of(known.name)}".strip()
    after = f" ({values})" if values else ""
    default = toml_value(known.default)
    return f"- `{known.name}`{short} = `{default}`: {live}{about.text}{after}"


def _range(about: Setting) -> str:
    """The bounds of a number; "": any from 0."""
    least = f"above {about.above}" if about.at_least is None else str(about.at_least)
    if about.at_most is None or about.at_most >= MOST:
        return "" if least == "0" else f"{least} or more" if least[0] != "a" else least
    return f"{least}..{about.at_most}"


def toml_value(value: Any) -> str:
    """A value as TOML writes it; none for what has no value."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(one) for one in value) + "]"
    return json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)


def effective(settings: Settings) -> str:
    """All settings as TOML: each with the place that its value came from, secrets masked."""
    lines: list[str] = []
    for section in Settings.sections:
        lines += ["", f"[{section}]"]
        for known in Settings.known.values():
            if known.section == section:
                value = known.masked(settings.value(known))
                shown = f"{known.name} = {toml_value(value)}"
                place = settings.places.get(known.path, "default")
                lines.append(f"{'# ' * (value is None)}{shown:<40} # {place}")
    return "\n".join(lines[1:]) + "\n"
