"""The base installation: what needs an optional library names the extra that brings it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from eplb.errors import ConfigError
from eplb.packages import EXTRA_OF, needed_for
from tests.support.repository import ROOT

PLAN = "import numpy as np, eplb; t = eplb.Topology.uniform(1, 2, 3)\n"
PLAN += "print(eplb.plan(np.ones((1, 4), np.int64), t, policy='{policy}').decision)"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of libraries without the optional ones, as ``pip install eplb`` makes it."""
    folder = tmp_path_factory.mktemp("base")
    for path in sys.path:
        if not path.endswith("site-packages"):
            continue
        for entry in Path(path).iterdir():
            if entry.name.partition(".")[0] not in EXTRA_OF:
                (folder / entry.name).symlink_to(entry)
    return folder


def run(base: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the base installation alone, and this source tree."""
    environ = {"PYTHONPATH": f"{ROOT}:{base}", "PATH": "/usr/bin:/bin", "HOME": str(base)}
    command = [sys.executable, "-S", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environ, cwd=base)


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("demo", "runtime"),
        ("serve", "api"),
        ("status", "api"),
        ("top", "api"),
        ("launch -- python rank.py", "runtime"),
    ],
)
def test_command_without_its_library_names_the_extra(base: Path, command: str, extra: str) -> None:
    ended = run(base, "-m", "api.cli.main", *command.split())

    assert ended.returncode == 2, ended.stderr
    assert re.fullmatch(
        rf"eplb: this command needs \w+, which is not installed, expected: pip install "
        rf"'eplb\[{extra}\]'\n",
        ended.stderr,
    )


def test_base_installation_plans(base: Path) -> None:
    ended = run(base, "-c", PLAN.format(policy="greedy"))

    assert ended.returncode == 0, ended.stderr


def test_policy_without_its_solver_names_the_extra(base: Path) -> None:
    ended = run(base, "-c", PLAN.format(policy="exact"))

    assert "ConfigError: policy exact needs ortools" in ended.stderr
    assert "pip install 'eplb[solver]'" in ended.stderr


def test_library_of_no_extra_is_missing_as_python_says_it() -> None:
    with pytest.raises(ModuleNotFoundError), needed_for("a test"):
        import no_such_library  # type: ignore[import-not-found]  # noqa: F401


def test_extra_of_a_library_brings_it() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    distributions = packages_distributions()
    for library, extra in EXTRA_OF.items():
        if library in ("starlette", "ray"):  # FastAPI brings the one; the other is not installed
            continue
        names = {name.lower().replace("_", "-") for name in distributions[library]}
        brought = {re.split(r"[>=<\[]", line)[0] for line in extras[extra]}
        assert names & brought, f"{library}: {names} of extra {extra}: {brought}"


def test_message_says_what_needs_the_library() -> None:
    with pytest.raises(ConfigError, match="a page needs plotly, which"), needed_for("a page"):
        raise ModuleNotFoundError("No module named 'plotly.io'", name="plotly.io")
