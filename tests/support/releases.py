"""Releases of this program, each really installed: from a wheel, in a folder of its own.

Processes of a release are started with its folder first on PYTHONPATH and its commands first on
PATH. The libraries that all releases need are those of the running environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.deployments import EPLB


@dataclass(frozen=True)
class Release:
    """One installed release."""

    folder: Path

    @property
    def environ(self) -> dict[str, str]:
        """What makes a process one of this release."""
        path = f"{self.folder / 'bin'}:{EPLB.parent}:{os.environ['PATH']}"
        return {"PATH": path, "PYTHONPATH": str(self.folder)}


def installed(source: Path, folder: Path) -> Release:
    """Build a wheel of a source tree, and install it."""
    wheels = folder.with_name(f"{folder.name}-wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    _run([*pip, "wheel", "--no-deps", "-w", str(wheels), str(source)])
    (wheel,) = wheels.glob("eplb-*.whl")
    _run([*pip, "install", "--no-deps", "--target", str(folder), str(wheel)])
    release = Release(folder)
    # Compiles the planner's kernels, half a minute of processor time, before any deadline.
    warm_up = "from eplb.precompile import warm_up; warm_up('auto')"
    _run([sys.executable, "-c", warm_up], os.environ | release.environ)
    return release


def other_release(release: Release, folder: Path, *, software: str, protocol: int) -> Release:
    """Install the same program once more, as one that has another version."""
    shutil.copytree(release.folder, folder)
    for file, line, other in (
        ("__init__.py", '__version__ = "', f'__version__ = "{software}"'),
        ("versions.py", "PROTOCOL = ", f"PROTOCOL = {protocol}"),
    ):
        path = folder / "eplb" / file
        lines = path.read_text().splitlines()
        (number,) = (n for n, text in enumerate(lines) if text.startswith(line))
        lines[number] = other
        path.write_text("\n".join(lines) + "\n")
    return Release(folder)


def _run(words: list[str], environ: Mapping[str, str] = os.environ) -> None:
    ended = subprocess.run(words, capture_output=True, text=True, env=environ, cwd="/")
    assert ended.returncode == 0, ended.stderr
