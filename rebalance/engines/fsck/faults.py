"""What the placement check finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["slot", "replicas", "factor", "tensors", "choice"]


@dataclass(frozen=True)
class Fault:
    """One fault of a slot, a tensor or a choice of replicas; its text names where and what."""

    kind: Kind
    row: int  # layer, by the engine's numbers
    slot: int  # of all ranks; -1: none in particular
    expert: int  # -1: none in particular
    name: str  # of the tensor
    what: str  # found, and expected

    def __str__(self) -> str:
        where = f"layer {self.row}"
        if self.slot >= 0:
            where += f" slot {self.slot}"
        if self.expert >= 0:
            where += f" expert {self.expert}"
        return f"{where}: {self.name} {self.what}"
