"""vLLM's own layers are proved, and what it leaves behind when experts move is named."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="run `make test-engines`: it has vllm 0.33.0 in .venv-vllm")

from rebalance.engines.common.conform import LayerVerdict, verdicts_of

LAYERS = "tests.support.engines.vllm_bench"
pytestmark = pytest.mark.slow


def verdicts(case: str) -> list[LayerVerdict]:
    _, found, _ = verdicts_of("vllm", [case], num_moves=2, seed=1, layers=LAYERS)
    return found


@pytest.mark.parametrize("case", ["bf16", "fp8 tensor", "fp8 block", "mxfp4", "int8", "w4a8 mxfp4"])
def test_layers_of_a_quantisation_are_proved_with_their_outputs(case: str) -> None:
    drafter, *target = verdicts(case)

    assert drafter.method == f"{target[0].method} of a drafter"
    for one in (drafter, *target):
        assert one.result == "proved", one
        assert {"w13_weight", "w2_weight", "output"} <= set(one.tensors)


def test_reload_after_a_move_is_named_because_vllm_loads_by_the_first_map() -> None:
    for one in verdicts("bf16")[1:]:
        assert "w13_weight has the bytes of expert" in one.reload


def test_input_scales_of_nvfp4_that_stay_behind_are_named() -> None:
    for one in verdicts("nvfp4 swizzled"):
        assert (one.result, one.step) == ("failed", "move 1")
        assert any("w13_input_scale has the bytes" in fault for fault in one.faults)
        assert any("output has the bytes of no expert" in fault for fault in one.faults)
