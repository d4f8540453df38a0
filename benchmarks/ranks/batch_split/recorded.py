"""Recorded routing of real models as the load of ranks: cases, their experts, windows of tokens.

256 experts are made of four layers of 64, or eight of 32, beside each other: each token goes to the
experts that it had in all of them. Traces lie where EPLB_DATA points, or at ../shared/data beside
the repository.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from eplb import Topology

DATA = Path(os.environ.get("EPLB_DATA", Path(__file__).parents[4] / "shared" / "data"))
Ints = NDArray[np.int64]
DOMAINS = ("intent", "summary")
NUM_HISTORY = 8  # windows that a plan sees, at most


@dataclass(frozen=True)
class Case:
    """A model's routing on a number of ranks."""

    model: str
    wide: int  # layers that make one
    num_ranks: int
    num_slots: int

    @property
    def name(self) -> str:
        """As tables show it."""
        made = f" x{self.wide}" if self.wide > 1 else ""
        return f"{self.model}{made}, {self.num_slots}/{self.num_ranks}"

    @property
    def topology(self) -> Topology:
        """All ranks in one domain."""
        return Topology.uniform(1, self.num_ranks, self.num_slots // self.num_ranks)


CASES = (
    Case("gpt-oss", 1, 8, 40),
    Case("gpt-oss", 1, 32, 64),
    Case("V2-Lite", 1, 8, 72),
    Case("V2-Lite", 1, 32, 96),
    Case("gpt-oss", 8, 32, 288),
    Case("gpt-oss", 8, 64, 320),
    Case("V2-Lite", 4, 32, 288),
    Case("V2-Lite", 4, 64, 320),
)


def expert_ids(case: Case) -> Ints:
    """[L, tokens, K] in recorded order."""
    if case.model == "gpt-oss":
        found = np.load(DATA / "gptoss20b_decode.npz")["expert_ids"].transpose(1, 0, 2)
    else:
        both = [np.load(DATA / f"dsv2lite_{name}.npz")["expert_ids"] for name in DOMAINS]
        found = np.concatenate(both, axis=1)
    ids: Ints = found.astype(np.int64)
    if case.wide == 1:
        return ids
    one = 32 if case.model == "gpt-oss" else 64
    num_layers = len(ids) // case.wide
    ids = ids[: num_layers * case.wide].reshape(num_layers, case.wide, *ids.shape[1:])
    ids = ids + (np.arange(case.wide) * one)[:, None, None]
    return np.concatenate([ids[:, nth] for nth in range(case.wide)], axis=2)


def windows(ids: Ints, tokens: int, order: str = "mixed") -> Ints:
    """[T, L, E] of runs of tokens: as recorded, or with blocks of 32 tokens mixed."""
    if order == "mixed":
        blocks = ids.shape[1] // 32
        drawn = np.random.default_rng(0).permutation(blocks)
        ids = ids[:, : blocks * 32].reshape(len(ids), blocks, 32, -1)[:, drawn]
        ids = ids.reshape(len(ids), blocks * 32, -1)
    num, num_experts = ids.shape[1] // tokens, int(ids.max()) + 1
    return np.array(
        [
            [
                np.bincount(layer[w * tokens : (w + 1) * tokens].ravel(), minlength=num_experts)
                for layer in ids
            ]
            for w in range(num)
        ]
    )
