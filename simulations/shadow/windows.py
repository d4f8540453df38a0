"""Windows as sources give them, what was skipped, and what a source is.

A source is polled. Each poll gives the windows that are complete by now, oldest first; the last
poll gives what is left. Watching a folder until it is finished and reading the finished folder go
through the same calls. What cannot be used is skipped and counted, with the reason of the first.

Shapes:  L MoE layers, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from eplb.core.model import ModelShape
from eplb.core.placement import Placement
from eplb.core.topology import Topology
from telemetry.formats.types import Layers, ReadOptions


@dataclass(frozen=True, eq=False)
class Observed:
    """One window as an engine reports it."""

    tokens: NDArray[np.int64]  # [L, E]
    layers: Layers
    held: Placement | None  # the map that served; None: not known
    where: str


@dataclass
class Skips:
    """What was not used, by item, with its kind and a sentence."""

    by_item: dict[str, tuple[str, str]] = field(default_factory=dict)

    def add(self, item: str, kind: str, why: str) -> None:
        """Note an item, once."""
        self.by_item[item] = kind, why

    def counts(self) -> dict[str, dict[str, Any]]:
        """Count and first example of each kind."""
        found: dict[str, dict[str, Any]] = {}
        for item, (kind, why) in self.by_item.items():
            first = why if item in why else f"{item}: {why}"
            one = found.setdefault(kind, {"count": 0, "first": first})
            one["count"] += 1
        return found


@dataclass(frozen=True)
class System:
    """What serves, where a source tells it."""

    topology: Topology
    model: ModelShape


class Source(Protocol):
    """Where windows come from."""

    skips: Skips
    notes: dict[str, None]  # of readers, each once

    def poll(self, *, is_last: bool) -> Iterator[Observed]:
        """Give the windows that are new."""

    def system(self) -> System | None:
        """Ranks and model; None: the source does not tell."""

    def close(self) -> None:
        """Release what the source holds open."""


@dataclass(frozen=True)
class SourceOptions:
    """How files become windows."""

    read: ReadOptions  # its max_windows is that of one file
    input_format: str | None = None
    window_steps: int = 100  # lines of a ``.jsonl`` in a window
    num_ranks: int | None = None  # files of one dump with a file for each rank
