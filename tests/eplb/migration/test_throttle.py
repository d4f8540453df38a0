"""The throttle of a request: the slower of its figures and the deployment's."""

from __future__ import annotations

import pytest

from eplb.decision.pace import Throttle
from eplb.errors import ConfigError
from eplb.migration.build import Pace

COPY = Pace(staging_experts=16, link_part=0.5)
FLIP = Pace(staging_experts=0, mode="flip", spare_slots=1)


@pytest.mark.parametrize(
    ("throttle", "pace", "changed"),
    [
        (Throttle(), COPY, {}),
        (Throttle(experts_per_transaction=2), COPY, {"experts_per_transaction": 2}),
        (Throttle(experts_per_transaction=8), COPY, {}),  # half of the ring: the default
        (Throttle(experts_per_transaction=9), COPY, {}),
        (Throttle(experts_per_transaction=6), Pace(experts_per_transaction=4), {}),
        (Throttle(link_part=0.25), COPY, {"link_part": 0.25}),
        (Throttle(link_part=1.0), COPY, {}),
        (Throttle(layers_per_transaction=1), FLIP, {"layers_per_transaction": 1}),
        (Throttle(layers_per_transaction=4), Pace(layers_per_transaction=2), {}),
        (Throttle(layers_per_transaction=1), COPY, {"layers_per_transaction": 1}),
    ],
)
def test_throttle_makes_a_pace_slower_and_never_faster(
    throttle: Throttle, pace: Pace, changed: dict[str, float]
) -> None:
    assert vars(throttle.of(pace)) == vars(pace) | changed


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({"experts_per_transaction": 0}, "experts_per_transaction is 0, expected 1 or more"),
        ({"layers_per_transaction": -1}, "layers_per_transaction is -1, expected 1 or more"),
        ({"link_part": 0.0}, "link_part is 0.0, expected more than 0 and at most 1"),
        ({"link_part": 1.5}, "link_part is 1.5, expected more than 0 and at most 1"),
    ],
)
def test_throttle_out_of_range_is_refused(figures: dict[str, float], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        Throttle(**figures)  # type: ignore[arg-type]


def test_experts_of_a_transaction_are_no_limit_of_flip_mode() -> None:
    with pytest.raises(ConfigError, match="in flip mode, expected layers_per_transaction"):
        Throttle(experts_per_transaction=2).of(FLIP)
