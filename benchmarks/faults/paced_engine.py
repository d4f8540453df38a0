"""The demo's engine with requests at a steady rate, which writes when each token was served.

    eplb launch --module benchmarks.faults.paced_engine -- ENGINE.json

The truth about an outage must not come from what the product reports. So each rank appends the
monotonic time of each of its steps to a file of its own: TOKENS_VARIABLE names the folder.
"""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path
from threading import Event

from api.demo import engine

TOKENS_VARIABLE = "PAIRS_TOKENS"
STEP_EVERY_S = 0.05  # requests of a small deployment: two cores are not busy with it alone


class PacedFigures(engine.Figures):
    """Writes down each step, and waits until the next request is due."""

    def stepped(self, took_s: float) -> None:
        """Record the end of a step."""
        super().stepped(took_s)
        path = Path(os.environ[TOKENS_VARIABLE]) / f"rank-{os.environ['RANK']}"
        now = time.monotonic()
        with path.open("ab") as file:
            file.write(struct.pack("d", now))
        Event().wait(STEP_EVERY_S - now % STEP_EVERY_S)


def tokens_of(folder: Path) -> list[float]:
    """Read the times of the steps of all ranks, in order."""
    data = b"".join(path.read_bytes() for path in folder.glob("rank-*"))
    return sorted(at for (at,) in struct.iter_unpack("d", data))


def main() -> None:
    """Serve as the demo's engine does."""
    engine.Figures = PacedFigures  # type: ignore[misc]
    engine.main()
