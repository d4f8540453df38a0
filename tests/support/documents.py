"""The pages of the project: their blocks of code, and the sections that are written from the code.

    python -m tests.support.documents    # write the generated sections again

A generated section lies between ``<!-- generated: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from typer.main import get_command

from api.app import create_app
from api.cli.main import COMMANDS, app
from api.http.dependencies import least_role
from api.http.document import OF_ALL, OF_CHANGES, OF_KEYS, OF_STORE
from api.http.problems import V1, ProblemType
from api.operations.table import ROUTES
from runtime.checkpoints.families import FAMILIES, ExpertLayout
from telemetry import open_store

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("eplb", "runtime", "telemetry", "rebalance", "simulations", "api")
TOP_PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
NOT_RUN = re.compile(r"<!-- not run: (?P<reason>[^>]+) -->")
FILE = re.compile(r"# (\S+\.\w+)\n")
SHARED_BY = 4  # commands, of an option that their reference shows once
# The API reference: builders beside what the packages export, and the methods that users call.
BUILDERS: Mapping[str, tuple[str, ...]] = {
    "eplb": (),
    "runtime": (),
    "rebalance": (),
    "rebalance.assembly.environment": ("build_rank_from_env",),
    "rebalance.assembly.rank": ("build_rank",),
    "rebalance.assembly.config": ("RankConfig",),
    "rebalance.assembly.group": ("join_votes",),
    "rebalance.assembly.controller": ("build_controller",),
    "rebalance.assembly.host_cache": ("build_host_cache",),
    "runtime.counters": ("PassCounter",),
    "runtime.dispatch.all_to_all": ("Received",),
    "runtime.dispatch.table": ("Trial", "check_dispatcher"),
    "runtime.experts": ("TensorSpec",),
    "runtime.model.compute": ("Experts",),
    "telemetry": ("open_store",),
}
METHODS = {
    "Checkpoint": "model_shape schema part router repack check identity",
    "Controller": "run close",
    "CostModel": "with_kernel",
    "Dispatcher": "dispatch combine",
    "ExpertBank": "live weights",
    "ExpertSchema": "swiglu swiglu_fp8 spans views",
    "Experts": "run",
    "MoELayer": "forward",
    "PassCounter": "begin watch",
    "Plan": "explain to_dict",
    "Rank": "enter start step wait wait_for_exchange held begin_update end_update placement phase "
    "request_halt pause_staging resume_staging measure_experts bank table all_to_all survive leave "
    "close",
    "RoutingTable": "choose draw",
    "SlotCounter": "add row drain",
    "StageSettings": "while_serving",
    "Topology": "uniform slots_on",
}
GIVEN = "Explanation LayerExplanation Migration Move Promise RedundancyLevel Transaction"
MOST_SHOWN = 6  # arguments; help() has those of longer lists
SECTION = re.compile(r"(<!-- generated: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str  # below the repository
    section: str  # heading of level two above it
    line: int  # of its first line of code, from 1
    language: str  # "" without one
    code: str
    not_run: str | None  # the reason, where the page marks it as one that no test runs

    @property
    def name(self) -> str:
        """Page and line."""
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """Every page but the reports, below the repository."""
    docs = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))
    return [*TOP_PAGES, *docs]


def text_of(page: str) -> str:
    """Read a page."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> Iterator[Block]:
    """Give the fenced blocks of a page in order."""
    reason, start, language, code, section = None, 0, "", list[str](), ""
    for number, line in enumerate(text_of(page).splitlines(), start=1):
        if start:
            if line.startswith("```"):
                yield Block(page, section, start, language, "\n".join(code) + "\n", reason)
                start, reason = 0, None
            else:
                code.append(line)
        elif line.startswith("```"):
            start, language, code = number + 1, line.removeprefix("```").strip(), []
        elif marked := NOT_RUN.fullmatch(line.strip()):
            reason = marked["reason"]
        elif line.strip():
            reason = None
            section = line.removeprefix("## ") if line.startswith("## ") else section
    assert not start, f"{page}:{start}: a block has no end"


def all_blocks() -> list[Block]:
    """Give the blocks of all pages."""
    return [block for page in pages() for block in blocks(page)]


def files_of(page: str) -> dict[str, str]:
    """Give the blocks of a page that are files, by the name in their first line, ``# NAME``."""
    found = {}
    for block in blocks(page):
        if name := FILE.match(block.code):
            found[name[1]] = block.code
    return found


# -- generated sections


@cache
def commands() -> Mapping[str, Any]:
    """Every command by its words, groups left out."""

    def below(words: str, found: Any) -> Iterator[tuple[str, Any]]:
        inner = getattr(found, "commands", None)
        if inner is None:
            yield words, found
            return
        for name, command in inner.items():
            yield from below(f"{words} {name}", command)

    return dict(sorted(below("eplb", get_command(app))))


