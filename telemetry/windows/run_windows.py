"""The windows of a run, of steps or of seconds, as recorded at its start.

The controller plans on windows and the page shows them; an index must mean the same to both.
"""

from __future__ import annotations

from eplb.core.model import ModelShape
from eplb.core.topology import Topology
from telemetry.store import RunInfo
from telemetry.windows.cuts import CutBySteps, CutByTime
from telemetry.windows.folder import DEFAULT_KEEP, Cut, WindowFolder


def folder_of(
    info: RunInfo, model: ModelShape, topology: Topology, *, keep: int = DEFAULT_KEEP
) -> WindowFolder:
    """Return an empty folder for the samples of a run.

    Args:
        model, topology: those that ``info`` describes.
        keep: how many windows it holds.

    Raises:
        HistoryError: windows of no steps, or of a negative number of seconds.
    """
    seconds = info.window_seconds
    cut: Cut = CutByTime(seconds) if seconds else CutBySteps(info.window_steps)
    # The number of layers is given: the first sample to arrive may be malformed.
    return WindowFolder(
        cut, topology.num_ranks, model.num_experts, keep=keep, num_layers=model.num_layers
    )
