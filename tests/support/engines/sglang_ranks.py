"""Ranks of SGLang's real balancer on a CPU, with gloo between them.

Manager, recorder, map, dispatch, updater and plug-in loader are the engine's own. Replaced are the
model (a class with expert weights), its description, and calls of a device module.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if find_spec("sglang") is None:
    pytest.skip(
        "run `make test-engines`: it has sglang 0.5.23 in .venv-sglang", allow_module_level=True
    )

# First: the engine imports torchvision.
import tests.support.engines.cpu_torchvision  # noqa: F401  # isort: skip
import numpy as np
import sglang.srt.plugins as plugins
import torch
import torch.distributed as dist
from sglang.srt.eplb import (
    eplb_manager,
    expert_distribution,
    expert_location,
    expert_location_dispatch,
)
from sglang.srt.eplb.expert_location import ExpertLocationMetadata, ModelConfigForExpertLocation
from sglang.srt.eplb.expert_location_updater import ExpertLocationUpdater
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.utils.common import LazyValue

from rebalance.engines.sglang import hooks, rounds
from tests.support.engines.ranks import (
    EACH,
    INTERVAL,
    NUM_EXPERTS,
    NUM_RANKS,
    NUM_SLOTS,
    EngineRank,
    Experts,
)
from tests.support.limits import NEVER_S

NAME = "sglang"
ALL_LAYERS = 4
DENSE = 0  # the layer without routed experts
MOE = [1, 2, 3]
PARTS = ("plugin",)  # gauges of what has to stay on
ROWS, TOP_K = 128, 2  # of one pass on one rank
# How the engine is started, and how many maps a test of it takes.
WAYS: dict[str, tuple[dict[str, Any], int]] = {
    "static": ({}, 100),
    "dynamic": ({"ep_dispatch_algorithm": "dynamic"}, 100),
    "static in chunks": ({"chunk": 1}, 10),
    "dynamic without all-to-all": (
        {"ep_dispatch_algorithm": "dynamic", "moe_a2a_backend": "none"},
        10,
    ),
}
WITH_TASKS_ALONE = {"eplb_rebalance_num_iterations": 10**6}  # no interval ends in a test
torch.set_num_threads(1)


class Model(torch.nn.Module):
    """Layers of one rank, and what of them the engine moves; ``forgets``: not their scales."""

    def __init__(self, rank: int, held: torch.Tensor, *, forgets: bool = False) -> None:
        super().__init__()
        own = held[:, rank * EACH : (rank + 1) * EACH].tolist()
        self.layers = torch.nn.ModuleList(Experts(layer, own[layer]) for layer in MOE)
        # As in the engine's Qwen3MoeForCausalLM; its DeepSeek models have a dict.
        self.routed_experts_weights_of_layer = LazyValue(
            lambda: {
                layer: [one.weight.data] if forgets else [one.weight.data, one.scale]
                for layer, one in zip(MOE, self.layers, strict=True)
            }
        )


class Rank(EngineRank):
    """One rank of the engine."""

    engine = NAME

    def __init__(self, rank: int, model: Any, manager: Any, rounds: Any) -> None:
        self.rank, self.model, self.manager = rank, model, manager
        self.plugin = rounds
        self.generator = torch.Generator().manual_seed(rank)
        self.mode = ForwardMode.DECODE

    @property
    def map(self) -> ExpertLocationMetadata:
        return expert_location.get_global_expert_location_metadata()

    @property
    def held(self) -> np.ndarray:
        held = self.map.physical_to_logical_map
        assert torch.equal(held, self.map.physical_to_logical_map_cpu), "two maps"
        return held.numpy()

    @property
    def lists(self) -> list[Any]:
        # The engine's initial lists differ by rank; without routed experts they stay.
        return self.map.logical_to_all_physical_map[MOE].tolist()

    @property
    def weighs_replicas(self) -> bool:
        return int(self.map.logical_to_all_physical_map_num_valid.max()) > NUM_RANKS

    @property
    def layers(self) -> dict[int, list[torch.Tensor]]:
        return dict(self.model.routed_experts_weights_of_layer.items())

    @property
    def is_on(self) -> bool:
        return self.plugin is not None

    @property
    def stopped(self) -> str:  # type: ignore[override]
        return "" if self.plugin is None else self.plugin.stopped

    @property
    def is_moving(self) -> bool:  # type: ignore[override]
        return self.recorder.ready is not None or bool(self.plugin._chunks)

    def close(self) -> None:
        self.plugin.close()

    def forward(self, popularity: np.ndarray) -> None:
        recorder = expert_distribution.get_global_expert_distribution_recorder()
        with recorder.with_forward_pass(self.passes + 1, SimpleNamespace(forward_mode=self.mode)):
            for layer in MOE:
                with recorder.with_current_layer(layer):
                    recorder.on_select_experts(self.choose(layer, popularity[layer]))
        self.manager.on_forward_pass_end()

    def choose(self, layer: int, popularity: np.ndarray) -> torch.Tensor:
        """Slots of the experts of a batch, by the engine's own rule."""
        weight = torch.from_numpy(popularity).expand(ROWS, -1)
        experts = torch.multinomial(weight, TOP_K, generator=self.generator)
        info = expert_location_dispatch.ExpertLocationDispatchInfo.init_new(layer)
        slots = expert_location_dispatch.topk_ids_logical_to_physical(experts, info)
        # A list or a table that names a slot without its expert would be a wrong answer of the
        # model.
        assert torch.equal(self.map.physical_to_logical_map[layer, slots], experts), "wrong slot"
        return slots


