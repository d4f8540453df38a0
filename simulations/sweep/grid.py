"""The tasks of a sweep: one for each configuration, named by a hash of what decides its result.

    load x settings of the sweep x configuration x software  ->  digest  ->  one row

The digest stands for the result: a finished task with the same digest is never run again, and one
whose load, settings or source code changed always is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path

import eplb
from eplb.core.dispatch import DispatchRule
from eplb.errors import ConfigError

# What a replay runs: the planner, the simulator and the cut at sudden changes of load.
SOURCES = ("eplb", "simulations", "telemetry/load/drift.py", "telemetry/load/chance.py")
LIBRARIES = ("numpy", "scipy", "numba", "ortools")  # generators, sums and solvers differ by version


@dataclass(frozen=True)
class Settings:
    """What all tasks of a sweep share.

    Raises:
        ConfigError: a number below its least.
    """

    load: str  # ``generated:...``, or the digest of recorded windows
    software: str  # the digest of ``software``
    model: str | None = None  # a known one: gives sizes of experts
    hardware: str | None = None  # None: imbalance alone, no times
    is_prefill: bool = False
    other_us: float = 0.0
    is_overlapped: bool = False
    past_windows: int = 16
    ranks_per_node: int = 8
    precision: str | None = None  # of the experts; None: that of the model's checkpoint

    def __post_init__(self) -> None:
        for name in ("past_windows", "ranks_per_node"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected 1 or more")


@dataclass(frozen=True)
class Task:
    """One configuration."""

    settings: Settings
    ranks: int
    redundant: int  # slots of each rank beyond those that hold all experts once
    interval: int  # windows from one plan to the next
    policy: str
    dispatch: str
    seed: int  # of the planner, and of generated load

    @property
    def digest(self) -> str:
        """The name of its result."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def tasks_of(
    settings: Settings,
    *,
    ranks: Sequence[int],
    redundant: Sequence[int],
    intervals: Sequence[int],
    policies: Sequence[str],
    dispatch: Sequence[DispatchRule],
    seeds: Sequence[int],
) -> list[Task]:
    """Every combination once, in order of the arguments, the last one fastest."""
    rules = [rule.value for rule in dispatch]
    grid = product(ranks, redundant, intervals, policies, rules, seeds)
    return list(dict.fromkeys(Task(settings, *one) for one in grid))


@cache
def software() -> str:
    """Digest of the source code that makes the numbers, and of the libraries below it."""
    root = Path(eplb.__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for library in LIBRARIES:
        try:
            digest.update(f"{library} {version(library)}\n".encode())
        except PackageNotFoundError:  # ortools comes with an extra
            digest.update(f"{library} is not installed\n".encode())
    for file in _files(root):
        digest.update(f"{file.relative_to(root)}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _files(root: Path) -> Iterable[Path]:
    for source in SOURCES:
        path = root / source
        of_folder = (one for one in path.rglob("*") if one.suffix in {".py", ".json"})
        yield from sorted(of_folder) if path.is_dir() else [path]
