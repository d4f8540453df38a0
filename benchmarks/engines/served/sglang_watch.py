"""A plug-in of SGLang that only looks: tokens of each slot in each pass, and the map they met.

Apart from the plug-in that is measured, so that "none", the engine's own balancer and ours are
counted by the same eyes. It is an entry point ``sglang.srt.plugins`` of a distribution that
``sglang_serve`` writes beside the engine, and does nothing unless ``SERVED_WATCH`` names a file.

``SERVED_PLANT=PASS`` is the control of the answers: at that pass rank 0 exchanges the weights of
two of its slots, in one layer, which no map knows.

Shapes:  P passes, L rows of the engine's map, S slots.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

FILE, PLANT, ON_CPU = "SERVED_WATCH", "SERVED_PLANT", "SERVED_ON_CPU"
EVERY = 32  # passes between two writes of the file


class Watch:
    """What one rank has seen."""

    def __init__(self, file: Path, plant_at: int) -> None:
        self._file, self._plant_at = file, plant_at
        self._pass = 0
        self._tokens: list[Any] = []  # [L, S] of each pass, on the device
        self._counted: list[np.ndarray] = []  # the same, copied to the host
        self._map_of_pass: list[int] = []
        self._maps: list[np.ndarray] = []  # [L, S] experts, each map once
        self._ended: list[float] = []

    def pass_begins(self, runner: Any, *_: Any, **__: Any) -> None:
        """Record in engines without a balancer too; plant the fault when it is due."""
        from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder

        recorder = get_global_expert_distribution_recorder()
        if not recorder.recording:
            recorder.start_record()
        self._pass += 1
        if self._pass == self._plant_at:
            self._plant(runner)

    def counted(
        self, _result: None, _accumulator: Any, _pass: int, _key: str, data: Any, _: Any
    ) -> None:
        """Keep the counts of a pass."""
        from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

        held = get_global_expert_location_metadata().physical_to_logical_map_cpu.numpy()
        if not self._maps or not np.array_equal(self._maps[-1], held):
            self._maps.append(held.copy())
        self._map_of_pass.append(len(self._maps) - 1)
        self._tokens.append(data["global_physical_count"].clone())
        self._ended.append(time.monotonic())
        if len(self._map_of_pass) % EVERY == 0:
            self._write()

    def _plant(self, runner: Any) -> None:
        import torch

        weights = runner.model.routed_experts_weights_of_layer
        with torch.inference_mode():
            for tensor in weights[max(weights.keys())]:
                first, second = tensor[0].clone(), tensor[1].clone()
                tensor[0].copy_(second)
                tensor[1].copy_(first)
        print(f"planted: slots 0 and 1 of layer {max(weights.keys())} exchanged", flush=True)

    def _write(self) -> None:
        self._counted += [tokens.cpu().numpy() for tokens in self._tokens]
        self._tokens.clear()
        partial = self._file.with_suffix(".partial.npz")
        np.savez(
            partial,
            tokens=np.stack(self._counted),
            map_of_pass=np.array(self._map_of_pass),
            maps=np.stack(self._maps),
            ended=np.array(self._ended),
        )
        partial.rename(self._file)


def let_recorder_run_on_cpu() -> None:
    """Give the engine's recorder and updater what they ask of a GPU's module.

    The engine serves on CPUs, but its recorder asks for the name of an accelerator.
    """
    import torch
    from sglang.srt.eplb import expert_distribution

    expert_distribution.get_device = lambda: "cpu"
    torch.cpu.empty_cache = lambda: None  # type: ignore[attr-defined]
    torch.cpu.is_current_stream_capturing = lambda: False  # type: ignore[attr-defined]


def register() -> None:
    """Register the hooks in a process that is asked to look."""
    if FILE not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if ON_CPU in os.environ:
        let_recorder_run_on_cpu()
    watch = Watch(Path(os.environ[FILE]), int(os.environ.get(PLANT, 0)))
    runner = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
    append = "sglang.srt.eplb.expert_distribution._StatAccumulator.append"
    HookRegistry.register(runner, watch.pass_begins, HookType.BEFORE)
    HookRegistry.register(append, watch.counted, HookType.AFTER)