def cli_section() -> str:
    """Every command with its arguments, the options of its own, and what it does."""
    times = Counter(
        _option(param) for command in commands().values() for param in _options(command)
    )
    shared = {option for option, number in times.items() if number >= SHARED_BY}
    # A group of which one command asks and another acts is in two panels: the help shows the last.
    panel_of = {name: title for title, panel in COMMANDS.items() for name in panel}
    parts = []
    for title in COMMANDS:
        rows = [
            f"| {_usage(words, command)} | {_own_options(command, shared)} "
            f"| {_cell(_first_sentence(command.help or ''))} |"
            for words, command in commands().items()
            if panel_of[words.split()[1]] == title
        ]
        head = [f"## {title}", "", "| command | options of its own | what it does |"]
        parts.append("\n".join([*head, "|---|---|---|", *rows]))
    head = ["## Options of several commands", "", "| option | default | meaning |", "|---|---|---|"]
    rows = [f"| `{name}` | {default} | {text} |" for name, default, text in sorted(shared)]
    return "\n\n".join([*parts, "\n".join([*head, *rows])]) + "\n"


def _options(command: Any) -> Iterator[Any]:
    for param in command.params:
        if param.param_type_name != "argument" and param.name != "help":
            yield param


def _option(param: Any) -> tuple[str, str, str]:
    return _spelling(param), _default(param), _cell(param.help or "")


def _usage(words: str, command: Any) -> str:
    given = [str(one.name).upper() for one in command.params if one.param_type_name == "argument"]
    return f"`{' '.join([words, *given])}`"


def _own_options(command: Any, shared: set[tuple[str, str, str]]) -> str:
    names = [
        f"**`{_spelling(param)}`**" if param.required else f"`{_spelling(param)}`"
        for param in _options(command)
        if _option(param) not in shared
    ]
    return " ".join(names) or "-"


def _first_sentence(text: str) -> str:
    first = " ".join(text.partition("\n\n")[0].split())
    return f"{first.partition('. ')[0].rstrip('.')}."


def _spelling(param: Any) -> str:
    return "/".join([*param.opts, *param.secondary_opts])


def _default(param: Any) -> str:
    if param.default is None:
        return "-"
    default = getattr(param.default, "value", param.default)
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def rest_section() -> str:
    """Every route with its arguments and least role; every key of a body once."""
    document = create_app(open_store("memory:", "documents")).openapi()
    schemas = document["components"]["schemas"]
    rows, keys = [], dict[tuple[str, str, str], None]()
    for one in ROUTES:
        (method,) = one.methods
        route = document["paths"][one.path][method.lower()]
        named = (known["name"] for known in route.get("parameters", []))
        given = [f"`{name}`" for name in named if f"{{{name}}}" not in one.path]
        if body := route.get("requestBody"):
            name, words = _body(body, schemas, keys)
            given.append("any live setting" if name == "SettingsRequest" else words)
        role = least_role(one).label if one.path.startswith(V1) else "-"
        summary = route["summary"]
        meaning = _cell(summary if summary.endswith("?") else f"{summary}.")
        rows.append(f"| `{method} {one.path}` | {', '.join(given) or '-'} | {role} | {meaning} |")
    head = ["| route | arguments | role | meaning |", "|---|---|---|---|"]
    key_head = ["| key of a body | values | meaning |", "|---|---|---|"]
    key_rows = [f"| `{key}` | {values} | {text} |" for key, values, text in sorted(keys)]
    return "\n".join([*head, *rows, "", *key_head, *key_rows, ""])


def _body(
    body: Mapping[str, Any],
    schemas: Mapping[str, Any],
    keys: dict[tuple[str, str, str], None],
) -> tuple[str, str]:
    """Name of a body, and its keys, those that are required in bold; note what each means."""
    reference: str = body["content"]["application/json"]["schema"]["$ref"]
    schema = schemas[name := reference.rpartition("/")[2]]
    required = schema.get("required", [])
    properties = schema["properties"]
    if name != "SettingsRequest":
        for key, value in properties.items():
            keys[key, _values(value), _cell(value.get("description", "-"))] = None
    words = [f"**`{key}`**" if key in required else f"`{key}`" for key in properties]
    return name, f"body: {' '.join(words)}"


def _values(value: Mapping[str, Any]) -> str:
    if "enum" in value:
        return ", ".join(f"`{one}`" if one is not None else "null" for one in value["enum"])
    if "anyOf" in value:
        return " or ".join(_values(one) for one in value["anyOf"])
    found = value.get("type", "object")
    if "maxLength" in value:
        found += f", at most {value['maxLength']} characters"
    if "maximum" in value and value["maximum"] < 2**31 - 1:
        found += f", {_least(value)} to {value['maximum']:.0f}"
    return found + (f", default {str(value['default']).lower()}" if "default" in value else "")


