"""The tasks of a sweep: one for each configuration, named by a hash of what decides its result.

    load x settings of the sweep x configuration x software  ->  digest  ->  one row

The digest stands for the result: a finished task with the same digest is never run again, and one
whose load, settings or source code changed always is. Generated windows travel to workers as their
text. Recorded ones are read once and copied into the folder of the sweep, so that all tasks see the
same windows even where a store goes on recording.

Shapes:  T windows, L MoE layers, E experts.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

import eplb
from eplb.core.dispatch import DispatchRule
from eplb.core.load import Phase
from eplb.core.model import ModelShape
from eplb.errors import ConfigError, HistoryError
from simulations.own_policies import source_digest
from simulations.windows import WindowSeries
from simulations.workloads import windows_named

# What a replay runs: the planner, the simulator and the cut at sudden changes of load.
SOURCES = ("eplb", "simulations", "telemetry/load/drift.py")
LIBRARIES = ("numpy", "scipy", "numba", "ortools")  # generators, sums and solvers differ by version


@dataclass(frozen=True)
class SweepSettings:
    """What all tasks of a sweep share.

    Raises:
        ConfigError: a number below its least.
    """

    load: str  # ``generated:...``, or the digest of recorded windows
    software: str  # the digest of ``software``
    model: str | None = None  # a known one, or a config.json: gives sizes of experts
    hardware: str | None = None  # None: imbalance alone, no times
    is_prefill: bool = False
    other_us: float = 0.0
    is_overlapped: bool = False
    past_windows: int = 16
    ranks_per_node: int = 8
    precision: str | None = None  # precision of the experts; None: that of the model's checkpoint
    model_digest: str = ""  # of the model's config.json; "": a known model

    def __post_init__(self) -> None:
        for name in ("past_windows", "ranks_per_node"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected 1 or more")


@dataclass(frozen=True)
class SweepTask:
    """One configuration."""

    settings: SweepSettings
    ranks: int
    redundant: int  # slots of each rank beyond those that hold all experts once
    interval: int  # windows from one plan to the next
    policy: str
    dispatch: str
    seed: int  # seed of the planner, and of generated load
    policy_file: str = ""  # FILE.py:FUNCTION of an own policy; "": it is in the table
    policy_digest: str = ""  # of an own policy's source

    @property
    def digest(self) -> str:
        """The name of its result, wherever the file of its policy lies."""
        text = json.dumps(asdict(replace(self, policy_file="")), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def tasks_of(
    settings: SweepSettings,
    *,
    ranks: Sequence[int],
    redundant: Sequence[int],
    intervals: Sequence[int],
    policies: Sequence[str],
    dispatch: Sequence[DispatchRule],
    seeds: Sequence[int],
    files: Mapping[str, str] = MappingProxyType({}),
) -> list[SweepTask]:
    """Every combination once, in order of the arguments, the last one fastest.

    Args:
        files: FILE.py:FUNCTION of policies that workers have to read.
    """
    rules = [rule.value for rule in dispatch]
    grid = product(ranks, redundant, intervals, policies, rules, seeds)
    tasks = dict.fromkeys(SweepTask(settings, *one) for one in grid)
    sources = {name: (files.get(name, ""), source_digest(name)) for name in policies}
    return [
        replace(one, policy_file=sources[one.policy][0], policy_digest=sources[one.policy][1])
        for one in tasks
    ]


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


@dataclass(frozen=True)
class Generated:
    """Windows drawn in the worker, from the seed of each task."""

    text: str  # ``generated:NAME:key=value,...``
    steps: int | None = None  # forward passes of a window; None: those of the generator

    @property
    def digest(self) -> str:
        """What decides the windows beside seed and model."""
        return self.text if self.steps is None else f"{self.text} steps={self.steps}"

    def windows(self, seed: int, model: ModelShape | None) -> WindowSeries:
        """The windows of a seed."""
        found = windows_named(self.text, seed, model)
        return found if self.steps is None else replace(found, steps=self.steps)


@dataclass(frozen=True, eq=False)
class Recorded:
    """Windows that were read before, the same for every task."""

    tokens: NDArray[np.int64] | Path  # [T, L, E], or a file of them that all workers map
    digest: str  # digest of counts, steps, phase and skipped windows
    steps: int
    phase: Phase
    skipped: int

    def windows(self, seed: int, model: ModelShape | None) -> WindowSeries:
        """The windows; neither a seed nor a model changes them."""
        source = self.tokens
        tokens = np.load(source, mmap_mode="r") if isinstance(source, Path) else source
        num_windows, num_layers, num_experts = tokens.shape
        return WindowSeries(
            num_layers,
            num_experts,
            lambda: iter(np.asarray(tokens)),
            num_windows,
            self.steps,
            self.phase,
            self.skipped,
        )

    def saved(self, folder: Path) -> Recorded:
        """The same, as a file below a folder.

        Raises:
            ConfigError: the file cannot be written.
        """
        assert not isinstance(self.tokens, Path), "saved once"
        path = folder / f"load-{self.digest[:16]}.npy"
        beside = path.with_name(f".{path.name}.{os.getpid()}.npy")
        try:
            np.save(beside, self.tokens)
            beside.replace(path)
        except OSError as exc:
            beside.unlink(missing_ok=True)
            raise ConfigError(f"{path} cannot be written: {exc.strerror or exc}") from exc
        return replace(self, tokens=path)


Load = Generated | Recorded


def recorded(windows: WindowSeries) -> Recorded:
    """Read all windows of a source.

    Raises:
        HistoryError: no window, or one that the replay would refuse.
    """
    read = list(windows)
    if not read:
        raise HistoryError("the load has no windows, expected at least 2")
    tokens = np.stack(read).astype(np.int64, copy=False)
    shape = (*tokens.shape, windows.steps, windows.phase, windows.skipped)
    digest = hashlib.sha256(repr(shape).encode())
    digest.update(tokens.tobytes())
    return Recorded(tokens, digest.hexdigest(), windows.steps, windows.phase, windows.skipped)
