"""Assumptions about a package are checked in its files: a small one, and no import of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rebalance.engines.common.guards import Assumptions, PackageSource, refusals, untried

FILES = {
    "__init__.py": "raise ImportError('nothing imports it')",
    "state.py": """
from made.parts import groups
from .parts.groups import group_of as of, LIMIT

class Base:
    ranks: int

class State(Base):
    def __init__(self, config):
        self.config, self.steps = config, 0

    @property
    def size(self):
        return 1

    def step(self, is_dummy=False, *, log_stats=False):
        self.steps += 1  # counts

    @classmethod
    def load(cls, path):
        return cls(path)
""",
    "parts/__init__.py": "",
    "parts/groups.py": """
LIMIT = 1023
try:
    import torch
except ImportError:
    torch = None

def group_of(rank, size):
    return rank // size
""",
}
ASSUMED = Assumptions(
    "made",
    ("1.2", "1.4"),
    signatures={
        "made.state.State.step": "self is_dummy [name] log_stats",
        "made.state.State.load": "path",
        "made.state.State": "config",
        "made.state.of": "rank ...",
        "made.gone.group_of|made.parts.groups.group_of": "rank size",
    },
    attributes={
        "made.state.State": "config steps size ranks names|step",
        "made.state": "State LIMIT",
        "made.parts.groups": "torch",
    },
    lines={"made.state.State.step": ("self.steps += 1",), "made.parts.groups": ("LIMIT = 1023",)},
    digests={"made.parts.groups.group_of": "3ec2705db24ccf6d"},
)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        file = tmp_path / "made" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return tmp_path / "made"


def refused(package: Path, assumed: Assumptions = ASSUMED, version: str = "1.3") -> list[str]:
    return list(refusals(assumed, PackageSource(package), version))


def test_package_with_the_structure_is_not_refused(package: Path) -> None:
    assert refused(package) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "refusal"),
    [
        ("state.py", "is_dummy", "dummy", "made.state.State.step takes (self dummy log_stats)"),
        ("state.py", "path", "place", "made.state.State.load takes (place), expected (path)"),
        ("state.py", "(self, config)", "(self, config, x)", "made.state.State takes (config x)"),
        ("state.py", "as of", "as by", "made.state.of does not exist"),
        ("parts/groups.py", "def group_of", "def groups_of", "made.state.of does not exist"),
        ("state.py", ", self.steps = config, 0", " = config", ""),
        (
            "state.py",
            "self.config, self.steps = config, 0",
            "pass",
            "State has no config, expected",
        ),
        ("state.py", "def size", "def length", "made.state.State has no size, expected as in made"),
        ("state.py", "ranks: int", "places: int", "made.state.State has no ranks, expected as in"),
        (
            "state.py",
            "+= 1",
            "+= 2",
            "made.state.State.step lacks 'self.steps += 1', expected as in",
        ),
        ("parts/groups.py", "1023", "1022", "made.parts.groups lacks 'LIMIT = 1023', expected as"),
        (
            "parts/groups.py",
            "torch",
            "other",
            "made.parts.groups has no torch, expected as in made",
        ),
        ("parts/groups.py", "rank // size", "rank % size", "groups.group_of has another source"),
        ("parts/groups.py", "rank // size", "rank // size  # a comment", ""),
    ],
)
def test_change_of_the_source_is_refused_with_its_place(
    file: str, old: str, new: str, refusal: str, package: Path
) -> None:
    text = (package / file).read_text(encoding="utf-8")
    assert old in text
    (package / file).write_text(text.replace(old, new), encoding="utf-8")

    found = refused(package)

    assert [one for one in found if refusal in one] if refusal else found == []


@pytest.mark.parametrize("version", ["1.1", "1.1.9", "0.9", "1.1.post3"])
def test_release_before_the_oldest_tested_one_is_refused(version: str, package: Path) -> None:
    assert refused(package, version=version) == [
        f"made is {version}, expected 1.2 or newer: 1.2 to 1.4 were tested"
    ]


@pytest.mark.parametrize("version", ["1.2", "1.4", "1.4.7", "1.4.post1", "1.4.0+cu130", "1.4rc2"])
def test_release_of_a_tested_series_is_neither_refused_nor_newer(
    version: str, package: Path
) -> None:
    assert refused(package, version=version) == []
    assert untried(ASSUMED, version) == ""


@pytest.mark.parametrize("version", ["1.5", "1.10.1", "2.0.0.dev3"])
def test_release_after_the_newest_tested_one_is_warned_about(
    version: str, package: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert refused(package, version=version) == []
    assert untried(ASSUMED, version) == f"made {version} is newer than what was tested, 1.2 to 1.4"
    assert "nothing moves until every rank has checked all its slots" in caplog.text


def test_single_tested_series_is_named_once(package: Path) -> None:
    one = replace(ASSUMED, releases=("1.4", "1.4"))

    assert refused(package, one) == ["made is 1.3, expected 1.4 or newer: 1.4 were tested"]
