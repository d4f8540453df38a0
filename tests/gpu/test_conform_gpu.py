"""Conformance of layers on a CUDA device, whose digests arrive after they were ordered."""

from __future__ import annotations

import pytest
import torch

from rebalance.engines.common.conform import OUTPUT
from tests.support.engines.toy_layer import ToyLayer, verdict

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_every_slot_of_a_layer_on_a_device_is_compared_and_proved() -> None:
    layer = ToyLayer("cuda")

    found = verdict(layer, layer.move, layer.outputs)

    assert (found.result, found.tensors) == ("proved", ("weight", OUTPUT))


def test_number_of_a_kernel_on_a_device_that_stays_behind_fails() -> None:
    layer = ToyLayer("cuda")

    found = verdict(layer, layer.forget, layer.outputs)

    assert (found.result, found.step) == ("failed", "move 1")
