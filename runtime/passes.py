"""Counts forward passes, for engines that do not number them.

A pass is one call of the whole model: two micro-batches in flight, speculative tokens and dummy
batches are part of the pass that runs them. So passes are counted where the model is called, never
in a dispatch, which a pass may do twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.hooks import RemovableHandle


class PassCounter:
    """Forward passes begun by this process."""

    def __init__(self) -> None:
        self._begun = 0

    @property
    def steps(self) -> int:
        """Passes begun so far: the number of the next one, from 0 on."""
        return self._begun

    def begin(self) -> int:
        """Count the pass that begins now, and return its number."""
        self._begun += 1
        return self._begun - 1

    def watch(self, model: torch.nn.Module) -> RemovableHandle:
        """Count every call of ``model``, the outermost module of the engine.

        Returns:
            A handle whose ``remove`` ends it.
        """

        def before(*_: Any) -> None:
            self.begin()

        return model.register_forward_pre_hook(before)
