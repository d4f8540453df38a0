"""The packages of this environment without one: for processes that are to miss a library."""

from __future__ import annotations

import sysconfig
from pathlib import Path


def packages_without(name: str, folder: Path) -> Path:
    """A folder with the packages of this environment but one, for a process with ``-S``."""
    folder.mkdir()
    for file in Path(sysconfig.get_path("purelib")).iterdir():
        if file.name.partition("-")[0] != name and file.suffix != ".pth":
            (folder / file.name).symlink_to(file)
    return folder
