"""Ranks of SGLang's real balancer in forked processes on a CPU, with gloo between them.

Manager, recorder, map, dispatch, updater and plug-in loader are the engine's own. Replaced are the
model (a class with expert weights), its description, and calls of a device module.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# First: the engine imports torchvision.
import tests.support.engines.cpu_torchvision  # noqa: F401  # isort: skip
import numpy as np
import sglang.srt.plugins as plugins
import torch
import torch.distributed as dist
from sglang.srt.eplb import eplb_manager, expert_distribution, expert_location
from sglang.srt.eplb.expert_location import ExpertLocationMetadata, ModelConfigForExpertLocation
from sglang.srt.eplb.expert_location_dispatch import (
    ExpertLocationDispatchInfo,
    topk_ids_logical_to_physical,
)
from sglang.srt.eplb.expert_location_updater import ExpertLocationUpdater
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_context, get_parallel

from rebalance.engines.sglang import hooks
from tests.support.limits import NEVER_S

NUM_RANKS, NUM_LAYERS, NUM_EXPERTS, NUM_SLOTS = 4, 4, 16, 24
DENSE = (0,)  # layers without routed experts
ROWS, TOP_K = 128, 2  # of one pass on one rank
INTERVAL, WINDOW = 8, 4  # passes
torch.set_num_threads(1)


def config_text(store: str, **engine: Any) -> str:
    """A deployment's file."""
    settings = "".join(f"{name} = {value}\n" for name, value in engine.items())
    return (
        f'[deployment]\nname = "test"\nstore = "{store}"\n'
        f"[telemetry]\nsample_steps = {WINDOW}\nwindow_steps = {WINDOW}\n"
        "[planner]\npay_back_s = 1e9\ntarget_imbalance = 1.0\n"
        f"[engine]\nmax_moved = 1.0\n{settings}"
    )


class Experts(torch.nn.Module):
    """Expert weights and scales of one layer and rank: every expert has other bytes in each."""

    def __init__(self, layer: int, held: list[int], factor: float) -> None:
        super().__init__()
        wide, scale = (
            torch.stack([weights_of(layer, expert)[one] for expert in held]) for one in range(2)
        )
        self.weight = torch.nn.Parameter(wide, requires_grad=False)
        self.register_buffer("scale", scale)
        self.factor = torch.tensor(factor)


class Model(torch.nn.Module):
    """Layers of one rank, and what of them the engine moves.

    Args:
        forgets: whether scales are left out of what is moved.
        factor: that this rank derived from its weights.
    """

    def __init__(
        self, rank: int, held: torch.Tensor, *, forgets: bool = False, factor: float = 1.0
    ) -> None:
        super().__init__()
        self._rank, self._forgets, self._factor = rank, forgets, factor
        self.load(held)

    def load(self, held: torch.Tensor) -> None:
        """Load the weights as a map [L, S] says, as a loader does at the start."""
        each = NUM_SLOTS // NUM_RANKS
        own = held[:, self._rank * each : (self._rank + 1) * each].tolist()
        moe = [layer for layer in range(NUM_LAYERS) if layer not in DENSE]
        experts = [Experts(layer, own[layer], self._factor) for layer in moe]
        self.layers = torch.nn.ModuleList(experts)
        self.routed_experts_weights_of_layer = {
            layer: [one.weight.data] if self._forgets else [one.weight.data, one.scale]
            for layer, one in zip(moe, self.layers, strict=True)
        }


def weights_of(layer: int, expert: int) -> list[torch.Tensor]:
    """The tensors of one expert."""
    salt = layer * 1000 + expert
    return [torch.arange(16) + 100.0 * salt, (torch.arange(6) * 7 + salt).to(torch.uint8)]


@dataclass
class Rank:
    """One rank of the engine."""

    rank: int
    model: Any
    manager: Any
    rounds: Any  # of the plug-in; None where it is off
    generator: torch.Generator
    passes: int = 0

    @property
    def map(self) -> ExpertLocationMetadata:
        return expert_location.get_global_expert_location_metadata()

    def forward(self, popularity: np.ndarray, mode: ForwardMode = ForwardMode.DECODE) -> None:
        """One pass: route, choose replicas, record, and what the engine does at its end."""
        recorder = expert_distribution.get_global_expert_distribution_recorder()
        batch = SimpleNamespace(forward_mode=mode)
        self.passes += 1
        with recorder.with_forward_pass(self.passes, batch):
            for layer in range(NUM_LAYERS):
                if layer in DENSE:
                    continue
                with recorder.with_current_layer(layer):
                    recorder.on_select_experts(self.choose(layer, popularity))
        self.manager.on_forward_pass_end()

    def choose(self, layer: int, popularity: np.ndarray, rows: int = ROWS) -> torch.Tensor:
        """Slots of the experts of a batch, by the engine's own rule."""
        weight = torch.from_numpy(popularity).expand(rows, -1)
        experts = torch.multinomial(weight, TOP_K, generator=self.generator)
        slots = topk_ids_logical_to_physical(experts, ExpertLocationDispatchInfo.init_new(layer))
        # A list or a table that names a slot without its expert would be a wrong answer of the
        # model.
        assert torch.equal(self.map.physical_to_logical_map[layer, slots], experts), "wrong slot"
        return slots

    def check_weights(self) -> None:
        """Every live slot has the bytes of the expert that the map names."""
        each = NUM_SLOTS // NUM_RANKS
        for layer, tensors in self.model.routed_experts_weights_of_layer.items():
            held = self.map.physical_to_logical_map[layer].tolist()
            assert held == self.map.physical_to_logical_map_cpu[layer].tolist(), "two maps"
            for slot in range(each):
                expert = held[self.rank * each + slot]
                for one, expected in zip(tensors, weights_of(layer, expert), strict=True):
                    assert torch.equal(one[slot], expected), f"layer {layer} slot {slot}: {expert}"


