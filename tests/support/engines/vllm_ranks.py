"""Ranks of the real vLLM ``EplbState`` in forked processes on a CPU, with gloo between them.

What vLLM takes from an accelerator is replaced: events, streams, pinned memory and the groups of
its parallel state. All of the balancer is vLLM's own: state, worker, moves, commits.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from eplb.core.cost import CostModel
from eplb.core.problem import Budget
from eplb.settings.deployment import WindowSettings
from rebalance.engines.common.plugin_settings import EngineSettings, PluginSettings

NUM_RANKS, NUM_LAYERS, NUM_EXPERTS, NUM_SLOTS = 4, 3, 16, 24
ROWS, TOP_K = 256, 2  # of one pass on one rank


class Event:
    """In place of an event of a device."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.at = 0.0

    def record(self, stream: object = None) -> None:
        self.at = time.monotonic()

    def wait(self, stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return (other.at - self.at) * 1e3


class Stream:
    """In place of a stream of a device."""

    def synchronize(self) -> None:
        pass


@contextlib.contextmanager
def no_stream(stream: object) -> Iterator[None]:
    yield


def weights_of(layer: int, expert: int) -> list[torch.Tensor]:
    """The tensors of one expert: another one has other bytes in each."""
    salt = layer * 1000 + expert
    wide = torch.arange(32, dtype=torch.float32) + 100.0 * salt
    scales = (torch.arange(6) * 7 + salt).to(torch.uint8)
    return [wide, scales]


@dataclass
class Rank:
    """One rank: vLLM's state over a model, and the plug-in if it is installed."""

    rank: int
    state: Any
    model: Any
    process: Any  # PluginProcess; None without the plug-in
    uninstall: Callable[[], None] | None

    @property
    def model_state(self) -> Any:
        """Of the target model, which vLLM adds last."""
        return list(self.state.model_states.values())[-1]

    def forward(self, seed: int, popularity: Any) -> None:
        """Route a pass of each model by vLLM's rule, and count as its kernel does."""
        drawn = np.random.default_rng((seed, self.rank))
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
        """The canary: each local slot has the bytes of the expert that its map names.

        Args:
            added: to every number since the load.
        """
        num_local = NUM_SLOTS // NUM_RANKS
        for found in self.state.model_states.values():
            held, model = found.physical_to_logical_map, found.model
            for layer, weights in enumerate(model.expert_weights):
                for row in range(num_local):
                    expert = int(held[layer, self.rank * num_local + row])
                    expected = weights_of(model.moe_layers[layer].number, expert)
                    for tensor, own in zip(weights, expected, strict=True):
                        assert torch.equal(tensor[row], own + added), (layer, row, expert)


@dataclass(frozen=True)
class Spent:
    """What one call of a part of the plug-in took of a step."""

    elapsed_ms: float
    num_waits: int  # times that the thread gave the processor up
    num_preemptions: int  # times that the kernel took it


def watched(process: Any) -> list[Spent]:
    """Record every call that the plug-in makes on the thread of vLLM's steps."""
    found: list[Spent] = []

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


def popularity_of(seed: int) -> Any:
    """[L, E] skewed chances of experts; another seed has other hot ones."""
    drawn = np.random.default_rng(seed).lognormal(0.0, 1.2, (NUM_LAYERS, NUM_EXPERTS))
    return drawn / drawn.sum(axis=1, keepdims=True)


def settings_for(store: str, **engine: Any) -> PluginSettings:
    """Settings by which every gain pays, so that plans move experts."""
    chosen = EngineSettings(
        **{"max_moved": 1.0, "phase": "decode", "load_deadline_s": 30.0} | engine
    )
    return PluginSettings(
        "contract",
        store,
        chosen,
        CostModel(pay_back_s=1e9),
        Budget(target_imbalance=1.0),
        WindowSettings(sample_steps=4, window_steps=8),
    )


def make_rank(
    rank: int,
    meet: Path,
    settings: PluginSettings | None,
    *,
    is_async: bool,
    interval: int = 8,
    prepare: Callable[[int, list[Layer]], None] | None = None,
    has_draft: bool = False,
) -> Rank:
    """Form the group, install the plug-in, and add a model to a real ``EplbState``.

    Args:
        rank: of this process.
        meet: file of the rendezvous.
        settings: of the plug-in; None: without it.
        is_async: whether vLLM moves experts in its own thread.
        interval: steps from one rebalance to the next.
        prepare: changes the layers of this rank after they were loaded.
        has_draft: whether a draft model with experts is added before, as vLLM does.
    """
    from vllm.distributed.eplb import (
        async_worker,
        eplb_communicator,
        eplb_state,
        eplb_utils,
        rebalance_execute,
    )
    from vllm.model_executor.models.interfaces import MixtureOfExperts

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=NUM_RANKS)
    group = coordinator(rank)
    balancing = coordinator(rank)
    torch.Event = Event  # type: ignore[misc, assignment]
    for module in (async_worker, eplb_communicator, rebalance_execute, eplb_utils):
        module.device_stream = no_stream
    for module in (eplb_state, async_worker):
        module.get_eplb_group = lambda: balancing
    eplb_state.get_ep_group = lambda: group
    eplb_state.get_node_count = lambda: 1
    eplb_state.PIN_MEMORY = eplb_communicator.PIN_MEMORY = False
    eplb_communicator.is_local_first_rank = lambda: False

    held = eplb_state.EplbState.build_initial_global_physical_to_logical_map(
        NUM_EXPERTS, NUM_SLOTS - NUM_EXPERTS
    )
    own = held[rank * NUM_SLOTS // NUM_RANKS :][: NUM_SLOTS // NUM_RANKS]
    layers = [Layer(number, own, eplb_state) for number in range(NUM_LAYERS)]
    if prepare is not None:
        prepare(rank, layers)

    class Model(MixtureOfExperts):
        num_expert_groups = 1
        num_logical_experts = num_routed_experts = NUM_EXPERTS
        num_physical_experts, num_local_physical_experts = NUM_SLOTS, NUM_SLOTS // NUM_RANKS
        num_shared_experts, num_redundant_experts = 0, NUM_SLOTS - NUM_EXPERTS

        def __init__(self, layers: list[Layer]) -> None:
            self.moe_layers, self.num_moe_layers = layers, len(layers)

    process = uninstall = None
    if settings is not None:
        from rebalance.engines.vllm.hooks import install
        from rebalance.engines.vllm.process import PluginProcess

        process = PluginProcess(settings)
        uninstall = install(process)
    config = SimpleNamespace(
        window_size=interval, step_interval=interval, use_async=is_async, policy="default",
        communicator="torch_gloo", log_balancedness_interval=1, migration_batching_enabled=False,
    )  # fmt: skip
    parallel = SimpleNamespace(
        eplb_config=config, enable_elastic_ep=False, num_ubatches=0, data_parallel_size=1
    )
    state = eplb_state.EplbState(parallel, torch.device("cpu"))
    model = Model(layers)
    if has_draft:
        draft = Model([Layer(NUM_LAYERS, own, eplb_state)])
        state.add_model(draft, configuration("draft"), model_name="contract (draft)")
    state.add_model(model, configuration("generate"))
    made = Rank(rank, state, model, process, uninstall)
    for found in state.model_states.values():
        found.communicator.set_stream(Stream())
    if is_async:
        run = async_worker.transfer_run_periodically
        state.async_worker = threading.Thread(target=run, args=(state, Stream()), daemon=True)
        state.async_worker.start()
    return made


def configuration(runner: str) -> Any:
    """What the balancer and the plug-in use of vLLM's ``ModelConfig``."""
    return SimpleNamespace(model="contract", runner_type=runner, compute_hash=lambda: runner)


def coordinator(rank: int) -> Any:
    """What the balancer uses of vLLM's ``GroupCoordinator``."""
    ranks = list(range(NUM_RANKS))
    cpu, device = dist.new_group(ranks), dist.new_group(ranks)
    return SimpleNamespace(
        ranks=ranks, rank_in_group=rank, world_size=NUM_RANKS, cpu_group=cpu, device_group=device,
        device_communicator=None,
    )  # fmt: skip


class Layer(torch.nn.Module):
    """A layer as the model's protocol asks for it, with the weights of its local experts."""

    top_k = TOP_K

    def __init__(self, number: int, experts: Any, eplb_state: Any) -> None:
        super().__init__()
        self.number, self.layer_name = number, f"model.layers.{number + 3}.mlp.experts"
        self.eplb_state = eplb_state.EplbLayerState()
        wide, scales = zip(*(weights_of(number, expert) for expert in experts), strict=True)
        self.register_buffer("wide", torch.stack(wide))
        self.register_buffer("scales", torch.stack(scales))

    def get_expert_weights(self) -> list[torch.Tensor]:
        return [self.wide, self.scales]

    def set_eplb_state(self, moe_layer_idx: int, **tensors: Any) -> None:
        self.eplb_state.set_layer_state(moe_layer_idx, **tensors)


Scenario = Callable[..., Any]


def on_ranks(scenario: Scenario, *args: Any) -> list[Any]:
    """Run ``scenario(rank, meet, *args)`` in a process for each rank, and return their results.

    Processes are forked, because an import of vLLM takes half a minute.
    """
    import vllm.distributed.eplb.eplb_state  # noqa: F401

    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        meet = Path(folder) / "meet"
        pipes = [fork.Pipe(duplex=False) for _ in range(NUM_RANKS)]
        ranks = [
            fork.Process(target=_run, args=(pipe[1], scenario, rank, meet, *args), daemon=True)
            for rank, pipe in enumerate(pipes)
        ]
        for process in ranks:
            process.start()
        try:
            return [_result(rank, pipe[0]) for rank, pipe in enumerate(pipes)]
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _run(pipe: Any, scenario: Scenario, rank: int, meet: Path, *args: Any) -> None:
    try:
        pipe.send(("ok", scenario(rank, meet, *args)))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
    finally:
        pipe.close()
        os._exit(0)  # threads of the engine never end


def _result(rank: int, pipe: Any) -> Any:
    outcome, value = pipe.recv()
    assert outcome == "ok", f"rank {rank}:\n{value}"
    return value


__all__ = ["make_rank", "on_ranks", "popularity_of", "replace", "settings_for", "watched"]
