"""Durations for people."""

from __future__ import annotations

import math

import pytest

from eplb.clock import duration_text, figure_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (1e-9, "0 s"),
        (-1e-9, "0 s"),
        (3.3e-5, "33 us"),
        (0.112, "112 ms"),
        (2.874, "2.87 s"),
        (-2.874, "-2.87 s"),
        (59.99, "60 s"),
        (240.0, "4 min"),
        (5400.0, "1.5 h"),
        (1e9, "31.7 years"),
        (1e13, "316,881 years"),
        (math.inf, "without end"),
    ],
)
def test_duration_is_told_in_the_largest_unit_it_reaches(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.0, "0"),
        (0.0123, "0.0123"),
        (5.0, "5"),
        (249.96, "250"),
        (1470.0, "1,470"),
    ],
)
def test_figure_has_no_exponent(number: float, text: str) -> None:
    assert figure_text(number) == text