def make_rank(
    rank: int,
    config: Path | None,
    *,
    chunk: int | None = None,
    forgets: bool = False,
    **flags: Any,
) -> Rank:
    """Start the engine's balancer in this process, with the plug-in if a file is given."""
    if config is not None:
        os.environ["EPLB_CONFIG"] = str(config)
    flags = {
        "ep_dispatch_algorithm": "static",
        "moe_a2a_backend": "deepep",
        "eplb_rebalance_num_iterations": INTERVAL,
    } | flags
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
        **flags,
    ).install()
    get_parallel().override_permanently(tp_rank=rank, moe_ep_rank=rank)
    hooks.ROUND_DEADLINE_S = rounds.CLOSE_S = NEVER_S  # a busy machine is no fault of the plug-in
    torch.cpu.empty_cache = lambda: None  # type: ignore[attr-defined]
    expert_distribution.get_device = lambda: "cpu"
    shape = ModelConfigForExpertLocation(ALL_LAYERS, NUM_EXPERTS, None)
    ModelConfigForExpertLocation.from_model_config = staticmethod(lambda config: shape)
    plugins.load_plugins()
    live = ExpertLocationMetadata.init_trivial(None, rank)
    expert_location.set_global_expert_location_metadata(live)
    recorder = expert_distribution.ExpertDistributionRecorder.init_new(live, rank)
    expert_distribution.set_global_expert_distribution_recorder(recorder)
    model = Model(rank, live.physical_to_logical_map, forgets=forgets)
    updater = ExpertLocationUpdater()
    manager = eplb_manager.EPLBManager(
        model_config=None,
        get_model=lambda: model,
        get_expert_location_updater=lambda: updater,
        get_expert_backup_client=lambda: None,
        get_weight_updater=lambda: SimpleNamespace(update_weights_from_disk=None),
    )
    target = "sglang.srt.eplb.eplb_manager.EPLBManager.on_forward_pass_end"
    found = [hook.__self__.rounds for _, hook, _ in HookRegistry._hooks.get(target, ())]
    return Rank(rank, model, manager, found[0] if found else None)


def watched(made: Rank) -> list[Any]:
    """Nothing: what the plug-in does after a pass has collectives, which wait for other ranks."""
    return []


def damage_each_fifth() -> None:
    """From now on every fifth tensor that this rank sends to a peer has a wrong byte."""
    exchange, sent = dist.batch_isend_irecv, []

    def damaged(operations: list[Any]) -> Any:
        for one in operations:
            if one.op is dist.isend:
                sent.append(one)
                if len(sent) % 5 == 0:
                    one.tensor = one.tensor.clone()
                    one.tensor.view(-1)[0] += 1
        return exchange(operations)

    dist.batch_isend_irecv = damaged
