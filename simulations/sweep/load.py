"""The load of a sweep, as its workers get it.

Generated windows travel as their text. Recorded ones are read once and copied into the folder of
the sweep, so that all tasks see the same windows even where a store goes on recording.

Shapes:  T windows, L MoE layers, E experts.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from eplb.core.load import Phase
from eplb.core.model import ModelShape
from eplb.errors import ConfigError, HistoryError
from simulations.windows import Windows
from simulations.workloads import windows_named


@dataclass(frozen=True)
class Generated:
    """Windows drawn in the worker, from the seed of each task."""

    text: str  # ``generated:NAME:key=value,...``
    steps: int | None = None  # forward passes of a window; None: those of the generator

    @property
    def digest(self) -> str:
        """What decides the windows beside seed and model."""
        return self.text if self.steps is None else f"{self.text} steps={self.steps}"

    def windows(self, seed: int, model: ModelShape | None) -> Windows:
        """The windows of a seed."""
        found = windows_named(self.text, seed, model)
        return found if self.steps is None else replace(found, steps=self.steps)


@dataclass(frozen=True, eq=False)
class Recorded:
    """Windows that were read before, the same for every task."""

    tokens: NDArray[np.int64] | Path  # [T, L, E], or a file of them that all workers map
    digest: str  # of counts, steps, phase and skipped windows
    steps: int
    phase: Phase
    skipped: int

    def windows(self, seed: int, model: ModelShape | None) -> Windows:
        """The windows; neither a seed nor a model changes them."""
        source = self.tokens
        tokens = np.load(source, mmap_mode="r") if isinstance(source, Path) else source
        num_windows, num_layers, num_experts = tokens.shape
        return Windows(
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


def recorded(windows: Windows) -> Recorded:
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
