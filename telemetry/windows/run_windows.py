"""The windows of a run, of steps or of seconds, as recorded at its start.

The controller plans on windows and the page shows them; an index must mean the same to both.
"""

from __future__ import annotations

from eplb.core.model import ModelShape
from eplb.core.topology import Topology
from telemetry.store import RunInfo
from telemetry.windows.step_windows import DEFAULT_KEEP, WindowFolder
from telemetry.windows.time_windows import TimeFolder

Folder = WindowFolder | TimeFolder


def folder_of(
    info: RunInfo, model: ModelShape, topology: Topology, *, keep: int = DEFAULT_KEEP
) -> Folder:
    """Return an empty folder for the samples of a run.

    Args:
        model, topology: those that ``info`` describes.
        keep: how many windows it holds.

    Raises:
        HistoryError: windows of no steps, or of a negative number of seconds.
    """
    # The number of layers is given: the first sample to arrive may be malformed.
    num_layers, shape = model.num_layers, (topology.num_ranks, model.num_experts)
    if info.window_seconds:
        return TimeFolder(info.window_seconds, *shape, keep=keep, num_layers=num_layers)
    return WindowFolder(info.window_steps, *shape, keep=keep, num_layers=num_layers)
