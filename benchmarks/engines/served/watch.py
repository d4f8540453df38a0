"""What is measured inside an engine's worker: rows of each slot in each step, maps, and times.

``register`` is a general plug-in of vLLM, which each of its processes calls before it builds a
worker; ``Watch`` extends the worker by the calls of ``rank``. Counts are summed on the device, in
CUDA graphs too, and read when the run is over. Nothing is changed in what the engine computes.

Shapes:  N steps, L MoE layers, P physical experts.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

VARIABLE = "EPLB_SERVED_WATCH"  # "1": measure in this process
STEPS = 16384  # that are kept
SLOTS = 160  # of a layer, at most
PLUGIN_HOOKS = ("before_step", "after_step")


class Measured:
    """The figures of one worker."""

    def __init__(self) -> None:
        self.rows_of_layers: dict[int, torch.Tensor] = {}  # by router: [SLOTS + 1], -1 first
        self.rows: torch.Tensor | None = None  # [STEPS, L, SLOTS + 1]
        self.maps: torch.Tensor | None = None  # [STEPS, L, P]
        self.num_rebalances = 0
        self.is_on = False
        self.steps: list[tuple[float, float, float, bool, int]] = []
        self.plugin_s = 0.0  # of the plug-in's hooks in the step that is made
        self.plugin: Any = None  # the plug-in in this process

    def count(self, router: Any, ids: torch.Tensor) -> None:
        """Add the rows that a layer's router sends to each slot."""
        rows = self.rows_of_layers.get(id(router))
        if rows is None:
            rows = torch.zeros(SLOTS + 1, dtype=torch.int32, device=ids.device)
            self.rows_of_layers[id(router)] = rows
        places = ids.flatten().long() + 1
        rows.scatter_add_(0, places, torch.ones_like(places, dtype=torch.int32))

    def end_step(self, began: float, ended: float, is_dummy: bool, state: Any) -> None:
        """Note a step that the engine has made; ``state`` is vLLM's ``EplbState``, if any."""
        if state is not None and state.expert_rearrangement_step == 0:
            self.num_rebalances += 1
        number, layers = len(self.steps), list(self.rows_of_layers.values())
        if not self.is_on or number >= STEPS:
            for rows in layers:
                rows.zero_()
            return
        if layers and self.rows is None:
            shape = (STEPS, len(layers), SLOTS + 1)
            self.rows = torch.zeros(shape, dtype=torch.int32, device=layers[0].device)
        for place, rows in enumerate(layers):
            assert self.rows is not None, "made above"
            self.rows[number, place].copy_(rows)
            rows.zero_()
        if state is not None and state.model_states:
            served = next(iter(state.model_states.values())).physical_to_logical_map
            if self.maps is None:
                self.maps = served.new_zeros((STEPS, *served.shape), dtype=torch.int16)
            self.maps[number].copy_(served)
        self.steps.append((began, ended, self.plugin_s, is_dummy, self.num_rebalances))

    def num_changes(self) -> int:
        """Rebalances that changed a slot. Waits for the device."""
        if self.maps is None or not self.steps:
            return 0
        maps = self.maps[: len(self.steps)]
        changed = (maps[1:] != maps[:-1]).flatten(1).any(1).cpu().numpy()
        numbers = np.array([step[4] for step in self.steps])
        return len(set(numbers[1:][changed].tolist()))


measured = Measured()


def register() -> None:
    """Wrap what is measured, where the environment asks for it. Once in a process."""
    if os.environ.get(VARIABLE) != "1" or hasattr(register, "is_done"):
        return
    register.is_done = True  # type: ignore[attr-defined]
    from vllm.model_executor.layers.fused_moe.router.fused_moe_router import FusedMoERouter

    select = FusedMoERouter.select_experts

    @functools.wraps(select)
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        weights, ids = select(self, *args, **kwargs)
        measured.count(self, ids)
        return weights, ids

    FusedMoERouter.select_experts = counted
    _wrap_steps()
    if os.environ.get("EPLB_CONFIG"):
        _wrap_plugin()