def _least(value: Mapping[str, Any]) -> str:
    if "exclusiveMinimum" in value:
        return f"more than {value['exclusiveMinimum']:.0f}"
    return f"{value['minimum']:.0f}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("``", "`")


def families_section() -> str:
    """Every layout of experts below a layer once, with the model families that have it."""
    families_of = dict[str, list[str]]()
    for family in FAMILIES:
        types = ", ".join(f"`{name}`" for name in sorted(family.model_types))
        unproved = f"; not proved: {family.unproven}" if family.unproven else ""
        for layout in family.layouts:
            families_of.setdefault(_layout(layout), []).append(f"{family.name} ({types}{unproved})")
    rows = [f"- {layout}: {'; '.join(found)}" for layout, found in families_of.items()]
    return "\n".join([*rows, ""])


def _layout(layout: ExpertLayout) -> str:
    kind = ["all experts in one tensor"] if layout.is_stacked else ["a tensor each"]
    kind += ["[in, out]"] if layout.is_transposed else []
    kind += ["gate and up interleaved"] if layout.is_interleaved else []
    return f"{', '.join(f'`{name}`' for name in layout.names.values())} ({', '.join(kind)})"


def problems_section() -> str:
    """Every type of problem."""
    kinds = {
        "Every route": OF_ALL,
        "Every route below `/api/v1`": (*OF_KEYS, *OF_STORE),
        "Every change": OF_CHANGES,
    }
    common = [
        f"{which} may be refused with {', '.join(f'`{kind.label}`' for kind in of_all)}."
        for which, of_all in kinds.items()
    ]
    by_status = dict[int, list[str]]()
    for kind in ProblemType:
        by_status.setdefault(kind.status, []).append(f"`{kind.label}`")
    rows = [f"- {status}: {', '.join(labels)}" for status, labels in by_status.items()]
    return "\n".join([*common, "", *rows, ""])


def api_section() -> str:
    """What users import: exports of three packages, and the builders of a rank."""
    parts = []
    for module, names in BUILDERS.items():
        found = import_module(module)
        exported = names or found.__all__
        shown = [name for name in exported if name not in GIVEN.split()]
        rows = [row for name in shown for row in _rows_of(getattr(found, name), name)]
        given = [f"`{name}`" for name in exported if name in GIVEN.split()]
        rows += [f"- given, and not made by users: {', '.join(given)}"] if given else []
        parts.append("\n".join([f"### `{module}`", *rows]))
    return "\n\n".join(parts) + "\n"


def _rows_of(found: Any, name: str) -> Iterator[str]:
    """A line for what is exported, and one for each method that users call."""
    if not callable(found) or (isinstance(found, type) and issubclass(found, Exception)):
        return  # constants; and errors, whose tree is drawn in eplb/errors.py
    yield f"- `{name}{_arguments(found)}`: {_about(found)}"
    for method in METHODS.get(name, "").split():
        one = inspect.getattr_static(found, method)
        raw = getattr(one, "__func__", one)  # of a static method
        given = "" if isinstance(one, property) else _arguments(raw)
        yield f"- `{name}.{method}{given}`: {_about(raw)}"


def _about(found: Any) -> str:
    return " ".join(_first_sentence(inspect.getdoc(found) or "").split()).replace("``", "`")


def _arguments(found: Any) -> str:
    """Names of the arguments, with ``=`` after those that have a default."""
    if isinstance(found, type) and (issubclass(found, Enum) or vars(found).get("_is_protocol")):
        return ""
    names, is_named = [], False
    for one in inspect.signature(found).parameters.values():
        if one.name in ("self", "cls") or one.name.startswith("_"):
            continue
        if one.kind is one.KEYWORD_ONLY and not is_named:
            names.append("*")
            is_named = True
        names.append(one.name if one.default is one.empty else f"{one.name}=")
    return f"({', '.join(names) if len(names) <= MOST_SHOWN else '...'})"


GENERATED: Mapping[str, Callable[[], str]] = {
    "api": api_section,
    "cli": cli_section,
    "families": families_section,
    "problems": problems_section,
    "rest": rest_section,
}


def generated_sections() -> Iterator[tuple[str, str, str]]:
    """Give page, name and content of every generated section as it stands."""
    for page in pages():
        for found in SECTION.finditer(text_of(page)):
            yield page, found[2], found[3]


def write_generated() -> None:
    """Write every generated section again."""
    for page in pages():
        text = text_of(page)
        new = SECTION.sub(lambda found: found[1] + GENERATED[found[2]]() + found[4], text)
        if new != text:
            (ROOT / page).write_text(new, encoding="utf-8")


if __name__ == "__main__":
    write_generated()
