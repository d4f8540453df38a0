"""Launchers, caches, a controller and ranks under two faults, in simulated time."""

from __future__ import annotations

import pytest

from benchmarks.schedules.restarts import refusing, run_schedules

PAIRS = [
    ("rank-killed", "store-stopped"),
    ("cache-killed", "rank-killed"),
    ("launcher-killed", "link-cut"),
    ("store-empty", "rank-killed"),
]


@pytest.mark.parametrize("pair", PAIRS, ids=" + ".join)
def test_deployment_serves_again_once_both_faults_have_passed(pair: tuple[str, str]) -> None:
    ((_, violation, _),) = run_schedules([pair], 1, seed=1)

    assert violation == ""


def test_schedules_find_a_launcher_that_takes_a_missing_peer_for_a_refusal() -> None:
    with refusing():
        ((_, violation, _),) = run_schedules([("link-cut",)], 1, seed=1)

    assert "'launch-0': 2, 'launch-1': 2" in violation
