"""SGLang's own quantisation methods and updater are proved to change no expert."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rebalance.engines.common.conform import LayerVerdict, report, verdicts_of
from tests.support.engines.gauge import value_of
from tests.support.engines.ranks import INTERVAL, NUM_RANKS, config_in, on_ranks
from tests.support.engines.sglang_ranks import MOE, make_rank

pytestmark = pytest.mark.slow


def verdicts(case: str) -> list[LayerVerdict]:
    _, found, _ = verdicts_of("sglang", [case], num_moves=2, seed=1)
    return found


@pytest.mark.parametrize("case", ["bf16", "fp8 block", "int8"])
def test_tensors_of_a_quantisation_are_proved_with_their_outputs(case: str) -> None:
    for one in verdicts(case):
        assert one.result == "proved", one
        assert {"w13_weight", "w2_weight", "output"} <= set(one.tensors)


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
    about, found, not_run = verdicts_of("sglang", ["bf16"], num_moves=1, seed=1)

    assert "not run on this hardware: sleep and wake-up: " in report(about, found, not_run)


def started(rank: int, config: Path, forgets: bool) -> dict[str, Any]:
    """A start with a preflight, and passes of two intervals."""
    made = make_rank(rank, config, forgets=forgets)
    start, lists = made.held.copy(), made.lists
    made.steps()  # after the first pass layers are proved
    is_as_before = (made.held == start).all() and made.lists == lists
    if forgets:
        made.steps(2 * INTERVAL)
    else:
        made.until_experts_move(start)
    refused, gauge = made.plugin.refused, value_of("sglang", "conformance")
    return made.result() | {
        "start": start.tolist(), "as before": is_as_before, "refused": refused, "gauge": gauge
    }  # fmt: skip


@pytest.mark.parametrize("forgets", [False, True], ids=["proved", "scales stay behind"])
def test_preflight_refuses_only_rows_that_are_not_proved(forgets: bool, tmp_path: Path) -> None:
    found = on_ranks(started, config_in(tmp_path, engine__preflight="all"), forgets)

    assert all(one["as before"] for one in found), "map and lists are those of the start"
    expected = (MOE, 0.0) if forgets else ([], 1.0)
    assert [(one["refused"], one["gauge"]) for one in found] == [expected] * NUM_RANKS
    assert all((one["map"] == one["start"]) == forgets for one in found)
    assert [one["faults"] for one in found] == [[]] * NUM_RANKS
