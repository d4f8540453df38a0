"""Compiled functions: without a cache, and all of them before the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT

import eplb

DEADLINE_S = 100.0
COMPILE_DEADLINE_S = 1800.0
ALL_KERNELS = ROOT / "tests" / "support" / "compiled_kernels.py"
PROGRAM = """
from eplb.core.jit import jit
import eplb.core.kernels
print(eplb.__file__, jit(lambda number: 2 * number)(21))
"""


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
        timeout=DEADLINE_S,
    )

    assert ended.stdout.split() == [str(package / "__init__.py"), "42"], ended.stderr


@pytest.mark.slow  # 92 s of CPU
def test_program_that_compiles_for_tests_calls_each_kernel(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, str(ALL_KERNELS), "--check"],
        env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=COMPILE_DEADLINE_S,
    )

    assert ended.returncode == 0, ended.stderr
