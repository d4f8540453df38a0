"""Compiled functions: without a cache, and all of them before the tests."""

from __future__ import annotations

import os
import pickle
import pkgutil
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from runpy import run_path
from typing import Any

import numpy as np
import pytest

import eplb
from eplb import DispatchRule
from eplb.core.compiler import MOST_INTERPRETED, code_digest, compiler_passes
from eplb.core.jit import LazyKernel, compiled_at_once

PROGRAM = """
from eplb.core.jit import jit
import eplb.core.jit
print(eplb.__file__, jit(lambda number: 2 * number)(21))
"""

# All compiled functions of the packages, and those that no call has compiled.
COMPILE_AND_LIST = """
import pkgutil
from importlib import import_module
from eplb.core.jit import LazyKernel
import eplb, runtime, simulations
from eplb.precompile import compile_planner
from runtime.memory import compile_digest
from simulations.peers import compile_peers

compile_planner()
compile_peers()
compile_digest()
kernels = {
    f"{module.name}.{name}": member
    for package in (eplb, runtime, simulations)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if not module.name.startswith("runtime.kernels")  # of triton
    for name, member in vars(import_module(module.name)).items()
    if isinstance(member, LazyKernel) and member.py_func.__module__ == module.name
}
print(sum(bool(kernel.dispatcher.signatures) for kernel in kernels.values()))
print("missing:", *[name for name, kernel in kernels.items() if not kernel.dispatcher.signatures])
"""


def test_compiled_functions_of_the_planner_leave_the_interpreter_to_other_threads() -> None:
    kernels = [
        member
        for module in pkgutil.walk_packages(eplb.__path__, "eplb.")
        for member in vars(import_module(module.name)).values()
        if isinstance(member, LazyKernel)
    ]

    assert len(kernels) > 15
    assert all(kernel.dispatcher.targetoptions["nogil"] for kernel in kernels)


# Plans of a fresh and of a serving placement, and how many kernels were compiled for them.
PLAN = """
import sys
import numpy as np
from eplb import DispatchRule, Topology, plan
from eplb.search.local_search import _work

drawn, ranks = np.random.default_rng(0), Topology.uniform(2, 2, 5)
load = drawn.poisson(1000 * drawn.lognormal(size=(1, 2, 16)), size=(3, 2, 16))
rule = DispatchRule(sys.argv[1])
fresh = plan(load, ranks, dispatch=rule)
hashes = [fresh.hash, plan(load[..., ::-1], ranks, current=fresh.target, dispatch=rule).hash]
print(*hashes, len(_work.dispatcher.signatures))
"""

TOTAL = """
from eplb.core.jit import inner, kernel

@inner
def added(total, value):
    return total + value

@kernel
def total(values):
    total = 0.0
    for value in values:
        total = added(total, value)
    return total
"""

TWICE = """
from eplb.core.jit import inner, jit

@jit
def twice(number):
    return times(number)

@inner
def times(number):
    return 2 * number
"""


def test_cache_that_names_a_module_that_is_gone_is_written_again(tmp_path: Path) -> None:
    module = tmp_path / "kernel_of_a_test.py"
    module.write_text(TWICE)
    assert run_path(str(module))["twice"](21) == 42
    (index,) = tmp_path.rglob("*.nbi")
    with index.open("rb") as file:
        version = pickle.load(file)
    gone = b"cgone.in_this_version\nRecord\n."
    index.write_bytes(pickle.dumps(version) + gone)

    assert run_path(str(module))["twice"](21) == 42

    assert gone not in index.read_bytes()


def test_cache_stays_valid_when_only_the_times_of_files_change(tmp_path: Path) -> None:
    module = tmp_path / "kernel_of_a_test.py"
    module.write_text(TWICE)
    run_path(str(module))["twice"](21)
    passes: list[str] = []

    os.utime(module, (0, 0))
    with compiler_passes(passes.append):
        assert run_path(str(module))["twice"](21) == 42

    assert not passes
    module.write_text(TWICE.replace("2 *", "3 *"))
    assert run_path(str(module))["twice"](21) == 63


def test_digest_of_a_kernel_changes_with_a_function_that_it_calls() -> None:
    digests = []
    for factor in (2, 3):
        names: dict[str, Any] = {}
        exec(f"def inside(x): return {factor} * x\ndef outside(x): return inside(x)", names)
        digests.append(code_digest(names["outside"]))

    assert digests[0] != digests[1]


def test_kernel_is_interpreted_until_it_had_enough_elements(tmp_path: Path) -> None:
    module = tmp_path / "kernel_of_a_test.py"
    module.write_text(TOTAL)
    total = run_path(str(module))["total"]
    few, many = np.arange(3.0), np.ones(MOST_INTERPRETED)

    assert total(few) == 3.0
    assert not total.dispatcher.signatures
    assert total(many) == MOST_INTERPRETED
    assert len(total.dispatcher.signatures) == 1


def test_kernel_is_interpreted_while_another_thread_compiles(tmp_path: Path) -> None:
    module = tmp_path / "kernel_of_a_test.py"
    module.write_text(TOTAL)
    total = run_path(str(module))["total"]

    with ThreadPoolExecutor(1) as others, compiled_at_once():
        assert others.submit(total, np.ones(2 * MOST_INTERPRETED)).result() == 2 * MOST_INTERPRETED
        assert not total.dispatcher.signatures
        total(np.arange(3.0))

    assert len(total.dispatcher.signatures) == 1


# A controller's process that ends while it compiles: whether it compiled all, and still does.
END_EARLY = """
from threading import Event, enumerate
from eplb.precompile import warmed_up_meanwhile

has_begun, functions = Event(), []
def noted(function):
    functions.append(function)
    has_begun.set()
with warmed_up_meanwhile("auto", noted):
    has_begun.wait()
print("" in functions, any(thread.name == "eplb-compiler" for thread in enumerate()))
"""


def test_compiler_beside_a_controller_ends_with_it(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", END_EARLY],
        env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )

    assert ended.stdout.split() == ["False", "False"], ended.stderr


@pytest.mark.parametrize("rule", [DispatchRule.WEIGHTED, DispatchRule.SGLANG_STATIC])
def test_interpreted_plans_equal_compiled_plans(tmp_path: Path, rule: DispatchRule) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PLAN, rule.value],
        env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )

    names: dict[str, Any] = {}
    exec(PLAN.replace("sys.argv[1]", repr(rule.value)), names)
    assert ended.stdout.split() == [*names["hashes"], "0"], ended.stderr


@pytest.mark.system
def test_install_that_cannot_be_written_compiles_without_a_cache(tmp_path: Path) -> None:
    package = tmp_path / "eplb"
    shutil.copytree(
        Path(eplb.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__")
    )
    # A file where folders are wanted refuses root too, which a read-only folder does not.
    for source in package.rglob("__init__.py"):
        source.with_name("__pycache__").touch()
    nowhere = str(package / "__pycache__" / "home")
    environ = os.environ | {"HOME": nowhere, "XDG_CACHE_HOME": nowhere, "NUMBA_CACHE_DIR": nowhere}

    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
    )

    assert ended.stdout.split() == [str(package / "__init__.py"), "42"], ended.stderr


@pytest.mark.slow  # 92 s of CPU
def test_compile_command_s_functions_call_each_kernel(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", COMPILE_AND_LIST],
        env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )

    compiled, missing = ended.stdout.splitlines()
    assert ended.returncode == 0, ended.stderr
    assert int(compiled) > 20
    assert missing == "missing:"
