"""Windows of several phases in one history: noise is that within a phase."""

from __future__ import annotations

import numpy as np
import pytest

from eplb import LoadHistory, Placement, Problem, Topology, plan
from eplb.core.load import Phase
from eplb.decision.score import noise_under
from eplb.errors import HistoryError

TOPOLOGY = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2)
SERVING = Placement(np.array([[0, 1, 2, 3]]), num_experts=4)
PREFILL = [600_000, 200_000, 100_000, 100_000]  # imbalance 1.6
DECODE = [1_000, 1_000, 4_000, 4_000]  # the other rank: 1.6
TURNS: tuple[Phase, ...] = ("prefill", "decode") * 4


def in_turns(phases: tuple[Phase, ...] = TURNS) -> LoadHistory:
    """Eight windows, of prefill and of decode in turns."""
    return LoadHistory(np.array([[PREFILL], [DECODE]] * 4), phases=phases)


def test_windows_of_a_history_have_its_phase_unless_they_differ() -> None:
    assert LoadHistory(np.ones((2, 1, 4)), phase="decode").phases == ("decode", "decode")
    assert in_turns().latest(3).phases == ("decode", "prefill", "decode")
    assert in_turns().of_windows(np.arange(2)).phases == ("prefill", "decode")


def test_phases_of_another_number_of_windows_are_refused() -> None:
    with pytest.raises(HistoryError, match="phases has 1 entries, expected 8 windows"):
        in_turns(("prefill",))


def test_parts_are_the_complete_windows_of_each_phase() -> None:
    incomplete = (frozenset({1}), *(frozenset[int](),) * 7)
    history = LoadHistory(in_turns().tokens, missing_ranks=incomplete, phases=TURNS)

    parts = Problem(history, TOPOLOGY).parts

    assert [part.tolist() for part in parts] == [[1, 3, 5], [0, 2, 4, 6]]
    (whole,) = Problem(LoadHistory(in_turns().tokens), TOPOLOGY).parts
    assert whole.tolist() == list(range(8))


def test_difference_of_phases_is_no_noise() -> None:
    apart = noise_under(Problem(in_turns(), TOPOLOGY), SERVING)
    together = noise_under(Problem(LoadHistory(in_turns().tokens), TOPOLOGY), SERVING)

    # Windows of one phase are alike: chance alone, most of it of decode's 10,000 tokens.
    assert apart[0] == pytest.approx(0.0045, abs=0.002)
    assert together[0] > 0.3


def test_plan_has_the_imbalance_of_each_phase_before_and_after() -> None:
    found = plan(in_turns(), TOPOLOGY, current=SERVING)

    prefill, decode = found.by_phase
    assert (prefill.phase, decode.phase) == ("prefill", "decode")
    assert (prefill.before, decode.before) == (pytest.approx(1.6), pytest.approx(1.6))
    mean = (prefill.after + decode.after) / 2
    assert mean == pytest.approx(found.after)
    assert mean < 1.25
