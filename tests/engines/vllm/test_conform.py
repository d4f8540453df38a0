"""Bytes of vLLM's own layers on a CPU: what it leaves behind when experts move is named."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="run `make test-engines`: it has vllm 0.33.0 in .venv-vllm")

from eplb.errors import ConfigError
from rebalance.engines.common.conform import NO_KERNELS, LayerVerdict, verdicts_of

LAYERS = "tests.support.engines.vllm_bench"
pytestmark = pytest.mark.slow


def verdicts(case: str) -> list[LayerVerdict]:
    _, found, _ = verdicts_of("vllm", [case], num_moves=2, seed=1, layers=LAYERS)
    return found


@pytest.mark.parametrize(
    "case",
    ["bf16", "fp8 tensor", "fp8 block", "mxfp4", "int8", "w4a8 mxfp4", "w4a16 triton"],
)
def test_bytes_of_a_quantisation_follow_its_experts_and_prove_nothing_without_kernels(
    case: str,
) -> None:
    drafter, *target = verdicts(case)

    assert drafter.method == f"{target[0].method} of a drafter"
    for one in (drafter, *target):
        assert (one.result, one.step, one.note.rpartition(": ")[2]) == (
            "not proved",
            "",
            NO_KERNELS,
        )
        assert {"w13_weight", "w2_weight"} <= set(one.tensors)


def test_quantisation_that_vllm_refuses_to_balance_is_named_with_its_reason() -> None:
    _, found, not_run = verdicts_of("vllm", ["w4a16"], num_moves=1, seed=1, layers=LAYERS)

    assert not found
    assert "EPLB is not supported CompressedTensorsWNA16MoEMethod" in not_run["w4a16"]


def test_reload_after_a_move_is_named_because_vllm_loads_by_the_first_map() -> None:
    for one in verdicts("bf16")[1:]:
        assert "w13_weight has the bytes of expert" in one.reload


def test_input_scales_of_nvfp4_that_stay_behind_are_named() -> None:
    for one in verdicts("nvfp4 swizzled"):
        assert (one.result, one.step) == ("failed", "move 1")
        assert any("w13_input_scale has the bytes" in fault for fault in one.faults)


def test_host_without_a_gpu_is_refused_with_what_is_expected() -> None:
    with pytest.raises(ConfigError, match="no CUDA device here, expected one: vllm's own kernels"):
        verdicts_of("vllm", ["bf16"], num_moves=1, seed=1)
