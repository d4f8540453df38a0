"""Families that the ``transformers`` library has: what it saves is what the reader finds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from eplb.errors import CheckpointError
from runtime import Checkpoint, ExpertSchema
from runtime.checkpoints.checkpoint import transformers_schema
from runtime.checkpoints.families import FAMILIES
from tests.support.models import library_models
from tests.support.models.library_models import CASES, HIDDEN, INTERMEDIATE, NUM_EXPERTS, Case
from tests.support.models.routers import Router, Scoring

LEAST_FAMILIES = 16


@dataclass(frozen=True)
class Saved:
    """A model of the library, and its checkpoint as the reader opens it."""

    case: Case
    experts: dict[int, Any]  # the library's modules, by layer
    model: torch.nn.Module
    checkpoint: Checkpoint


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    case: Case = request.param
    model = library_models.build(case)
    folder = library_models.save(case, model, tmp_path_factory.mktemp("family") / "model")
    return Saved(case, library_models.expert_modules(model), model, Checkpoint(folder))


def matrices(saved: Saved, layer: int, expert: int) -> dict[str, torch.Tensor]:
    """Gate, up and down [out, in] of one expert, from the library's own parameters."""
    module = saved.experts[layer]
    gate_up, down = module.gate_up_proj[expert], module.down_proj[expert]
    if gate_up.shape[0] == HIDDEN:  # [in, out]
        gate_up, down = gate_up.T, down.T
    is_interleaved = saved.case.name == "gpt-oss"
    gate, up = (gate_up[0::2], gate_up[1::2]) if is_interleaved else gate_up.chunk(2)
    return {"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": down}


def test_families_proved_are_those_that_are_not_marked() -> None:
    proved = {case.family or case.name for case in CASES}
    marked = {family.name for family in FAMILIES if family.unproven}
    own = {"eplb's own model"}

    assert len(proved) >= LEAST_FAMILIES
    assert proved | marked | own == {family.name for family in FAMILIES}
    assert not proved & marked


def test_family_and_its_moe_layers_are_recognised(saved: Saved) -> None:
    assert saved.checkpoint.config.family.name == (saved.case.family or saved.case.name)
    assert saved.checkpoint.moe_layers == saved.case.moe_layers == tuple(saved.experts)
    assert saved.checkpoint.mtp_layers == ()


def test_figures_of_the_model_shape_are_those_of_its_config(saved: Saved) -> None:
    shape = saved.checkpoint.model_shape()
    module = saved.experts[shape.layer_ids[0]]

    assert (shape.num_experts, shape.hidden, shape.intermediate) == (8, HIDDEN, INTERMEDIATE)
    assert shape.expert_bytes == sum(
        parameter[0].nbytes for parameter in module.parameters(recurse=False)
    )
    saved.checkpoint.check(shape, saved.checkpoint.schema())


def test_every_expert_is_read_byte_for_byte(saved: Saved) -> None:
    schema = ExpertSchema.swiglu(HIDDEN, INTERMEDIATE, torch.bfloat16)
    record = torch.full((schema.record_bytes,), 0xA5, dtype=torch.uint8)

    for layer in saved.experts:
        for expert in range(NUM_EXPERTS):
            expected = matrices(saved, layer, expert)
            saved.checkpoint.repack(layer, expert, schema, record)

            for part, matrix in expected.items():
                assert torch.equal(saved.checkpoint.part(layer, expert, part), matrix), part
            views = schema.views(record)
            gate_up = torch.cat([expected["gate_proj.weight"], expected["up_proj.weight"]])
            assert torch.equal(views["gate_up"], gate_up)
            assert torch.equal(views["down"], expected["down_proj.weight"])


def test_record_in_the_library_s_layout_holds_its_parameters(saved: Saved) -> None:
    schema = transformers_schema(saved.checkpoint)
    record = torch.full((schema.record_bytes,), 0xA5, dtype=torch.uint8)
    saved.checkpoint.check(saved.checkpoint.model_shape(), schema)

    for layer, module in saved.experts.items():
        own = dict(module.named_parameters(recurse=False))
        for expert in range(NUM_EXPERTS):
            saved.checkpoint.repack(layer, expert, schema, record)

            views = schema.views(record)
            assert views.keys() == own.keys()
            for name, parameter in own.items():
                assert torch.equal(views[name], parameter[expert]), name


def test_record_as_stored_holds_the_bytes_of_the_files(saved: Saved) -> None:
    schema, checkpoint = saved.checkpoint.schema(), saved.checkpoint
    record = torch.full((schema.record_bytes,), 0xA5, dtype=torch.uint8)

    for layer in saved.experts:
        for expert in range(NUM_EXPERTS):
            checkpoint.repack(layer, expert, schema, record)

            end = 0
            for spec, start in schema.spans():
                assert not record[end:start].any()
                end = start + spec.num_bytes
                where = checkpoint.range(layer, expert, spec.name)
                with safe_open(checkpoint.path / where.file, framework="pt") as file:
                    tensor = file.get_tensor(where.name)
                if tensor.shape != spec.shape:
                    tensor = tensor[expert]
                raw = tensor.contiguous().view(torch.uint8).flatten()
                assert torch.equal(record[start:end], raw), spec.name
            assert not record[end:].any()


