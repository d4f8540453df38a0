"""The pages of the project: their blocks of code, and the sections that are written from the code.

    python -m tests.support.documents    # write the generated sections again

A generated section lies between ``<!-- generated: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import ast
import re
import runpy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from typer.main import get_command

from api.cli.main import app
from api.http.app import create_app
from api.http.problems import ProblemType
from api.operations.declaration import OF_ALL, OF_CHANGES, OF_KEYS, OF_STORE, V1
from api.operations.table import OPERATIONS
from runtime.checkpoints.families import FAMILIES, ExpertLayout
from telemetry import open_store

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("eplb", "runtime", "telemetry", "rebalance", "simulations", "api")
TOP_PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
NOT_RUN = re.compile(r"<!-- not run: (?P<reason>[^>]+) -->")
FILE = re.compile(r"# (\S+\.\w+)\n")
SHARED_BY = 4  # commands, of an option that their reference shows once
SECTION = re.compile(r"(<!-- generated: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str  # below the repository
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
    reason, start, language, code = None, 0, "", list[str]()
    for number, line in enumerate(text_of(page).splitlines(), start=1):
        if start:
            if line.startswith("```"):
                yield Block(page, start, language, "\n".join(code) + "\n", reason)
                start, reason = 0, None
            else:
                code.append(line)
        elif line.startswith("```"):
            start, language, code = number + 1, line.removeprefix("```").strip(), []
        elif marked := NOT_RUN.fullmatch(line.strip()):
            reason = marked["reason"]
        elif line.strip():
            reason = None
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
    """Every command with its arguments and options; those of several commands stand once."""
    rows_of = {
        words: [
            f"| `{_spelling(param)}` | {_default(param)} | {_cell(param.help or '')} |"
            for param in command.params
            if param.name != "help"
        ]
        for words, command in commands().items()
    }
    times = Counter(row for rows in rows_of.values() for row in rows)
    common: dict[str, str] = {}  # one meaning for each spelling, the most frequent
    for row, number in times.most_common():
        if number >= SHARED_BY:
            common.setdefault(row.split(" | ")[0], row)
    shared = sorted(common.values())
    head = ["| argument or option | default | meaning |", "|---|---|---|"]
    parts = ["\n".join(["### Options of several commands", "", *head, *shared])]
    for words, rows in rows_of.items():
        about = " ".join((commands()[words].help or "").split())
        also = ", ".join(row.split(" | ")[0].removeprefix("| ") for row in rows if row in shared)
        own = [row for row in rows if row not in shared]
        lines = [f"### `{words}`", about, *([f"Also {also}."] if also else [])]
        parts.append("\n".join([*lines, *(["", *head, *own] if own else [])]))
    return "\n\n".join(parts) + "\n"


def _options(params: Iterable[Any]) -> str:
    rows = [
        f"| `{_spelling(param)}` | {_default(param)} | {_cell(param.help or '')} |"
        for param in params
        if param.name != "help"
    ]
    head = ["", "| argument or option | default | meaning |", "|---|---|---|"]
    return "\n".join([*head, *rows]) if rows else ""


def _spelling(param: Any) -> str:
    if param.param_type_name == "argument":
        return str(param.name).upper()
    return " / ".join([*param.opts, *param.secondary_opts])


def _default(param: Any) -> str:
    if param.default is None:
        return "required" if param.required else "-"
    default = getattr(param.default, "value", param.default)
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def rest_section() -> str:
    """Every operation: route, arguments, least role, refusals, meaning; and every body."""
    document = create_app(open_store("memory:", "documents")).openapi()
    rows, bodies = [], dict[str, None]()
    for one in OPERATIONS:
        route = document["paths"][one.path][one.method.lower()]
        given = [f"`{known['name']}`" for known in route.get("parameters", [])]
        if body := route.get("requestBody"):
            bodies[name := _schema_name(body)] = None
            given.append(f"body [{name}](#{name.lower()})")
        refusals = ", ".join(f"`{kind.label}`" for kind in one.own_problems) or "-"
        role = one.least_role.label if one.path.startswith(V1) else "-"
        summary = one.summary if one.summary.endswith("?") else f"{one.summary}."
        about = _cell(f"{summary} {one.description}")
        rows.append(
            f"| `{one.route}` | {', '.join(given) or '-'} | {role} | {refusals} | {about} |"
        )
    head = ["| route | arguments | role | refusals | meaning |", "|---|---|---|---|---|"]
    kinds = {
        "Every route": OF_ALL,
        "Every route below `/api/v1`": (*OF_KEYS, *OF_STORE),
        "Every change": OF_CHANGES,
    }
    common = [
        f"{which} may be refused with {', '.join(f'`{kind.label}`' for kind in of_all)}."
        for which, of_all in kinds.items()
    ]
    schemas = document["components"]["schemas"]
    tables = [_body(name, schemas[name]) for name in bodies]
    return "\n".join([*common, "", *head, *rows, "", *tables])


def _schema_name(body: Mapping[str, Any]) -> str:
    reference: str = body["content"]["application/json"]["schema"]["$ref"]
    return reference.rpartition("/")[2]


def _body(name: str, schema: Mapping[str, Any]) -> str:
    required = schema.get("required", [])
    rows = [
        f"| `{key}` | {'yes' if key in required else 'no'} | {_values(value)} "
        f"| {_cell(value.get('description', '-'))} |"
        for key, value in schema["properties"].items()
    ]
    head = ["| key | required | values | meaning |", "|---|---|---|---|"]
    about = _cell(schema["description"])
    return "\n".join([f"### {name}", about, "", *head, *rows, ""])


def _values(value: Mapping[str, Any]) -> str:
    if "enum" in value:
        return ", ".join(f"`{one}`" if one is not None else "null" for one in value["enum"])
    if "anyOf" in value:
        return " or ".join(_values(one) for one in value["anyOf"])
    found = value.get("type", "value")
    if "maxLength" in value:
        found += f", {value.get('minLength', 0)} to {value['maxLength']} characters"
    if "maximum" in value:
        found += f", {_least(value)} to {value['maximum']:.0f}"
    return found + (f", default {str(value['default']).lower()}" if "default" in value else "")


def _least(value: Mapping[str, Any]) -> str:
    if "exclusiveMinimum" in value:
        return f"more than {value['exclusiveMinimum']:.0f}"
    return f"{value['minimum']:.0f}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("``", "`")


def folders_section() -> str:
    """Every sub-package and what its docstring states."""
    rows = []
    for package in PACKAGES:
        for init in sorted((ROOT / package).glob("*/**/__init__.py")):
            about = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or "-"
            first = about.partition("\n\n")[0]
            rows.append(f"| `{init.parent.relative_to(ROOT).as_posix()}` | {_cell(first)} |")
    return "\n".join(["| folder | holds |", "|---|---|", *rows, ""])


def imports_section() -> str:
    """Who may import whom, as ``tests/test_imports.py`` checks it."""
    rules = runpy.run_path(str(ROOT / "tests" / "test_imports.py"))["RULES"]
    rows = []
    for folder, rule in sorted(rules.items()):
        parts = map(_names, (rule.ours, rule.others, rule.never))
        rows.append(f"| `{_on_disk(folder)}` | {' | '.join(parts)} |")
    head = "| folder | of this project | other libraries | never, of the standard library |"
    return "\n".join([head, "|---|---|---|---|", *rows, ""])


def _on_disk(name: str) -> str:
    """A folder, or the module of that name."""
    return name if (ROOT / name).is_dir() else f"{name}.py"


def _names(names: frozenset[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names)) or "-"


def families_section() -> str:
    """Every model family that checkpoints are read of."""
    rows = [
        f"| {family.name} | {_names(frozenset(family.model_types))} | "
        f"{'; '.join(_layout(layout) for layout in family.layouts)} | "
        f"{', '.join(f'`{prefix}`' for prefix in family.mtp_layers) or '-'} | "
        f"{f'no: {family.unproven}' if family.unproven else 'yes'} |"
        for family in FAMILIES
    ]
    head = "| family | `model_type` | experts below a layer | MTP experts | proved |"
    return "\n".join([head, "|---|---|---|---|---|", *rows, ""])


def _layout(layout: ExpertLayout) -> str:
    kind = ["all experts in one tensor"] if layout.is_stacked else ["a tensor each"]
    kind += ["[in, out]"] if layout.is_transposed else []
    kind += ["gate and up interleaved"] if layout.is_interleaved else []
    return f"{', '.join(f'`{name}`' for name in layout.names.values())} ({', '.join(kind)})"


def problems_section() -> str:
    """Every type of problem."""
    rows = [
        f"| {kind.status} | `{kind.label}` | {kind.title} | {_cell(kind.meaning)} |"
        for kind in ProblemType
    ]
    head = ["| status | type | title | meaning |", "|---|---|---|---|"]
    return "\n".join([*head, *rows, ""])


GENERATED: Mapping[str, Callable[[], str]] = {
    "cli": cli_section,
    "families": families_section,
    "folders": folders_section,
    "imports": imports_section,
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