def _wrap_steps() -> None:
    """Note each step of both model runners."""
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.gpu import eplb_utils

    for owner, name, field in (
        (eplb_utils.EPLBController, "step", "state"),
        (gpu_model_runner.GPUModelRunner, "eplb_step", "eplb_state"),
    ):
        _wrap_step(owner, name, field)


def _wrap_step(owner: Any, name: str, field: str) -> None:
    """Wrap a method that makes EPLB's step; the field has vLLM's state, or None."""
    own = getattr(owner, name)

    @functools.wraps(own)
    def stepped(self: Any, is_dummy: bool = False, is_profile: bool = False) -> None:
        measured.plugin_s, began = 0.0, time.perf_counter()
        own(self, is_dummy, is_profile)
        if not is_profile:
            measured.end_step(began, time.perf_counter(), is_dummy, getattr(self, field))

    setattr(owner, name, stepped)


def _wrap_plugin() -> None:
    """Sum the time of the plug-in's own work in a step."""
    from rebalance.engines.vllm.process import PluginProcess

    for name in PLUGIN_HOOKS:
        own = getattr(PluginProcess, name)

        def timed(self: Any, *args: Any, _own: Any = own, **kwargs: Any) -> None:
            began, measured.plugin = time.perf_counter(), self
            _own(self, *args, **kwargs)
            measured.plugin_s += time.perf_counter() - began

        setattr(PluginProcess, name, functools.wraps(own)(timed))


class Watch:
    """Calls of a worker, by ``collective_rpc``."""

    model_runner: Any

    def watch_begin(self) -> None:
        """Measure from here on."""
        measured.is_on = True

    def watch_changes(self) -> int:
        """Rebalances that changed a slot since the start."""
        return measured.num_changes()

    def watch_write(self, path: str) -> None:
        """Write what was measured, and begin anew."""
        number, layers = len(measured.steps), len(measured.rows_of_layers)
        empty = np.zeros((0, 0, 0), dtype=np.int16)
        rows = np.zeros((number, layers, SLOTS), dtype=np.int32)
        if measured.rows is not None:
            rows = measured.rows[:number, :, 1:].cpu().numpy()
        maps = empty if measured.maps is None else measured.maps[:number].cpu().numpy()
        on_gpu = torch.cuda.is_available()
        began, ended, plugin, dummy, rebalance = np.array(measured.steps).reshape(-1, 5).T
        with Path(path).open("wb") as file:
            np.savez_compressed(
                file,
                rows=rows,
                maps=maps,
                began=began,
                ended=ended,
                plugin=plugin,
                dummy=dummy,
                rebalance=rebalance,
                peak_bytes=torch.cuda.max_memory_allocated() if on_gpu else 0,
            )
        measured.is_on = False

    def watch_plant(self, layer: int, place: int, source: int) -> str:
        """Give a slot the weights of another slot of this rank; "": undone by ``watch_undo``."""
        weights = self._watched_weights(layer)
        self._planted = [(tensor, place, tensor[place].clone()) for tensor in weights]
        for tensor in weights:
            tensor[place].copy_(tensor[source])
        self._watch_wait()
        is_same = all(torch.equal(tensor[place], kept) for tensor, place, kept in self._planted)
        return "the slots have the same bytes" if is_same else ""

    def watch_undo(self) -> None:
        """Give the slot its own weights back."""
        for tensor, place, kept in self._planted:
            tensor[place].copy_(kept)
        self._planted = []
        self._watch_wait()

    def watch_kill_store(self) -> int:
        """Kill the plug-in's process at the store; its number."""
        number = measured.plugin.recorder.pid
        os.kill(number, signal.SIGKILL)
        return int(number)

    def watch_shape(self) -> tuple[int, int]:
        """Layers, and slots of this rank."""
        layers = self._watched_model().moe_layers
        return len(layers), int(self._watched_weights(0)[0].shape[0])

    def _watched_weights(self, layer: int) -> list[torch.Tensor]:
        return list(self._watched_model().moe_layers[layer].get_expert_weights())

    def _watched_model(self) -> Any:
        model = self.model_runner.get_model()
        return getattr(model, "language_model", model)

    @staticmethod
    def _watch_wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
