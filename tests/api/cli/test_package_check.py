"""A host application's own module in place of one of ours is named, not imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import eplb
from eplb.errors import ConfigError
from eplb.packages import PACKAGES, check_packages

HOME = Path(eplb.__file__).parents[1]
CHECK = """
from eplb.errors import ConfigError
from eplb.packages import check_packages
try:
    check_packages()
except ConfigError as exc:
    print(exc)
"""


def what_an_application_is_told(folder: Path) -> str:
    """Run the check as a program that lies in ``folder``, whose modules therefore come first."""
    program = folder / "main.py"
    program.write_text(CHECK)
    ended = subprocess.run([sys.executable, str(program)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_our_own_packages_are_accepted(tmp_path: Path) -> None:
    check_packages()

    assert what_an_application_is_told(tmp_path) == ""


def test_stray_module_is_named_with_what_was_expected(tmp_path: Path) -> None:
    stray = tmp_path / "runtime.py"
    stray.write_text("raise SystemExit('a check must not import what it finds')")

    told = what_an_application_is_told(tmp_path)

    assert told.startswith(f"importing 'runtime' finds {stray}, expected {HOME / 'runtime'}")


def test_stray_package_is_named(tmp_path: Path) -> None:
    (tmp_path / "api").mkdir()
    (tmp_path / "api" / "__init__.py").touch()

    assert f"importing 'api' finds {tmp_path / 'api'}" in what_an_application_is_told(tmp_path)


def test_package_check_reads_only_the_named_packages(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"package 'no_such_package' is missing, expected .*/no_"):
        check_packages([*PACKAGES, "no_such_package"])


def test_folder_of_data_is_not_taken_for_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weights").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))

    with pytest.raises(ConfigError, match=f"importing 'weights' finds {tmp_path / 'weights'}"):
        check_packages(["weights"])


def test_import_of_a_shadowed_package_names_the_shadowing_module(
    tmp_path: Path,
) -> None:
    (tmp_path / "runtime.py").touch()
    program = tmp_path / "main.py"
    program.write_text("import rebalance\n")

    ended = subprocess.run([sys.executable, str(program)], capture_output=True, text=True)

    expected = f"ConfigError: importing 'runtime' finds {tmp_path / 'runtime.py'}, expected"
    assert expected in ended.stderr.splitlines()[-1]
