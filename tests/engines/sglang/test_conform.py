"""SGLang's own quantisation methods and updater are proved to change no expert."""

from __future__ import annotations

import pytest

from rebalance.engines.common.conform import NO_KERNELS, LayerVerdict, report, verdicts_of
from tests.support.engines.sglang_ranks import NAME

LAYERS = "tests.support.engines.sglang_bench"
pytestmark = pytest.mark.slow


def verdicts(case: str) -> list[LayerVerdict]:
    _, found, _ = verdicts_of(NAME, [case], num_moves=2, seed=1, layers=LAYERS)
    return found


@pytest.mark.parametrize("case", ["bf16", "fp8 block", "int8"])
def test_bytes_of_a_quantisation_follow_its_experts_and_prove_nothing_without_kernels(
    case: str,
) -> None:
    for one in verdicts(case):
        assert (one.result, one.step, one.note.rpartition(": ")[2]) == (
            "not proved",
            "",
            NO_KERNELS,
        )
        assert {"w13_weight", "w2_weight"} <= set(one.tensors)


@pytest.mark.parametrize("case", ["bf16", "fp8 block"])
def test_reload_after_moves_loads_by_the_map_that_serves(case: str) -> None:
    assert [one.reload for one in verdicts(case)] == ["", ""]


def test_reload_of_tensors_that_the_method_has_replaced_is_named() -> None:
    for one in verdicts("int8"):
        assert "ValueError: quant method must be one of" in one.reload


def test_input_scales_of_w4a8_that_differ_by_rank_are_named() -> None:
    for one in verdicts("w4a8"):
        assert (one.result, one.step) == ("failed", "load")
        assert "w13_input_scale has another value on ranks" in one.faults[0]


def test_what_a_cpu_does_not_hold_is_named() -> None:
    about, found, not_run = verdicts_of(NAME, ["bf16"], num_moves=1, seed=1, layers=LAYERS)

    assert "not run on this hardware: sleep and wake-up: " in report(about, found, not_run)
