"""The offline simulator: recorded or generated load, planned on the past, judged on the future."""

from simulations.replay import Replay, Scenario, replay, replay_all
from simulations.report import summary, table
from simulations.traces import load_trace
from simulations.workloads import Workload, generate, workload_named

__all__ = [
    "Replay",
    "Scenario",
    "Workload",
    "generate",
    "load_trace",
    "replay",
    "replay_all",
    "summary",
    "table",
    "workload_named",
]
