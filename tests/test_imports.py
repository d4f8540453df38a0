"""Who may import whom, proven from the source itself."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.support.repository import ROOT


@dataclass(frozen=True)
class Rule:
    """What the files of one folder may import beside the standard library and the folder itself."""

    ours: frozenset[str]  # folders, or single modules
    others: frozenset[str]
    never: frozenset[str] = frozenset()  # of the standard library


def rule(ours: str, others: str, never: str = "") -> Rule:
    return Rule(frozenset(ours.split()), frozenset(others.split()), frozenset(never.split()))


# What a process of a rank imports: it writes samples, and reads no windows.
SERVING = (
    "eplb runtime rebalance telemetry.open_store telemetry.state telemetry.load.reporter "
    "telemetry.load.spool"
)
# The longest folder that holds a file has its rule; a file may have one of its own.
RULES = {
    # Pure: a clock, an environment or a global generator would make two plans of one load differ.
    "eplb": rule("", "numpy scipy numba ortools", never="os time datetime random secrets socket"),
    # The prepared problem: every step of the planner reads it, and it knows none of them.
    "eplb/core": rule(
        "eplb.clock eplb.declared eplb.errors",
        "numpy numba",
        never="os time datetime random secrets socket",
    ),
    "telemetry": rule("eplb", "numpy redis zstandard prometheus_client"),
    # Files of engines, read without torch and without any engine.
    "telemetry/formats": rule("eplb telemetry", "numpy yaml safetensors"),
    "runtime": rule("eplb", "numpy torch safetensors deep_ep triton"),
    # A rank knows the store by its interface, and nothing of how load is folded into windows.
    "rebalance": rule("eplb runtime telemetry.state", "numpy torch"),
    # What several folders share, and folders that know nothing of how bytes move.
    "rebalance/types": rule("eplb", ""),
    "rebalance/protocol": rule("eplb runtime rebalance.types", "numpy torch"),
    "rebalance/weights/disk": rule("eplb runtime rebalance.types", "numpy torch"),
    # Where a rank, a host's cache and a controller are put together; a serving process embeds it.
    "rebalance/assembly": rule(
        SERVING,
        "numpy torch",
    ),
    # Plug-ins run in an engine's processes, which have its package and never ``api``. The engine's
    # own modules are imported inside functions alone.
    "rebalance/engines": rule(
        SERVING,
        "numpy torch prometheus_client",
    ),
    "rebalance/engines/vllm": rule(
        f"{SERVING} telemetry.formats",
        "numpy torch vllm prometheus_client",
    ),
    "rebalance/engines/common/fsck": rule(
        "eplb runtime rebalance.types rebalance.engines.common rebalance.weights.expert_records "
        "telemetry.state",
        "numpy torch",
    ),
    # A command of an engine, and the files that it names: read where no engine is.
    "rebalance/engines/common/command": rule(f"{SERVING} telemetry.formats", ""),
    "rebalance/engines/trtllm_options": rule(SERVING, "yaml"),
    "rebalance/engines/sglang": rule(
        "eplb telemetry runtime rebalance.controller.plans rebalance.engines "
        "rebalance.weights.expert_records",
        "numpy torch sglang",
    ),
    # The controller runs where there is no torch and no expert.
    "rebalance/controller": rule("eplb telemetry rebalance.types", "numpy"),
    "simulations": rule("eplb telemetry", "numpy scipy plotly pyarrow rich ray"),
    "api": rule(
        "eplb telemetry runtime rebalance simulations",
        "numpy torch typer rich pydantic fastapi starlette uvicorn h11 sse_starlette "
        "prometheus_client httpx",
    ),
}
# A back end is named where one is opened, and nowhere else.
BACK_ENDS = tuple(f"telemetry.state.{name}" for name in ("memory", "sqlite", "redis"))
OPENS = {
    ("telemetry.state.sqlite_backup", "api/cli/store_commands.py"),
}
OURS = frozenset(folder for folder in RULES if "/" not in folder)
IN_ONE_FILE = ("redis", "deep_ep", "ray")
# Each imports those before it alone: who may, then requests, then routes with their commands.
LAYERS = ("api/access", "api/http", "api/operations", "api/cli")
WITHOUT_TORCH = (
    "eplb",
    "telemetry",
    "simulations",
    "api.cli.simulator.simulate",
    "rebalance.assembly.controller",
)


@dataclass(frozen=True)
class Import:
    line: int
    name: str  # dotted, of a module
    is_for_types: bool  # under ``if TYPE_CHECKING``: nothing at run time

    @property
    def package(self) -> str:
        return self.name.partition(".")[0]


@cache
def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@cache
def is_package(name: str) -> bool:
    return (ROOT / name.replace(".", "/")).is_dir()


@cache
def imports(source: Path) -> tuple[Import, ...]:
    """Everything that a file imports, late imports included."""
    return tuple(imports_in(ast.parse(source.read_text(), str(source)), is_for_types=False))


def imports_in(block: ast.AST, is_for_types: bool) -> Iterator[Import]:
    """Statements alone are walked: an expression imports nothing."""
    if isinstance(block, ast.Import):
        yield from (Import(block.lineno, alias.name, is_for_types) for alias in block.names)
    elif isinstance(block, ast.ImportFrom):
        assert block.level == 0, f"line {block.lineno}: imports are absolute here"
        assert block.module is not None, "only a relative import has no module"
        whole = is_package(block.module)
        names = [f"{block.module}.{a.name}" if whole else block.module for a in block.names]
        yield from (Import(block.lineno, name, is_for_types) for name in dict.fromkeys(names))
    elif isinstance(block, ast.If):
        is_for_types |= ast.unparse(block.test) == "TYPE_CHECKING"
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inner in getattr(block, part, ()):
            yield from imports_in(inner, is_for_types)


def scope_of(source: str) -> str:
    """The folder, or file, whose rule a path below the repository has."""
    place = f"{source.removesuffix('.py')}/"
    return max((one for one in RULES if place.startswith(f"{one}/")), key=len)


def is_allowed(name: str, source: str) -> bool:
    top, scope = name.partition(".")[0], scope_of(source)
    rule_here, own = RULES[scope], scope.replace("/", ".")
    if f"{name}.".startswith(f"{own}."):
        return True
    if top in OURS:
        if name.startswith(BACK_ENDS) and (name, source) not in OPENS:
            return False
        return any(f"{name}.".startswith(f"{allowed}.") for allowed in rule_here.ours)
    if top in sys.stdlib_module_names:
        return top not in rule_here.never
    return top in rule_here.others


@pytest.mark.parametrize("folder", sorted(OURS))
def test_folder_imports_only_what_its_rule_names(folder: str) -> None:
    strays = [
        f"{source.relative_to(ROOT)}:{one.line} imports {one.name}"
        for source in sources(folder)
        for one in imports(source)
        if not is_allowed(one.name, str(source.relative_to(ROOT)))
    ]

    assert sources(folder), f"{folder} has no source"
    assert not strays, "\n".join(strays)


@pytest.mark.parametrize(
    ("name", "source", "allowed"),
    [
        ("torch", "eplb/planner.py", False),
        ("time", "eplb/planner.py", False),
        ("eplb.core.load", "eplb/planner.py", True),
        ("eplb.search.layer", "eplb/core/problem.py", False),
        ("telemetry.state.sqlite", "rebalance/rank/rank.py", False),
        ("telemetry.state.store", "rebalance/rank/rank.py", True),
        ("telemetry.open_store", "rebalance/rank/rank.py", False),
        ("telemetry.open_store", "rebalance/assembly/rank.py", True),
        ("telemetry.state.redis_link", "rebalance/assembly/rank.py", False),
        ("telemetry.load.reader", "rebalance/rank/rank.py", False),
        ("telemetry.load.reader", "rebalance/controller/loop.py", True),
        ("runtime.experts", "rebalance/controller/loop.py", False),
        ("torch", "rebalance/controller/loop.py", False),
        ("rebalance.rank.rank", "rebalance/types.py", False),
        ("rebalance.weights.sources", "rebalance/protocol/voter.py", False),
        ("rebalance.types", "rebalance/protocol/voter.py", True),
        ("rebalance.weights.cache.address", "rebalance/weights/disk/record_loader.py", False),
        ("runtime.experts", "simulations/replay.py", False),
        ("rebalance.rank.rank", "api/demo/run.py", True),
    ],
)
def test_rules_allow_and_forbid_the_listed_imports(name: str, source: str, allowed: bool) -> None:
    assert is_allowed(name, source) is allowed


def modules() -> dict[str, Path]:
    return {
        ".".join(source.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): source
        for folder in (*OURS, "benchmarks")
        for source in sources(folder)
    }


def test_modules_have_no_import_cycle() -> None:
    """Imports inside functions and for types count too."""
    ours = modules()
    edges = {
        module: {
            one.name if one.name in ours else one.name.rpartition(".")[0] for one in imports(source)
        }
        & ours.keys() - {module}
        for module, source in ours.items()
    }
    done, path = set[str](), list[str]()

    def visit(module: str) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module in done:
            return
        path.append(module)
        for name in sorted(edges[module]):
            visit(name)
        path.pop()
        done.add(module)

    for module in sorted(ours):
        visit(module)


def test_planner_draws_from_seeded_generators_only() -> None:
    seeded = {"default_rng", "Generator", "SeedSequence", "RandomState", "MT19937"}
    drawing = {
        str(source.relative_to(ROOT)): drawn - seeded
        for source in sources("eplb")
        if (drawn := set(re.findall(r"np\.random\.(\w+)", source.read_text()))) - seeded
    }

    assert drawing == {}


@pytest.mark.parametrize("package", IN_ONE_FILE)
def test_heavy_library_is_imported_in_one_file_at_most(package: str) -> None:
    importers = {
        str(source.relative_to(ROOT))
        for folder in OURS
        for source in sources(folder)
        for one in imports(source)
        if one.package == package and not one.is_for_types
    }

    assert len(importers) <= 1, f"{package} is imported in {sorted(importers)}"


def test_fastapi_is_imported_by_the_service_and_its_routes_alone() -> None:
    importers = {
        str(source.parent.relative_to(ROOT))
        for folder in OURS
        for source in sources(folder)
        if any(one.package == "fastapi" for one in imports(source))
    }

    assert importers == {"api", "api/http", "api/operations"}


@pytest.mark.parametrize("number", range(len(LAYERS)))
def test_layer_of_the_admin_api_imports_no_later_one(number: int) -> None:
    later = tuple(f"{layer.replace('/', '.')}." for layer in LAYERS[number + 1 :])
    upwards = [
        (str(source.relative_to(ROOT)), one.name)
        for source in sources(LAYERS[number])
        for one in imports(source)
        if f"{one.name}.".startswith(later)
    ]

    assert upwards == []


def test_heavy_libraries_are_loaded_late() -> None:
    """What each import loads is judged before the next: all in one process, light ones first."""
    code = f"""
import importlib, sys
def loaded(*heavy):
    return sorted({{name.partition(".")[0] for name in sys.modules}} & set(heavy))
import eplb
eplb.Topology.uniform(1, 2, 3)
print("eplb", *loaded("numba", "scipy", "ortools"))
for package in {WITHOUT_TORCH}:
    importlib.import_module(package)
    print(package, *loaded("torch", "redis", "ray"))
"""

    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)

    assert (ended.stdout.split(), ended.stderr) == (["eplb", *WITHOUT_TORCH], "")


@pytest.mark.parametrize("package", ["eplb", "telemetry", "runtime", "rebalance"])
def test_lazy_exports_equal_the_imports_for_types(package: str) -> None:
    tree = ast.parse((ROOT / package / "__init__.py").read_text())
    for_types = {
        alias.asname or alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    module = importlib.import_module(package)
    lazy = {name: mod for mod, names in module._EXPORTS.items() for name in names.split()}

    assert lazy == for_types
    assert set(lazy) <= set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        assert getattr(module, name) is not None
