"""SGLang's own quantisation methods and updater are proved to change no expert."""

from __future__ import annotations

import pytest

# First: the engine imports torchvision.
import tests.support.engines.cpu_torchvision  # noqa: F401  # isort: skip
from rebalance.engines.common.bench import verdicts_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", ["bf16", "fp8 block", "int8"])
def test_tensors_of_a_quantisation_are_proved_with_their_outputs(case: str) -> None:
    _, found = verdicts_of("sglang", [case], num_moves=2, seed=1)

    for one in found:
        assert one.result == "proved", one
        assert {"w13_weight", "w2_weight", "output"} <= set(one.tensors)
