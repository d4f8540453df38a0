"""Conformance of SGLang's layers: forced moves by its updater.

Shapes:  L rows that are proved, S slots of all ranks, C slots of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch.distributed as dist

from rebalance.engines.common.conform import Subject
from rebalance.engines.common.fsck.check import EngineView
from rebalance.engines.common.tap import IntArray
from rebalance.engines.sglang import engine
from rebalance.engines.sglang.replica_weights import replica_lists
from runtime.group import gathered_large


def subject_of(
    view: EngineView, group: dist.ProcessGroup, rows: list[int], move: Callable[[Any], None]
) -> Subject:
    """Some rows of the engine's map.

    Args:
        view: the engine's tensors and map.
        group: of all ranks, which nothing else uses meanwhile.
        rows: with routed experts.
        move: the engine's own move of these rows to other metadata.
    """
    live = engine.metadata()

    def wanted(target: IntArray) -> Any:
        held = live.physical_to_logical_map_cpu.numpy().astype(np.int64)
        held[rows] = target
        lists = replica_lists(held, np.ones_like(held), live.num_logical_experts)
        return engine.metadata_for(held, lists, lists[:, :, 0])

    return Subject(
        EngineView(rows, view.layer, view.held, view.rank, view.num_ranks),
        lambda mine: gathered_large(mine, group),
        methods_of(view, rows),
        lambda target: move(wanted(target)),
        lambda target: live.update(wanted(target), update_layer_ids=rows),
    )


def experts_of(view: EngineView, row: int) -> Any:
    """The module with the weights of a row."""
    return view.layer(row)[0].get_submodule(view.owners[row][0])


def methods_of(view: EngineView, rows: list[int]) -> dict[int, str]:
    """The quantisation of rows, by the engine's names."""
    found = {row: getattr(experts_of(view, row), "quant_method", None) for row in rows}
    return {row: type(method).__name__.removesuffix("Method") for row, method in found.items()}