def test_router_is_read_byte_for_byte(saved: Saved) -> None:
    state = saved.model.state_dict()

    for layer in saved.experts:
        own = [tensor for name, tensor in state.items() if f"layers.{layer}." in name]
        router = saved.checkpoint.router(layer)
        assert "weight" in router
        for role, found in router.items():
            # Every number was drawn at random, so that equal bytes are the same tensor.
            same = [t for t in own if t.shape == found.shape and t.dtype == found.dtype]
            assert any(torch.equal(found, tensor) for tensor in same), role


def test_everything_else_is_dense_and_nothing_is_missed(saved: Saved) -> None:
    dense = saved.checkpoint.dense_weights()
    files = saved.checkpoint.path.glob("*.safetensors")
    total = 0
    for path in files:
        with safe_open(path, framework="pt") as file:
            total += sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118

    shape = saved.checkpoint.model_shape()
    routed = shape.num_layers * shape.num_experts * shape.expert_bytes
    unused = 4 * shape.num_layers * 2 * INTERMEDIATE * HIDDEN * 2  # of the library's LongCat
    assert sum(tensor.nbytes for tensor in dense.values()) + routed == total - (
        unused if saved.case.name == "LongCat-Flash" else 0
    )


def test_expert_or_layer_that_there_is_not_is_refused(saved: Saved) -> None:
    some = saved.checkpoint.moe_layers[0]
    others = [(layer, 0) for layer in set(range(4)) - set(saved.experts)]

    for layer, expert in [*others, (some, NUM_EXPERTS)]:
        with pytest.raises(CheckpointError, match=f"layer {layer} has no"):
            saved.checkpoint.part(layer, expert, "down_proj.weight")


NUM_TOKENS = 1000
ROUNDING = 1e-6

ROUTERS: dict[str, dict[str, Any]] = {
    "DeepSeek-V3, R1": {
        "scoring": Scoring.SIGMOID,
        "num_groups": 2,
        "top_groups": 1,
        "is_normalised": True,
        "scale": 2.5,
    },
    "Qwen3-MoE": {"scoring": Scoring.SOFTMAX},
    "Mixtral": {"scoring": Scoring.SOFTMAX, "is_normalised": True},
    "gpt-oss": {"scoring": Scoring.TOP_SOFTMAX},
}


def router_module(model: torch.nn.Module, layer: int) -> Any:
    """The library's router of a layer."""
    (found,) = (
        module
        for name, module in model.named_modules()
        if name.endswith((f"layers.{layer}.mlp.gate", f"layers.{layer}.mlp.router"))
    )
    return found


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("normalised", [False, True])
def test_router_chooses_the_library_s_experts_and_weights(
    name: str, normalised: bool, tmp_path: Path
) -> None:
    (case,) = (case for case in CASES if case.name == name)
    model = library_models.build(case).float()
    checkpoint = Checkpoint(library_models.save(case, model, tmp_path / "model"))
    settings, generator = dict(ROUTERS[name]), torch.Generator().manual_seed(5)
    tokens = torch.randn((NUM_TOKENS, HIDDEN), generator=generator)

    for layer in checkpoint.moe_layers:
        theirs = router_module(model, layer)
        if hasattr(theirs, "norm_topk_prob"):
            theirs.norm_topk_prob = settings["is_normalised"] = normalised
        router = Router(top_k=theirs.top_k, **checkpoint.router(layer), **settings)
        experts, weights = router.route(tokens)
        with torch.no_grad():
            _, expected_weights, expected = theirs(tokens)

        order, expected_order = experts.argsort(dim=1), expected.argsort(dim=1)
        assert torch.equal(experts.gather(1, order), expected.gather(1, expected_order))
        difference = weights.gather(1, order) - expected_weights.gather(1, expected_order)
        assert difference.abs().max() <= ROUNDING
        assert len(experts.unique()) == NUM_EXPERTS  # no expert is left out of the comparison


def test_group_that_is_not_chosen_gives_no_expert() -> None:
    logits = torch.tensor([[9.0, -9.0, -9.0, 1.0, 1.0, 1.0]])  # groups of three: 0..2 and 3..5
    router = Router(
        weight=torch.eye(6), top_k=2, scoring=Scoring.SIGMOID, num_groups=2, top_groups=1
    )

    experts, weights = router.route(logits)

    assert set(experts.flatten().tolist()) <= {3, 4, 5}  # 2 x 0.73 is more than 1.0 + 0.0
    assert torch.allclose(weights, torch.full((1, 2), 0.7310586))


def test_correction_bias_changes_the_choice_and_not_the_weight() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    bias = torch.tensor([0.0, 0.0, 1.0])
    router = Router(
        weight=torch.eye(3), top_k=1, scoring=Scoring.SIGMOID, correction_bias=bias, scale=2.0
    )

    experts, weights = router.route(logits)

    assert experts.tolist() == [[2]]
    assert weights.tolist() == [[1.0]]  # twice the sigmoid of 0


def test_zero_computation_experts_have_ids_after_the_routed_ones(tmp_path: Path) -> None:
    (case,) = (case for case in CASES if case.name == "LongCat-Flash")
    model = library_models.build(case)
    checkpoint = Checkpoint(library_models.save(case, model, tmp_path / "model"))

    assert checkpoint.router(0)["weight"].shape == (NUM_EXPERTS + 4, HIDDEN)
    assert checkpoint.config.figures.num_zero == 4
    assert checkpoint.model_shape().num_experts == NUM_EXPERTS  # they take no slot and no bytes
