"""A layer is proved by the outputs of its kernel, and by nothing less."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rebalance.engines.common.conform import NO_KERNELS, OUTPUT, from_json, to_json
from tests.support.engines.toy_layer import ToyLayer, verdict


def test_layer_whose_outputs_follow_its_experts_is_proved() -> None:
    engine = ToyLayer()

    found = verdict(engine, engine.move, engine.outputs)

    assert (found.result, found.faults) == ("proved", ())
    assert found.tensors == ("weight", OUTPUT)


def test_number_of_a_kernel_that_stays_behind_fails_though_all_bytes_are_right() -> None:
    engine = ToyLayer()

    found = verdict(engine, engine.forget, engine.outputs)

    assert (found.result, found.step) == ("failed", "move 1")
    assert all(": output has the bytes of" in fault for fault in found.faults)


@pytest.mark.parametrize(
    ("outputs", "note"),
    [
        (None, NO_KERNELS),
        (ToyLayer.failing, "RuntimeError: no image for this device"),
        (ToyLayer.infinite, "outputs of the kernel are not finite, expected numbers"),
        (ToyLayer.counting, "outputs of the kernel differ from call to call, expected the same"),
        (ToyLayer.alike, "outputs of two experts are alike, expected others"),
    ],
)
def test_bytes_without_outputs_that_tell_experts_apart_prove_nothing(
    outputs: Callable[[ToyLayer, int], torch.Tensor] | None, note: str
) -> None:
    engine = ToyLayer()

    found = verdict(engine, engine.move, outputs and outputs.__get__(engine))

    assert (found.result, found.faults) == ("not proved", ())
    assert note in found.note


def test_exception_of_a_kernel_is_kept_with_its_trace() -> None:
    engine = ToyLayer()

    found = verdict(engine, engine.move, engine.failing)

    assert "in failing" in found.trace
    assert from_json(to_json([found])) == [found]
