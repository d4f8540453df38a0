"""vLLM's own layers and kernels on a CUDA device: proved, and with planted faults not."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm", reason="run it where vllm 0.33.0 and a CUDA device are")

from rebalance.engines.common.conform import OUTPUT, LayerVerdict, verdicts_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a CUDA device"),
]
PLANTED = "tests.support.engines.vllm_planted"


def verdicts(case: str, layers: str = "") -> list[LayerVerdict]:
    _, found, _ = verdicts_of("vllm", [case], num_moves=2, seed=1, layers=layers)
    return found


@pytest.mark.parametrize(
    "case", ["bf16", "fp8 tensor", "fp8 block", "int8", "mxfp4", "w4a16 triton"]
)
def test_layers_of_a_quantisation_are_proved_by_the_outputs_of_their_kernel(case: str) -> None:
    found = verdicts(case)

    assert [one.result for one in found] == ["proved"] * 3, found
    assert all(OUTPUT in one.tensors for one in found)


@pytest.mark.parametrize("case", ["fp8 block", "int8", "mxfp4"])
def test_scale_that_stays_behind_is_named_by_bytes_and_outputs(case: str) -> None:
    found = verdicts(f"{case}, scale", PLANTED)[0]

    assert (found.result, found.step) == ("failed", "move 1")
    assert any(": output has the bytes of no expert" in fault for fault in found.faults)


@pytest.mark.parametrize("case", ["bf16", "mxfp4"])
def test_wrong_map_of_a_kernel_is_named_by_outputs_alone(case: str) -> None:
    found = verdicts(f"{case}, map", PLANTED)[0]

    assert (found.result, found.step) == ("failed", "move 1")
    assert all(": output has the bytes of" in fault for fault in found.faults)
