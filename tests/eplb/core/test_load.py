"""Load as samples and as windows: what is taken, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from eplb import LoadHistory, LoadSample, Placement, Problem, Topology, plan
from eplb.core.bounded_json import MAX_JSON_BYTES, decode_json
from eplb.core.load import Phase, as_history
from eplb.decision.score import noise_under
from eplb.errors import HistoryError


def test_fractions_keep_their_proportions() -> None:
    tokens = as_history([[0.5, 0.25, 0.25]]).tokens

    assert tokens[0, 0, 0] == 2 * tokens[0, 0, 1] > 2**30


def test_tensors_are_taken_without_importing_torch() -> None:
    torch = pytest.importorskip("torch")

    assert as_history(torch.tensor([[1, 2]])).tokens.tolist() == [[[1, 2]]]


@pytest.mark.parametrize("load", [[[1e300, 1.0]], [[1e-320, 0.0]], [[0.0, 0.0]]])
def test_figures_of_any_size_can_be_planned_on(load: list[list[float]]) -> None:
    tokens = as_history(load).tokens

    assert 0 <= tokens.sum() < 2**41


def test_fractions_of_more_figures_than_int64_could_sum_are_scaled_down() -> None:
    figures = 2**22 + 1
    tokens = as_history(np.full((1, figures, 1), 0.5)).tokens

    assert tokens[0, 0, 0] == 2**62 // figures
    assert tokens.sum(dtype=object) <= 2**62


def test_latest_windows_keep_their_steps() -> None:
    history = LoadHistory(
        np.arange(6).reshape(3, 1, 2), first_step=np.array([0, 5, 10]), last_step=[4, 9, 14]
    )

    latest = history.latest(2)

    assert latest.first_step.tolist() == [5, 10]
    assert latest.steps_per_window.tolist() == [5, 5]
    assert history.latest(9).num_windows == 3
    assert history.total().tolist() == [[6, 9]]


def test_lengths_that_differ_are_refused() -> None:
    with pytest.raises(HistoryError, match="first_step has 1 entries, expected 2 windows"):
        LoadHistory(np.ones((2, 1, 2)), first_step=np.array([0]), last_step=np.array([1]))


def test_sample_in_the_wrong_order_is_refused() -> None:
    def sample(last_step: int, tokens: list[list[int]]) -> LoadSample:
        held = np.array([[0, 1]])
        counted = np.array(tokens)
        return LoadSample("d", "r", 0, 1, 0.0, 5, last_step, "decode", 1, held, counted)

    assert sample(5, [[1, 2]]).tokens.sum() == 3
    with pytest.raises(HistoryError, match=r"steps 5\.\.4, expected first <= last"):
        sample(4, [[1, 2]])
    with pytest.raises(HistoryError, match="-1 tokens in a slot"):
        sample(5, [[1, -1]])
    with pytest.raises(HistoryError, match="expected the same"):
        sample(5, [[1]])


TOPOLOGY = Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=2)
SERVING = Placement(np.array([[0, 1, 2, 3]]), num_experts=4)
PREFILL = [600_000, 200_000, 100_000, 100_000]  # imbalance 1.6
DECODE = [1_000, 1_000, 4_000, 4_000]  # the other rank: 1.6
LONG_DECODE = [100_000, 100_000, 400_000, 400_000]  # as many tokens as in prefill
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
    alternating = LoadHistory(np.array([[PREFILL], [LONG_DECODE]] * 4))
    together = noise_under(Problem(alternating, TOPOLOGY), SERVING)

    # Windows of one phase are alike: chance alone, most of it of decode's 10,000 tokens.
    assert apart[0] == pytest.approx(0.0045, abs=0.002)
    assert together[0] > 0.3


def test_few_tokens_of_another_load_are_no_noise_of_the_many() -> None:
    # Of 10,000 tokens after each million: they are part of the next window's block.
    together = noise_under(Problem(LoadHistory(in_turns().tokens), TOPOLOGY), SERVING)

    assert together[0] < 0.02


def test_plan_has_the_imbalance_of_each_phase_before_and_after() -> None:
    found = plan(in_turns(), TOPOLOGY, current=SERVING)

    prefill, decode = found.by_phase
    assert (prefill.phase, decode.phase) == ("prefill", "decode")
    assert (prefill.before, decode.before) == (pytest.approx(1.6), pytest.approx(1.6))
    mean = (prefill.after + decode.after) / 2
    assert mean == pytest.approx(found.after)
    assert mean < 1.25


DEEP = 100_000


@pytest.mark.parametrize(
    "text",
    [
        b"[" * DEEP,
        b"[" * DEEP + b"]" * DEEP,
        b'{"a":' * DEEP + b"1" + b"}" * DEEP,
        b'["]", ' * DEEP,  # brackets within strings close nothing
        b'["\\"]", ' * DEEP,  # an escaped quote ends no string
        ("[" * DEEP).encode("utf-16"),
        "[\u5b5d".encode("utf-16-le") * DEEP,
        b'"[' * DEEP,
        b"[}" * DEEP,
    ],
    ids=lambda text: repr(text[:12]),
)
def test_json_nested_deep_is_rejected_with_value_error(text: bytes) -> None:
    with pytest.raises(ValueError):
        decode_json(text)


def test_json_above_the_stated_size_is_rejected_unparsed() -> None:
    with pytest.raises(ValueError, match="expected at most 10"):
        decode_json(b" " * 11, max_bytes=10)


@pytest.mark.parametrize("unit", [b"[", b'\\"', b'{"'])
def test_hostile_text_of_full_size_is_rejected_in_linear_time(unit: bytes) -> None:
    with pytest.raises(ValueError):
        decode_json(unit * (MAX_JSON_BYTES // len(unit)))  # in quadratic time: hours
