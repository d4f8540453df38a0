"""vLLM's own layers are proved, and what it leaves behind when experts move is named."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rebalance.engines.common.bench import verdicts_of
from rebalance.engines.common.conform import Verdict
from rebalance.engines.common.fsck.report import report_of
from rebalance.engines.common.gauge import value_of
from telemetry import open_store
from tests.support.engines.ranks import (
    INTERVAL,
    NAME,
    NUM_EXPERTS,
    NUM_LAYERS,
    NUM_RANKS,
    NUM_SLOTS,
    config_in,
    on_ranks,
    settings_in,
)
from tests.support.engines.vllm_ranks import make_rank

pytestmark = pytest.mark.slow


def verdicts(case: str) -> list[Verdict]:
    _, found, _ = verdicts_of("vllm", [case], num_moves=2, seed=1)
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


def started(rank: int, config: Path, forgets: bool) -> dict[str, Any]:
    """A start with a preflight, and steps of two intervals once experts may move."""
    made = make_rank(rank, config, forgets=forgets)
    start = made.held.tolist()
    made.check_weights()
    made.until_it_may_move()
    made.steps(2 * INTERVAL, is_checked=not forgets)
    refused = made.plugin.refused_layers
    gauge = value_of("vllm", "conformance")
    return made.result() | {"start": start, "refused": refused, "gauge": gauge}


def test_preflight_refuses_layers_whose_scales_stay_behind(tmp_path: Path) -> None:
    config = config_in(tmp_path, engine__preflight="all")
    found = on_ranks(started, config, True)

    first = [slot % NUM_EXPERTS for slot in range(NUM_SLOTS)]
    assert [one["start"] for one in found] == [[first] * NUM_LAYERS] * NUM_RANKS
    assert all(one["map"] == one["start"] for one in found), "no layer moves"
    assert [(one["refused"], one["gauge"]) for one in found] == [([0, 1, 2], 0.0)] * NUM_RANKS
    assert [one["faults"] for one in found] == [[]] * NUM_RANKS, "the weights are as before"
    with closing(open_store(settings_in(config).deployment.store, NAME)) as store:
        report = report_of(store)
    (line,) = report.refused
    assert line.startswith("layers [0, 1, 2] keep their map: layer 0")
    assert "scale has the bytes of expert" in line


def test_preflight_lets_proved_layers_move(tmp_path: Path) -> None:
    found = on_ranks(started, config_in(tmp_path, engine__preflight="sample"), False)

    assert [(one["refused"], one["gauge"]) for one in found] == [([], 1.0)] * NUM_RANKS
    assert all(one["map"] == found[0]["map"] != one["start"] for one in found)
    assert [one["faults"] for one in found] == [[]] * NUM_RANKS
