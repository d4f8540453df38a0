"""Ranks of the real vLLM ``EplbState`` on a CPU, with gloo between them.

What vLLM takes from an accelerator is replaced: events, streams, pinned memory and the groups of
its parallel state. All of the balancer is vLLM's own: state, worker, moves, commits.
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="run `make test-engines`: it has vllm 0.33.0 in .venv-vllm")

from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.eplb import async_worker, eplb_communicator, eplb_state

from rebalance.engines.vllm.hooks import install
from rebalance.engines.vllm.process import PluginProcess
from tests.support.engines import nixl_on_host, vllm_cpu
from tests.support.engines.ranks import (
    INTERVAL,
    NUM_EXPERTS,
    NUM_LAYERS,
    NUM_RANKS,
    NUM_SLOTS,
    EngineRank,
    Experts,
    check_slots,
    settings_in,
)

NAME = "vllm"
MOE = [0, 1, 2]
PARTS = ("policy", "mover")  # gauges of what has to stay on
ROWS, TOP_K = 256, 2  # of one pass on one rank
# How the engine is started, and how many maps a test of it takes.
WAYS: dict[str, tuple[dict[str, Any], int]] = {
    "sync": ({}, 100),
    "async": ({"is_async": True}, 100),
    "sync nccl": ({"communicator": "torch_nccl"}, 100),  # over gloo: a device's group is a host's
    "async nccl": ({"is_async": True, "communicator": "torch_nccl"}, 100),
}
if nixl_on_host.IS_THERE:
    WAYS["sync nixl"] = {"communicator": "nixl"}, 100
    WAYS["async nixl"] = {"is_async": True, "communicator": "nixl"}, 100
WITH_TASKS_ALONE: dict[str, Any] = {}  # vLLM plans at its intervals alone


class Rank(EngineRank):
    """One rank: vLLM's state over a model, and the plug-in if it is installed."""

    engine = NAME

    def __init__(self, group: Any, state: Any, model: Any, process: PluginProcess | None) -> None:
        self.rank, self.state, self.model = group.rank_in_group, state, model
        self.plugin: Any = process
        self.each = NUM_SLOTS // group.world_size

    @property
    def model_state(self) -> Any:
        """Of the target model, which vLLM adds last."""
        return list(self.state.model_states.values())[-1]

    @property
    def mover(self) -> Any:
        """The check of what vLLM moves of the target model."""
        return self.plugin.check_of(self.model_state.communicator)

    @property
    def held(self) -> np.ndarray:
        return self.model_state.physical_to_logical_map.numpy()

    @property
    def lists(self) -> list[Any]:
        return self.model_state.logical_to_physical_map.tolist()

    @property
    def weighs_replicas(self) -> bool:
        return bool((self.model_state.logical_replica_count > NUM_SLOTS).any())

    @property
    def layers(self) -> dict[int, list[torch.Tensor]]:
        return dict(enumerate(self.model.expert_weights))

    @property
    def is_on(self) -> bool:
        parts = ("policy", "shares", "mover", "tap")
        return self.plugin is not None and any(map(self.plugin.is_on, parts))

    @property
    def why_off(self) -> str:  # type: ignore[override]
        return "" if self.plugin is None else self.plugin.refused

    def result(self) -> dict[str, Any]:
        names = ("checked", "wrong", "unchecked")
        return super().result() | {name: getattr(self.mover, f"num_{name}", 0) for name in names}

    def forward(self, popularity: np.ndarray) -> None:
        self.route(popularity)
        self.state.step()

    def route(self, popularity: np.ndarray) -> None:
        """Route a pass of each model by vLLM's rule, and count as its kernel does."""
        drawn = np.random.default_rng((self.passes, self.rank))
        for found in reversed(list(self.state.model_states.values())):
            self._routed(found, drawn, popularity)

    def _routed(self, found: Any, drawn: np.random.Generator, popularity: Any) -> None:
        state, held = self.state, found.physical_to_logical_map.numpy()
        for layer in range(len(held)):
            experts = drawn.choice(NUM_EXPERTS, (ROWS, TOP_K), p=popularity[layer])
            rows = np.repeat(np.arange(ROWS), TOP_K).astype(np.uint64)
            count = found.logical_replica_count[layer].numpy()[experts.ravel()]
            hashed = rows * 2654435769 & 0xFFFFFFFF
            replica = (hashed % count.astype(np.uint64)).astype(np.int64)
            slots = found.logical_to_physical_map[layer].numpy()[experts.ravel(), replica]
            # A list that names a slot without its expert would be a wrong answer of the model.
            assert (held[layer, slots] == experts.ravel()).all(), f"layer {layer}: wrong list"
            if bool(state.should_record_tensor):
                counted = np.bincount(slots, minlength=NUM_SLOTS)
                found.expert_load_pass[layer] += torch.from_numpy(counted).int()

    def check_weights(self, added: int = 0) -> None:
        """As ``EngineRank``, of the draft model too."""
        for found in self.state.model_states.values():
            own = found.physical_to_logical_map[:, self.rank * self.each :][:, : self.each]
            for layer, weights in enumerate(found.model.expert_weights):
                number = found.model.moe_layers[layer].number
                check_slots(number, weights, own[layer].tolist(), added)


