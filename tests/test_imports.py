"""Who may import whom, proven from the source itself."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

HOME = Path(__file__).parents[1]
DEADLINE_S = 60.0


@dataclass(frozen=True)
class Rule:
    """What the files of one folder may import beside the standard library and the folder itself."""

    ours: frozenset[str]  # a package, or single modules of one
    others: frozenset[str]
    never: frozenset[str] = frozenset()  # of the standard library


def rule(ours: str, others: str, never: str = "") -> Rule:
    return Rule(frozenset(ours.split()), frozenset(others.split()), frozenset(never.split()))


RULES = {
    # Pure: a clock, an environment or a global generator would make two plans of one load differ.
    "eplb": rule("", "numpy scipy numba ortools", never="os time datetime random secrets socket"),
    "telemetry": rule("eplb", "numpy redis zstandard prometheus_client"),
    "runtime": rule("eplb", "numpy torch safetensors deep_ep triton"),
    # The controller folds windows, sees changes of load and keeps what is old; the agent is handed
    # what it reads of the runtime.
    "rebalance": rule(
        "eplb telemetry.store telemetry.windows telemetry.run_windows telemetry.intake "
        "telemetry.retention telemetry.drift telemetry.holder "
        "runtime.experts runtime.routing runtime.memory runtime.checkpoint runtime.counters "
        "runtime.digests runtime.dispatch runtime.streams runtime.symmetric runtime.agreement "
        "runtime.listeners",
        "numpy torch",
    ),
    "simulations": rule("eplb telemetry", "numpy scipy plotly pyarrow rich"),
    "api": rule(
        "eplb telemetry runtime rebalance simulations",
        "numpy torch typer rich pydantic fastapi starlette uvicorn h11 sse_starlette "
        "prometheus_client",
    ),
}
OURS = frozenset(RULES)
IN_ONE_FILE = ("redis", "fastapi", "deep_ep", "ray")
WITHOUT_TORCH = ("eplb", "telemetry", "simulations")


def sources(folder: str) -> list[Path]:
    return sorted((HOME / folder).rglob("*.py"))


def imports(source: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that a file imports, late imports included."""
    for node in ast.walk(ast.parse(source.read_text(), str(source))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}:{node.lineno}: imports are absolute here"
            assert node.module is not None, "only a relative import has no module"
            is_package = node.module in OURS
            names = [f"{node.module}.{a.name}" if is_package else node.module for a in node.names]
            yield from ((node.lineno, name) for name in dict.fromkeys(names))


def is_allowed(name: str, folder: str) -> bool:
    top = name.partition(".")[0]
    rule_here = RULES[folder]
    if top == folder:
        return True
    if top in OURS:
        return any(f"{name}.".startswith(f"{allowed}.") for allowed in rule_here.ours)
    if top in sys.stdlib_module_names:
        return top not in rule_here.never
    return top in rule_here.others


@pytest.mark.parametrize("folder", RULES)
def test_a_folder_imports_only_what_its_rule_names(folder: str) -> None:
    strays = [
        f"{source.relative_to(HOME)}:{line} imports {name}"
        for source in sources(folder)
        for line, name in imports(source)
        if not is_allowed(name, folder)
    ]

    assert sources(folder), f"{folder} has no source"
    assert not strays, "\n".join(strays)


@pytest.mark.parametrize(
    ("name", "folder", "allowed"),
    [
        ("torch", "eplb", False),
        ("time", "eplb", False),
        ("eplb.plan", "eplb", True),
        ("telemetry.sqlite", "rebalance", False),
        ("telemetry.store", "rebalance", True),
        ("telemetry.open_store", "rebalance", False),
        ("runtime.moe", "rebalance", False),
        ("telemetry.windows", "simulations", True),
        ("runtime.experts", "simulations", False),
        ("rebalance.agent", "api", True),
    ],
)
def test_the_rules_say_what_they_are_read_as(name: str, folder: str, allowed: bool) -> None:
    assert is_allowed(name, folder) is allowed


def test_the_planner_draws_from_seeded_generators_only() -> None:
    seeded = ("default_rng", "Generator", "SeedSequence", "RandomState", "MT19937")
    drawing = [
        f"{source.relative_to(HOME)}:{node.lineno}"
        for source in sources("eplb")
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "np.random"
        if node.attr not in seeded
    ]

    assert drawing == []


@pytest.mark.parametrize("package", IN_ONE_FILE)
def test_a_heavy_library_is_imported_in_one_file_at_most(package: str) -> None:
    importers = {
        str(source.relative_to(HOME))
        for folder in RULES
        for source in sources(folder)
        for line, name in imports(source)
        if name.partition(".")[0] == package and line not in lines_for_types(source)
    }

    assert len(importers) <= 1, f"{package} is imported in {sorted(importers)}"


def lines_for_types(source: Path) -> set[int]:
    """Lines under ``if TYPE_CHECKING``, which import nothing at run time."""
    return {
        line
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


@pytest.mark.parametrize("package", WITHOUT_TORCH)
def test_a_package_leaves_torch_alone(package: str) -> None:
    code = f"import sys, {package}; print(sorted({{'torch', 'redis', 'ray'}} & sys.modules.keys()))"

    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=HOME, capture_output=True, text=True, timeout=DEADLINE_S
    )

    assert (ended.stdout.strip(), ended.stderr) == ("[]", "")
