"""The base installation: what needs an optional library names the extra that brings it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from dataclasses import asdict
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import eplb
from eplb.clock import Deadline
from eplb.errors import ConfigError
from eplb.packages import EXTRA_OF, needed_for
from eplb.versions import (
    CONTROLLER,
    HOST_CACHE,
    PROTOCOL,
    RANKS,
    Announcement,
    announcement_from_dict,
    refusal,
)
from tests.support.repository import ROOT
from tests.support.simulated_time import Clock

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
        rf"'eplb\[{extra}\]', in a clone '\.\[{extra}\]'\n",
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


def of(component: str, protocol: int) -> Announcement:
    return Announcement(component, "x", f"0.{protocol}.0", protocol, protocol - 1)


@pytest.mark.parametrize(
    ("joining", "present", "fits"),
    [
        (of(CONTROLLER, 5), of(RANKS, 5), True),
        (of(CONTROLLER, 5), of(RANKS, 4), True),
        (of(CONTROLLER, 5), of(RANKS, 3), False),
        (of(CONTROLLER, 4), of(RANKS, 5), False),
        (of(CONTROLLER, 3), of(RANKS, 5), False),
        (of(RANKS, 4), of(CONTROLLER, 5), True),
        (of(RANKS, 5), of(CONTROLLER, 4), False),
        (of(RANKS, 3), of(CONTROLLER, 5), False),
        (of(RANKS, 4), of(HOST_CACHE, 5), True),
        (of(RANKS, 5), of(HOST_CACHE, 4), False),
        (of(HOST_CACHE, 5), of(RANKS, 4), True),
        (of(CONTROLLER, 4), of(CONTROLLER, 5), True),
        (of(CONTROLLER, 5), of(CONTROLLER, 4), True),
        (of(CONTROLLER, 6), of(CONTROLLER, 4), False),
        (of(CONTROLLER, 4), of(CONTROLLER, 6), False),
    ],
)
def test_versions_next_to_each_other_fit_where_no_reader_is_older(
    joining: Announcement, present: Announcement, fits: bool
) -> None:
    assert (refusal(joining, present) == "") is fits


@pytest.mark.parametrize(
    ("joining", "present", "expected"),
    [
        (of(CONTROLLER, 5), of(RANKS, 3), "protocol 4 or later: upgrade by one release at a time"),
        (of(RANKS, 3), of(CONTROLLER, 5), "protocol 4 or later to join it: upgrade this process"),
        (of(RANKS, 5), of(CONTROLLER, 4), "protocol 5 or later: upgrade controllers and host"),
        (of(CONTROLLER, 4), of(RANKS, 5), "protocol 4 at most: ranks go back before all others"),
    ],
)
def test_refusal_names_both_versions_and_the_one_expected(
    joining: Announcement, present: Announcement, expected: str
) -> None:
    said = refusal(joining, present)

    assert f"of eplb {joining.software} (protocol {joining.protocol}) cannot join: found" in said
    assert f"of eplb {present.software} (protocol {present.protocol}), expected" in said
    assert expected in said


def test_announcement_is_of_this_release_and_read_back() -> None:
    mine = Announcement(CONTROLLER, "gpu7:1", time=4.0)

    assert (mine.software, mine.protocol) == (eplb.__version__, PROTOCOL)
    assert announcement_from_dict(asdict(mine)) == mine
    later = of(RANKS, 9)
    written = asdict(later)
    assert announcement_from_dict(written | {"commit": "abc"}) == later  # a new field
    with pytest.raises(ValueError, match="protocol is '2', expected int"):
        announcement_from_dict(written | {"protocol": "2"})


def test_deadline_passes_at_its_moment_and_not_before() -> None:
    clock = Clock(5.0)
    deadline = Deadline.after(2.0, clock)

    assert (deadline.left_s, deadline.has_passed) == (2.0, False)
    clock.now = 6.5
    assert (deadline.left_s, deadline.has_passed) == (0.5, False)
    clock.now = 7.0
    assert (deadline.left_s, deadline.has_passed) == (0.0, True)
    clock.now = 9.0
    assert (deadline.left_s, deadline.has_passed) == (0.0, True)
