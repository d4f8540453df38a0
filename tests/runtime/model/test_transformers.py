"""Models of the ``transformers`` library over two gloo ranks: logits are the library's own."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.errors import CheckpointError, ConfigError
from rebalance.assembly.config import NetworkConfig, RankConfig
from rebalance.assembly.host_cache import build_host_cache
from rebalance.weights.cache.address import HostCacheAddress
from rebalance.weights.cache.cache_settings import HostCacheSettings
from runtime import Checkpoint, ExpertBank
from runtime.dispatch.all_to_all import Received
from runtime.experts import ExpertSchema
from runtime.model.transformers import (
    LibraryExperts,
    find_experts,
    library_schema,
    prove_experts,
)
from telemetry import open_store
from tests.support.models import library_models
from tests.support.models.library_models import CASES, Case, transformers
from tests.support.models.transformers_rank import ModelSetup, serve_models
from tests.support.two_ranks import begin_run

RunRanks = Callable[[int, Callable[[int], Any]], list[Any]]
MODELS = ("DeepSeek-V3, R1", "Qwen3-MoE", "gpt-oss")
TOPOLOGY = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=6)
# Slots 0..5 are rank 0's. A few experts change at first, then nearly all.
FIRST = [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]
SECOND = [0, 1, 2, 6, 4, 5, 6, 7, 0, 3, 2, 4]
THIRD = [7, 6, 5, 4, 3, 0, 5, 4, 3, 2, 1, 0]
ROUNDING = 2e-6  # of the largest logit, in float32: sums are made in another order


def case_of(name: str) -> Case:
    (found,) = (case for case in CASES if case.name == name)
    return found


def saved(name: str, folder: Path) -> Path:
    case = case_of(name)
    return library_models.save(case, library_models.build(case).float(), folder / name)


def placement(slots: list[int], num_layers: int, generation: int) -> Placement:
    return Placement(np.tile(slots, (num_layers, 1)), num_experts=8, generation=generation)


@pytest.mark.system
def test_logits_are_the_library_s_before_during_and_after_rebalances(
    tmp_path: Path, run_ranks: RunRanks
) -> None:
    setups = []
    with ExitStack() as stack:
        for number, name in enumerate(MODELS):
            folder = saved(name, tmp_path)
            checkpoint = Checkpoint(folder)
            shape = checkpoint.model_shape()
            model = getattr(transformers, case_of(name).model_class).from_pretrained(folder)
            cache = HostCacheAddress(f"transformers-{os.getpid()}-{number}", os.urandom(16))
            schema = library_schema(model, checkpoint)
            stack.enter_context(
                closing(build_host_cache(HostCacheSettings(), cache, shape, schema, folder))
            )
            url = f"sqlite:{tmp_path / f'{number}.sqlite'}"
            deployment = f"library-{number}"
            store = stack.enter_context(closing(open_store(url, deployment)))
            layers = shape.num_layers
            store.commit(placement(FIRST, layers, 0), expected=None, reason="start")
            network = NetworkConfig(interface="lo")
            config = RankConfig(deployment, sample_steps=4, staging_experts=6, network=network)
            targets = (placement(SECOND, layers, 1), placement(THIRD, layers, 2))
            run = f"run-{os.getpid()}-{number}"
            begin_run(store, run, model=shape, topology=TOPOLOGY)
            setups.append(ModelSetup(name, model, folder, config, cache, url, run, targets))
        found = run_ranks(2, partial(serve_models, topology=TOPOLOGY, setups=setups))

    for rank in found:
        for one, setup in zip(rank, setups, strict=True):
            assert one.num_proved == 6 * setup.targets[0].num_layers
            assert sorted(one.errors) == [0, 1, 2]
            assert max(one.errors.values()) <= ROUNDING * max(1.0, one.largest_logit)
            assert one.num_while_moving > 0
            assert one.num_moved > 0


# -- one process


@dataclass(frozen=True)
class Loaded:
    """A model of the library, and a bank whose slot s of every layer holds expert (3 s) mod 8."""

    model: Any
    checkpoint: Checkpoint
    bank: ExpertBank
    held: list[tuple[int, int, int]]


@pytest.fixture(scope="module", params=MODELS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    case = case_of(request.param)
    model = library_models.build(case).float()
    folder = library_models.save(case, model, tmp_path_factory.mktemp("library") / "model")
    checkpoint = Checkpoint(folder)
    schema, layers = library_schema(model, checkpoint), checkpoint.moe_layers
    bank = ExpertBank(schema, len(layers), num_slots=8, num_staging=0)
    held = [(n, slot, 3 * slot % 8) for n in range(len(layers)) for slot in range(8)]
    for number, slot, expert in held:
        checkpoint.repack(layers[number], expert, schema, bank.live(number, slot))
    return Loaded(model, checkpoint, bank, held)


def test_slots_hold_the_bytes_of_the_library_s_parameters(loaded: Loaded) -> None:
    assert prove_experts(loaded.model, loaded.bank, loaded.held) == len(loaded.held)


def test_slot_with_another_expert_is_refused_with_its_tensor(loaded: Loaded) -> None:
    layer = loaded.checkpoint.moe_layers[0]

    with pytest.raises(
        CheckpointError, match=rf"layer {layer} expert 4: gate_up_proj in slot 1 differs from model"
    ):
        prove_experts(loaded.model, loaded.bank, [(0, 1, 4)])


def test_bank_of_another_schema_is_refused_with_both_tensor_names(loaded: Loaded) -> None:
    other = ExpertBank(ExpertSchema.swiglu(hidden=32, intermediate=16), 1, 1, num_staging=1)

    with pytest.raises(
        ConfigError,
        match=r"found tensors down, gate_up, expected down_proj, .*gate_up_proj.* as in model",
    ):
        prove_experts(loaded.model, other, [(0, 0, 0)])


@pytest.mark.parametrize("is_padded", [False, True])
def test_rows_of_slots_give_what_the_library_computes(loaded: Loaded, is_padded: bool) -> None:
    counts = torch.tensor([3, 0, 1, 2, 0, 0, 5, 1])
    tokens = torch.randn((12, 32), generator=torch.Generator().manual_seed(2))
    slots = torch.arange(8).repeat_interleave(counts)
    rows, is_filled = tokens, torch.arange(6) < counts[:, None]
    if is_padded:
        rows = torch.full((8, 6, 32), torch.nan)  # beyond a slot's count there may be anything
        rows[is_filled] = tokens

    for number, one in enumerate(find_experts(loaded.model)):
        over_slots = LibraryExperts([one], [loaded.bank.weights(number)])
        found = over_slots.run(0, Received(rows, counts, ticket=None))
        with torch.no_grad():
            expected = one.module(tokens, (3 * slots % 8)[:, None], torch.ones(12, 1))
            others = one.module(tokens, slots[:, None], torch.ones(12, 1))

        assert torch.allclose(found[is_filled] if is_padded else found, expected, atol=1e-6)
        assert (expected - others).abs().max() > 0.1  # another expert would be noticed


def test_model_without_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match="Linear has no experts module with a parameter gate_up"):
        find_experts(torch.nn.Linear(2, 2))


def test_experts_without_computation_are_refused() -> None:
    """LongCat-Flash gives them ids that no slot has."""
    model = library_models.build(case_of("LongCat-Flash"))

    with pytest.raises(ConfigError, match=r"gate_up_proj': 12, 'down_proj': 8.* same number every"):
        find_experts(model)


def test_checkpoint_of_another_precision_is_refused(loaded: Loaded) -> None:
    half = copy.deepcopy(loaded.model).to(torch.bfloat16)

    with pytest.raises(
        CheckpointError,
        match=r"gate_up_proj \[.*\] torch.bfloat16.* expected .* torch.float32.* as in",
    ):
        library_schema(half, loaded.checkpoint)
