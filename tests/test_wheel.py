"""What is installed is the six packages, whole, and nothing else at the top level."""

from __future__ import annotations

import subprocess
import sys
import zipfile

import pytest

from tests.support.repository import ROOT

PACKAGES = {"eplb", "runtime", "telemetry", "rebalance", "api", "simulations"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Names of the files in a wheel built as an installer builds it."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "-w", folder, ROOT]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("eplb-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_top_level_is_the_six_packages(names: list[str]) -> None:
    top = {name.partition("/")[0] for name in names}

    assert {name for name in top if not name.endswith(".dist-info")} == PACKAGES
    assert len(top) == len(PACKAGES) + 1


def test_every_source_file_is_in_the_wheel(names: list[str]) -> None:
    sources = {
        str(source.relative_to(ROOT))
        for package in PACKAGES
        for source in (ROOT / package).rglob("*.py")
    }

    assert sources - set(names) == set()


def test_page_is_in_the_wheel(names: list[str]) -> None:
    page = {str(file.relative_to(ROOT)) for file in (ROOT / "api" / "http" / "static").iterdir()}

    assert "api/http/static/index.html" in page
    assert page - set(names) == set()


def test_command_is_declared(names: list[str]) -> None:
    assert any(name.endswith(".dist-info/entry_points.txt") for name in names)
