"""Quantised experts are carried: every scale moves with its weight, byte for byte."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eplb.errors import CheckpointError
from runtime import Checkpoint, ExpertSchema
from runtime.checkpoints.own_model import quantise_blocks
from tests.support.folders import change_config, write_shards

Tensors = dict[str, torch.Tensor]
Quantise = Callable[[torch.Tensor], Tensors]  # a matrix -> what is stored, by suffix
RANDOM = torch.Generator().manual_seed(3)


def raw(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random bytes: what quantised numbers mean is nobody's business here."""
    size = dtype.itemsize * torch.Size(shape).numel()
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=RANDOM)
    return data.view(dtype).view(shape)


def fp8_blocks(matrix: torch.Tensor) -> Tensors:
    """DeepSeek-V3: a float32 scale for each block."""
    wide = matrix.float().repeat(4, 4)  # 128 x 128 and more
    values, scale = quantise_blocks(wide)
    return {"weight": values[: matrix.shape[0], : matrix.shape[1]], "weight_scale_inv": scale}


def fp8_channels(matrix: torch.Tensor) -> Tensors:
    rows = matrix.shape[0]
    values = raw(tuple(matrix.shape), torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": raw((rows, 1), torch.float32)}


def int8_channels(matrix: torch.Tensor) -> Tensors:
    """Ascend's W8A8: a scale and an offset for each row."""
    rows = matrix.shape[0]
    values = {"weight": raw(tuple(matrix.shape), torch.int8)}
    scales = {k: raw((rows, 1), torch.bfloat16) for k in ("weight_scale", "weight_offset")}
    return values | scales


def w4a8(matrix: torch.Tensor) -> Tensors:
    rows, columns = matrix.shape
    return {
        "weight": raw((rows, columns // 2), torch.int8),
        "weight_scale_inv": raw((rows, 1), torch.float32),
        "input_scale": raw((), torch.float32),
    }


def w4a8_of_ascend(matrix: torch.Tensor) -> Tensors:
    rows, columns = matrix.shape
    return {
        "weight": raw((rows // 2, columns), torch.int8),
        "weight_scale": raw((rows, 1), torch.bfloat16),
        "weight_offset": raw((rows, 1), torch.bfloat16),
        "weight_scale_second": raw((rows, columns // 32), torch.bfloat16),
        "weight_offset_second": raw((rows, columns // 32), torch.bfloat16),
        "scale_bias": raw((rows, 1), torch.float32),
    }


def nvfp4(matrix: torch.Tensor) -> Tensors:
    """A scale in FP8 for 16 values, a float32 scale for the tensor, one for its input."""
    rows, columns = matrix.shape
    return {
        "weight": raw((rows, columns // 2), torch.uint8),
        "weight_scale": raw((rows, columns // 16), torch.float8_e4m3fn),
        "weight_scale_2": raw((), torch.float32),
        "input_scale": raw((), torch.float32),
    }


def int4_packed(matrix: torch.Tensor) -> Tensors:
    """Kimi K2 Thinking and K2.5: eight values in an int32, a scale for 32 values."""
    rows, columns = matrix.shape
    return {
        "weight_packed": raw((rows, columns // 8), torch.int32),
        "weight_scale": raw((rows, columns // 32), torch.bfloat16),
        "weight_shape": torch.tensor([rows, columns], dtype=torch.int32),
    }


def fp4_with_e8m0(matrix: torch.Tensor) -> Tensors:
    """DeepSeek-V4: two values in a byte, a power of two for 32 values."""
    rows, columns = matrix.shape
    scale = raw((rows, columns // 32), torch.float8_e8m0fnu)
    return {"weight": raw((rows, columns // 2), torch.int8), "scale": scale}


def with_odd_sizes(matrix: torch.Tensor) -> Tensors:
    """Three bytes before a float32: it begins at the next multiple of four in a record."""
    return {"weight": raw(tuple(matrix.shape), torch.int8), "bias": raw((3,), torch.uint8)} | {
        "weight_scale": raw((), torch.float32)
    }


FORMATS = [
    fp8_blocks,
    fp8_channels,
    int8_channels,
    w4a8,
    w4a8_of_ascend,
    nvfp4,
    int4_packed,
    fp4_with_e8m0,
    with_odd_sizes,
]


def quantised(tensors: Tensors, quantise: Quantise) -> Tensors:
    found = {}
    for name, tensor in tensors.items():
        if ".experts." in name:
            stem = name.removesuffix(".weight")
            found |= {f"{stem}.{suffix}": part for suffix, part in quantise(tensor).items()}
        else:
            found[name] = tensor
    return found


@pytest.fixture(params=FORMATS, ids=lambda quantise: quantise.__name__)
def stored(request: pytest.FixtureRequest, folder: Path, tensors: Tensors) -> Tensors:
    """What the checkpoint's files hold."""
    found = quantised(tensors, request.param)
    write_shards(folder, found)
    return found


def equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Same bytes; NaNs among random bytes differ from themselves as numbers."""
    same = found.dtype == expected.dtype and found.shape == expected.shape
    flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in (found, expected)]
    return same and torch.equal(*flat)


def test_record_has_every_scale_and_its_schema_says_where(stored: Tensors, folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    shape, schema = checkpoint.model_shape(include_mtp=True), checkpoint.schema()
    record = torch.full((schema.record_bytes,), 0xA5, dtype=torch.uint8)

    checkpoint.check(shape, schema)
    assert shape.layer_ids == (1, 2, 3)
    for layer in shape.layer_ids:
        for expert in range(shape.num_experts):
            checkpoint.repack(layer, expert, schema, record)
            name = f"model.layers.{layer}.mlp.experts.{expert}."
            expected = {k.removeprefix(name): t for k, t in stored.items() if k.startswith(name)}
            views = schema.views(record)
            assert views.keys() == expected.keys()
            assert all(equal(views[part], expected[part]) for part in expected)
    spans = [(start, start + spec.num_bytes) for spec, start in schema.spans()]
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert shape.expert_bytes == sum(spec.num_bytes for spec in schema.tensors)


def test_records_of_a_bank_have_the_same_views(stored: Tensors, folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    schema = checkpoint.schema()
    records = torch.zeros((2, schema.record_bytes), dtype=torch.uint8)

    checkpoint.repack(1, 0, schema, records[0])
    checkpoint.repack(2, 3, schema, records[1])

    for part, view in schema.views(records).items():
        for row, name in enumerate(("1.mlp.experts.0", "2.mlp.experts.3")):
            assert equal(view[row], stored[f"model.layers.{name}.{part}"]), part


def test_missing_scale_of_one_expert_is_named(stored: Tensors, folder: Path) -> None:
    suffix = next(n for n in stored if ".experts." in n and not n.endswith(".weight"))
    name = re.sub(r"layers\.\d\.mlp\.experts\.\d", "layers.2.mlp.experts.1", suffix)
    write_shards(folder, {k: t for k, t in stored.items() if k != name})
    checkpoint = Checkpoint(folder)

    with pytest.raises(CheckpointError, match=f"tensor {re.escape(name)} is missing"):
        checkpoint.check(checkpoint.model_shape(), checkpoint.schema())


def test_schema_that_would_leave_a_scale_behind_is_refused(folder: Path, tensors: Tensors) -> None:
    write_shards(folder, quantised(tensors, fp8_channels))
    checkpoint = Checkpoint(folder)
    schema = ExpertSchema.swiglu(64, 32, torch.float8_e4m3fn)

    with pytest.raises(
        CheckpointError, match=r"gate_proj.weight_scale belongs to an expert, expected it among"
    ):
        checkpoint.check(checkpoint.model_shape(), schema)


def test_other_precision_in_one_layer_is_refused_with_both_types(
    folder: Path, tensors: Tensors
) -> None:
    """DeepSeek-R1 in NVFP4 has its layer of multi-token prediction in BF16."""
    last = {name: tensor for name, tensor in tensors.items() if ".layers.3." in name}
    others = {name: tensor for name, tensor in tensors.items() if name not in last}
    write_shards(folder, quantised(others, nvfp4) | last)
    checkpoint = Checkpoint(folder)

    checkpoint.check(checkpoint.model_shape(), checkpoint.schema())
    with pytest.raises(
        CheckpointError,
        match=r"layers.3.mlp.experts.0.gate_proj.weight has shape \(32, 64\) of torch.bfloat16 .* "
        r"expected \(32, 32\) of torch.uint8",
    ):
        checkpoint.check(checkpoint.model_shape(include_mtp=True), checkpoint.schema())


# -- experts stacked in one tensor


@pytest.fixture
def mxfp4(tmp_path: Path) -> tuple[Path, Tensors]:
    """gpt-oss as it is published: 4-bit blocks of 32, scales, biases, experts stacked."""
    found: Tensors = {}
    for layer in (0, 1):
        name = f"model.layers.{layer}.mlp"
        found[f"{name}.router.weight"] = torch.ones(4, 64, dtype=torch.bfloat16)
        found[f"{name}.router.bias"] = torch.zeros(4, dtype=torch.bfloat16)
        for part, rows, columns in (("gate_up_proj", 64, 64), ("down_proj", 64, 32)):
            stem = f"{name}.experts.{part}"
            found[f"{stem}_blocks"] = raw((4, rows, columns // 32, 16), torch.uint8)
            found[f"{stem}_scales"] = raw((4, rows, columns // 32), torch.uint8)
            found[f"{stem}_bias"] = raw((4, rows), torch.bfloat16)
    write_shards(tmp_path, found)
    config = {
        "model_type": "gpt_oss",
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        "experts_per_token": 2,
        "hidden_size": 64,
        "intermediate_size": 32,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path, found


def test_mxfp4_record_is_the_expert_s_slice_of_each_tensor(mxfp4: tuple[Path, Tensors]) -> None:
    folder, stored = mxfp4
    checkpoint = Checkpoint(folder)
    schema = checkpoint.schema()
    record = torch.zeros(schema.record_bytes, dtype=torch.uint8)

    checkpoint.check(checkpoint.model_shape(), schema)
    for layer in (0, 1):
        for expert in range(4):
            checkpoint.repack(layer, expert, schema, record)
            for part, view in schema.views(record).items():
                expected = stored[f"model.layers.{layer}.mlp.experts.{part}"][expert]
                assert equal(view, expected), part
    assert len(schema.tensors) == 6


def test_bias_of_interleaved_gate_and_up_is_taken_apart(mxfp4: tuple[Path, Tensors]) -> None:
    folder, stored = mxfp4
    both = stored["model.layers.1.mlp.experts.gate_up_proj_bias"][3]

    checkpoint = Checkpoint(folder)

    assert equal(checkpoint.part(1, 3, "gate_proj.bias"), both[0::2])
    assert equal(checkpoint.part(1, 3, "up_proj.bias"), both[1::2])


def test_stack_of_fewer_experts_than_the_config_says_is_refused(
    mxfp4: tuple[Path, Tensors],
) -> None:
    change_config(mxfp4[0], num_local_experts=5)

    with pytest.raises(CheckpointError, match=r"has shape \(4, .*expected 5 experts as the first"):
        Checkpoint(mxfp4[0]).schema()


def test_one_scale_for_all_experts_is_every_expert_s(mxfp4: tuple[Path, Tensors]) -> None:
    folder, stored = mxfp4
    scales = {
        f"model.layers.{layer}.mlp.experts.{part}_input_scale": raw((), torch.float32)
        for layer in (0, 1)
        for part in ("gate_up_proj", "down_proj")
    }
    write_shards(folder, stored | scales)
    checkpoint = Checkpoint(folder)

    checkpoint.check(checkpoint.model_shape(), checkpoint.schema())
    for expert in range(4):
        found = checkpoint.part(1, expert, "down_proj_input_scale")
        assert equal(found, scales["model.layers.1.mlp.experts.down_proj_input_scale"])
