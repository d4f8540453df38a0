"""Each assumption about an engine is compared with the wheel: one that does not hold is named."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rebalance.engines.common.guards import Assumptions, refusals, source_of, untried
from tests.support.engines.which import ENTRY, NAME
from tests.support.repository import ROOT

ASSUMED: Assumptions = ENTRY.ASSUMED
AS_READ, SOURCE = ASSUMED.as_read, source_of(ASSUMED.package)
OLDEST, NEWEST = ASSUMED.releases
LOADS = f"""
from rebalance.engines.{NAME}.entry import register
from tests.support.engines.installed import engine  # what it replaces on a CPU
register()
"""


def changed() -> Iterator[tuple[str, Assumptions, str]]:
    """For every assumption: its name, the assumption with one change, and what is refused."""

    def alone(name: str, refusal: str, **assumed: object) -> tuple[str, Assumptions, str]:
        made = Assumptions(ASSUMED.package, ASSUMED.releases, **assumed)  # type: ignore[arg-type]
        return name, made, refusal

    for path, names in ASSUMED.signatures.items():
        words = names.removesuffix("...")
        yield alone(path, f"{path} takes (", signatures={path: f"{words} further"})
        gone = f"{path}_gone"
        yield alone(gone, f"{gone} does not exist, {AS_READ}", signatures={gone: names})
    for place, lines in ASSUMED.lines.items():
        for line in lines:
            other = f"{line[:3]}x{line[3:]}"
            yield alone(
                f"{place} {line}", f"{place} lacks {other!r}, {AS_READ}", lines={place: (other,)}
            )
    for path, names in ASSUMED.attributes.items():
        for name in names.split():
            refusal = f"{path} has no {name}_gone, {AS_READ}"
            yield alone(f"{path} {name}", refusal, attributes={path: f"{name}_gone"})
    for path in ASSUMED.digests:
        refusal = f"{path} has another source, expected {'0' * 16} as in {ASSUMED.package}"
        yield alone(f"{path} digest", refusal, digests={path: "0" * 16})


@pytest.mark.parametrize(
    ("assumed", "refusal"), [pytest.param(*one, id=name) for name, *one in changed()]
)
def test_assumption_that_does_not_hold_is_refused(assumed: Assumptions, refusal: str) -> None:
    (found,) = refusals(assumed, SOURCE)

    assert found.startswith(refusal)


def test_released_wheel_passes_every_check() -> None:
    assert list(ENTRY.refusals()) == []


@pytest.mark.parametrize("version", ["0.0.1", f"0.{int(OLDEST.split('.')[1]) - 1}.99"])
def test_release_older_than_the_oldest_tested_is_refused(version: str) -> None:
    assert list(refusals(Assumptions(ASSUMED.package, ASSUMED.releases), version=version)) == [
        f"{ASSUMED.package} is {version}, expected {OLDEST} or newer: {OLDEST} to {NEWEST} were "
        "tested"
    ]


@pytest.mark.parametrize("version", [OLDEST, f"{NEWEST}.post1", f"{NEWEST}+cu130", f"{NEWEST}rc1"])
def test_release_in_between_is_no_newer_one(version: str) -> None:
    assert list(refusals(Assumptions(ASSUMED.package, ASSUMED.releases), version=version)) == []
    assert untried(ASSUMED, version) == ""


@pytest.mark.parametrize("version", [f"{NEWEST}9", f"{NEWEST}9.post1", "1.0.0"])
def test_newer_release_with_the_same_structure_is_named_and_not_refused(version: str) -> None:
    assert list(refusals(Assumptions(ASSUMED.package, ASSUMED.releases), version=version)) == []
    assert untried(ASSUMED, version).startswith(f"{ASSUMED.package} {version} is newer than")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "is_observed"), [("{}.post1", False), ("{}.post1+cu130", False), ("9{}", True)]
)
def test_engine_that_calls_itself_another_release_loads_the_plugin(
    version: str, is_observed: bool, tmp_path: Path
) -> None:
    version = version.format(importlib.metadata.version(NAME))
    written = tmp_path / f"{NAME}-{version}.dist-info/METADATA"
    written.parent.mkdir()
    written.write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version}\n")
    file = tmp_path / "eplb.toml"
    file.write_text(f"[deployment]\nname = 'prod'\nstore = 'sqlite:{tmp_path}/store'\n")
    environ = {"EPLB_CONFIG": str(file), "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}

    ended = subprocess.run(
        [sys.executable, "-c", LOADS], env=os.environ | environ, capture_output=True, text=True
    )

    assert ended.returncode == 0, ended.stderr
    assert "EPLB plug-in loaded for deployment 'prod'" in ended.stderr
    newer = f"{NAME} {version} is newer than what was tested"
    assert (newer in ended.stderr) == is_observed
