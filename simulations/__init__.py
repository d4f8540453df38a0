"""The offline simulator: plans on past windows of a load, and judges on the next one."""

from simulations.batches import load_trace
from simulations.replay import Replay, Scenario, replay, replay_all
from simulations.report import comparison_table, summary
from simulations.workloads import generate

__all__ = [
    "Replay",
    "Scenario",
    "comparison_table",
    "generate",
    "load_trace",
    "replay",
    "replay_all",
    "summary",
]