@dataclass(frozen=True)
class Spent:
    """What one call of a part of the plug-in took of a step."""

    elapsed_ms: float
    num_waits: int  # times that the thread gave the processor up
    num_preemptions: int  # times that the kernel took it


def watched(made: Rank) -> list[Spent]:
    """Record every call that the plug-in makes on the thread of vLLM's steps."""
    process, found = made.plugin, list[Spent]()

    def wrap(name: str) -> None:
        own = getattr(process, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            before, began = resource.getrusage(resource.RUSAGE_THREAD), time.perf_counter()
            try:
                return own(*args, **kwargs)
            finally:
                elapsed = time.perf_counter() - began
                after = resource.getrusage(resource.RUSAGE_THREAD)
                waits = after.ru_nvcsw - before.ru_nvcsw
                found.append(Spent(1e3 * elapsed, waits, after.ru_nivcsw - before.ru_nivcsw))

        setattr(process, name, call)

    for name in ("before_step", "after_step", "committed", "map_ended"):
        wrap(name)
    return found


def make_rank(
    rank: int,
    config: Path | None,
    *,
    is_async: bool = False,
    forgets: bool = False,
    interval: int = INTERVAL,
    prepare: Callable[[list[Layer]], None] | None = None,
    has_draft: bool = False,
    draft_layers: int = 1,
    stages: int = 1,
    communicator: str = "torch_gloo",
) -> Rank:
    """Install the plug-in, if a file is given, and add a model to a real ``EplbState``.

    Args:
        rank: of this process, in a gloo group of all ranks.
        config: the deployment's file.
        is_async: whether vLLM moves experts in its own thread.
        forgets: whether the scales are left out of what vLLM moves.
        interval: steps from one rebalance to the next.
        prepare: changes the layers of this rank after they were loaded.
        has_draft: whether a draft model with experts is added before, as vLLM does.
        draft_layers: of it.
        stages: of a pipeline, each with layers of its own.
        communicator: that of vLLM, by its name.
    """
    torch.set_num_threads(1)
    if stages > 1:
        group, balancing = groups_of_stages(rank, stages)
    else:
        group, balancing = (vllm_cpu.coordinator(rank, NUM_RANKS) for _ in range(2))
    vllm_cpu.install(group, balancing)
    if communicator == "nixl":
        nixl_on_host.install()
    held = eplb_state.EplbState.build_initial_global_physical_to_logical_map(
        NUM_EXPERTS, NUM_SLOTS - NUM_EXPERTS
    )
    each, first = NUM_SLOTS // group.world_size, NUM_LAYERS * (rank // group.world_size)
    own = list(held[group.rank_in_group * each :][:each])
    layers = [Layer(first + number, own, forgets) for number in range(NUM_LAYERS)]
    if prepare is not None:
        prepare(layers)
    process = None
    if config is not None:
        process = PluginProcess(settings_in(config))
        install(process)
    state = vllm_cpu.state_of(interval=interval, is_async=is_async)
    state.parallel_config.pipeline_parallel_size = stages
    state.parallel_config.eplb_config.communicator = communicator
    model = model_of(layers, group.world_size)
    if has_draft:
        numbers = range(NUM_LAYERS, NUM_LAYERS + draft_layers)
        draft = model_of([Layer(one, own, forgets) for one in numbers], group.world_size)
        state.add_model(draft, vllm_cpu.configuration("draft"), model_name="contract (draft)")
    state.add_model(model, vllm_cpu.configuration("generate"))
    for found in state.model_states.values():
        found.communicator.set_stream(vllm_cpu.Stream())
    if is_async:
        run = async_worker.transfer_run_periodically
        state.async_worker = threading.Thread(
            target=run, args=(state, vllm_cpu.Stream()), daemon=True
        )
        state.async_worker.start()
    return Rank(group, state, model, process)


def groups_of_stages(rank: int, stages: int) -> tuple[Any, Any]:
    """vLLM's own groups of this rank for experts and for balancing; a stage has each."""
    config, size = VllmConfig(device_config=DeviceConfig(device="cpu")), NUM_RANKS // stages
    parallel = config.parallel_config
    parallel.pipeline_parallel_size, parallel.tensor_parallel_size = stages, size
    parallel.enable_eplb = True
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(NUM_RANKS, rank, "env://", rank, "gloo")
        parallel_state.initialize_model_parallel(size, stages, backend="gloo")
    return parallel_state.get_ep_group(), parallel_state.get_eplb_group()


def model_of(layers: list[Layer], num_ranks: int) -> Any:
    """What the balancer uses of a model."""
    return vllm_cpu.model_of(layers, NUM_EXPERTS, NUM_SLOTS, num_ranks)


class Layer(Experts):
    """A layer as the model's protocol asks for it."""

    top_k = TOP_K

    def __init__(self, number: int, held: list[int], forgets: bool) -> None:
        super().__init__(number, held)
        self.number, self.layer_name = number, f"model.layers.{number + 3}.mlp.experts"
        self.eplb_state, self._forgets = eplb_state.EplbLayerState(), forgets

    def get_expert_weights(self) -> list[torch.Tensor]:
        return [self.weight.data] if self._forgets else [self.weight.data, self.scale]

    def set_eplb_state(self, moe_layer_idx: int, **tensors: Any) -> None:
        self.eplb_state.set_layer_state(moe_layer_idx, **tensors)


def transfer_nothing() -> None:
    """From now on vLLM's communicator on this rank neither sends nor receives."""
    eplb_communicator.batch_isend_irecv = lambda operations: []
    nixl_on_host.read_nothing()


def damage_each_fifth() -> None:
    """From now on every fifth expert that this rank sends, or reads by NIXL, has a wrong byte."""
    nixl_on_host.damage_each_fifth()
    for name in ("TorchDistGlooStagedEplbCommunicator", "TorchDistNcclEplbCommunicator"):
        _damage(getattr(eplb_communicator, name))


def _damage(communicator: Any) -> None:
    add_send, sent = communicator.add_send, []

    def damage(self: Any, tensors: Any, dst_rank: int, expert_id: int) -> None:
        sent.append(expert_id)
        if len(sent) % 5 == 0:
            tensors = [tensor.clone() for tensor in tensors]
            tensors[0].view(-1)[0] += 1
        add_send(self, tensors, dst_rank, expert_id)

    communicator.add_send = damage
