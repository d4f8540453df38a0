"""The layers of ``rebalance.engines.vllm.layers`` with faults that a move leaves on rank 1.

``scale``: a slot keeps the last tensor that vLLM should have moved. ``map``: the kernel's own map
of slots names two of them in turn, which no byte of a weight shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from rebalance.engines.common.conform import Subject
from rebalance.engines.vllm import layers
from rebalance.engines.vllm.conform import experts_of

PLANTED = 1  # rank
NOT_RUN: dict[str, str] = {}
CASES = {f"{name}, {fault}": name for name, fault in product(layers.CASES, ("scale", "map"))}


def subjects(rank: int, name: str, seed: int) -> Iterator[Subject]:
    """As of ``layers``."""
    case, _, fault = name.rpartition(", ")
    for subject in layers.subjects(rank, case, seed):
        yield replace(subject, move=planted(subject, fault)) if rank == PLANTED else subject


def planted(subject: Subject, fault: str) -> Any:
    view, own = subject.view, slice(subject.view.slot(0), subject.view.slot(subject.view.num_own))
    row = view.rows[0]
    experts = experts_of(view.layer(row)[0])

    def move(target: Any) -> None:
        changed = np.flatnonzero(view.held(row)[own] != target[0][own])
        before = view.moved(row)[-1].clone()
        subject.move(target)
        if fault == "scale":
            view.moved(row)[-1][changed[0]] = before[changed[0]]
        elif fault == "map":
            first = view.slot(0)
            experts._expert_map[[first, first + 1]] = experts._expert_map[[first + 1, first]]

    return move
