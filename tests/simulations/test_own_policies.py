"""A user's own policy: named by its file, replayed again after an edit, its faults in one line."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from api.processes.commands import own_command
from eplb.errors import ConfigError
from eplb.policies.table import POLICIES
from simulations.own_policies import register_named, source_digest
from tests.support.repository import ROOT

POLICY = """
from eplb import Placement, Problem
import numpy as np

def {name}(problem: Problem) -> Placement:
    {first}
    num_layers, num_experts = problem.history.tokens.shape[1:]
    order = np.arange(num_experts)[::{step}]
    return Placement(np.tile(order, (num_layers, 1)).astype(np.int32), num_experts)
"""
LOAD = "generated:gamma:windows=4,layers=2,experts=16"


@pytest.fixture(autouse=True)
def kept_table() -> Iterator[None]:
    known = dict(POLICIES.data)
    yield
    POLICIES.data = known


def write(path: Path, name: str, first: str = "pass", step: int = 1) -> str:
    path.write_text(POLICY.format(name=name, first=first, step=step))
    return f"{path}:{name}"


def eplb(folder: Path, *words: str) -> tuple[int, str, str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(
        own_command(*words), capture_output=True, text=True, cwd=folder, env=environ
    )
    return done.returncode, done.stdout, done.stderr


def test_row_of_an_own_policy_is_replayed_after_an_edit_of_its_file(tmp_path: Path) -> None:
    def sweep() -> tuple[int, dict[str, Any]]:
        words = ("sweep", LOAD, "--output", "out", "--ranks", "4", "--redundant-per-rank", "0")
        one = ("--every", "1", "--policy", f"none,raw:{named.name}:mine", "--workers", "1")
        status, output, errors = eplb(tmp_path, *words, *one, "--json")
        assert status == 0, errors
        found: dict[str, Any] = json.loads(output)
        return found["ran"], found["rows"][1]

    named = tmp_path / "mine.py"
    write(named, "mine")
    first, again = sweep(), sweep()
    write(named, "mine", step=-1)
    edited = sweep()

    assert [first[0], again[0], edited[0]] == [2, 0, 1]
    assert again[1] == first[1]
    assert edited[1]["task"] != first[1]["task"]


def test_policy_that_raises_is_one_line_with_the_place_in_its_file(tmp_path: Path) -> None:
    write(tmp_path / "mine.py", "mine", first="problem.history.tokens[99]")
    words = ("simulate", LOAD, "--ranks", "4", "--policy", "none,mine.py:mine")
    status, output, errors = eplb(tmp_path, *words)

    assert status == 0, errors
    assert "Traceback" not in output + errors
    assert "the policy raised IndexError at mine.py:6: index 99 is out of bounds" in output


def test_same_function_of_a_file_is_one_policy_under_its_name(tmp_path: Path) -> None:
    named = write(tmp_path / "mine.py", "one_of_a_file")

    assert register_named(named) == register_named(named) == "one_of_a_file"
    assert register_named(f"raw:{named}") == "raw:one_of_a_file"
    assert register_named("auto") == "auto"
    assert len(source_digest("raw:one_of_a_file")) == 64
    assert source_digest("auto") == source_digest("none") == ""


@pytest.mark.parametrize(
    ("text", "function", "why"),
    [
        (None, "f", "there is no such file"),
        ("x = 1", "f", "x.py has no such function"),
        ("import json\njson.loads('')", "f", "JSONDecodeError at x.py:2: Expecting value"),
        ("def f(:", "f", "SyntaxError at x.py:1: "),
        ("def greedy(problem): pass", "greedy", "'greedy' is registered already"),
    ],
)
def test_file_that_gives_no_policy_is_refused_in_one_line(
    text: str | None, function: str, why: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "x.py").write_text(text)

    with pytest.raises(ConfigError, match=why) as refused:
        register_named(f"{tmp_path / 'x.py'}:{function}")
    assert "\n" not in str(refused.value)