def popularity_of(seed: int) -> np.ndarray:
    """Lognormal popularity of the experts."""
    return np.random.default_rng(seed).lognormal(0, 1.0, NUM_EXPERTS)


def make_rank(
    rank: int,
    *,
    config: Path | None,
    chunk: int | None = None,
    model: dict[str, Any] | None = None,
    **flags: Any,
) -> Rank:
    """Start the engine's balancer in this process, with the plug-in if a file is given."""
    if config is not None:
        os.environ["EPLB_CONFIG"] = str(config)
    flags = {"ep_dispatch_algorithm": "static", "moe_a2a_backend": "deepep"} | flags
    get_context().override_server_args(
        device="cpu",
        ep_size=NUM_RANKS,
        tp_size=NUM_RANKS,
        enable_eplb=True,
        ep_num_redundant_experts=NUM_SLOTS - NUM_EXPERTS,
        deepep_mode="normal",
        init_expert_location="trivial",
        expert_distribution_recorder_mode="stat",
        expert_distribution_recorder_buffer_size=INTERVAL,
        eplb_rebalance_layers_per_chunk=chunk,
        **{"eplb_rebalance_num_iterations": INTERVAL} | flags,
    ).install()
    get_parallel().override_permanently(tp_rank=rank, moe_ep_rank=rank)
    hooks.ROUND_DEADLINE_S = NEVER_S  # a busy machine is no fault of the plug-in
    torch.cpu.empty_cache = lambda: None  # type: ignore[attr-defined]
    expert_distribution.get_device = lambda: "cpu"
    shape = ModelConfigForExpertLocation(NUM_LAYERS, NUM_EXPERTS, None)
    ModelConfigForExpertLocation.from_model_config = staticmethod(lambda config: shape)
    plugins.load_plugins()
    live = ExpertLocationMetadata.init_trivial(None, rank)
    expert_location.set_global_expert_location_metadata(live)
    recorder = expert_distribution.ExpertDistributionRecorder.init_new(live, rank)
    expert_distribution.set_global_expert_distribution_recorder(recorder)
    made, updater = (
        Model(rank, live.physical_to_logical_map, **model or {}),
        ExpertLocationUpdater(),
    )
    manager = eplb_manager.EPLBManager(
        model_config=None,
        get_model=lambda: made,
        get_expert_location_updater=lambda: updater,
        get_expert_backup_client=lambda: None,
        get_weight_updater=lambda: SimpleNamespace(update_weights_from_disk=None),
    )
    return Rank(rank, made, manager, rounds_of(), torch.Generator().manual_seed(rank))


def rounds_of() -> Any:
    """The rounds of the plug-in in this process; None where it is off."""
    for _, hook, _source in HookRegistry._hooks.get(
        "sglang.srt.eplb.eplb_manager.EPLBManager.on_forward_pass_end", ()
    ):
        return hook.__self__.rounds
    return None


def on_ranks(
    work: Callable[..., Any],
    *args: Any,
    num_ranks: int = NUM_RANKS,
) -> list[Any]:
    """Run ``work(rank, *args)`` in forked ranks with a gloo group, and return what each returns."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    pipes, children = [], []
    for rank in range(num_ranks):
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(theirs, port, rank, num_ranks, work, args))
        child.start()
        theirs.close()
        pipes.append(ours)
        children.append(child)
    try:
        found = [pipe.recv() for pipe in pipes]
        failed = [f"rank {rank}: {one[1]}" for rank, one in enumerate(found) if not one[0]]
        assert not failed, "\n".join(failed)
        return [one[1] for one in found]
    finally:
        for child in children:
            child.kill()
            child.join()


def _child(pipe: Any, port: int, rank: int, num_ranks: int, work: Any, args: Any) -> None:
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=NEVER_S),
        )
        pipe.send((True, work(rank, *args)))
        dist.barrier()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
        os._exit(0)
