"""Compiled functions: without a cache, and all of them before the tests."""

from __future__ import annotations

import os
import pickle
import pkgutil
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from runpy import run_path

import pytest
from numba.core.dispatcher import Dispatcher

import eplb

PROGRAM = """
from eplb.core.jit import jit
import eplb.core.jit
print(eplb.__file__, jit(lambda number: 2 * number)(21))
"""

# All compiled functions of the packages, and those that no call has compiled.
COMPILE_AND_LIST = """
import pkgutil
from importlib import import_module
from numba.core.dispatcher import Dispatcher
import eplb, runtime, simulations
from eplb.precompile import compile_planner
from runtime.memory.shared import compile_digest
from simulations.peers.precompile import compile_peers

compile_planner()
compile_peers()
compile_digest()
kernels = {
    f"{module.name}.{name}": member
    for package in (eplb, runtime, simulations)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if not module.name.startswith(("runtime.kernels", "runtime.batch.kernels"))  # of triton
    for name, member in vars(import_module(module.name)).items()
    if isinstance(member, Dispatcher) and member.py_func.__module__ == module.name
}
print(sum(bool(kernel.signatures) for kernel in kernels.values()))
print("missing:", *[name for name, kernel in kernels.items() if not kernel.signatures])
"""


def test_compiled_functions_of_the_planner_leave_the_interpreter_to_other_threads() -> None:
    kernels = [
        member
        for module in pkgutil.walk_packages(eplb.__path__, "eplb.")
        for member in vars(import_module(module.name)).values()
        if isinstance(member, Dispatcher)
    ]

    assert len(kernels) > 20
    assert all(kernel.targetoptions["nogil"] for kernel in kernels)


TWICE = """
from eplb.core.jit import jit

@jit
def twice(number):
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
