"""Fetch the newest wheel of each engine, and report what of its structure the plug-in lacks there.

    python -m tests.engines.newest [ENGINE ...]

It fails for nothing that it finds: a release is news, and no fault of a commit.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from zipfile import ZipFile

from rebalance.engines.common.guards import Assumptions, PackageSource, refusals, untried

ENGINES = "vllm", "sglang"


def fetch(engine: str, folder: Path) -> tuple[PackageSource, str]:
    """The source and the version of the newest wheel of an engine."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download"]
    subprocess.run([*pip, "--no-deps", "--only-binary=:all:", "--dest", folder, engine], check=True)
    (wheel,) = folder.glob("*.whl")
    with ZipFile(wheel) as packed:
        names = [name for name in packed.namelist() if name.startswith(f"{engine}/")]
        packed.extractall(folder, [name for name in names if name.endswith(".py")])
    return PackageSource(folder / engine), wheel.name.split("-")[1]


def changes(engine: str, source: PackageSource, version: str) -> Iterator[str]:
    """Yield what of each declaration of an engine's plug-in does not hold in a release."""
    declared = import_module(f"rebalance.engines.{engine}.assumptions")
    for name, assumed in vars(declared).items():
        if isinstance(assumed, Assumptions):
            yield from (f"{name}: {one}" for one in refusals(assumed, source, version))
    if reason := untried(declared.ASSUMED, version):
        yield reason


def main(engines: list[str]) -> None:
    """Print a line for each change, or that there is none."""
    for engine in engines:
        with tempfile.TemporaryDirectory() as folder:
            source, version = fetch(engine, Path(folder))
            lines = list(changes(engine, source, version)) or ["as it was tested"]
        for line in lines:
            print(f"newest {engine}, {version}: {line}")


if __name__ == "__main__":
    main(sys.argv[1:] or list(ENGINES))
